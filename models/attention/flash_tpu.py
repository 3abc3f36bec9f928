"""Runtime-window flash attention for TPU: a Pallas forward kernel with a scalar-prefetch grid.

The grid is (batch, head, query block, step). `plan.spans` says, per row, head and query block,
which key blocks are needed; these bounds are prefetched scalars, so windows are data: no
recompilation, and every batch row may have its own (candidate masks fold into the batch axis).
Steps past the end do no work and fetch nothing, because their block index does not change.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.attention import plan

FLOOR = -1e30
LANES = 128
MAX_SPANS = 2**15  # entries of each prefetched table; five tables must fit scalar memory (1 MiB)


def _kernel(
  windows_ref,
  first_ref,
  second_ref,
  last_ref,
  count_ref,
  q_ref,
  k_ref,
  v_ref,
  q_where_ref,
  k_where_ref,
  out_ref,
  visits_ref,
  top_ref,
  total_ref,
  acc_ref,
  *,
  heads,
  blocks,
  scale,
  softcap,
  sinks,
):
  b, h, i, step = (pl.program_id(axis) for axis in range(4))
  row = b * heads + h
  count = count_ref[row * blocks + i]

  @pl.when(step == 0)
  def _start():
    top_ref[...] = jnp.full_like(top_ref, FLOOR)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    visits_ref[...] = jnp.zeros_like(visits_ref)

  @pl.when(step < count)
  def _visit():
    s = scale * jax.lax.dot_general(
      q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if softcap is not None:
      s = softcap * jnp.tanh(s / softcap)
    # Queries lie along sublanes: one column of the lane-broadcast table is all that is needed.
    q_pos, q_seg = q_where_ref[0][:, :1], q_where_ref[1][:, :1]
    k_pos, k_seg = k_where_ref[:1, :], k_where_ref[1:2, :]
    distance = q_pos - k_pos
    near = distance < windows_ref[row]
    if sinks:
      near |= jnp.broadcast_to(k_pos < sinks, near.shape)
    mask = near & (distance >= 0) & ((q_seg == k_seg) | (k_seg == 0)) & (q_seg >= 0) & (k_seg >= 0)
    s = jnp.where(mask, s, FLOOR)
    top = top_ref[:, :1]
    new = jnp.maximum(top, s.max(-1, keepdims=True))
    p = jnp.where(mask, jnp.exp(s - new), 0.0)
    shrink = jnp.exp(top - new)
    top_ref[...] = jnp.broadcast_to(new, top_ref.shape)
    total = total_ref[:, :1] * shrink + p.sum(-1, keepdims=True)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
    acc_ref[...] = acc_ref[...] * shrink + jnp.dot(
      p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32
    )
    visits_ref[...] += jnp.ones_like(visits_ref)

  @pl.when(step == pl.num_programs(3) - 1)
  def _finish():
    out_ref[...] = (acc_ref[...] / jnp.maximum(total_ref[:, :1], 1e-30)).astype(out_ref.dtype)


def _call(q, k, v, windows, positions, segments, *, block, scale, softcap, sinks, interpret):
  """The kernel on padded arrays: output `[B, T, H, K]`, and key blocks visited `[B, H, Nq]`."""
  B, T, H, K = q.shape
  G = k.shape[2]
  R, blocks = H // G, T // block
  if B * H * blocks > MAX_SPANS:
    raise NotImplementedError(
      f"backend 'flash_tpu': {B} rows x {H} heads x {blocks} query blocks need more loop bounds "
      f"than scalar memory holds ({MAX_SPANS}); put fewer candidates or rows in a call"
    )
  summary = plan.summarise(positions, segments, block)
  spans = plan.spans(plan.needed(windows, summary, summary, sinks))

  def key_block(b, h, i, step, _windows, first, second, last, _count):
    at = (b * H + h) * blocks + i
    return plan.block_at(first[at], second[at], last[at], step)

  def query_map(b, h, i, step, *_):
    return b, h, i, 0

  def key_map(b, h, i, step, *tables):
    # div, not //: floor division asks for the kind of TPU, which is absent when compiling ahead.
    return b, jax.lax.div(h, R), key_block(b, h, i, step, *tables), 0

  where_BxOxT = jnp.stack([positions, segments], axis=1)
  q_where_BxOxTxN = jnp.broadcast_to(where_BxOxT[..., None], (*where_BxOxT.shape, LANES))
  k_where_BxExT = jnp.pad(where_BxOxT, ((0, 0), (0, 6), (0, 0)))  # whole sublane tiles
  kernel = functools.partial(
    _kernel, heads=H, blocks=blocks, scale=scale, softcap=softcap, sinks=sinks
  )
  out, visits = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(B, H, blocks, blocks),
      in_specs=[
        pl.BlockSpec((None, None, block, K), query_map),
        pl.BlockSpec((None, None, block, K), key_map),
        pl.BlockSpec((None, None, block, K), key_map),
        pl.BlockSpec((None, 2, block, LANES), lambda b, h, i, step, *_: (b, 0, i, 0)),
        pl.BlockSpec(
          (None, 8, block), lambda b, h, i, step, *tables: (b, 0, key_block(b, h, i, step, *tables))
        ),
      ],
      out_specs=[
        pl.BlockSpec((None, None, block, K), query_map),
        pl.BlockSpec((None, None, 8, LANES), query_map),
      ],
      scratch_shapes=[
        pltpu.VMEM((block, LANES), jnp.float32),
        pltpu.VMEM((block, LANES), jnp.float32),
        pltpu.VMEM((block, K), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((B, H, T, K), q.dtype),
      jax.ShapeDtypeStruct((B, H, blocks * 8, LANES), jnp.int32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
    ),
    interpret=interpret,
    name="flash_runtime_windows",
  )(
    windows.reshape(-1),
    *(x.reshape(-1) for x in spans),
    q.swapaxes(1, 2),
    k.swapaxes(1, 2),
    v.swapaxes(1, 2),
    q_where_BxOxTxN,
    k_where_BxExT,
  )
  return out.swapaxes(1, 2), visits[:, :, ::8, 0]


@functools.lru_cache(maxsize=64)
def _foldable(**static):
  """The kernel as a function whose vmap folds the new axis into the batch (not a loop)."""
  call = functools.partial(_call, **static)

  @jax.custom_batching.custom_vmap
  def folded(*args):
    return tuple(call(*args))

  @folded.def_vmap
  def rule(size, in_batched, *args):
    args = [
      x if b else jnp.broadcast_to(x[None], (size, *x.shape))
      for x, b in zip(args, in_batched, strict=True)
    ]
    outs = folded(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in args))
    outs = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in outs)
    return outs, (True, True)

  @jax.custom_vjp
  def forward_only(*args):
    return folded(*args)

  def refuse(*args):
    raise NotImplementedError(
      "backend 'flash_tpu' has no gradients: it serves the search. Train with static windows "
      "(backend 'splash'), or use backend 'blocked'"
    )

  forward_only.defvjp(refuse, refuse)
  return forward_only


def flash_tpu(
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
  block: int = 512,
  interpret: bool = False,
  count_visits: bool = False,
):
  """Attention with windows `[H]` or `[B, H]` as data; see `models.attention.attention`.

  Args:
    block: tokens in a block of queries and of keys, a multiple of 128 on a real TPU.
    interpret: run the kernel's steps as ordinary XLA operations, on any platform.
    count_visits: also return the key blocks visited, int32 `[B, H, ceil(T / block)]`.

  Raises:
    NotImplementedError: on a GPU, when differentiated, or with too many rows for scalar memory.
  """
  del layout
  if jax.default_backend() == "gpu" and not interpret:
    raise NotImplementedError("backend 'flash_tpu' runs on TPU only; on a GPU use backend='triton'")
  B, T, H, _ = q.shape
  windows_BxH = jnp.broadcast_to(jnp.asarray(windows, jnp.int32), (B, H))
  block = min(block, T + -T % LANES)
  positions, segments, q, k, v = plan.pad_tokens(block, positions, segments, q, k, v)
  run = _foldable(block=block, scale=scale, softcap=softcap, sinks=sinks, interpret=interpret)
  out, visits = run(q, k, v, windows_BxH, positions, segments)
  return (out[:, :T], visits) if count_visits else out[:, :T]
