"""The two CPU backends, in plain XLA: `static` for compiled-in windows, `blocked` for runtime ones.

Both run the loops of `models.attention.loops`. They differ in what shares bounds: with static
windows all neighbouring groups of one window, with runtime windows every kv group has its own.
"""

import jax.numpy as jnp

from models.attention import plan
from models.attention.loops import Static, Where, flash

# Tokens and query heads of a tile, the latter of several groups where those have fewer. Its scores stay
# in a core's cache, and little is wasted at the edges of a window and of T. Larger tiles were slower for
# 1 to 8 heads a group, most of all backward.
TILE, HEADS = 64, 4


def _power_of_two(limit: float, most: int, least: int = 16) -> int:
  """The largest power of two that is at most `limit`, kept within `least` .. `most`."""
  size = least
  while size * 2 <= min(limit, most):
    size *= 2
  return size


def _divisor(number: int, most: int) -> int:
  """The largest divisor of a number that is at most `most`, or 1."""
  return max((d for d in range(1, most + 1) if number % d == 0), default=1)


def _flash(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, where, fixed):
  """`flash` with heads in the middle; `[B, T, H, K]`."""
  B, T, H, K = q_BxTxHxK.shape
  G = k_BxTxGxK.shape[2]
  q = q_BxTxHxK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
  k, v = (x.transpose(0, 2, 1, 3).reshape(B * G, T, K) for x in (k_BxTxGxK, v_BxTxGxK))
  out = flash(q.reshape(B * G, H // G, T, K), k, v, where, fixed)
  return out.reshape(B, G, H // G, T, K).transpose(0, 3, 1, 2, 4).reshape(B, T, H, K)


def blocked(q, k, v, windows, *, positions, segments, sinks=0, scale, softcap=None, layout="any"):
  """Runtime windows: one trace for all of them, work only where some head of a group looks.

  `layout` is not needed: positions and segments may be anything `reference.visible` allows.
  """
  del layout
  B, T, H, _ = q.shape
  G = k.shape[2]
  R = H // G
  windows_NxR = jnp.broadcast_to(jnp.asarray(windows, jnp.int32), (B, H)).reshape(B * G, R)
  block = _power_of_two(T, TILE)
  fixed = Static(1, block, block, sinks, scale, softcap)
  positions, segments, q, k, v = plan.pad_tokens(block, positions, segments, q, k, v)
  where = Where(positions, segments, windows_NxR)
  return _flash(q, k, v, where, fixed)[:, :T]


def static(q, k, v, windows, *, positions, segments, sinks=0, scale, softcap=None, layout="any"):
  """Static windows, a tuple of H ints: one loop nest per run of neighbouring equal groups.

  Full heads take the triangle of key blocks, local heads the block of the query and those before
  it that its window touches.

  Raises:
    NotImplementedError: windows are not a tuple, or differ within a kv group.
  """
  del layout
  if not isinstance(windows, tuple):
    raise NotImplementedError(
      "backend 'static' needs the windows as a tuple of ints; use backend='blocked' for an array"
    )
  T, H = q.shape[1:3]
  G = k.shape[2]
  R = H // G
  outs = []
  for first, stop, window in plan.runs(windows, G):
    heads = slice(first * R, stop * R)
    block = _power_of_two(min(T, window), TILE, TILE // 2)
    fixed = Static(_divisor(stop - first, HEADS // R), block, block, sinks, scale, softcap)
    pos, seg, q_run, k_run, v_run = plan.pad_tokens(
      block, positions, segments, q[:, :, heads], k[:, :, first:stop], v[:, :, first:stop]
    )
    where = Where(pos, seg, jnp.full((1, R), window, jnp.int32))
    outs.append(_flash(q_run, k_run, v_run, where, fixed)[:, :T])
  return jnp.concatenate(outs, axis=2)
