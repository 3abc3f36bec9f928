"""Mixture of experts: every token through its top experts, none dropped.

Parameters of one layer (stacked on a leading L in a model):

    router/kernel         [D, E]
    experts/gate/kernel   [E, D, F]
    experts/up/kernel     [E, D, F]
    experts/down/kernel   [E, F, D]
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.config import ModelConfig


def route(logits_NxE: jax.Array, top: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
  """The experts of each token and their weights.

  Args:
    logits_NxE: float32; softmax is over all experts, before the choice.
    top: experts per token, k.
    normalise: scale the k weights to sum to 1 (`norm_topk_prob`).

  Returns:
    Weights float32 `[N, k]`, falling, and expert numbers int32 `[N, k]`.
  """
  weights_Nxk, experts_Nxk = jax.lax.top_k(jax.nn.softmax(logits_NxE, axis=-1), top)
  if normalise:
    weights_Nxk = weights_Nxk / weights_Nxk.sum(-1, keepdims=True)
  return weights_Nxk, experts_Nxk


def grouped(x_NxD, weights_Nxk, experts_Nxk, gate_ExDxF, up_ExDxF, down_ExFxD) -> jax.Array:
  """Each token through its experts, summed with its weights: `[N, D]`, dtype of x.

  The k N rows are sorted by expert, so that each expert multiplies its own rows only; the sum over
  experts is in float32.
  """
  N, top = experts_Nxk.shape
  chosen = experts_Nxk.reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  sizes_E = jnp.bincount(chosen, length=len(gate_ExDxF)).astype(jnp.int32)
  out_RxD = jax.lax.platform_dependent(
    x_NxD[order // top], sizes_E, gate_ExDxF, up_ExDxF, down_ExFxD, cpu=blocks, default=ragged
  )
  out_NxkxD = out_RxD[jnp.argsort(order)].reshape(N, top, -1).astype(jnp.float32)
  return (out_NxkxD * weights_Nxk[:, :, None]).sum(1).astype(x_NxD.dtype)


def ragged(rows_RxD, sizes_E, gate_ExDxF, up_ExDxF, down_ExFxD) -> jax.Array:
  """SwiGLU of rows sorted by expert, `sizes_E` rows each, through `jax.lax.ragged_dot`."""
  gate = jax.lax.ragged_dot(rows_RxD, gate_ExDxF, sizes_E)
  up = jax.lax.ragged_dot(rows_RxD, up_ExDxF, sizes_E)
  return jax.lax.ragged_dot(nn.silu(gate) * up, down_ExFxD, sizes_E)


def blocks(rows_RxD, sizes_E, gate_ExDxF, up_ExDxF, down_ExFxD) -> jax.Array:
  """The same in blocks of rows of one expert each, one after the other.

  For CPUs, where `ragged_dot` multiplies every row with every expert. Each expert's rows are padded
  to whole blocks; the bound on their number is static, whatever the router does.
  """
  (R, D), E = rows_RxD.shape, len(sizes_E)
  b = min(max(R // E, 8), 128)
  count = -(-R // b) + min(E, R)
  blocks_E = -(-sizes_E // b)
  ends_E = jnp.cumsum(blocks_E)
  row = jnp.arange(R, dtype=jnp.int32)
  expert_R = jnp.searchsorted(jnp.cumsum(sizes_E), row, side="right")
  within = row - (jnp.cumsum(sizes_E) - sizes_E)[expert_R]
  place_R = (ends_E - blocks_E)[expert_R] * b + within
  padded = jnp.zeros((count * b, D), rows_RxD.dtype).at[place_R].set(rows_RxD, unique_indices=True)
  block = jnp.arange(count, dtype=jnp.int32)
  expert = jnp.minimum(jnp.searchsorted(ends_E, block, side="right"), E - 1)

  def one(inputs):
    x_bxD, e = inputs
    return (nn.silu(x_bxD @ gate_ExDxF[e]) * (x_bxD @ up_ExDxF[e])) @ down_ExFxD[e]

  return jax.lax.map(one, (padded.reshape(count, b, D), expert)).reshape(count * b, D)[place_R]


class Router(nn.Module):
  """Logits of the experts, in float32 whatever the dtype of the model: top-k is a step function,
  and a rounded logit can send a token elsewhere."""

  num_experts: int

  @nn.compact
  def __call__(self, x_NxD):
    shape = (x_NxD.shape[-1], self.num_experts)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    return jnp.dot(
      x_NxD.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )


class Kernels(nn.Module):
  """A stack of one matrix per expert."""

  shape: tuple[int, int, int]

  @nn.compact
  def __call__(self, dtype):
    init = nn.initializers.lecun_normal(batch_axis=(0,))
    return self.param("kernel", init, self.shape).astype(dtype)


class Experts(nn.Module):
  config: ModelConfig

  @nn.compact
  def __call__(self, x_NxD, weights_Nxk, experts_Nxk):
    c = self.config
    wide, narrow = (
      (c.num_experts, c.model_dim, c.moe_ffn_dim),
      (c.num_experts, c.moe_ffn_dim, c.model_dim),
    )
    shapes = {"gate": wide, "up": wide, "down": narrow}
    kernels = [Kernels(shape, name=name)(x_NxD.dtype) for name, shape in shapes.items()]
    return grouped(x_NxD, weights_Nxk, experts_Nxk, *kernels)


class MoE(nn.Module):
  """Feed-forward of routed SwiGLU experts: `[..., D]` to `[..., D]`."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    c = self.config
    x_NxD = x.reshape(-1, x.shape[-1])
    logits_NxE = Router(c.num_experts, name="router")(x_NxD)
    weights_Nxk, experts_Nxk = route(logits_NxE, c.experts_per_token, c.norm_topk_prob)
    return Experts(c, name="experts")(x_NxD, weights_Nxk, experts_Nxk).reshape(x.shape)
