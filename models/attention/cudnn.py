"""Static windows through cuDNN's fused attention: the named alternative on NVIDIA GPUs."""

import jax
import jax.numpy as jnp

from models.attention import plan


def cudnn(q, k, v, windows, *, positions, segments, sinks=0, scale, softcap=None, layout="any"):
  """Attention with a static window row, one cuDNN call per run of equal groups.

  Raises:
    NotImplementedError: no NVIDIA GPU, runtime windows, float32, packed rows, sinks or a soft
      cap; each message names the backend that can.
  """
  del positions, segments
  if jax.default_backend() != "gpu":
    raise NotImplementedError(
      "backend 'cudnn' needs an NVIDIA GPU; leave backend unset to get the platform's own"
    )
  if not isinstance(windows, tuple):
    raise NotImplementedError(
      "backend 'cudnn' needs the windows as a tuple of ints; use backend='triton'"
    )
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(
      f"backend 'cudnn' takes bfloat16 or float16, not {q.dtype}; use backend='triton'"
    )
  if layout != "plain" or sinks or softcap is not None:
    raise NotImplementedError(
      "backend 'cudnn' takes one document per row, no sinks, no soft cap; use backend='triton'"
    )
  G = k.shape[2]
  R = q.shape[2] // G
  outs = [
    jax.nn.dot_product_attention(
      q[:, :, first * R : stop * R],
      k[:, :, first:stop],
      v[:, :, first:stop],
      scale=scale,
      is_causal=True,  # always: a left window alone would let the future in
      local_window_size=None if plan.is_full(window, q.shape[1]) else (window - 1, 0),
      implementation="cudnn",
    )
    for first, stop, window in plan.runs(windows, G)
  ]
  return jnp.concatenate(outs, axis=2)
