"""Contexts of several lengths behind one evaluator: each is scored as it would be alone."""

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch_jax import scoring
from bosch_jax.contexts import Contexts, pad, shares
from bosch_jax.evaluator import Evaluator, forward_flops
from tests.bosch_jax.evaluator_test import data_mesh
from tests.bosch_jax.tiny import CONFIG, random_masks, tiny_params, tiny_prompts

SHORT, LONG = tiny_prompts(3, seed=1), tiny_prompts(2, seed=2)
WINDOWS = 6, 9
STATES = 2 * 5 * 60 * CONFIG.model_dim * 4  # bytes of two layers' inputs, at 60 tokens a context


def longer(prompts, extra=24):
  """The same contexts with more padding: another T, the same scores."""
  return pad(prompts, prompts.tokens_BxT.shape[1] + extra)


@pytest.mark.parametrize("devices", [None, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_scores_of_lengths_together_equal_those_of_each_alone(devices, batch):
  params, long = tiny_params(), longer(LONG)
  mesh = None if devices is None else data_mesh(devices)
  options = {"batch": batch, "mesh": mesh}
  both = Evaluator(CONFIG, params, SHORT, WINDOWS[0], also=[(long, WINDOWS[1])], **options)
  masks = random_masks(4)
  both.rebase(masks[0])
  near = [masks[0] ^ np.eye(4, 3, k, dtype=bool) for k in range(3)]
  scores = both.score([*masks, *near])
  assert scores.nll.shape == (7, 5, 2)
  for prompts, window, own in ((SHORT, 6, [0, 2, 4]), (long, 9, [1, 3])):
    alone = Evaluator(CONFIG, params, prompts, window, **options).score([*masks, *near])
    np.testing.assert_allclose(scores.nll[:, own], alone.nll, atol=1e-5)
    np.testing.assert_array_equal(scores.exact[:, own], alone.exact)


def test_a_gradient_over_lengths_is_the_mean_of_theirs():
  params, share, long = tiny_params(), np.random.default_rng(0).random((4, 3)), longer(LONG)
  both = Evaluator(CONFIG, params, SHORT, 6, also=[(long, 9)])
  loss, gradient = both.relax(share, [0, 3])
  short, padded, bare = (
    Evaluator(CONFIG, params, prompts, window).relax(share, [row])
    for prompts, window, row in ((SHORT, 6, 0), (long, 9, 1), (LONG, 9, 1))
  )
  np.testing.assert_allclose(loss, (short[0] + padded[0]) / 2, rtol=1e-6)
  np.testing.assert_allclose(gradient, (short[1] + padded[1]) / 2, atol=1e-6)
  # Padding changes the rounding alone: errors of float32 are about as large, next to float64.
  np.testing.assert_allclose(padded[0], bare[0], rtol=1e-5)
  np.testing.assert_allclose(padded[1], bare[1], atol=1e-5 * np.abs(bare[1]).max())


def test_cost_is_the_share_of_the_flops_and_one_for_a_full_pass():
  long = longer(LONG, 60)
  both = Evaluator(CONFIG, tiny_params(), SHORT, 6, also=[(long, 9)], calibration=4)
  mask = random_masks(1)[0]
  mask[0] = True  # shares no layer with the base
  both.score([mask], [1])
  flops = [
    CONFIG.num_layers * layer + head
    for layer, head in (forward_flops(CONFIG, p.take([0])) for p in (SHORT, long))
  ]
  np.testing.assert_allclose(both.cost, flops[1] / (2 * flops[0] + 2 * flops[1]), rtol=1e-6)
  both.score([mask])
  np.testing.assert_allclose(both.cost, 1.0, rtol=1e-6)


def test_states_kept_of_all_lengths_fit_the_memory_given():
  long = longer(LONG, 48)
  both = Evaluator(CONFIG, tiny_params(), SHORT, 6, also=[(long, 9)], state_bytes=STATES)
  mask = random_masks(1)[0]
  both.rebase(mask)
  both.score([mask ^ np.eye(4, 3, -3, dtype=bool)])  # differs in the last layer
  kept = [x for states in both._states for x in states.values()]
  assert 0 < sum(x.nbytes for x in kept) <= STATES


def test_one_trace_for_each_length(monkeypatch):
  chex.clear_trace_counter()
  scoring.compiled.cache_clear()
  counted = chex.assert_max_traces(scoring.score, n=2)
  monkeypatch.setattr(scoring, "score", counted)
  both = Evaluator(CONFIG, tiny_params(), SHORT, 6, also=[(longer(LONG), 9)])
  for mask in random_masks(20):
    both.score([mask])
  scoring.compiled.cache_clear()


@given(st.integers(1, 40), st.integers(1, 5))
def test_lengths_take_turns(total, parts):
  sizes = shares(total, parts)
  assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
  assert sizes == [len(range(i, total, parts)) for i in range(parts)]


def test_sets_that_cannot_take_turns_are_refused():
  with pytest.raises(ValueError, match="turns"):
    Contexts((LONG, SHORT), WINDOWS)
  with pytest.raises(ValueError, match="questions"):
    Contexts((SHORT, tiny_prompts(2, questions=1)), WINDOWS)
