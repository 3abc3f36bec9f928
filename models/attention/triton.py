"""Flash attention for NVIDIA GPUs: Pallas (Triton) kernels, forward and backward, per-head windows.

One kernel serves runtime and static windows: a window is a number in memory, loop bounds are
computed from it before the kernel starts (`plan.spans`), and key blocks outside are not visited.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from models.attention import plan

FLOOR = -1e30


class Static(NamedTuple):
  """Compiled-in facts of a call."""

  block_q: int
  block_k: int
  scale: float
  softcap: float | None
  sinks: int
  interpret: bool


def _dot(a, b):
  """Matrix product in float32; exact float32 products for float32 inputs (no TF32)."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return plt.dot(a, b, precision=exact)


def _cap(s, fixed):
  """Scaled and capped scores, and the derivative of the cap (None without one)."""
  s = s * fixed.scale
  if fixed.softcap is None:
    return s, None
  # tanh by exponentials: the kernel language has no tanh of its own on every version.
  e = jnp.exp(-2.0 * jnp.abs(s / fixed.softcap))
  t = jnp.sign(s) * (1.0 - e) / (1.0 + e)
  return fixed.softcap * t, 1.0 - t * t


def _mask(window, q_pos, q_seg, k_pos, k_seg, sinks):
  """bool `[len(q), len(k)]`, by the rule of `reference.visible`."""
  q_pos, q_seg, k_pos, k_seg = q_pos[:, None], q_seg[:, None], k_pos[None, :], k_seg[None, :]
  distance = q_pos - k_pos
  near = distance < window
  if sinks:
    near = near | (k_pos < sinks)
  return near & (distance >= 0) & ((q_seg == k_seg) | (k_seg == 0)) & (q_seg >= 0) & (k_seg >= 0)


def _visit(bounds, body, carry):
  """Runs `body(block, carry)` over `first`, then `second` .. `last`; nothing if count is 0."""
  first, second, _, count = (ref[...] for ref in bounds)

  def step(t, carry):
    return body(jnp.where(t == 0, first, second + t - 1), carry)

  return jax.lax.fori_loop(0, count, step, carry)


def _forward_kernel(
  window_ref,
  first,
  second,
  last,
  count,
  q_ref,
  k_ref,
  v_ref,
  q_pos_ref,
  q_seg_ref,
  pos_ref,
  seg_ref,
  out_ref,
  lse_ref,
  *,
  fixed,
):
  q, q_pos, q_seg, window = q_ref[...], q_pos_ref[...], q_seg_ref[...], window_ref[...]

  def key_block(j, carry):
    top, total, acc = carry
    at = pl.ds(j * fixed.block_k, fixed.block_k)
    s, _ = _cap(_dot(q, k_ref[at, :].T), fixed)
    mask = _mask(window, q_pos, q_seg, pos_ref[at], seg_ref[at], fixed.sinks)
    s = jnp.where(mask, s, FLOOR)
    new = jnp.maximum(top, s.max(-1))
    p = jnp.where(mask, jnp.exp(s - new[:, None]), 0.0)
    shrink = jnp.exp(top - new)
    acc = acc * shrink[:, None] + _dot(p.astype(v_ref.dtype), v_ref[at, :])
    return new, total * shrink + p.sum(-1), acc

  zero = jnp.zeros(fixed.block_q, jnp.float32)
  start = (zero + FLOOR, zero, jnp.zeros(q.shape, jnp.float32))
  top, total, acc = _visit((first, second, last, count), key_block, start)
  total = jnp.maximum(total, 1e-30)
  out_ref[...] = (acc / total[:, None]).astype(out_ref.dtype)
  lse_ref[...] = top + jnp.log(total)


def _weights(window, q, k, q_pos, q_seg, k_pos, k_seg, lse, fixed):
  """Softmax weights recomputed from the log-sum-exp, and the derivative of the cap."""
  s, slope = _cap(_dot(q, k.T), fixed)
  mask = _mask(window, q_pos, q_seg, k_pos, k_seg, fixed.sinks)
  # Masked before the exponential too: a row without keys has no meaningful lse.
  p = jnp.where(mask, jnp.exp(jnp.where(mask, s - lse[:, None], 0.0)), 0.0)
  return p, slope


def _score_gradient(p, slope, d_out, v, delta, fixed):
  ds = p * (_dot(d_out, v.T) - delta[:, None])
  return (ds if slope is None else ds * slope) * fixed.scale


def _query_kernel(
  window_ref,
  first,
  second,
  last,
  count,
  q_ref,
  k_ref,
  v_ref,
  q_pos_ref,
  q_seg_ref,
  pos_ref,
  seg_ref,
  d_out_ref,
  lse_ref,
  delta_ref,
  dq_ref,
  *,
  fixed,
):
  q, q_pos, q_seg, window = q_ref[...], q_pos_ref[...], q_seg_ref[...], window_ref[...]
  d_out, lse, delta = d_out_ref[...], lse_ref[...], delta_ref[...]

  def key_block(j, dq):
    at = pl.ds(j * fixed.block_k, fixed.block_k)
    k = k_ref[at, :]
    p, slope = _weights(window, q, k, q_pos, q_seg, pos_ref[at], seg_ref[at], lse, fixed)
    ds = _score_gradient(p, slope, d_out, v_ref[at, :], delta, fixed)
    return dq + _dot(ds.astype(k.dtype), k)

  dq = _visit((first, second, last, count), key_block, jnp.zeros(q.shape, jnp.float32))
  dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_kernel(
  window_ref,
  first,
  second,
  last,
  count,
  q_ref,
  k_ref,
  v_ref,
  k_pos_ref,
  k_seg_ref,
  pos_ref,
  seg_ref,
  d_out_ref,
  lse_ref,
  delta_ref,
  dk_ref,
  dv_ref,
  *,
  fixed,
):
  k, v, k_pos, k_seg = k_ref[...], v_ref[...], k_pos_ref[...], k_seg_ref[...]
  window = window_ref[...]

  def query_block(i, carry):
    dk, dv = carry
    at = pl.ds(i * fixed.block_q, fixed.block_q)
    q, d_out = q_ref[at, :], d_out_ref[at, :]
    p, slope = _weights(window, q, k, pos_ref[at], seg_ref[at], k_pos, k_seg, lse_ref[at], fixed)
    ds = _score_gradient(p, slope, d_out, v, delta_ref[at], fixed)
    return dk + _dot(ds.astype(q.dtype).T, q), dv + _dot(p.astype(d_out.dtype).T, d_out)

  zero = jnp.zeros(k.shape, jnp.float32)
  dk, dv = _visit((first, second, last, count), query_block, (zero, zero))
  dk_ref[...] = dk.astype(dk_ref.dtype)
  dv_ref[...] = dv.astype(dv_ref.dtype)


def _specs(T, K, R, block, fixed):
  """Block specs on a grid (block, head, row), by name of what an operand is."""
  return {
    "window": pl.BlockSpec((None, None), lambda i, h, b: (b, h)),
    "bound": pl.BlockSpec((None, None, None), lambda i, h, b: (b, h, i)),
    "q_block": pl.BlockSpec((None, block, None, K), lambda i, h, b: (b, i, h, 0)),
    "q_all": pl.BlockSpec((None, T, None, K), lambda i, h, b: (b, 0, h, 0)),
    "kv_block": pl.BlockSpec((None, block, None, K), lambda i, h, b: (b, i, h // R, 0)),
    "kv_all": pl.BlockSpec((None, T, None, K), lambda i, h, b: (b, 0, h // R, 0)),
    "where_block": pl.BlockSpec((None, block), lambda i, h, b: (b, i)),
    "where_all": pl.BlockSpec((None, T), lambda i, h, b: (b, 0)),
    "row_block": pl.BlockSpec((None, None, block), lambda i, h, b: (b, h, i)),
    "row_all": pl.BlockSpec((None, None, T), lambda i, h, b: (b, h, 0)),
  }


def _launch(kernel, q_shape, groups, block, inputs, outputs, fixed, name):
  """Runs `kernel` over (T / block, H, B); operands are pairs (name of spec, array or shape)."""
  B, T, H, K = q_shape
  specs = _specs(T, K, H // groups, block, fixed)
  return pl.pallas_call(
    functools.partial(kernel, fixed=fixed),
    grid=(T // block, H, B),
    in_specs=[specs[kind] for kind, _ in inputs],
    out_specs=[specs[kind] for kind, _ in outputs],
    out_shape=[shape for _, shape in outputs],
    compiler_params=plt.CompilerParams(num_warps=4 if K <= 64 else 8, num_stages=2),
    interpret=fixed.interpret,
    name=name,
  )(*(x for _, x in inputs))


def _needed(windows, positions, segments, fixed):
  queries = plan.summarise(positions, segments, fixed.block_q)
  keys = plan.summarise(positions, segments, fixed.block_k)
  return plan.needed(windows, queries, keys, fixed.sinks)


def _forward(q, k, v, windows, positions, segments, fixed):
  B, T, H, _ = q.shape
  bounds = plan.spans(_needed(windows, positions, segments, fixed))
  inputs = [
    ("window", windows),
    *(("bound", x) for x in bounds),
    ("q_block", q),
    ("kv_all", k),
    ("kv_all", v),
    ("where_block", positions),
    ("where_block", segments),
    ("where_all", positions),
    ("where_all", segments),
  ]
  outputs = [
    ("q_block", jax.ShapeDtypeStruct(q.shape, q.dtype)),
    ("row_block", jax.ShapeDtypeStruct((B, H, T), jnp.float32)),
  ]
  return _launch(
    _forward_kernel, q.shape, k.shape[2], fixed.block_q, inputs, outputs, fixed, "window_forward"
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, windows, positions, segments, fixed):
  return _forward(q, k, v, windows, positions, segments, fixed)[0]


def _attend_forward(q, k, v, windows, positions, segments, fixed):
  out, lse = _forward(q, k, v, windows, positions, segments, fixed)
  return out, (q, k, v, windows, positions, segments, out, lse)


def _attend_backward(fixed, saved, d_out):
  q, k, v, windows, positions, segments, out, lse = saved
  B, T, H, K = q.shape
  G = k.shape[2]
  # Two accumulators and two more operands live in registers: half the forward's blocks.
  fixed = fixed._replace(block_q=max(16, fixed.block_q // 2), block_k=max(16, fixed.block_k // 2))
  delta_BxHxT = jnp.einsum("bthk,bthk->bht", out.astype(jnp.float32), d_out.astype(jnp.float32))
  matrix = _needed(windows, positions, segments, fixed)
  every = [("where_all", positions), ("where_all", segments)]
  own = [("where_block", positions), ("where_block", segments)]
  (dq,) = _launch(
    _query_kernel,
    q.shape,
    G,
    fixed.block_q,
    [
      ("window", windows),
      *(("bound", x) for x in plan.spans(matrix)),
      ("q_block", q),
      ("kv_all", k),
      ("kv_all", v),
      *own,
      *every,
      ("q_block", d_out),
      ("row_block", lse),
      ("row_block", delta_BxHxT),
    ],
    [("q_block", jax.ShapeDtypeStruct(q.shape, q.dtype))],
    fixed,
    "window_backward_q",
  )
  per_head = jax.ShapeDtypeStruct(q.shape, jnp.float32)
  dk, dv = _launch(
    _key_kernel,
    q.shape,
    G,
    fixed.block_k,
    [
      ("window", windows),
      *(("bound", x) for x in plan.spans(matrix.swapaxes(2, 3))),
      ("q_all", q),
      ("kv_block", k),
      ("kv_block", v),
      *own,
      *every,
      ("q_all", d_out),
      ("row_all", lse),
      ("row_all", delta_BxHxT),
    ],
    [("q_block", per_head), ("q_block", per_head)],
    fixed,
    "window_backward_kv",
  )
  # Every query head wrote a share of its group's gradient.
  dk, dv = (x.reshape(B, T, G, H // G, K).sum(3).astype(k.dtype) for x in (dk, dv))
  return dq, dk, dv, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def triton(
  q,
  k,
  v,
  windows,
  *,
  positions,
  segments,
  sinks=0,
  scale,
  softcap=None,
  layout="any",
  block: int = 128,
  interpret: bool = False,
):
  """Attention with windows `[H]`, `[B, H]` or a tuple; see `models.attention.attention`.

  Args:
    block: tokens in a block of queries and of keys in the forward pass, a power of two.
    interpret: run the kernel's steps as ordinary XLA operations, on any platform.

  Raises:
    NotImplementedError: on a TPU, or head_dim above 128.
  """
  del layout
  if jax.default_backend() == "tpu" and not interpret:
    raise NotImplementedError(
      "backend 'triton' runs on NVIDIA GPUs; on a TPU use backend='flash_tpu' or 'splash'"
    )
  B, T, H, K = q.shape
  if K > 128:
    raise NotImplementedError(
      f"backend 'triton' holds head_dim up to 128, got {K}; use backend='blocked'"
    )
  windows_BxH = jnp.broadcast_to(jnp.asarray(windows, jnp.int32), (B, H))
  while block > 16 and block >= 2 * T:
    block //= 2
  positions, segments, q, k, v = plan.pad_tokens(block, positions, segments, q, k, v)
  # The kernel language wants powers of two; added columns are zero and change no score.
  extra = pl.next_power_of_2(max(K, 16)) - K
  q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra else x for x in (q, k, v))
  fixed = Static(block, min(block, 64 if K > 64 else block), scale, softcap, sinks, interpret)
  return _attend(q, k, v, windows_BxH, positions, segments, fixed)[:, :T, :, :K]
