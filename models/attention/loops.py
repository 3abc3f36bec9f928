"""Flash attention as XLA loops: blocks of queries, and inside them only the key blocks needed.

Never more than one `[together * R * block_q, block_k]` tile of scores exists, forward and backward, so
memory is linear in the number of tokens. Loop bounds are data: a window is an argument, not a
constant, and another window needs no other trace.

Tiles are small, as are the arrays that a tile's operations read: XLA's runtime shares larger
operations among threads, which at this size costs more than it gains.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention import plan

PRODUCT = 2**20  # multiplications of a tile's product that one thread does; more are shared
FLOOR = -1e30  # a finite "nothing seen yet": exp(FLOOR - FLOOR) is 1, never NaN


class Where(NamedTuple):
  """What decides who sees whom: int32 positions and segments `[P, T]`, windows `[W, R]`.

  P is a divisor of N: `N / P` neighbouring groups share a row of tokens. W is 1, where all have the
  same windows, or N.
  """

  positions: jax.Array
  segments: jax.Array
  windows: jax.Array


class Static(NamedTuple):
  """Compiled-in facts of a call.

  `together` neighbouring kv groups share a tile: they have a row of tokens and windows in common.
  """

  together: int
  block_q: int
  block_k: int
  sinks: int
  scale: float
  softcap: float | None


def _visits(own: Where, fixed: Static):
  """For each query block of a row the needed key blocks: the first `count` of `order`, int32.

  One row at a time, as this grows with the square of T, if only by 4 bytes for 4096 pairs of tokens.
  """
  queries = plan.summarise(own.positions, own.segments, fixed.block_q)
  keys = plan.summarise(own.positions, own.segments, fixed.block_k)
  widest_1x1 = own.windows.max(-1, keepdims=True)
  needed_QxN = plan.needed(widest_1x1, queries, keys, fixed.sinks)[0, 0]
  order_QxN = jnp.argsort(~needed_QxN, axis=-1, stable=True).astype(jnp.int32)
  return order_QxN, needed_QxN.sum(-1)


def _query_blocks(body, where: Where, fixed: Static, groups: int, blocks: int, carry):
  """`carry = body(n, i, own, visits, carry)` for all tiles: n the first of their groups, i the block
  of queries, `own` what holds for them and `visits` the key blocks as `(order, count)`."""

  def row(step, carry):
    n = step * fixed.together
    own = _row(where, n, groups)
    order_QxN, count_Q = _visits(own, fixed)

    def block(i, carry):
      return body(n, i, own, (order_QxN[i], count_Q[i]), carry)

    return jax.lax.fori_loop(0, blocks, block, carry)

  return jax.lax.fori_loop(0, groups // fixed.together, row, carry)


def _tile(x, rows: int, row, block, size):
  """`rows` rows of one block of the last but one axis: `[N, ..., T, K]` to `[rows, ..., size, K]`."""
  start = (row, *(0,) * (x.ndim - 3), block * size, 0)
  return jax.lax.dynamic_slice(x, start, (rows, *x.shape[1:-2], size, x.shape[-1]))


def _put(x, tile, row, block):
  """`x` with such a tile replaced."""
  start = (row, *(0,) * (x.ndim - 3), block * tile.shape[-2], 0)
  return jax.lax.dynamic_update_slice(x, tile.astype(x.dtype), start)


def _row(where: Where, n, rows: int) -> Where:
  """What holds for group n of `rows`: P = W = 1, and no window below 0 (see `_mask`)."""

  def row(x):
    return jax.lax.dynamic_slice_in_dim(x, n * len(x) // rows, 1)

  return Where(row(where.positions), row(where.segments), jnp.maximum(row(where.windows), 0))


def _mask(where: Where, fixed: Static, i, j):
  """bool `[1, R, block_q, block_k]` for one group, by the rule of `reference.visible`.

  In as few operations as it takes: they are a good part of what a tile costs besides its products.
  A distance below 0 is a large number without its sign, a padded query is before every key.
  """

  def tokens(x_1xT, block, size):
    return jax.lax.dynamic_slice_in_dim(x_1xT, block * size, size, 1)

  q_pos, q_seg = (tokens(x, i, fixed.block_q) for x in (where.positions, where.segments))
  k_pos, k_seg = (tokens(x, j, fixed.block_k) for x in (where.positions, where.segments))
  q_pos = jnp.where(q_seg < 0, -plan.FAR, q_pos)
  same = (q_seg[:, :, None] == k_seg[:, None, :]) | (k_seg == 0)[:, None, :]
  distance = _unsigned(q_pos[:, :, None] - k_pos[:, None, :])[:, None]
  near = distance < _unsigned(where.windows)[:, :, None, None]
  if fixed.sinks:
    near |= (distance <= jnp.iinfo(jnp.int32).max) & (k_pos < fixed.sinks)[:, None, None, :]
  return near & same[:, None]


def _unsigned(x):
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _scores(q_OxMxK, k_OxSxK, fixed: Static):
  """float32 scores and, with a soft cap, their tanh (for the derivative)."""
  s = fixed.scale * jnp.einsum("omk,osk->oms", q_OxMxK, k_OxSxK, preferred_element_type=jnp.float32)
  if fixed.softcap is None:
    return s, None
  t = jnp.tanh(s / fixed.softcap)
  return fixed.softcap * t, t


def _forward(q, k, v, where: Where, fixed: Static):
  N, R, T, K = q.shape
  O, M, blocks = fixed.together, R * fixed.block_q, T // fixed.block_q

  def query_block(n, i, own, visits, carry):
    order_N, count = visits
    q_OxMxK = _tile(q, O, n, i, fixed.block_q).reshape(O, M, K)

    def key_block(step, carry):
      top, total, out = carry
      j = order_N[step]
      s, _ = _scores(q_OxMxK, _tile(k, O, n, j, fixed.block_k), fixed)
      # Masked scores lie below FLOOR, so that they count as 0 even in a row that has seen nothing.
      mask = _mask(own, fixed, i, j)
      s = jnp.where(mask, s.reshape(O, R, fixed.block_q, -1), 2 * FLOOR).reshape(O, M, -1)
      new = jnp.maximum(top, s.max(-1, keepdims=True))
      p = jnp.exp(s - new)
      shrink = jnp.exp(top - new)
      v_OxSxK = _tile(v, O, n, j, fixed.block_k)
      pv = jnp.einsum(
        "oms,osk->omk", p.astype(v.dtype), v_OxSxK, preferred_element_type=jnp.float32
      )
      return new, total * shrink + p.sum(-1, keepdims=True), out * shrink + pv

    zero = jnp.zeros((O, M, 1), jnp.float32)
    start = (jnp.full_like(zero, FLOOR), zero, jnp.zeros((O, M, K), jnp.float32))
    top, total, out = jax.lax.fori_loop(0, count, key_block, start)
    total = jnp.maximum(total, 1e-30)
    tiles = out / total, top + jnp.log(total)
    shape = (O, R, fixed.block_q, -1)
    return tuple(_put(x, tile.reshape(shape), n, i) for x, tile in zip(carry, tiles, strict=True))

  carry = jnp.zeros_like(q), jnp.zeros((N, R, T, 1), jnp.float32)
  return _query_blocks(query_block, where, fixed, N, blocks, carry)


def _backward(q, k, v, where: Where, out, lse, d_out, fixed: Static):
  N, R, T, K = q.shape
  O, M, blocks = fixed.together, R * fixed.block_q, T // fixed.block_q
  f32 = jnp.float32
  delta_NxRxTx1 = (out.astype(f32) * d_out.astype(f32)).sum(-1, keepdims=True)

  def query_block(n, i, own, visits, carry):
    order_N, count = visits
    q_OxMxK, do_OxMxK, lse_OxMx1, delta_OxMx1 = (
      _tile(x, O, n, i, fixed.block_q).reshape(O, M, -1) for x in (q, d_out, lse, delta_NxRxTx1)
    )

    def key_block(step, carry):
      dq_OxMxK, dk, dv = carry
      j = order_N[step]
      k_OxSxK, v_OxSxK = (_tile(x, O, n, j, fixed.block_k) for x in (k, v))
      s, tanh = _scores(q_OxMxK, k_OxSxK, fixed)
      mask = _mask(own, fixed, i, j)
      mask = jnp.broadcast_to(mask, (O, R, fixed.block_q, fixed.block_k)).reshape(s.shape)
      # Masked before the exponential: a row without keys has no meaningful lse.
      p = jnp.exp(jnp.where(mask, s - lse_OxMx1, FLOOR))
      dp = jnp.einsum("omk,osk->oms", do_OxMxK, v_OxSxK, preferred_element_type=f32)
      ds = p * (dp - delta_OxMx1)
      if tanh is not None:
        ds *= 1.0 - tanh * tanh
      ds, p = (fixed.scale * ds).astype(q.dtype), p.astype(q.dtype)
      dq_OxMxK += jnp.einsum("oms,osk->omk", ds, k_OxSxK, preferred_element_type=f32)
      dk_OxSxK = jnp.einsum("oms,omk->osk", ds, q_OxMxK, preferred_element_type=f32)
      dv_OxSxK = jnp.einsum("oms,omk->osk", p, do_OxMxK, preferred_element_type=f32)
      dk, dv = (
        _put(x, _tile(x, O, n, j, fixed.block_k) + tile, n, j)
        for x, tile in ((dk, dk_OxSxK), (dv, dv_OxSxK))
      )
      return dq_OxMxK, dk, dv

    dq, dk, dv = carry
    start = (jnp.zeros((O, M, K), f32), dk, dv)
    dq_OxMxK, dk, dv = jax.lax.fori_loop(0, count, key_block, start)
    return _put(dq, dq_OxMxK.reshape(O, R, fixed.block_q, K), n, i), dk, dv

  carry = jnp.zeros_like(q), jnp.zeros(k.shape, f32), jnp.zeros(v.shape, f32)
  dq, dk, dv = _query_blocks(query_block, where, fixed, N, blocks, carry)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash(q_NxRxTxK, k_NxTxK, v_NxTxK, where: Where, fixed: Static):
  """Attention of N kv groups, R query heads each; every group visits the key blocks it needs.

  Args:
    q_NxRxTxK, k_NxTxK, v_NxTxK: any float dtype; T is a multiple of both block sizes.
    where: see `Where`.
    fixed: see `Static`.

  Returns:
    `[N, R, T, K]` in the dtype of q.
  """
  return _forward(q_NxRxTxK, k_NxTxK, v_NxTxK, where, fixed)[0]


def _flash_forward(q, k, v, where, fixed):
  out, lse = _forward(q, k, v, where, fixed)
  return out, (q, k, v, where, out, lse)


def _flash_backward(fixed, saved, d_out):
  q, k, v, where, out, lse = saved
  _, R, _, K = q.shape
  while R * fixed.block_q * fixed.block_k * K > PRODUCT and fixed.block_q > 16:
    fixed = fixed._replace(block_q=fixed.block_q // 2)
  return *_backward(q, k, v, where, out, lse, d_out, fixed), None


flash.defvjp(_flash_forward, _flash_backward)
