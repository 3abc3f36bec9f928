"""A training step against Hugging Face torch, and a hybrid's step against full attention's.

Contenders of one length are timed in turns in one process and the fastest turn of each counts, in CPU
seconds on a CPU: other programs on the machine then disturb all of them alike, or not at all. A turn
is two steps, of which the second counts: in training steps follow each other, and the first of a turn
also pays for getting back the memory that the others' turns took.
"""

import dataclasses
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import output
from models import registry
from models.errors import InputError
from models.export import save_folder
from models.hybridize import hybridize, static_windows
from models.windows import HeadMask, num_local_for
from train import layers, partition, subset
from train.data.packing import Row
from train.flops import step_flops
from train.optimizer import optimizer, schedule
from train.settings import CptSettings
from train.setup import fresh_state
from train.step import Plan, compiled_step, make_model


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    model: any model of `models.registry`.
    batch: rows of a step.
    torch_tokens: length of the comparison with torch; 0 = none.
    hybrid_tokens: length of the comparison of the hybrid with full attention; 0 = none.
    ratio: share of local head groups of the hybrid, spread evenly over the layers.
    window: tokens a local head sees; 0 = an eighth of the length.
    repeats: turns; the fastest counts.
    out: folder for train.json.
  """

  model: str = "smollm2-135m"
  batch: int = 1
  torch_tokens: int = 1024
  hybrid_tokens: int = 2048
  ratio: float = 0.75
  window: int = 0
  repeats: int = 3
  out: str = "runs/bench-train"


def spread_mask(config, ratio: float) -> HeadMask:
  """A mask of this ratio whose local groups are spread evenly."""
  total = config.total_groups
  local = np.zeros(total, bool)
  local[np.linspace(0, total - 1, num_local_for(ratio, total)).astype(int)] = True
  return HeadMask(local.reshape(config.num_layers, config.num_groups))


def ids(config, batch: int, tokens: int) -> np.ndarray:
  """One token more than are predicted."""
  return np.random.default_rng(0).integers(0, config.vocab_size, (batch, tokens + 1))


class Ours:
  """Our step on whole rows, float32, all parameters trained: call it for one update."""

  def __init__(self, loaded, options: Options, tokens: int, ratio: float):
    config, settings = loaded.config, CptSettings(mask="full")
    mask = spread_mask(config, ratio)
    hybrid = hybridize(loaded.params, mask, config)
    windows = static_windows(hybrid.full_groups, options.window or tokens // 8, config)
    transform = optimizer(settings)
    mesh = partition.make_mesh(1, 1, 1, jax.devices()[:1])
    state = fresh_state(mesh, transform, subset.split(hybrid.params, "all")[0])
    plan = Plan(make_model(config, windows), None, transform, schedule(settings))
    self._state = layers.split(state) if plan.model.unroll else state
    text = ids(config, options.batch, tokens).astype(np.int32)
    shape = text[:, :-1].shape
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), shape)
    row = Row(
      text[:, :-1], text[:, 1:], np.ones(shape, np.float32), positions, np.ones(shape, np.int32)
    )
    self._batch = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    step = compiled_step(plan, jax.default_backend())
    self._step = step.lower(self._state, {}, None, self._batch).compile()
    self.flops = step_flops(config, windows, options.batch, tokens)
    self.memory = self._step.memory_analysis().temp_size_in_bytes

  def __call__(self) -> float:
    self._state, metrics = self._step(self._state, {}, None, self._batch)
    return float(jax.block_until_ready(metrics)["loss"])


class Torch:
  """The same step by Hugging Face's model, torch's AdamW and clipping."""

  def __init__(self, loaded, options: Options, tokens: int):
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
      save_folder(folder, loaded.config, loaded.params)
      self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    self._model.train()
    settings = CptSettings(mask="full")
    self._optimizer = torch.optim.AdamW(
      self._model.parameters(), lr=float(schedule(settings)(0)), betas=(0.9, 0.95),
      weight_decay=settings.weight_decay,
    )  # fmt: skip
    self._ids = torch.tensor(ids(loaded.config, options.batch, tokens))
    self._torch, self._clip = torch, settings.clip

  def __call__(self) -> float:
    self._optimizer.zero_grad()
    logits = self._model(self._ids[:, :-1], use_cache=False).logits
    loss = self._torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._ids[:, 1:].flatten())
    loss.backward()
    self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
    self._optimizer.step()
    return float(loss.detach())


def timed(call: Callable) -> dict[str, float]:
  """Wall and CPU seconds of one call."""
  wall, cpu = time.perf_counter(), time.process_time()
  call()
  return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def measure(calls: dict[str, Callable], repeats: int, report: Callable) -> dict[str, dict]:
  """Fastest turn of each, in seconds, and the loss of the first step. `first_cpu_s` is of the steps that
  came behind another contender's turn."""
  found = {}
  for name, call in calls.items():
    report(f"{name}: first step")
    found[name] = {"first_loss": call(), "wall_s": np.inf, "cpu_s": np.inf, "first_cpu_s": np.inf}
  for _ in range(repeats):
    for name, call in calls.items():
      behind, spent = timed(call), timed(call)
      spent["first_cpu_s"] = behind["cpu_s"]
      report(
        f"{name}: {spent['wall_s']:.2f} s, {spent['cpu_s']:.2f} CPU s"
        f" (first of the turn {behind['cpu_s']:.2f} CPU s)"
      )
      found[name] |= {clock: min(found[name][clock], s) for clock, s in spent.items()}
  return found


def main(options: Options) -> list[dict]:
  """Measures, prints the table, and writes train.json."""
  console, records = Console(), []
  if options.torch_tokens and importlib.util.find_spec("torch") is None:
    raise InputError("--torch-tokens", options.torch_tokens, "needs torch; install it, or give 0")
  if options.repeats < 1 or options.batch < 1:
    raise InputError("--repeats and --batch", "", "must be 1 or more")
  loaded = registry.load(options.model)

  def report(text):
    print(f"train: {text}", file=sys.stderr, flush=True)

  def compare(tokens: int, calls: dict):
    found = measure(calls, options.repeats, report)
    clock = "cpu_s" if jax.default_backend() == "cpu" else "wall_s"
    base = found[next(iter(calls))][clock]
    for name, facts in found.items():
      flops, memory = (getattr(calls[name], field, None) for field in ("flops", "memory"))
      records.append(
        {"tokens": tokens, "contender": name, **facts, "ratio": facts[clock] / base}
        | {"flops": flops, "temporary_bytes": memory}
      )

  if options.torch_tokens:
    ours = Ours(loaded, options, options.torch_tokens, 0.0)
    torch_step = Torch(loaded, options, options.torch_tokens)
    compare(options.torch_tokens, {"torch, full attention": torch_step, "full attention": ours})
    del ours, torch_step
  if options.hybrid_tokens:
    full = Ours(loaded, options, options.hybrid_tokens, 0.0)
    hybrid = Ours(loaded, options, options.hybrid_tokens, options.ratio)
    name = f"hybrid, {options.ratio:.0%} local"
    compare(options.hybrid_tokens, {"full attention": full, name: hybrid})
  console.print(table(records, options))
  folder = output.write(options.out, "train", output.with_platform(options, records))
  console.print(f"written to {folder}/train.json")
  return records


def table(records: list[dict], options: Options) -> Table:
  """Seconds of a step, and the ratio to the first contender of its length."""
  result = Table(
    title=f"One training step of {options.model} on {jax.default_backend()}, batch {options.batch}, float32"
  )
  columns = ("tokens", "contender", "wall s", "CPU s", "ratio", "GFLOP/s", "temp MiB", "first loss")
  for column in columns:
    result.add_column(column, justify="left" if column == "contender" else "right")
  for r in records:
    result.add_row(
      str(r["tokens"]), r["contender"], f"{r['wall_s']:.2f}", f"{r['cpu_s']:.2f}", f"{r['ratio']:.2f}",
      "-" if r["flops"] is None else f"{r['flops'] / r['wall_s'] / 1e9:.0f}",
      "-" if r["temporary_bytes"] is None else f"{r['temporary_bytes'] / 2**20:.0f}",
      f"{r['first_loss']:.4f}",
    )  # fmt: skip
  return result
