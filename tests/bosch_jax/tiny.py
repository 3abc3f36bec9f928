"""A tiny random model and packed prompts on it, for tests that need no real text."""

import jax
import jax.numpy as jnp
import numpy as np

from bosch_jax.prompts import pack
from models.config import ModelConfig
from models.transformer import Transformer

CONFIG = ModelConfig(
  vocab_size=61,
  num_layers=4,
  model_dim=32,
  num_heads=6,
  num_groups=3,
  head_dim=8,
  ffn_dim=48,
  context=128,
)


def tiny_params(config: ModelConfig = CONFIG, seed: int = 0) -> dict:
  tokens = jnp.zeros((1, 4), jnp.int32)
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  params = Transformer(config).init(jax.random.key(seed), tokens, windows)["params"]
  return jax.tree.map(lambda p: 2.5 * p if p.ndim > 2 else p, params)  # sharper attention


def tiny_prompts(contexts: int = 4, questions: int = 2, seed: int = 0):
  """Haystacks of unequal length, questions and answers of random tokens."""
  rng = np.random.default_rng(seed)

  def draw(low, high):
    return rng.integers(1, CONFIG.vocab_size, rng.integers(low, high)).tolist()

  return pack(
    [draw(20, 28) for _ in range(contexts)],
    [[(draw(3, 6), draw(2, 4)) for _ in range(questions)] for _ in range(contexts)],
  )


def random_masks(count: int, seed: int = 0, config: ModelConfig = CONFIG) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return list(rng.random((count, config.num_layers, config.num_groups)) < 0.5)
