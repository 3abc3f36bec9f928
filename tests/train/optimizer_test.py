import itertools

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.optimizer import clip_by_global_norm, decays, optimizer, schedule
from train.settings import CptSettings


def rates(**options):
  settings = CptSettings(mask="full", lr=1.0, **options)
  return [float(schedule(settings)(step)) for step in range(settings.steps)]


def test_cosine():
  values = rates(steps=40, warmup=4)
  np.testing.assert_allclose(values[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
  assert all(a > b for a, b in itertools.pairwise(values[4:])) and 0.1 < values[-1] < 0.12


def test_warmup_stable_decay():
  values = rates(steps=40, warmup=4, schedule="wsd", decay=0.25)
  assert values[4:31] == [1.0] * 27 and values[0] == pytest.approx(0.2)
  np.testing.assert_allclose(values[30:], np.linspace(1, 0, 11)[:10], atol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_short_runs_have_rates_too(kind, steps):
  assert all(0 < rate <= 1 for rate in rates(steps=steps, warmup=10, schedule=kind))


def test_decay_is_for_matrices_and_gradients_are_clipped():
  params = {"layers/attn/q/kernel": jnp.ones((2, 2)), "final_norm/scale": jnp.ones(2)}
  assert decays(params) == {"layers/attn/q/kernel": True, "final_norm/scale": False}
  settings = CptSettings(mask="full", lr=0.1, warmup=0, weight_decay=0.5, clip=1.0)
  transform = optimizer(settings)
  state = transform.init(params)
  zero = {path: jnp.zeros_like(p) for path, p in params.items()}
  updates, _ = transform.update(zero, state, params)
  assert float(updates["layers/attn/q/kernel"].max()) < 0
  assert float(jnp.abs(updates["final_norm/scale"]).max()) == 0


@pytest.mark.parametrize("size", [0.0, 0.1, 1.0, 30.0, np.inf, np.nan])
def test_clipping_is_that_of_optax(size):
  rng = np.random.default_rng(0)
  gradient = {"a": jnp.float32(size) * rng.normal(size=(3, 4)), "b": jnp.ones(5) * size}
  got, _ = clip_by_global_norm(1.0).update(gradient, optax.EmptyState())
  want, _ = optax.clip_by_global_norm(1.0).update(gradient, optax.EmptyState())
  chex.assert_trees_all_close(got, want, rtol=1e-6)
