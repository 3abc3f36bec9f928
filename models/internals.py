"""What attention sees inside a model: rotated queries and keys of every layer."""

from collections.abc import Callable
from typing import Any

import jax

from models.attention import attention
from models.transformer import Layer, Transformer, embed, rotary_layers
from models.windows import FULL


def observe_attention(
  model: Transformer,
  params,
  tokens_BxT: jax.Array,
  positions_BxT: jax.Array,
  segments_BxT: jax.Array,
  observe: Callable[[jax.Array, jax.Array], Any],
) -> Any:
  """Runs the model with full attention and looks at the queries and keys of each layer.

  One layer's queries and keys exist at a time, so memory grows with what `observe` returns only.

  Args:
    tokens_BxT, positions_BxT, segments_BxT: int32, see `models.attention`.
    observe: `(q_BxTxHxK, k_BxTxGxK) -> pytree`, both as they enter attention: with biases and norms
      applied, and rotated where the layer rotates.

  Returns:
    The pytrees of all layers, stacked on a leading axis L.
  """
  layer = Layer(model.config)

  def attend(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK):
    out_BxTxHxK = attention(
      q_BxTxHxK,
      k_BxTxGxK,
      v_BxTxGxK,
      (FULL,) * model.config.num_heads,
      positions_BxT=positions_BxT,
      segments_BxT=segments_BxT,
      backend=model.backend,
      packed=model.packed,
    )
    return out_BxTxHxK, observe(q_BxTxHxK, k_BxTxGxK)

  def step(x_BxTxD, inputs):
    params_l, rotary = inputs
    arguments = x_BxTxD, None, positions_BxT, segments_BxT, rotary, attend
    return layer.apply({"params": params_l}, *arguments)

  layers = params["layers"], rotary_layers(model.config)
  return jax.lax.scan(step, embed(params, tokens_BxT), layers)[1]
