"""Rotary embedding: frequencies, plain or stretched beyond the first training's context.

References: RoFormer (arXiv 2104.09864); position interpolation (2306.15595), "linear"; YaRN
(2309.00071); Llama 3.1 (2407.21783), "llama3". Constants and roundings follow Hugging Face's
`modeling_rope_utils`, which checkpoints are run with.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> np.ndarray:
  """float32 `[K/2]`: radians per token of each pair of dimensions.

  In float32 step by step, as torch rounds them: at position 100,000 the last bit of a frequency
  is a visible angle. The power is taken in float64, because torch's is rounded correctly and
  numpy's float32 one is not.
  """
  K, one = config.head_dim, np.float32(1)
  exponent = np.arange(0, K, 2, dtype=np.float32) / np.float32(K)
  wave = (config.rope_theta ** exponent.astype(np.float64)).astype(np.float32)  # tokens per radian
  scaling = config.rope_scaling
  if scaling is None:
    return one / wave
  if scaling.kind == "linear":
    return one / wave / np.float32(scaling.factor)
  if scaling.kind == "llama3":
    return _llama3(one / wave, scaling)
  kept = one - _yarn_ramp(config, scaling)
  return one / (np.float32(scaling.factor) * wave) * (one - kept) + one / wave * kept


def _llama3(frequency: np.ndarray, s: RopeScaling) -> np.ndarray:
  turns = s.original_context / (2 * np.pi / frequency)  # within the original context
  share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
  share = np.clip(share, 0, 1).astype(np.float32)
  return (1 - share) * (frequency / np.float32(s.factor)) + share * frequency


def _yarn_ramp(config: ModelConfig, s: RopeScaling) -> np.ndarray:
  """float32 `[K/2]`, 0 where a frequency is kept and 1 where it is divided by the factor."""
  K = config.head_dim

  def dimension(turns: float) -> float:
    """The dimension pair that turns so often within the original context."""
    return (
      K * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
    )

  low, high = dimension(s.beta_fast), dimension(s.beta_slow)
  if s.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, K - 1)
  if low == high:
    high += 0.001  # a step
  ramp = (np.arange(K // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
  return np.clip(ramp, 0, 1)


def rope_angles(positions_BxT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """cos and sin of the rotary angles, float32 `[B, T, 1, K/2]`.

  Args:
    positions_BxT: int32.
    config: the architecture.
  """
  angles = _angles(positions_BxT, config)
  return _scaled(jnp.cos(angles), config), _scaled(jnp.sin(angles), config)


def rope_tables(positions_BxT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """`rope_angles`, as the output of a loop: XLA keeps that in memory, where it would otherwise compute
  cos and sin again for every head of every unrolled layer."""
  angles = _angles(positions_BxT, config)

  def either(carry, is_sin):
    return carry, _scaled(jnp.where(is_sin, jnp.sin(angles), jnp.cos(angles)), config)

  cos, sin = jax.lax.scan(either, None, jnp.array([False, True]))[1]
  return cos, sin


def _angles(positions_BxT, config: ModelConfig):
  frequency = jnp.asarray(frequencies(config))
  return positions_BxT[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]


def _scaled(x, config: ModelConfig):
  scaling = config.rope_scaling
  return (
    x * jnp.float32(scaling.attention_factor) if scaling and scaling.attention_factor != 1 else x
  )


def switched(cos: jax.Array, sin: jax.Array, rotary) -> tuple[jax.Array, jax.Array]:
  """cos 1 and sin 0, no rotation, where the bool scalar `rotary` is False; None = True."""
  if rotary is None:
    return cos, sin
  return jnp.where(rotary, cos, jnp.ones_like(cos)), jnp.where(rotary, sin, jnp.zeros_like(sin))


def rotate(x_BxTxNxK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotary embedding in the half-rotation order of Hugging Face Llama checkpoints."""
  a, b = jnp.split(x_BxTxNxK.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxTxNxK.dtype)
