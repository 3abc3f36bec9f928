"""Relaxed head masks: every head group a blend of its local and its full output.

With a share s of 0 a group is full, with 1 local, and in between its output is
`(1 - s) full + s local`, so a loss has a gradient in s: one backward pass says for all groups at once
where it is cheap to go local (the gates of DuoAttention, at the level of key/value groups).
"""

import functools

import jax
import jax.numpy as jnp

from models.attention import attention
from models.transformer import Layer, Transformer, rotary_layers
from models.windows import FULL

REMAT_TOKENS = 4096  # from here on a backward pass recomputes layers instead of storing them


def relaxed_hidden(
  model: Transformer, params, x_BxTxD, share_BxLxG, window, positions_BxT, segments_BxT
):
  """Hidden states `[B, T, D]` after the last layer under relaxed masks.

  Args:
    x_BxTxD: at the input of layer 0.
    share_BxLxG: float32 in [0, 1], the share of each group's output that is local. Differentiable.
    window: int32 scalar, W of local heads.
    positions_BxT, segments_BxT: int32, see `models.attention`.
  """
  c = model.config
  layer = Layer(c)
  share_LxBxH = jnp.repeat(share_BxLxG.swapaxes(0, 1), c.num_heads // c.num_groups, axis=2)
  windowed = functools.partial(
    attention,
    positions_BxT=positions_BxT,
    segments_BxT=segments_BxT,
    sinks=model.sinks,
    backend=model.backend or _differentiable(),
    packed=model.packed,
  )
  local_H = jnp.broadcast_to(window, (c.num_heads,))

  def step(x_BxTxD, inputs):
    params_l, share_BxH, rotary = inputs

    def blend(*qkv):
      full_BxTxHxK = windowed(*qkv, (FULL,) * c.num_heads)
      local_BxTxHxK = windowed(*qkv, local_H)
      share = share_BxH.astype(full_BxTxHxK.dtype)[:, None, :, None]
      return full_BxTxHxK + share * (local_BxTxHxK - full_BxTxHxK), None

    inputs = x_BxTxD, None, positions_BxT, segments_BxT, rotary, blend
    return layer.apply({"params": params_l}, *inputs)

  if x_BxTxD.shape[0] * x_BxTxD.shape[1] >= REMAT_TOKENS:
    step = jax.checkpoint(step)
  return jax.lax.scan(step, x_BxTxD, (params["layers"], share_LxBxH, rotary_layers(c)))[0]


def _differentiable() -> str | None:
  """The kernel with which TPUs score questions on a shared haystack has no gradients; XLA's loops do."""
  return "blocked" if jax.default_backend() == "tpu" else None
