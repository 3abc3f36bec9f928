"""The specification: dense, masked, float32 softmax. Every other backend is tested against it."""

import jax
import jax.numpy as jnp
import numpy as np


def as_array(windows, positions, segments=None, sinks: int = 0) -> np.ndarray:
  """The mask written out pair by pair: the oracle that `visible` itself is tested against.

      as_array([2], range(4))   as_array([2], [0, 1, 2, 2], [0, 0, 1, 2]): a haystack, 2 questions
      1 . . .                   1 . . .
      1 1 . .                   1 1 . .
      . 1 1 .                   . 1 1 .
      . . 1 1                   . 1 . 1

  Args:
    windows: H ints.
    positions: T ints.
    segments: T ints, default all 0.
    sinks: the first keys that stay visible to every head.

  Returns:
    int `[H, T, T]` of 0 and 1.
  """
  segments = [0] * len(positions) if segments is None else segments
  places = list(zip(positions, segments, strict=True))

  def sees(window, query, key):
    (q_pos, q_seg), (k_pos, k_seg) = query, key
    if q_seg < 0 or k_seg < 0 or (k_seg != 0 and k_seg != q_seg):
      return 0
    return int(0 <= q_pos - k_pos < window or (k_pos < sinks and k_pos <= q_pos))

  return np.array([[[sees(w, query, key) for key in places] for query in places] for w in windows])


def visible(
  windows_xH: jax.Array,
  positions_BxT: jax.Array,
  segments_BxT: jax.Array,
  positions_BxS: jax.Array,
  segments_BxS: jax.Array,
  sinks: int = 0,
) -> jax.Array:
  """The mask as an array: bool `[B, H, T, S]`, True where the query sees the key.

  Key j is visible to query i iff all of
    * `0 <= pos_i - pos_j < w`, or `pos_j < sinks` and `pos_j <= pos_i`;
    * `seg_j == seg_i` or `seg_j == 0` (segment 0 is shared by all: a haystack with several
      questions behind it); a negative segment is padding, which nobody sees and which sees nobody.

  Args:
    windows_xH: int32 `[H]` or `[B, H]`, the most recent keys a head sees, self included.
    positions_BxT, positions_BxS: int32 positions of queries and keys within their document.
    segments_BxT, segments_BxS: int32 segments of queries and keys.
    sinks: the first keys that stay visible to every head.
  """
  distance_BxTxS = positions_BxT[:, :, None] - positions_BxS[:, None, :]
  windows_BxH = jnp.broadcast_to(windows_xH, (positions_BxT.shape[0], windows_xH.shape[-1]))
  near_BxHxTxS = distance_BxTxS[:, None] < windows_BxH[:, :, None, None]
  if sinks:
    near_BxHxTxS |= (positions_BxS < sinks)[:, None, None, :]
  same = segments_BxT[:, :, None] == segments_BxS[:, None, :]
  shared = (segments_BxS == 0)[:, None, :]
  real = (segments_BxT >= 0)[:, :, None] & (segments_BxS >= 0)[:, None, :]
  allowed_BxTxS = (distance_BxTxS >= 0) & (same | shared) & real
  return near_BxHxTxS & allowed_BxTxS[:, None]


def attend(
  q_BxTxHxK: jax.Array,
  k_BxSxGxK: jax.Array,
  v_BxSxGxK: jax.Array,
  mask_BxHxTxS: jax.Array,
  *,
  scale: float,
  softcap: float | None = None,
) -> jax.Array:
  """Softmax attention under an explicit mask; a row that sees nothing yields zeros.

  Returns:
    `[B, T, H, K]` in the dtype of q. Scores and softmax are float32.
  """
  B, T, H, K = q_BxTxHxK.shape
  S, G = k_BxSxGxK.shape[1:3]
  q_BxTxGxRxK = q_BxTxHxK.reshape(B, T, G, H // G, K)
  scores_BxGxRxTxS = scale * jnp.einsum(
    "btgrk,bsgk->bgrts", q_BxTxGxRxK, k_BxSxGxK, preferred_element_type=jnp.float32
  )
  if softcap is not None:
    scores_BxGxRxTxS = softcap * jnp.tanh(scores_BxGxRxTxS / softcap)
  mask_BxGxRxTxS = mask_BxHxTxS.reshape(B, G, H // G, T, S)
  # A finite floor and a guarded denominator keep values and gradients finite on empty rows.
  scores_BxGxRxTxS = jnp.where(mask_BxGxRxTxS, scores_BxGxRxTxS, -1e30)
  top = jax.lax.stop_gradient(scores_BxGxRxTxS.max(-1, keepdims=True))
  weights = jnp.where(mask_BxGxRxTxS, jnp.exp(scores_BxGxRxTxS - top), 0.0)
  weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
  out = jnp.einsum(
    "bgrts,bsgk->btgrk",
    weights.astype(v_BxSxGxK.dtype),
    v_BxSxGxK,
    preferred_element_type=jnp.float32,
  )
  return out.reshape(B, T, H, K).astype(q_BxTxHxK.dtype)


def reference(q, k, v, windows, *, positions, segments, sinks=0, scale, softcap=None, layout="any"):
  """Dense attention with per-head windows; see `models.attention.attention` for the arguments."""
  del layout
  windows = jnp.asarray(windows, jnp.int32)
  mask = visible(windows, positions, segments, positions, segments, sinks)
  return attend(q, k, v, mask, scale=scale, softcap=softcap)
