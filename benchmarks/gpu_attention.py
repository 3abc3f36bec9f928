"""Checks and times attention on a real NVIDIA GPU.

    python benchmarks/gpu_attention.py                      # numerics, then timings at 8k and 32k
    python benchmarks/gpu_attention.py --numerics-only
    python benchmarks/gpu_attention.py --out runs/gpu

Numerics: forward and gradients of the Triton kernels, static and runtime windows, packed rows and a
shared haystack, and of cuDNN, against the float32 reference. Timings: half and three quarters of
the heads local (W = 1024) against all heads full, forward and with gradients. Exits with status 1
if a check fails or there is no GPU.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

if __name__ == "__main__":  # run as a script: the project's root is one folder up
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import output
from models.attention import attention
from models.windows import FULL

# Largest difference allowed, relative to the largest value of the reference.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}


def arrays(T, H, G, K, dtype):
  keys = jax.random.split(jax.random.key(T), 4)
  return [
    jax.random.normal(key, (1, T, heads, K), jnp.float32).astype(dtype)
    for key, heads in zip(keys, (H, G, G, H), strict=True)
  ]


def both(run, cotangent):
  """Output and gradients of `run`, compiled."""

  def loss(q, k, v):
    out = run(q, k, v)
    return (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(), out

  def result(q, k, v):
    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads

  return jax.jit(result)


def layouts(T):
  """Keyword arguments of one document, packed documents, and a haystack with two questions."""

  def row(*documents):
    positions = np.concatenate([np.arange(first, first + n) for _, first, n in documents])
    segments = np.concatenate([np.full(n, segment) for segment, _, n in documents])
    return {
      "positions_BxT": jnp.asarray(positions[None], jnp.int32),
      "segments_BxT": jnp.asarray(segments[None], jnp.int32),
    }

  half, rest = T // 2, T - T // 2
  yield "one document", {}
  yield "packed", {**row((1, 0, half), (2, 0, rest - 9), (-1, 0, 9)), "packed": True}
  yield "haystack", row((0, 0, half), (1, half, 40), (2, half, rest - 40))


def numerics() -> list[dict]:
  """One record per case: the largest relative difference of output and gradients."""
  records = []
  for dtype in ("float32", "bfloat16", "float16"):
    for K in (64, 80, 128):
      T, H, G = 1000, 8, 4
      q, k, v, cotangent = arrays(T, H, G, K, dtype)
      row = (FULL,) * 4 + (200,) * 4
      for layout, places in layouts(T):
        for backend, windows in (
          ("triton", row), ("triton", jnp.asarray(row, jnp.int32)), ("cudnn", row),
        ):  # fmt: skip
          if backend == "cudnn" and (dtype == "float32" or layout != "one document" or K == 80):
            continue
          wide = [x.astype(jnp.float32) for x in (q, k, v)]
          with jax.default_matmul_precision("highest"):
            want = both(
              lambda *x, p=places, r=row: attention(*x, r, backend="reference", **p), cotangent
            )(*wide)
          got = both(
            lambda *x, p=places, b=backend, w=windows: attention(*x, w, backend=b, **p), cotangent
          )(q, k, v)
          error = max(
            float(np.abs(np.asarray(a, np.float32) - np.asarray(b)).max() / np.abs(b).max())
            for a, b in zip(got, want, strict=True)
          )
          records.append({
            "backend": backend, "windows": "static" if isinstance(windows, tuple) else "runtime",
            "dtype": dtype, "head_dim": K, "layout": layout, "error": error,
            "passed": bool(error <= TOLERANCE[dtype]),
          })  # fmt: skip
          print(json.dumps(records[-1]), flush=True)
  return records


def seconds(call, repeats: int) -> float:
  """Median wall time of `call`, after two runs that do not count."""
  spent = []
  for turn in range(repeats + 2):
    start = time.perf_counter()
    jax.block_until_ready(call())
    if turn >= 2:
      spent.append(time.perf_counter() - start)
  return statistics.median(spent)


def timings(lengths, head_dim: int, window: int, repeats: int) -> list[dict]:
  """One record per length, backend, mode and ratio; `speedup` is over all heads full."""
  records = []
  for T in lengths:
    H, G = 16, 8
    q, k, v, cotangent = arrays(T, H, G, head_dim, "bfloat16")
    for backend in ("triton", "cudnn"):
      for mode in ("forward", "forward+backward"):
        full = None
        for ratio in (0.0, 0.5, 0.75, 1.0):
          local = int(ratio * H)
          row = (FULL,) * (H - local) + (window,) * local

          def run(q, k, v, row=row, backend=backend):
            return attention(q, k, v, row, backend=backend)

          function = jax.jit(run) if mode == "forward" else both(run, cotangent)
          spent = seconds(lambda f=function, x=(q, k, v): f(*x), repeats)
          full = spent if full is None else full
          records.append({
            "tokens": T, "backend": backend, "mode": mode, "ratio": ratio, "seconds": spent,
            "speedup": full / spent,
          })  # fmt: skip
          print(json.dumps(records[-1]), flush=True)
  return records


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--numerics-only", action="store_true", help="no timings")
  parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
  parser.add_argument("--head-dim", type=int, default=128)
  parser.add_argument("--window", type=int, default=1024)
  parser.add_argument("--repeats", type=int, default=10)
  parser.add_argument("--out", help="folder for gpu_attention.json")
  options = parser.parse_args(argv)
  if jax.default_backend() != "gpu":
    print(f"needs an NVIDIA GPU, but jax runs on {jax.default_backend()}", file=sys.stderr)
    return 1
  checks = numerics()
  times = []
  if not options.numerics_only:
    times = timings(options.lengths, options.head_dim, options.window, options.repeats)
  if options.out:
    record = {"device": jax.devices()[0].device_kind, "checks": checks, "timings": times}
    output.write(options.out, "gpu_attention", record)
  failed = [c for c in checks if not c["passed"]]
  print(f"{len(checks) - len(failed)} of {len(checks)} checks passed")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
