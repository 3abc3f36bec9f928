"""Which key blocks a query block needs: shared by every backend that skips work.

A block is `size` consecutive tokens. From the lowest and highest position and segment of a block
one can tell that no query in it sees any key of another block; such pairs are never visited. For
one document per row the rule is exact: the number of visited blocks is the minimum.

    window 2 blocks, 6 blocks of queries (rows) and keys: x = visited
    x . . . . .
    x x . . . .
    x x x . . .
    . x x x . .
    . . x x x .
    . . . x x x
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.windows import FULL

FAR = 2**30  # beyond any position, with room for differences in int32


class Blocks(NamedTuple):
  """Ranges over the real tokens of each block, int32 `[B, N]`; `shared`: holds segment 0.

  A block of padding has an empty range (lowest = FAR, highest = -1), so nothing needs it.
  """

  pos_min: jax.Array
  pos_max: jax.Array
  seg_min: jax.Array
  seg_max: jax.Array
  shared: jax.Array


def summarise(positions_BxT: jax.Array, segments_BxT: jax.Array, size: int) -> Blocks:
  """Ranges of every block of `size` tokens; T must be a multiple of `size`."""
  shape = (positions_BxT.shape[0], positions_BxT.shape[1] // size, size)
  pos, seg = positions_BxT.reshape(shape), segments_BxT.reshape(shape)
  real = seg >= 0

  def low(x):
    return jnp.where(real, x, FAR).min(-1)

  def high(x):
    return jnp.where(real, x, -1).max(-1)

  return Blocks(low(pos), high(pos), low(seg), high(seg), (seg == 0).any(-1))


def needed(windows_BxH: jax.Array, queries: Blocks, keys: Blocks, sinks: int = 0) -> jax.Array:
  """bool `[B, H, Nq, Nk]`: whether some query of the row block may see some key of the column."""
  q = Blocks(*(x[:, :, None] for x in queries))
  k = Blocks(*(x[:, None, :] for x in keys))
  segment = ((k.seg_max >= q.seg_min) & (k.seg_min <= q.seg_max)) | k.shared
  both_BxNxN = segment & (k.pos_min <= q.pos_max)
  near = (q.pos_min - k.pos_max)[:, None] < windows_BxH[:, :, None, None]
  if sinks:
    near |= (k.pos_min < sinks)[:, None]
  return near & both_BxNxN[:, None]


class Spans(NamedTuple):
  """Blocks to visit for each query block, int32: `first`, then `second` .. `last`, `count` in all.

  The first block stands alone because sinks put it far from the others. `count` is 0 for a block
  of padding. Blocks between `second` and `last` that are not needed are visited too: they occur
  only between a shared haystack and a question's own tokens.
  """

  first: jax.Array
  second: jax.Array
  last: jax.Array
  count: jax.Array


def spans(needed_xQxN: jax.Array) -> Spans:
  """Turns the last axis of a needed matrix into loop bounds."""
  blocks = needed_xQxN.shape[-1]
  index = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), needed_xQxN.shape)
  first = jnp.where(needed_xQxN, index, blocks).min(-1)
  last = jnp.where(needed_xQxN, index, -1).max(-1)
  rest = needed_xQxN & (index > first[..., None])
  second = jnp.where(rest, index, blocks).min(-1)
  count = jnp.where(last < 0, 0, 1 + jnp.maximum(last - second + 1, 0))
  zero = jnp.zeros_like(first)
  first, last = jnp.minimum(first, blocks - 1), jnp.maximum(last, zero)
  return Spans(first, jnp.minimum(second, last), last, count)


def block_at(first, second, last, step):
  """The block visited at `step`; past the end it stays at the last one (nothing new is fetched)."""
  return jnp.where(step == 0, first, jnp.minimum(second + step - 1, last))


def visited(windows_xH, tokens: int, block: int, sinks: int = 0) -> jax.Array:
  """Key blocks visited per head over all query blocks of one document, int32 `[H]`."""
  positions = jnp.arange(tokens, dtype=jnp.int32)[None]
  summary = summarise(positions, jnp.zeros_like(positions), block)
  matrix = needed(jnp.asarray(windows_xH, jnp.int32)[None], summary, summary, sinks)
  return spans(matrix).count.sum(-1)[0]


def runs(windows: tuple[int, ...], groups: int) -> list[tuple[int, int, int]]:
  """Neighbouring kv groups with one window: `(first group, last group + 1, window)`.

  A model whose groups are sorted per layer (`models.hybridize`) has at most two runs per layer.

  Raises:
    NotImplementedError: heads of one kv group have different windows.
  """
  R = len(windows) // groups
  result: list[tuple[int, int, int]] = []
  for g in range(groups):
    row = windows[g * R : (g + 1) * R]
    if len(set(row)) > 1:
      raise NotImplementedError(
        f"heads of kv group {g} have different static windows {row}; give one window per group, or "
        "pass the windows as an array (runtime windows)"
      )
    if result and result[-1][2] == row[0]:
      result[-1] = (result[-1][0], g + 1, row[0])
    else:
      result.append((g, g + 1, row[0]))
  return result


def pad_tokens(size: int, positions_BxT, segments_BxT, *arrays_BxTx):
  """Pads the token axis to a multiple of `size`; added tokens are padding (segment -1)."""
  extra = -positions_BxT.shape[1] % size
  if not extra:
    return positions_BxT, segments_BxT, *arrays_BxTx

  def pad(x, value=0):
    return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2), constant_values=value)

  return pad(positions_BxT), pad(segments_BxT, -1), *(pad(x) for x in arrays_BxTx)


def is_full(window: int, tokens: int) -> bool:
  """A static window that no token of the sequence can reach beyond."""
  return window >= min(tokens, FULL)
