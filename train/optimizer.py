"""AdamW with a schedule, clipping, and weight decay on matrices only."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from train.settings import CptSettings


def schedule(settings: CptSettings) -> optax.Schedule:
  """Learning rate by step: a linear warm-up, then a cosine to a tenth, or (WSD) a plateau with a
  linear decay to zero over the last `decay` share of the steps."""
  steps, warmup = settings.steps, min(settings.warmup, max(settings.steps - 1, 0))
  rise = optax.linear_schedule(settings.lr / (warmup + 1), settings.lr, max(warmup, 1))
  if settings.schedule == "cosine":
    rest = optax.cosine_decay_schedule(settings.lr, max(steps - warmup, 1), alpha=0.1)
    return _promoting(optax.join_schedules([rise, rest], [warmup]))
  last = max(1, round(settings.decay * steps))
  plateau = optax.constant_schedule(settings.lr)
  fall = optax.linear_schedule(settings.lr, 0.0, last)
  return _promoting(
    optax.join_schedules([rise, plateau, fall], [warmup, max(warmup, steps - last)])
  )


def decays(params: dict) -> dict:
  """Which parameters weight decay is for: not the scales of norms, not biases."""
  return {path: not path.endswith(("/scale", "/bias")) for path in params}


def optimizer(settings: CptSettings) -> optax.GradientTransformation:
  """Clipping by the global norm, then AdamW; its state is float32 like the master weights."""
  chain = optax.chain(
    clip_by_global_norm(settings.clip),
    optax.adamw(
      schedule(settings), b1=0.9, b2=0.95, weight_decay=settings.weight_decay, mask=decays
    ),
  )
  return optax.GradientTransformation(chain.init, _promoting(chain.update))


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
  """optax's, by a product where that has a quotient. XLA computes a quotient once for both moments, and
  writes all gradients a second time for it; a product it computes where it is used."""

  def update(gradient, state, params=None):
    norm = optax.tree.norm(gradient)
    scale = jnp.where(norm < most, 1.0, most / norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradient), state

  return optax.GradientTransformation(optax.init_empty_state, update)


def _promoting(function: Callable) -> Callable:
  """optax mixes integer counts and float numbers, which strict promotion refuses."""

  @functools.wraps(function)
  def call(*args):
    with jax.numpy_dtype_promotion("standard"):
      return function(*args)

  return call
