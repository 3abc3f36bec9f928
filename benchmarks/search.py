"""The search engine against plain loops, and against the machine's matrix products, in one run.

A real search runs with a clock around every batch of scores. In turns with its batches run two loops,
as one would write them first, which score some masks, one question per prompt, each by a whole forward
pass:

  * plain JAX: dense masked attention, logits of all positions;
  * Hugging Face torch: the same, a boolean mask for every layer and head;

and matrix products, whose pace is the machine's peak. All is given per scored answer (one question under
one mask) and in CPU seconds, which other programs on the machine disturb least. What the loops' masks are
does not change their cost.
"""

import dataclasses
import functools
import importlib.util
import itertools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import output
from benchmarks.turns import Contender, Turns
from bosch_jax.evaluator import Evaluator
from bosch_jax.progress import SearchProgress
from bosch_jax.prompts import PromptSet
from bosch_jax.scoring import Batch
from bosch_jax.search import search
from bosch_jax.select import calibration_prompts
from bosch_jax.settings import SearchOptions, SelectSettings
from models import export, registry
from models.attention import visible
from models.config import ModelConfig
from models.errors import InputError
from models.transformer import Transformer
from models.windows import expand

TURN = 3.0  # CPU seconds of the search between two turns of others


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    model: as in `python run.py select`.
    ratio, window, context, samples, budget, seed: of the search that is measured.
    masks: how many masks of that search the plain loops score.
    questions: how many questions they score them on.
    out: folder for search.json.
  """

  model: str = "smollm2-135m"
  ratio: float = 0.5
  window: int = 64
  context: int = 512
  samples: int = 4
  budget: int = 24
  seed: int = 1
  masks: int = 2
  questions: int = 2
  out: str = "runs/bench-search"


@dataclasses.dataclass
class Spent:
  """Of one stage: answers scored, CPU and wall seconds, and FLOPs of the matrix products needed."""

  answers: int = 0
  cpu: float = 0.0
  wall: float = 0.0
  flops: float = 0.0


class Timed(Evaluator):
  """An evaluator with a clock; between its batches others have their turns."""

  def __init__(self, *args, turns: Turns, **kwargs):
    super().__init__(*args, **kwargs)
    self.spent: dict[str, Spent] = {}
    self._turns = turns
    self._work = Work(self.config, self.prompts, self.window)

  def _score_new(self, masks, slot, contexts):
    stored = [set(self._states[b]) for b in contexts]
    cpu, wall = time.process_time(), time.perf_counter()
    super()._score_new(masks, slot, contexts)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    spent = self.spent.setdefault(self.stage.split()[0], Spent())
    spent.cpu += cpu
    spent.wall += wall
    spent.answers += len(masks) * len(contexts) * self.prompts.num_questions
    for b, before in zip(contexts, stored, strict=True):
      for s in set(self._states[b]) - before:
        spent.flops += self._work.layers(self._base, b, (s - 1) * self._stride, s * self._stride)
      for mask in masks:
        spent.flops += self._work.layers(mask, b, slot * self._stride) + self._work.head
    self._turns.worked(cpu)


class Work:
  """FLOPs of the matrix products that a score needs: projections and feed-forward of every token,
  scores and values of the pairs of tokens that see each other, logits of the answers. 2 per
  multiply-add; no norms, no softmax, nothing masked."""

  def __init__(self, config: ModelConfig, sets: PromptSet, window: int):
    c, tokens = config, sets.tokens_BxT.shape[1]
    weights = 2 * c.model_dim * c.head_dim * (c.num_heads + c.num_groups)
    self._dense = 2.0 * tokens * (weights + 3 * c.model_dim * c.active_ffn_dim)
    places = sets.positions_BxT, sets.segments_BxT
    both = np.array([window, np.iinfo(np.int32).max], np.int32)
    pairs_Bx2 = np.array([
      visible(both, *(x[b : b + 1] for x in (*places, *places))).sum((0, -2, -1))
      for b in range(len(sets))
    ])  # fmt: skip
    self._local_B, self._full_B = (4.0 * c.heads_per_group * c.head_dim * pairs_Bx2).T
    self.head = 2.0 * sets.target_BxQxA[0].size * c.model_dim * c.vocab_size

  def layers(
    self, mask_LxG: np.ndarray, context: int, start: int, stop: int | None = None
  ) -> float:
    part = mask_LxG[start:stop]
    attention = part.sum() * self._local_B[context] + (~part).sum() * self._full_B[context]
    return len(part) * self._dense + float(attention)


def products(config: ModelConfig, tokens: int) -> dict[str, Contender]:
  """float32 matrix products, a turn of a third of a second each: a large one, and the largest of the
  model's layers. Their work is counted in FLOPs."""
  sizes = (2048, 2048, 2048), (tokens, config.model_dim, config.active_ffn_dim)
  run = jax.jit(jnp.matmul)

  def make(m: int, k: int, n: int) -> Contender:
    a, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((m, k), (k, n))))
    jax.block_until_ready(run(a, b))

    def turn() -> float:
      count, stop = 0, time.perf_counter() + 1 / 3
      while time.perf_counter() < stop or not count:
        jax.block_until_ready(run(a, b))
        count += 1
      return 2.0 * m * k * n * count

    return Contender(turn)

  return {" x ".join(map(str, size)): make(*size) for size in sizes}


@functools.partial(jax.jit, static_argnums=0)
def _plain_step(model, params, batch: Batch, windows_LxH):
  """NLL of the answer of one plain prompt, from the loss at every position."""
  logits_1xTxV = model.apply({"params": params}, batch.tokens_BxT, windows_LxH)
  loss_1xT = -jnp.take_along_axis(
    jax.nn.log_softmax(logits_1xTxV)[:, :-1], batch.tokens_BxT[:, 1:, None], axis=-1
  )[..., 0]
  valid = batch.valid_BxQxA[0, 0]
  return jnp.where(valid, loss_1xT[0, batch.answer_BxQxA[0, 0]], 0.0).sum() / valid.sum().astype(
    jnp.float32
  )


def plain_jax(loaded, plain: PromptSet, window: int) -> Callable[[np.ndarray, int], float]:
  """A function of a mask and a question that returns the NLL of the answer."""
  model = Transformer(loaded.config, backend="reference")
  rows = [Batch.of(plain, [b]) for b in range(len(plain))]

  def score(mask, row) -> float:
    windows_LxH = expand(mask, loaded.config.num_heads, window)
    return float(_plain_step(model, loaded.params, rows[row], windows_LxH))

  return score


def hf_torch(loaded, plain: PromptSet, window: int) -> Callable[[np.ndarray, int], float]:
  """The same by Hugging Face's model in torch.

  Raises:
    InputError: torch is not installed.
  """
  if importlib.util.find_spec("torch") is None:
    raise InputError(
      "torch", "", "is not installed and this benchmark compares with it; pip install torch==2.13.0"
    )
  import torch
  import transformers

  transformers.utils.logging.disable_progress_bar()
  chosen: dict[str, torch.Tensor] = {}

  def per_head(module, query, key, value, attention_mask, scaling=None, **rest):
    out = torch.nn.functional.scaled_dot_product_attention(
      query, key, value, attn_mask=chosen["masks"][module.layer_idx], scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None

  transformers.AttentionInterface.register("per_head", per_head)
  with tempfile.TemporaryDirectory() as folder:
    export.save_folder(pathlib.Path(folder) / "model", loaded.config, loaded.params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      pathlib.Path(folder) / "model", dtype=torch.float32, attn_implementation="per_head"
    ).eval()
  T = plain.tokens_BxT.shape[1]
  distance = torch.arange(T)[:, None] - torch.arange(T)[None]
  causal = distance >= 0
  either = torch.stack([causal, causal & (distance < window)])  # full, local
  repeats = loaded.config.heads_per_group

  @torch.inference_mode()
  def score(mask, row) -> float:
    heads = torch.from_numpy(np.repeat(mask, repeats, axis=1).astype(np.int64))
    chosen["masks"] = [either[heads[l]][None] for l in range(len(mask))]
    ids = torch.from_numpy(plain.tokens_BxT[row : row + 1].astype(np.int64))
    logits = model(ids).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    return float(loss[plain.answer_BxQxA[row, 0][plain.valid_BxQxA[row, 0]]].mean())

  return score


def repeated(score: Callable, masks: Sequence[np.ndarray], questions: int) -> Contender:
  """A loop that scores one answer a turn, of all masks and questions again and again."""
  pairs = itertools.cycle(itertools.product(masks, range(questions)))

  def turn() -> float:
    score(*next(pairs))
    return 1.0

  return Contender(turn)


def measure(options: Options, progress=lambda text: None) -> dict:
  """All figures of the benchmark.

  Raises:
    InputError: torch is missing, or settings that no search can have.
  """
  settings = SelectSettings(
    model=options.model, ratio=options.ratio, window=options.window, context=options.context,
    samples=options.samples, budget=options.budget, seed=options.seed, search=SearchOptions(recipe="probes"),
  )  # fmt: skip
  loaded = registry.load(settings.model)
  settings.check_model(loaded.config)
  (calibration,) = calibration_prompts(loaded.tokenizer, settings)
  plain = calibration.unpack().take(range(options.questions))
  few = [np.zeros((loaded.config.num_layers, loaded.config.num_groups), bool)]
  # Torch first: its absence is told before minutes are spent.
  progress("Hugging Face torch, plain JAX and the engine on the same masks")
  rng = np.random.default_rng(options.seed)
  few += [rng.random(few[0].shape) < options.ratio for _ in range(options.masks - 1)]
  loops = {
    "Hugging Face torch": hf_torch(loaded, plain, settings.window),
    "plain JAX": plain_jax(loaded, plain, settings.window),
  }
  evaluator = Evaluator(loaded.config, loaded.params, calibration, settings.window)
  contexts = range(-(-options.questions // calibration.num_questions))
  ours = evaluator.score(few, contexts).nll.reshape(len(few), -1)[:, : options.questions]
  apart = {}
  for name, score in loops.items():
    theirs = [[score(mask, row) for row in range(len(plain))] for mask in few]
    apart[name] = float(np.abs(np.array(theirs) - ours).max())
  progress("the search, in turns with the others")
  timed = {name: repeated(score, few, len(plain)) for name, score in loops.items()}
  peak = products(loaded.config, calibration.tokens_BxT.shape[1])
  turns = Turns([*timed.values(), *peak.values()], every=TURN)
  evaluator = Timed(loaded.config, loaded.params, calibration, settings.window, turns=turns)
  search(evaluator, settings, options.ratio, SearchProgress(Console(quiet=True), settings.budget))
  turns.finish()
  stages = {name: dataclasses.asdict(spent) for name, spent in evaluator.spent.items()}
  trace = [s for name, s in stages.items() if name in ("1", "3")]
  answer = {"engine": sum(s["cpu"] for s in trace) / sum(s["answers"] for s in trace)}
  answer |= {name: loop.cpu / loop.done for name, loop in timed.items()}
  peak = {name: (p.done / p.cpu, p.done / p.wall) for name, p in peak.items()}
  best = [max(x) for x in zip(*peak.values(), strict=True)]
  total = [sum(s[field] for s in stages.values()) for field in ("flops", "cpu", "wall")]
  return {
    "options": dataclasses.asdict(options),
    "jax": jax.__version__,
    "stages": stages,
    "cpu_seconds_per_answer": answer,
    "speedup": {name: answer[name] / answer["engine"] for name in loops},
    "largest_nll_difference": apart,
    "matmul_flops_per_cpu_and_wall_second": peak,
    "share_of_matmul_peak": {"cpu": total[0] / total[1] / best[0], "wall": total[0] / total[2] / best[1]},
  }  # fmt: skip


def table(facts: dict) -> Table:
  """CPU milliseconds per scored answer, and how many times the engine is faster."""
  o = facts["options"]
  result = Table(
    title=f"One scored answer: {o['model']}, context {o['context']}, window {o['window']}, "
    f"{o['samples']} contexts, stages 1 and 3 of a search to ratio {o['ratio']:g}"
  )
  for column in ("contender", "CPU ms per answer", "engine is faster", "largest NLL difference"):
    result.add_column(column, justify="left" if column == "contender" else "right")
  for name, seconds in facts["cpu_seconds_per_answer"].items():
    faster, apart = facts["speedup"].get(name), facts["largest_nll_difference"].get(name)
    result.add_row(
      name, f"{1e3 * seconds:.1f}", "-" if faster is None else f"{faster:.1f}x",
      "-" if apart is None else f"{apart:.1e}",
    )  # fmt: skip
  return result


def main(options: Options) -> dict:
  """Measures, prints, and writes search.json."""
  console = Console()
  facts = measure(options, lambda text: print(f"search: {text}", file=sys.stderr, flush=True))
  console.print(table(facts))
  share = facts["share_of_matmul_peak"]
  console.print(
    f"{share['cpu']:.0%} of the float32 matmul peak per CPU second while scoring, {share['wall']:.0%} per wall "
    "second, over the whole search",
    soft_wrap=True, highlight=False,
  )  # fmt: skip
  for name, (cpu, wall) in facts["matmul_flops_per_cpu_and_wall_second"].items():
    console.print(
      f"matmul {name}: {cpu / 1e9:.0f} GFLOP per CPU second, {wall / 1e9:.0f} per wall second",
      soft_wrap=True, highlight=False,
    )  # fmt: skip
  folder = output.write(options.out, "search", facts)
  console.print(f"written to {folder}/search.json")
  return facts
