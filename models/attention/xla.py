"""The two CPU backends, in plain XLA: `static` for compiled-in windows, `blocked` for runtime ones.

Both run the loops of `models.attention.loops`. They differ in what shares a loop: with static
windows all neighbouring groups of one window go together, with runtime windows every row and kv
group has bounds of its own.
"""

import jax
import jax.numpy as jnp

from models.attention import plan
from models.attention.loops import Static, Where, flash

# Tokens of a tile. Its scores, some heads of queries each, stay in a core's cache, and little is wasted
# at the edges of a window and of T. Larger ones were slower for 1 to 8 heads a group, most of all
# backward (1024 tokens, full: 64 45 ms, 128 52, 256 61).
TILE = 64


def _power_of_two(limit: float, most: int, least: int = 16) -> int:
  """The largest power of two that is at most `limit`, kept within `least` .. `most`."""
  size = least
  while size * 2 <= min(limit, most):
    size *= 2
  return size


def _to_groups(x_BxTxHxK, groups):
  """`[B, T, H, K]` to `[B * G, R, T, K]`."""
  B, T, H, K = x_BxTxHxK.shape
  x = x_BxTxHxK.reshape(B, T, groups, H // groups, K)
  return x.transpose(0, 2, 3, 1, 4).reshape(B * groups, H // groups, T, K)


def _from_groups(x_NxRxTxK, batch):
  """`[B * G, R, T, K]` to `[B, T, H, K]`."""
  N, R, T, K = x_NxRxTxK.shape
  x = x_NxRxTxK.reshape(batch, N // batch, R, T, K).transpose(0, 3, 1, 2, 4)
  return x.reshape(batch, T, N // batch * R, K)


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
  fixed = Static(block, block, sinks, scale, softcap)
  positions, segments, q, k, v = plan.pad_tokens(block, positions, segments, q, k, v)
  q_NxRxTxK = _to_groups(q, G)
  k_NxTxK, v_NxTxK = (_to_groups(x, G)[:, 0] for x in (k, v))
  rows_N = jnp.repeat(jnp.arange(B), G)

  def group(args):
    q, k, v, windows_R, row = args
    where = Where(positions[row][None], segments[row][None], windows_R[None])
    return flash(q[None], k[None], v[None], where, fixed)[0]

  out = jax.lax.map(group, (q_NxRxTxK, k_NxTxK, v_NxTxK, windows_NxR, rows_N))
  return _from_groups(out, B)[:, :T]


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
  B, T, H, _ = q.shape
  G = k.shape[2]
  R = H // G
  outs = []
  for first, stop, window in plan.runs(windows, G):
    heads, n = slice(first * R, stop * R), B * (stop - first)
    block = _power_of_two(min(T, window), TILE, TILE // 2)
    fixed = Static(block, block, sinks, scale, softcap)
    pos, seg, q_run, k_run, v_run = plan.pad_tokens(
      block, positions, segments, q[:, :, heads], k[:, :, first:stop], v[:, :, first:stop]
    )
    pos, seg = (x if B == 1 else jnp.repeat(x, stop - first, axis=0) for x in (pos, seg))
    where = Where(pos, seg, jnp.full((n, R), window, jnp.int32))
    k_run, v_run = (_to_groups(x, stop - first)[:, 0] for x in (k_run, v_run))
    out = flash(_to_groups(q_run, stop - first), k_run, v_run, where, fixed)
    outs.append(_from_groups(out, B)[:, :T])
  return jnp.concatenate(outs, axis=2)
