"""Flash attention as XLA loops: blocks of queries, and inside them only the key blocks needed.

Never more than one `[block_q, block_k]` tile of scores per head exists, forward and backward, so
memory is linear in the number of tokens. Loop bounds are data: a window is an argument, not a
constant, and another window needs no other trace.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention import plan

FLOOR = -1e30  # a finite "nothing seen yet": exp(FLOOR - FLOOR) is 1, never NaN


class Where(NamedTuple):
  """What decides who sees whom: int32 positions and segments `[P, T]` (P = 1 or N), and int32
  windows `[N, R]`."""

  positions: jax.Array
  segments: jax.Array
  windows: jax.Array


class Static(NamedTuple):
  """Compiled-in facts of a call."""

  block_q: int
  block_k: int
  sinks: int
  scale: float
  softcap: float | None


def _rows(x, block, size, axis=1):
  return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _mask(where: Where, fixed: Static, i, j):
  """bool `[N, R, block_q, block_k]`, by the rule of `reference.visible`."""
  q_pos, q_seg = _rows(where.positions, i, fixed.block_q), _rows(where.segments, i, fixed.block_q)
  k_pos, k_seg = _rows(where.positions, j, fixed.block_k), _rows(where.segments, j, fixed.block_k)
  distance = (q_pos[:, :, None] - k_pos[:, None, :])[:, None]
  near = distance < where.windows[:, :, None, None]
  if fixed.sinks:
    near |= (k_pos < fixed.sinks)[:, None, None, :]
  same = (q_seg[:, :, None] == k_seg[:, None, :]) | (k_seg == 0)[:, None, :]
  real = (q_seg >= 0)[:, :, None] & (k_seg >= 0)[:, None, :]
  return near & (distance >= 0) & (same & real)[:, None]


def _scores(q_NxMxK, k_NxSxK, fixed: Static):
  """float32 scores and, with a soft cap, their tanh (for the derivative)."""
  s = fixed.scale * jnp.einsum("nmk,nsk->nms", q_NxMxK, k_NxSxK, preferred_element_type=jnp.float32)
  if fixed.softcap is None:
    return s, None
  t = jnp.tanh(s / fixed.softcap)
  return fixed.softcap * t, t


def _visits(where: Where, fixed: Static):
  """For each query block the needed key blocks, first `count` entries of a row of indices."""
  queries = plan.summarise(where.positions, where.segments, fixed.block_q)
  keys = plan.summarise(where.positions, where.segments, fixed.block_k)
  widest_NxO = where.windows.max(-1, keepdims=True)
  if where.positions.shape[0] == 1:
    widest_NxO = widest_NxO.max(0, keepdims=True)
  matrix_QxN = plan.needed(widest_NxO, queries, keys, fixed.sinks).any((0, 1))
  return jnp.argsort(~matrix_QxN, axis=-1, stable=True).astype(jnp.int32), matrix_QxN.sum(-1)


def _forward(q, k, v, where: Where, fixed: Static):
  N, R, T, K = q.shape
  M = R * fixed.block_q
  order_QxN, count_Q = _visits(where, fixed)

  def query_block(i):
    q_NxMxK = _rows(q, i, fixed.block_q, 2).reshape(N, M, K)

    def key_block(step, carry):
      top, total, out = carry
      j = order_QxN[i, step]
      s, _ = _scores(q_NxMxK, _rows(k, j, fixed.block_k), fixed)
      mask = _mask(where, fixed, i, j)
      # Masked scores lie below FLOOR, so that they count as 0 even in a row that has seen nothing.
      s = jnp.where(mask, s.reshape(N, R, fixed.block_q, -1), 2 * FLOOR).reshape(N, M, -1)
      new = jnp.maximum(top, s.max(-1))
      p = jnp.exp(s - new[..., None])
      shrink = jnp.exp(top - new)
      pv = jnp.einsum(
        "nms,nsk->nmk",
        p.astype(v.dtype),
        _rows(v, j, fixed.block_k),
        preferred_element_type=jnp.float32,
      )
      return new, total * shrink + p.sum(-1), out * shrink[..., None] + pv

    zero = jnp.zeros((N, M), jnp.float32)
    start = (jnp.full_like(zero, FLOOR), zero, jnp.zeros((N, M, K), jnp.float32))
    top, total, out = jax.lax.fori_loop(0, count_Q[i], key_block, start)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    lse = top + jnp.log(jnp.maximum(total, 1e-30))
    shape = (N, R, fixed.block_q)
    return out.astype(q.dtype).reshape(*shape, K), lse.reshape(shape)

  out_QxNxRxTxK, lse_QxNxRxT = jax.lax.map(query_block, jnp.arange(T // fixed.block_q))
  out = jnp.moveaxis(out_QxNxRxTxK, 0, 2).reshape(q.shape)
  return out, jnp.moveaxis(lse_QxNxRxT, 0, 2).reshape(N, R, T)


def _backward(q, k, v, where: Where, out, lse, d_out, fixed: Static):
  N, R, T, K = q.shape
  M = R * fixed.block_q
  order_QxN, count_Q = _visits(where, fixed)
  f32 = jnp.float32
  delta_NxRxT = (out.astype(f32) * d_out.astype(f32)).sum(-1)

  def query_block(carry, i):
    q_NxMxK, do_NxMxK = (_rows(x, i, fixed.block_q, 2).reshape(N, M, K) for x in (q, d_out))
    lse_NxM, delta_NxM = (_rows(x, i, fixed.block_q, 2).reshape(N, M) for x in (lse, delta_NxRxT))

    def key_block(step, carry):
      dq, dk, dv = carry
      j = order_QxN[i, step]
      k_NxSxK, v_NxSxK = _rows(k, j, fixed.block_k), _rows(v, j, fixed.block_k)
      s, tanh = _scores(q_NxMxK, k_NxSxK, fixed)
      mask = _mask(where, fixed, i, j)
      mask = jnp.broadcast_to(mask, (N, R, fixed.block_q, fixed.block_k)).reshape(s.shape)
      # Masked before the exponential: a row without keys has no meaningful lse.
      p = jnp.exp(jnp.where(mask, s - lse_NxM[..., None], FLOOR))
      dp = jnp.einsum("nmk,nsk->nms", do_NxMxK, v_NxSxK, preferred_element_type=f32)
      ds = p * (dp - delta_NxM[..., None])
      if tanh is not None:
        ds *= 1.0 - tanh * tanh
      ds, p = (fixed.scale * ds).astype(q.dtype), p.astype(q.dtype)
      dq += jnp.einsum("nms,nsk->nmk", ds, k_NxSxK, preferred_element_type=f32)
      dk_j = jnp.einsum("nms,nmk->nsk", ds, q_NxMxK, preferred_element_type=f32)
      dv_j = jnp.einsum("nms,nmk->nsk", p, do_NxMxK, preferred_element_type=f32)
      dk, dv = (
        jax.lax.dynamic_update_slice_in_dim(
          x, _rows(x, j, fixed.block_k) + x_j, j * fixed.block_k, 1
        )
        for x, x_j in ((dk, dk_j), (dv, dv_j))
      )
      return dq, dk, dv

    dk, dv = carry
    dq = jnp.zeros((N, M, K), f32)
    dq, dk, dv = jax.lax.fori_loop(0, count_Q[i], key_block, (dq, dk, dv))
    return (dk, dv), dq.astype(q.dtype).reshape(N, R, fixed.block_q, K)

  zeros = jnp.zeros(k.shape, f32)
  (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), jnp.arange(T // fixed.block_q))
  return jnp.moveaxis(dq, 0, 2).reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash(q_NxRxTxK, k_NxTxK, v_NxTxK, where: Where, fixed: Static):
  """Attention of N kv groups that visit the same key blocks, R query heads each.

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
  return *_backward(q, k, v, where, out, lse, d_out, fixed), None


flash.defvjp(_flash_forward, _flash_backward)
