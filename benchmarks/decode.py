"""Decoding with the hybrid cache against the full cache and Hugging Face torch, side by side.

Caches are filled with random keys and values up to the context, so that no prompt of that length
has to be read first; then tokens are generated for real. All contenders are timed in turns and the
fastest turn of each counts: other programs disturb all of them alike, or not at all.
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
from models import cache as kv
from models import registry
from models.cache import CacheSpec
from models.decode import extend, unstack
from models.errors import InputError
from models.hybridize import hybridize
from models.sampling import Sampling, choose
from models.windows import HeadMask, num_local_for


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure."""

  model: str = "smollm2-135m"
  """Model: smollm2-135m, a .gguf file, a Hugging Face folder or id."""
  contexts: tuple[int, ...] = (2048, 8192)
  """Tokens in the cache once the last one is generated."""
  ratios: tuple[float, ...] = (0.5, 0.75)
  """Shares of local groups; which ones is drawn at random, as only their number costs time."""
  window: int = 256
  """Tokens a local group keeps."""
  batch: int = 1
  """Rows decoded together."""
  tokens: int = 16
  """Tokens of one turn."""
  repeats: int = 5
  """Turns; the fastest counts."""
  chunk: int = 512
  """Tokens of a prompt chunk, whose memory is reported."""
  torch: bool = True
  """Also run Hugging Face torch `generate`, with its dynamic and its static cache."""
  out: str = "runs/bench-decode"
  """Folder for decode.json."""

  def __post_init__(self):
    for field in ("window", "batch", "repeats", "chunk"):
      if getattr(self, field) < 1:
        raise InputError(f"--{field}", getattr(self, field), "must be positive; use 1 or more")
    if self.tokens < 3:
      raise InputError("--tokens", self.tokens, "must be 3 or more, as the first is not timed")
    if min(self.contexts) <= self.tokens:
      raise InputError(
        "--contexts", min(self.contexts), "must be more than --tokens; use for example 2048"
      )
    for ratio in self.ratios:
      if not 0 <= ratio <= 1:
        raise InputError("--ratios", ratio, "must be shares from 0 to 1; use for example 0.75")
    if self.torch and importlib.util.find_spec("torch") is None:
      raise InputError(
        "--torch", "", "torch is not installed; install requirements-dev.txt or pass --no-torch"
      )


def random_mask(config, ratio: float, seed: int = 0) -> HeadMask:
  """A mask with the exact number of local groups."""
  local = np.zeros(config.total_groups, bool)
  chosen = np.random.default_rng(seed).permutation(config.total_groups)
  local[chosen[: num_local_for(ratio, config.total_groups)]] = True
  return HeadMask(local.reshape(config.num_layers, config.num_groups))


class Ours:
  """Greedy decoding through `models.decode`, the loop of `models.generate` without its text.

  Args:
    ratio: share of local groups; 0 = the full cache.
  """

  def __init__(self, loaded, options: Options, context: int, ratio: float):
    c, mask = loaded.config, random_mask(loaded.config, ratio)
    hybrid = hybridize(loaded.params, mask, c)
    self.params, self.options, self.context = unstack(hybrid.params), options, context
    self.spec = CacheSpec(
      c, hybrid.full_groups, options.window, 0, options.batch, context, jnp.float32
    )
    self.formula = mask.kv_bytes(c, context, options.window) * 2 * options.batch  # float32
    self.cache, self.name = self._filled(), f"ours, {ratio:.0%} local" if ratio else "ours, full"
    self.logits = jnp.zeros((options.batch, c.vocab_size), jnp.float32)
    self.choose = jax.jit(lambda x: choose(x, None, Sampling()))

  def _filled(self):
    keys = iter(jax.random.split(jax.random.key(0), 4 * len(self.spec.full_groups)))
    cache = jax.tree.map(
      lambda x: jax.random.normal(next(keys), x.shape, x.dtype), kv.empty(self.spec).layers
    )
    return kv.Cache(cache, self._length())

  def _length(self):
    return jnp.full(self.options.batch, self.context - self.options.tokens, jnp.int32)

  @property
  def kv_bytes(self) -> int:
    return kv.num_bytes(self.cache)

  def turn(self) -> list[tuple[float, float]]:
    """(wall, CPU) clock at every token."""
    self.cache, clocks = self.cache._replace(length_B=self._length()), []
    one = np.ones(self.options.batch, np.int32)
    for _ in range(self.options.tokens):
      token = np.asarray(self.choose(self.logits))
      clocks.append((time.perf_counter(), time.process_time()))
      self.cache, self.logits = extend(
        self.spec, self.params, self.cache, self.logits, token[:, None], one
      )
    jax.block_until_ready(self.logits)
    return clocks

  def prompt_temporaries(self, chunk: int) -> int:
    """Bytes that reading one chunk of a prompt takes beside parameters and cache."""
    cache = jax.eval_shape(lambda: kv.empty(self.spec))
    tokens = jax.ShapeDtypeStruct((self.options.batch, chunk), jnp.int32)
    count = jax.ShapeDtypeStruct((self.options.batch,), jnp.int32)
    lowered = extend.lower(self.spec, self.params, cache, self.logits, tokens, count)
    return lowered.compile().memory_analysis().temp_size_in_bytes


class Torch:
  """Hugging Face `generate` on the same weights, with a cache of its own kind.

  Args:
    kind: "dynamic" or "static".
  """

  def __init__(self, model, config, options: Options, context: int, kind: str):
    self.model, self.config, self.options, self.context = model, config, options, context
    self.kind, self.name = kind, f"torch, {kind}"
    self.kv_bytes = config.kv_bytes(context, 4) * options.batch

  def _filled(self):
    import torch
    import transformers

    o, c = self.options, self.config
    if self.kind == "static":
      cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.context)
    else:
      cache = transformers.DynamicCache(config=self.model.config)
    shape = (o.batch, c.num_groups, self.context - o.tokens, c.head_dim)
    for l in range(c.num_layers):
      cache.update(torch.randn(shape), torch.randn(shape), l)
    return cache

  def turn(self) -> list[tuple[float, float]]:
    import torch

    cache, clocks = self._filled(), []

    class Clock:
      def put(self, value):
        clocks.append((time.perf_counter(), time.process_time()))

      def end(self):
        pass

    # One token behind what the cache holds is still to be read; what stands before is in the cache.
    ids = torch.ones((self.options.batch, self.context - self.options.tokens + 1), dtype=torch.long)
    self.model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      cache=cache,
      max_new_tokens=self.options.tokens - 1,
      min_new_tokens=self.options.tokens - 1,
      do_sample=False,
      eos_token_id=None,
      streamer=Clock(),
    )
    return clocks[1:]  # the streamer is given the prompt first


def torch_model(loaded):
  """The model in torch, by way of a Hugging Face folder."""
  import torch
  import transformers

  from models.export import save_folder

  transformers.logging.set_verbosity_error()
  with tempfile.TemporaryDirectory() as folder:
    save_folder(folder, loaded.config, loaded.params)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def measure(options: Options, progress: Callable[[str], None] = lambda text: None) -> list[dict]:
  """One record per contender and context."""
  loaded = registry.load(options.model)
  if max(options.contexts) > loaded.config.context:
    raise InputError(
      "--contexts", max(options.contexts), f"is beyond this model's {loaded.config.context} tokens"
    )
  theirs = torch_model(loaded) if options.torch else None
  records = []
  for context in options.contexts:
    progress(f"context {context}: compiling")
    contenders = [Ours(loaded, options, context, r) for r in (0.0, *options.ratios)]
    if theirs is not None:
      contenders += [
        Torch(theirs, loaded.config, options, context, k) for k in ("dynamic", "static")
      ]
    best = {x.name: [np.inf, np.inf] for x in contenders}
    for x in contenders:
      x.turn()  # warm-up, not counted
    for turn in range(options.repeats):
      progress(f"context {context}: turn {turn + 1} of {options.repeats}")
      for x in contenders:
        clocks = np.diff(np.array(x.turn()), axis=0).mean(0)
        best[x.name] = np.minimum(best[x.name], clocks).tolist()
    full, full_bytes = best["ours, full"], contenders[0].kv_bytes
    for x in contenders:
      wall, cpu = best[x.name]
      ours = isinstance(x, Ours)
      records.append({
        "context": context, "contender": x.name, "wall_s": wall, "cpu_s": cpu,
        "tokens_per_s": options.batch / wall, "speedup": full[0] / wall, "cpu_speedup": full[1] / cpu,
        "kv_bytes": x.kv_bytes, "kv_bytes_formula": x.formula if ours else None,
        "kv_share": x.kv_bytes / full_bytes,
        "prompt_temporary_bytes": x.prompt_temporaries(options.chunk) if ours else None,
      })  # fmt: skip
  return records


def table(records: list[dict], options: Options) -> Table:
  result = Table(
    title=f"Decoding {options.model} on {jax.default_backend()}: batch {options.batch}, window {options.window}, "
    f"float32; per step; speed over ours, full; chunk = MiB to read {options.chunk} tokens of a prompt",
  )
  for column in (
    "tokens", "contender", "KV MiB", "ms", "CPU ms", "tok/s", "speed", "by CPU", "chunk",
  ):  # fmt: skip
    left = column == "contender"
    result.add_column(column, justify="left" if left else "right", no_wrap=left)
  for i, r in enumerate(records):
    if i and r["context"] != records[i - 1]["context"]:
      result.add_section()
    memory = r["prompt_temporary_bytes"]
    result.add_row(
      str(r["context"]), r["contender"], f"{r['kv_bytes'] / 2**20:.1f}",
      f"{1e3 * r['wall_s']:.1f}", f"{1e3 * r['cpu_s']:.1f}", f"{r['tokens_per_s']:.1f}",
      f"{r['speedup']:.2f}x", f"{r['cpu_speedup']:.2f}x",
      "-" if memory is None else f"{memory / 2**20:.0f}",
    )  # fmt: skip
  return result


def main(options: Options) -> list[dict]:
  """Measures, prints the table, and writes decode.json."""
  console = Console()
  records = measure(options, lambda text: print(f"decode: {text}", file=sys.stderr, flush=True))
  console.print(table(records, options))
  folder = output.write(options.out, "decode", output.with_platform(options, records))
  console.print(f"written to {folder}/decode.json")
  return records
