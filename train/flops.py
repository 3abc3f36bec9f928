"""What a training step costs, and how fast this machine could be."""

import time

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.hf_table import table

# Published dense bfloat16 peaks of one device, FLOP/s.
PEAKS = {
  "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12,
  "TPU v6 lite": 918e12, "TPU v6e": 918e12, "NVIDIA A100": 312e12, "NVIDIA H100": 989e12,
}  # fmt: skip


def visible_pairs(window: int, tokens: int) -> int:
  """Pairs of query and key that a head with this window sees in a row of one document."""
  w = min(window, tokens)
  return w * (w + 1) // 2 + (tokens - w) * w


def forward_flops(config: ModelConfig, windows, rows: int, tokens: int) -> float:
  """Products of one forward pass, the output head included.

  Args:
    windows: L rows of H ints.
    rows, tokens: B and T; documents within a row are not looked at.
  """
  weights = 0
  for row in table(config):
    size = 1
    for n in row.full_shape:
      size *= n
    if len(row.counts) == 2:
      size = size * config.experts_per_token // config.num_experts
    if row.target.endswith("kernel"):
      weights += size
  if config.tied_head:
    weights += config.vocab_size * config.model_dim
  pairs = sum(visible_pairs(w, tokens) for row in windows for w in row)
  return 2.0 * rows * (weights * tokens + 2 * config.head_dim * pairs)


def step_flops(config: ModelConfig, windows, rows: int, tokens: int, teacher=None) -> float:
  """A step of training: forward, twice that backward, and the teacher's forward if there is one.
  What is computed again by remat does not count, as is usual for MFU."""
  own = 3 * forward_flops(config, windows, rows, tokens)
  return own + (0 if teacher is None else forward_flops(config, teacher, rows, tokens))


def peak_flops(device: jax.Device, dtype=jnp.float32) -> float:
  """FLOP/s that this device's products can reach: published, or where nothing is published (a
  CPU) measured by one large product."""
  for name in sorted(PEAKS, key=len, reverse=True):
    if device.device_kind.startswith(name):
      return PEAKS[name]
  n = 1536
  a = jax.device_put(jnp.ones((n, n), dtype), device)
  product = jax.jit(jnp.dot)
  product(a, a).block_until_ready()
  best = min(_seconds(product, a) for _ in range(3))
  return 2.0 * n**3 / best


def _seconds(product, a) -> float:
  start = time.perf_counter()
  product(a, a).block_until_ready()
  return time.perf_counter() - start
