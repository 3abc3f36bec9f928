"""Choosing the next token from logits: greedy, or drawn after temperature, top-k, top-p and min-p."""

import dataclasses

import jax
import jax.numpy as jnp

from models.errors import InputError

_NEVER = -jnp.inf


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are chosen. The filters apply in the order of the fields, each to what the one
  before left, as in Hugging Face `generate`.

  Attributes:
    temperature: logits are divided by it; 0 = the most likely token, always.
    top_k: only the k most likely tokens; 0 = all.
    top_p: only the most likely tokens that together hold this share of probability; 1 = all.
    min_p: only tokens at least this share as likely as the most likely one; 0 = all.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  def __post_init__(self):
    if not 0 <= self.temperature < float("inf"):
      raise InputError(
        "--temperature", self.temperature, "must be 0 (greedy) or more; use for example 0.7"
      )
    if self.top_k < 0:
      raise InputError("--top-k", self.top_k, "must be 0 (all tokens) or more; use for example 40")
    if not 0 < self.top_p <= 1:
      raise InputError("--top-p", self.top_p, "must be a share above 0, up to 1; use 1 for all")
    if not 0 <= self.min_p <= 1:
      raise InputError("--min-p", self.min_p, "must be a share from 0 to 1; use 0 for all")
    filters = self.top_k or self.top_p < 1 or self.min_p
    if filters and not self.temperature:
      raise InputError(
        "--temperature", self.temperature, "is greedy, which top-k, top-p and min-p do not change; "
        "give a temperature such as 1, or leave them out",
      )  # fmt: skip


def filtered(logits_BxV: jax.Array, sampling: Sampling) -> jax.Array:
  """Logits over the temperature, minus infinity where a token is ruled out. At least the most
  likely token stays; of equally likely tokens at a limit all stay.

  Args:
    logits_BxV: float32.
    sampling: temperature above 0.
  """
  logits = logits_BxV / sampling.temperature
  if 0 < sampling.top_k < logits.shape[-1]:
    least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
    logits = jnp.where(logits < least, _NEVER, logits)
  if sampling.top_p < 1:
    falling = -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p  # probability of the tokens ahead
    least = jnp.where(before < sampling.top_p, falling, jnp.inf).min(-1, keepdims=True)
    logits = jnp.where(logits < least, _NEVER, logits)
  if sampling.min_p:
    least = logits.max(-1, keepdims=True) + jnp.log(jnp.float32(sampling.min_p))
    logits = jnp.where(logits < least, _NEVER, logits)
  return logits


def choose(logits_BxV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
  """The next token of each row, int32 `[B]`.

  Args:
    logits_BxV: float32.
    keys_B: a random key for each row, so that a row draws the same whatever stands beside it.
    sampling: static.
  """
  if not sampling.temperature:
    return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  draw = jax.vmap(jax.random.categorical)
  return draw(keys_B, filtered(logits_BxV, sampling)).astype(jnp.int32)
