"""A tiny model whose heads, widths and vocabulary divide over two devices, and batches for it."""

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.hybridize import hybridize, static_windows
from models.transformer import Transformer
from models.windows import HeadMask
from train import partition, subset
from train.data.packing import Row, blank, put
from train.optimizer import optimizer, schedule
from train.settings import CptSettings
from train.setup import fresh_state
from train.step import Plan, make_model

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=3,
  model_dim=32,
  num_heads=8,
  num_groups=4,
  head_dim=8,
  ffn_dim=48,
  context=128,
)
MASK = HeadMask(np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]], bool))
WINDOW = 6


def tiny_params(config: ModelConfig = CONFIG, seed: int = 0) -> dict:
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  params = Transformer(config).init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32), windows)
  return jax.tree.map(lambda p: 2.0 * p if p.ndim > 2 else p, params["params"])


def tiny_batch(rows: int = 4, accumulate: int = 1, length: int = 24, seed: int = 0) -> Row:
  """Packed rows of two documents and padding, with weights of 0, 1 and 2."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(rows * accumulate):
    row, start = blank(length), 0
    for segment in (1, 2):
      ids = rng.integers(0, CONFIG.vocab_size, rng.integers(6, length // 2))
      start = put(row, start, ids, segment, rng.integers(0, 3, len(ids) - 1))
    made.append(row)
  stacked = Row(*(np.stack(x) for x in zip(*made, strict=True)))
  return Row(*(x.reshape(accumulate, rows, length) for x in stacked))


def tiny_run(mesh=None, train="all", distill=0.0, mask=MASK, **changes):
  """(plan, state, frozen, reference) on a mesh (default one device)."""
  mesh = mesh or partition.make_mesh(1, 1, 1, jax.devices()[:1])
  settings = CptSettings(mask="full", lr=1e-2, warmup=2, steps=20)
  hybrid = hybridize(tiny_params(), mask, CONFIG)
  windows = static_windows(hybrid.full_groups, WINDOW, CONFIG)
  trained, frozen = subset.split(hybrid.params, train)
  full = static_windows((CONFIG.num_groups,) * CONFIG.num_layers, 1, CONFIG)
  remat = changes.pop("remat", "none")
  plan = Plan(
    make_model(CONFIG, windows, mesh=mesh, remat=remat),
    make_model(CONFIG, full, mesh=mesh) if distill else None,
    optimizer(settings), schedule(settings), distill, **{"chunk": 16, **changes},
  )  # fmt: skip
  reference = jax.tree.map(lambda p: p.astype(plan.dtype), hybrid.params) if distill else None
  return plan, fresh_state(mesh, plan.optimizer, trained), frozen, reference


def on_mesh(mesh, batch: Row) -> Row:
  return jax.tree.map(lambda x: jax.device_put(x, partition.batch_sharding(mesh)), batch)
