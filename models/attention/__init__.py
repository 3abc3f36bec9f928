"""Attention with a window of its own for every head."""

import jax
import jax.numpy as jnp

from models.attention.reference import reference

BACKENDS = {"reference": reference}


def attention(
  q_BxTxHxK: jax.Array,
  k_BxTxGxK: jax.Array,
  v_BxTxGxK: jax.Array,
  windows_xH: jax.Array,
  *,
  positions_BxT: jax.Array | None = None,
  segments_BxT: jax.Array | None = None,
  sinks: int = 0,
  scale: float | None = None,
  softcap: float | None = None,
  backend: str | None = None,
) -> jax.Array:
  """Causal grouped-query attention in which every head sees its own window of recent keys.

  Args:
    q_BxTxHxK: queries, any float dtype.
    k_BxTxGxK, v_BxTxGxK: keys and values; query head h uses group h // (H // G).
    windows_xH: int32 `[H]` or `[B, H]`, traced or not: the most recent keys a head sees, self
      included; `FULL` for all.
    positions_BxT: int32 positions within the document; default 0..T-1.
    segments_BxT: int32 segments (see `reference.visible`); default all 0.
    sinks: the first keys that stay visible to every head.
    scale: multiplies the scores; default K ** -0.5.
    softcap: scores become `softcap * tanh(scores / softcap)`; None = off.
    backend: a key of `BACKENDS`; None = the best for this platform and size.

  Returns:
    `[B, T, H, K]` in the dtype of q; rows that see nothing (padding) are zero.

  Raises:
    NotImplementedError: the backend asked for cannot do this; the message says what can.
  """
  B, T, _, K = q_BxTxHxK.shape
  if positions_BxT is None:
    positions_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  if segments_BxT is None:
    segments_BxT = jnp.zeros((B, T), jnp.int32)
  return BACKENDS[backend or "reference"](
    q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, windows_xH,
    positions=positions_BxT, segments=segments_BxT, sinks=sinks,
    scale=K**-0.5 if scale is None else scale, softcap=softcap,
  )
