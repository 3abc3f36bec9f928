"""The hybrid key/value cache: full groups keep every token, local groups a ring of recent ones.

For each layer of a model whose groups are sorted (`models.hybridize`: full ones first):

    full_k, full_v     [B, n_full, S, K]       token p stands in slot p; S is the capacity
    local_k, local_v   [B, n_local, W + s, K]  the first s tokens (sinks) stand in slots 0 .. s - 1,
                                               token p behind them in slot s + (p - s) % W

    W = 3, s = 1, after 6 tokens (0 .. 5):  slot   0  1  2  3
                                            token  0  4  5  3

Keys are stored rotated. Every row of a batch begins at slot 0 and has a length of its own, so which
token a slot holds follows from the length alone, and a row is what it would be by itself. A head's
keys are contiguous: one step of decoding reads them once, front to back.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.windows import FULL


@dataclasses.dataclass(frozen=True)
class CacheSpec:
  """The static facts of a cache; hashable, so that a step compiles once for each.

  Attributes:
    config: the architecture.
    full_groups: L ints, how many of a layer's groups (its first) are full.
    window: W, tokens a local group keeps, the newest included.
    sinks: s, first tokens that local groups keep as well.
    batch: B.
    capacity: S, most tokens of a row.
    dtype: of keys and values.
  """

  config: ModelConfig
  full_groups: tuple[int, ...]
  window: int
  sinks: int
  batch: int
  capacity: int
  dtype: jnp.dtype

  def __post_init__(self):
    object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
    if len(self.full_groups) != self.config.num_layers or not all(
      0 <= n <= self.config.num_groups for n in self.full_groups
    ):
      raise ValueError(
        f"full_groups {self.full_groups} must be {self.config.num_layers} numbers from 0 to {self.config.num_groups}"
      )
    for field in ("window", "batch", "capacity"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} {getattr(self, field)} must be positive")
    if self.sinks < 0:
      raise ValueError(f"sinks {self.sinks} must not be negative")

  @property
  def slots(self) -> int:
    """Slots of a local group: W + s, or all tokens where those are fewer."""
    return min(self.window + self.sinks, self.capacity)

  @property
  def num_bytes(self) -> int:
    """Bytes of keys and values, by the formula; `num_bytes` counts them in the buffers."""
    full = sum(self.full_groups)
    kept = full * self.capacity + (self.config.total_groups - full) * self.slots
    return 2 * self.batch * kept * self.config.head_dim * self.dtype.itemsize

  def full(self) -> "CacheSpec":
    """The same cache with every group full."""
    groups = (self.config.num_groups,) * self.config.num_layers
    return dataclasses.replace(self, full_groups=groups)


class LayerCache(NamedTuple):
  """Keys and values of one layer; None where it has no full or no local groups."""

  full_k: jax.Array | None
  full_v: jax.Array | None
  local_k: jax.Array | None
  local_v: jax.Array | None


class Cache(NamedTuple):
  """Attributes:
  layers: L of them.
  length_B: int32, tokens each row holds.
  """

  layers: tuple[LayerCache, ...]
  length_B: jax.Array


def empty(spec: CacheSpec) -> Cache:
  """A cache without tokens."""

  def zeros(groups, slots):
    shape = (spec.batch, groups, slots, spec.config.head_dim)
    return jnp.zeros(shape, spec.dtype) if groups else None

  layers = []
  for n in spec.full_groups:
    m = spec.config.num_groups - n
    layers.append(
      LayerCache(
        zeros(n, spec.capacity), zeros(n, spec.capacity), zeros(m, spec.slots), zeros(m, spec.slots)
      )
    )
  return Cache(tuple(layers), jnp.zeros(spec.batch, jnp.int32))


def num_bytes(cache: Cache) -> int:
  """Bytes of the buffers that hold keys and values."""
  return sum(buffer.nbytes for buffer in jax.tree.leaves(cache.layers))


def slot_of(position: jax.Array, spec: CacheSpec) -> jax.Array:
  """The slot of a local group in which the token at `position` stands (or stood)."""
  if spec.slots == spec.capacity:
    return position
  return jnp.where(
    position < spec.sinks, position, spec.sinks + (position - spec.sinks) % spec.window
  )


def held(length_B: jax.Array, spec: CacheSpec) -> jax.Array:
  """int32 `[B, slots]`: position of the token in each slot of a local group; -1 = none yet."""
  slot = jnp.arange(spec.slots, dtype=jnp.int32)[None]
  last = length_B[:, None] - 1
  if spec.slots == spec.capacity:
    return jnp.where(slot <= last, slot, -1)
  newest = last - (last - slot) % spec.window  # of the positions that stand in this slot
  position = jnp.where(slot < spec.sinks, slot, newest)
  return jnp.where((position >= jnp.minimum(slot, spec.sinks)) & (position <= last), position, -1)


def write(buffer_BxGxSxK: jax.Array, new_BxTxGxK: jax.Array, slot_BxT: jax.Array) -> jax.Array:
  """Puts keys or values of T tokens into their slots; a slot of `FULL` drops its token."""
  rows = jnp.arange(len(slot_BxT))[:, None]
  return buffer_BxGxSxK.at[rows, :, slot_BxT].set(
    new_BxTxGxK.astype(buffer_BxGxSxK.dtype), mode="drop"
  )


def full_slots(position_BxT: jax.Array, real_BxT: jax.Array) -> jax.Array:
  """Where full groups put tokens: `FULL` (nowhere) for padding."""
  return jnp.where(real_BxT, position_BxT, FULL)


def local_slots(
  position_BxT: jax.Array, real_BxT: jax.Array, end_B: jax.Array, spec: CacheSpec
) -> jax.Array:
  """Where local groups put tokens: nowhere for padding and for those that the last of the row,
  at `end_B - 1`, no longer sees (they would overwrite newer ones)."""
  stays = (position_BxT >= end_B[:, None] - spec.window) | (position_BxT < spec.sinks)
  return jnp.where(real_BxT & stays, slot_of(position_BxT, spec), FULL)
