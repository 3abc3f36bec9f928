"""Attention against dense masked attention, side by side in one run.

All contenders of one length are timed in turns and the fastest turn of each counts, in CPU seconds
on a CPU: other programs on the machine then disturb all of them alike, or not at all.
"""

import dataclasses
import gc
import importlib.util
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import output
from models.attention import attention, choose, visible
from models.windows import FULL, num_local_for

MODES = ("forward", "forward+backward")
BASELINES = ("dense masked", "jax.nn", "torch SDPA")


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    lengths: tokens T.
    ratios: shares of local heads; heads are sorted, full ones first.
    heads, groups, head_dim: H, G, K.
    window: keys a local head sees.
    repeats: turns; the fastest counts.
    backward: also time forward and backward together.
    dense_tokens: longest T for contenders with a T x T array.
    out: folder for attention.json and attention.png.
  """

  lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
  ratios: tuple[float, ...] = (0.0, 0.5, 0.75, 1.0)
  heads: int = 8
  groups: int = 8
  head_dim: int = 64
  window: int = 256
  repeats: int = 3
  backward: bool = True
  dense_tokens: int = 8192
  out: str = "runs/bench-attention"


def window_row(options: Options, ratio: float) -> tuple[int, ...]:
  """H windows, the local groups last."""
  R, local = options.heads // options.groups, num_local_for(ratio, options.groups)
  return (FULL,) * (R * (options.groups - local)) + (options.window,) * (R * local)


def _jax_contender(options: Options, T: int, mode: str, run: Callable) -> tuple[Callable, int]:
  """A compiled call without arguments, and the bytes of its temporaries."""
  keys = jax.random.split(jax.random.key(T), 3)
  arrays = [
    jax.random.normal(key, (1, T, heads, options.head_dim))
    for key, heads in zip(keys, (options.heads, options.groups, options.groups), strict=True)
  ]
  if mode == "forward+backward":
    function = jax.grad(lambda q, k, v: run(q, k, v).sum(), (0, 1, 2))
  else:
    function = run
  compiled = jax.jit(function).lower(*arrays).compile()
  memory = compiled.memory_analysis()
  return lambda: jax.block_until_ready(compiled(*arrays)), memory.temp_size_in_bytes


def _dense_mask(row, T):
  positions = jnp.arange(T, dtype=jnp.int32)[None]
  zeros = jnp.zeros_like(positions)
  return visible(jnp.asarray(row, jnp.int32), positions, zeros, positions, zeros)


def _torch_contender(options: Options, T: int, mode: str, row) -> Callable:
  import torch

  gradients = mode == "forward+backward"
  q, k, v = (
    torch.randn(1, heads, T, options.head_dim, requires_grad=gradients)
    for heads in (options.heads, options.groups, options.groups)
  )
  mask = torch.from_numpy(np.array(_dense_mask(row, T)))

  def run():
    out = torch.nn.functional.scaled_dot_product_attention(
      q, k, v, attn_mask=mask, enable_gqa=options.groups != options.heads
    )
    if gradients:
      out.sum().backward()

  return run


def contenders(options: Options, T: int, mode: str):
  """Yields `(name, ratio or None, call, temporary bytes or None)`; baselines have no ratio, as
  their work does not depend on the mask."""
  for ratio in options.ratios:
    row = window_row(options, ratio)
    array = jnp.asarray(row, jnp.int32)
    yield ("static", ratio, *_jax_contender(options, T, mode, lambda *x, r=row: attention(*x, r)))
    runtime = _jax_contender(options, T, mode, lambda *x, r=array: attention(*x, r))
    yield ("runtime", ratio, *runtime)
  if options.dense_tokens < T:
    return
  row = window_row(options, 0.5)
  dense = _jax_contender(options, T, mode, lambda *x: attention(*x, row, backend="reference"))
  yield ("dense masked", None, *dense)

  def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, mask=_dense_mask(row, T))

  yield ("jax.nn", None, *_jax_contender(options, T, mode, library))
  if importlib.util.find_spec("torch") is not None:
    yield "torch SDPA", None, _torch_contender(options, T, mode, row), None


def _measure(calls: dict, repeats: int) -> dict:
  """Fastest turn of each call, in seconds: `{key: (wall, cpu)}`. Slow ones take fewer turns."""
  best: dict = {}
  for key, call in calls.items():
    call()  # warm-up, not counted
    best[key] = (np.inf, np.inf)
  for turn in range(repeats):
    for key, call in calls.items():
      if turn and best[key][0] * turn > 20:
        continue
      wall, cpu = time.perf_counter(), time.process_time()
      call()
      spent = time.perf_counter() - wall, time.process_time() - cpu
      best[key] = tuple(min(a, b) for a, b in zip(best[key], spent, strict=True))
  return best


def measure(options: Options, progress: Callable[[str], None] = lambda text: None) -> list[dict]:
  """One record per contender, length, ratio and mode; `speedup` is over dense masked attention."""
  records = []
  for T in options.lengths:
    for mode in MODES if options.backward else MODES[:1]:
      progress(f"{T} tokens, {mode}")
      calls, memory = {}, {}
      for name, ratio, call, temporaries in contenders(options, T, mode):
        calls[name, ratio], memory[name, ratio] = call, temporaries
      times = _measure(calls, options.repeats)
      clock = 1 if jax.default_backend() == "cpu" else 0
      dense = times.get(("dense masked", None))
      for (name, ratio), spent in times.items():
        records.append({
          "tokens": T, "mode": mode, "contender": name, "ratio": ratio,
          "wall_s": spent[0], "cpu_s": spent[1], "temporary_bytes": memory[name, ratio],
          "speedup": dense[clock] / spent[clock] if dense else None,
          "wall_speedup": dense[0] / spent[0] if dense else None,
        })  # fmt: skip
      del calls
      gc.collect()
  return records


def table(records: list[dict], options: Options) -> Table:
  """Seconds, speed-up and memory as a rich table."""
  backend = choose(jax.default_backend(), max(options.lengths), options.head_dim, True, "plain", 0)
  result = Table(
    title=f"Attention on {jax.default_backend()} ({backend}): H={options.heads} G={options.groups} "
    f"K={options.head_dim} W={options.window}, float32; speed-up over dense masked",
  )
  for column in ("tokens", "mode", "contender", "local", "wall s", "cpu s", "speed-up", "temp MB"):
    result.add_column(column, justify="left" if column in ("mode", "contender") else "right")
  previous = None
  for r in records:
    if previous not in (None, (r["tokens"], r["mode"])):
      result.add_section()
    previous = r["tokens"], r["mode"]
    memory, speedup = r["temporary_bytes"], r["speedup"]
    result.add_row(
      str(r["tokens"]), r["mode"], r["contender"],
      "-" if r["ratio"] is None else f"{r['ratio']:.0%}",
      f"{r['wall_s']:.4f}", f"{r['cpu_s']:.4f}", "-" if speedup is None else f"{speedup:.1f}x",
      "-" if memory is None else f"{memory / 2**20:.0f}",
    )  # fmt: skip
  return result


def plot(records: list[dict], path: pathlib.Path) -> None:
  """Seconds against tokens, a panel per mode."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  modes = [m for m in MODES if any(r["mode"] == m for r in records)]
  figure, axes = pyplot.subplots(1, len(modes), figsize=(6 * len(modes), 4.5), squeeze=False)
  clock = "cpu_s" if jax.default_backend() == "cpu" else "wall_s"
  for axis, mode in zip(axes[0], modes, strict=True):
    lines: dict = {}
    for r in records:
      if r["mode"] == mode:
        lines.setdefault((r["contender"], r["ratio"]), []).append((r["tokens"], r[clock]))
    for (name, ratio), points in lines.items():
      label = name if ratio is None else f"{name}, {ratio:.0%} local"
      style = ":" if name in BASELINES else "-" if name == "static" else "--"
      axis.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=3, label=label)
    axis.set(
      xscale="log",
      yscale="log",
      xlabel="tokens",
      title=mode,
      ylabel="CPU seconds" if clock == "cpu_s" else "seconds",
    )
    axis.set_xticks(sorted({r["tokens"] for r in records}))
    axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axis.minorticks_off()
    axis.grid(alpha=0.3)
  axes[0][-1].legend(fontsize=7)
  figure.tight_layout()
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


def main(options: Options) -> list[dict]:
  """Measures, prints the table, and writes attention.json and attention.png."""
  console = Console()
  records = measure(options, lambda text: print(f"attention: {text}", file=sys.stderr, flush=True))
  console.print(table(records, options))
  folder = output.write(options.out, "attention", output.with_platform(options, records))
  plot(records, folder / "attention.png")
  console.print(f"written to {folder}/attention.json and attention.png")
  return records
