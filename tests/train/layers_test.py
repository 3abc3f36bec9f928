"""The state with an array for every layer: the same training, the same checkpoints."""

import functools

import chex
import jax
import numpy as np
import pytest

from tests.train.tiny import tiny_batch, tiny_run
from train import layers
from train.checkpoints import Checkpoints
from train.step import loss_and_gradient, train_step


def steps(plan, state, frozen, reference, count=3):
  step = jax.jit(functools.partial(train_step, plan))
  for seed in range(count):
    state, metrics = step(state, frozen, reference, tiny_batch(seed=seed))
  return state, metrics


@pytest.mark.parametrize("changes", [{}, {"train": "attention"}, {"distill": 0.5}], ids=str)
def test_split_state_is_trained_like_the_stacked_one(changes):
  plan, state, *rest = tiny_run(**changes)
  gradient = jax.jit(functools.partial(loss_and_gradient, plan))
  split = layers.split(state)
  want_means, want = gradient(state.trained, *rest, tiny_batch())
  means, got = gradient(split.trained, *rest, tiny_batch())
  chex.assert_trees_all_close(means, want_means, rtol=1e-6)
  got = layers.stacked(split._replace(trained=got), state).trained
  chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)

  want, want_metrics = steps(plan, state, *rest)
  got, metrics = steps(plan, split, *rest)
  # AdamW divides a gradient by its own size, rounding included: a thousandth of the learning rate.
  chex.assert_trees_all_close(layers.stacked(got, want), want, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_close(metrics, want_metrics, rtol=1e-5)


def test_split_and_stacked_are_inverse():
  _, state, *_ = tiny_run()
  split = layers.split(state)
  inside = [path for path, leaf in split.trained.items() if isinstance(leaf, tuple)]
  assert inside and all(path.startswith("layers/") for path in inside)
  chex.assert_trees_all_equal(layers.stacked(split, layers.layout(state)), state)
  chex.assert_trees_all_equal(layers.stacked(state, layers.layout(state)), state)


def test_a_checkpoint_of_one_form_is_read_in_the_other(tmp_path):
  plan, state, *rest = tiny_run()
  split, _ = steps(plan, layers.split(state), *rest, count=1)
  saved = layers.stacked(split, state)
  checkpoints = Checkpoints(tmp_path, {"model": "tiny"}, keep=1)
  checkpoints.save(1, lambda: saved, 1, None)
  checkpoints.close()
  restored, _ = Checkpoints(tmp_path, {"model": "tiny"}, keep=1).restore(layers.layout(state))
  chex.assert_trees_all_equal(layers.split(restored), split)
  np.testing.assert_array_equal(restored.step, 1)
