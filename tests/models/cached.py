"""Runs a model over its cache, for tests: prompts in chunks, then one token at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models import cache as kv
from models.config import ModelConfig
from models.decode import extend, unstack
from models.hybridize import hybridize
from models.transformer import Transformer
from models.windows import HeadMask

# What is compiled for a few short texts is quicker in all without optimisation.
QUICK = {"xla_backend_optimization_level": 0}
quick_extend = jax.jit(extend.__wrapped__, static_argnums=0, compiler_options=QUICK)


class Cached:
  """A hybridized model and what its cache holds.

  Args:
    config, params, mask: the model, in the order of its checkpoint.
    window, sinks, batch, capacity: of the cache.
  """

  def __init__(self, config: ModelConfig, params, mask: HeadMask, window, sinks, batch, capacity):
    hybrid = hybridize(params, mask, config)
    self.spec = kv.CacheSpec(
      config, hybrid.full_groups, window, sinks, batch, capacity, jnp.float32
    )
    self.params = unstack(hybrid.params)
    self.clear()

  def clear(self) -> None:
    self.cache = kv.empty(self.spec)
    self.logits = jnp.zeros((self.spec.batch, self.spec.config.vocab_size), jnp.float32)

  def read(self, tokens_BxT: np.ndarray, count_B) -> np.ndarray:
    """Logits behind the last token of each row."""
    self.cache, self.logits = quick_extend(
      self.spec,
      self.params,
      self.cache,
      self.logits,
      jnp.asarray(tokens_BxT, jnp.int32),
      jnp.asarray(count_B, jnp.int32),
    )
    return np.asarray(self.logits)

  def prompt(self, rows: list[np.ndarray], chunk: int) -> np.ndarray:
    """Reads rows of different lengths in chunks; what pads them is a real token id, so that reading
    padding would show."""
    for first in range(0, max(map(len, rows)), chunk):
      tokens = np.full((len(rows), chunk), 1)
      counts = [len(row[first : first + chunk]) for row in rows]
      for b, row in enumerate(rows):
        tokens[b, : counts[b]] = row[first : first + chunk]
      self.read(tokens, counts)
    return np.asarray(self.logits)


@functools.cache
def _forward(config: ModelConfig, sinks: int):
  return jax.jit(Transformer(config, sinks, "reference").apply, compiler_options=QUICK)


def forward(config, params, mask: HeadMask, window, sinks, ids_BxT) -> np.ndarray:
  """Logits `[B, T, V]` of one pass over the whole text, by the dense specification."""
  windows = jnp.asarray(mask.windows(window, config.num_heads))
  ids = jnp.asarray(ids_BxT, jnp.int32)
  return np.asarray(_forward(config, sinks)({"params": params}, ids, windows))
