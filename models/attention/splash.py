"""Static windows on TPU: the splash attention kernel that ships with JAX, one call per window.

Heads of one window are contiguous (`plan.runs`), each run gets one mask that the kernel computes by
itself: no mask array is ever built, and blocks outside the window are not in the grid at all. A
`MultiHeadMask` that mixes windows would lose both.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

from models.attention import plan

LANES = 128


class WindowMask(splash_lib.LocalMask):
  """Causal, with a window of keys (self included) and the first `sinks` keys besides.

  Tells at once whether a block is empty or whole. The library asks for every block, and comparing
  their positions one by one takes ten seconds at 32k tokens.

  Args:
    tokens: S of the `[S, S]` mask.
    window: most recent keys seen; None = all.
    sinks: first keys seen by all later queries.
  """

  def __init__(self, tokens: int, window: int | None, sinks: int = 0):
    super().__init__((tokens, tokens), (None if window is None else window - 1, 0), 0)
    self.window, self.sinks = tokens if window is None else window, sinks
    if window is not None and sinks:
      near = self.mask_function
      self.mask_function = lambda q, k: near(q, k) | ((k < sinks) & (q >= k))

  def __getitem__(self, idx):
    rows, columns = (range(*part.indices(self.shape[0])) for part in idx)
    first_q, last_q, first_k, last_k = rows[0], rows[-1], columns[0], columns[-1]
    if first_k > last_q or (first_q - last_k >= self.window and first_k >= self.sinks):
      return np.broadcast_to(np.False_, (len(rows), len(columns)))
    if last_k <= first_q and (last_q - first_k < self.window or last_k < self.sinks):
      return np.broadcast_to(np.True_, (len(rows), len(columns)))
    return super().__getitem__(idx)

  def __eq__(self, other):
    return super().__eq__(other) and (self.window, self.sinks) == (other.window, other.sinks)

  def __hash__(self):
    return hash((super().__hash__(), self.window, self.sinks))


@functools.lru_cache(maxsize=64)
def _kernel(heads: int, tokens: int, window: int, sinks: int, softcap, block: int, interpret: bool):
  mask = WindowMask(tokens, None if plan.is_full(window, tokens) else window, sinks)
  sizes = splash_lib.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  # Small index tables; made outside any trace so that the cached kernel holds plain arrays.
  with jax.ensure_compile_time_eval():
    return splash_lib.make_splash_mha(
      splash_lib.MultiHeadMask([mask] * heads),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=1,
      attn_logits_soft_cap=softcap,
      interpret=interpret,
    )


def splash(
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
):
  """Attention with a static window row; see `models.attention.attention`.

  Args:
    layout: 'plain' (one document per row) or 'packed' (documents one after another, by segment).
    block: tokens in a block, a multiple of 128; 512 compiles on every TPU generation.
    interpret: run the kernel's steps as ordinary XLA operations, on any platform.

  Raises:
    NotImplementedError: on a GPU; runtime windows; a layout the kernel cannot express; packed
      documents with sinks.
  """
  if jax.default_backend() == "gpu" and not interpret:
    raise NotImplementedError(
      "backend 'splash' needs scalar prefetch, which GPUs lack; use backend='triton'"
    )
  if not isinstance(windows, tuple):
    raise NotImplementedError(
      "backend 'splash' compiles windows in: give them as a tuple of ints, or use "
      "backend='flash_tpu'"
    )
  if layout == "any":
    raise NotImplementedError(
      "backend 'splash' compares segments for equality only, so it cannot show segment 0 (a "
      "shared haystack) to the others; use backend='flash_tpu', or pass packed=True if no segment "
      "is shared"
    )
  if layout == "packed" and sinks:
    raise NotImplementedError(
      "backend 'splash' knows the first keys of a row, not of each packed document; use sinks=0, "
      "one document per row, or backend='flash_tpu'"
    )
  _, T, H, _ = q.shape
  G = k.shape[2]
  R = H // G
  block = min(block, T + -T % LANES)
  q = (q * jnp.asarray(scale, q.dtype)) if scale != 1.0 else q  # the kernel does not scale
  _, segments, q, k, v = plan.pad_tokens(block, positions, segments, q, k, v)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  ids = splash_lib.SegmentIds(segments, segments)
  outs = []
  for first, stop, window in plan.runs(windows, G):
    run = _kernel((stop - first) * R, q.shape[2], window, sinks, softcap, block, interpret)
    outs.append(
      jax.vmap(run)(q[:, first * R : stop * R], k[:, first:stop], v[:, first:stop], segment_ids=ids)
    )
  out = jnp.concatenate(outs, axis=1).swapaxes(1, 2)
  # Padding sees its own segment in the kernel; by the specification it sees nothing.
  return jnp.where((segments >= 0)[:, :, None, None], out, jnp.zeros((), out.dtype))[:, :T]
