"""Layer heuristics written out layer by layer, and what all rankings share."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch_jax import rankings
from bosch_jax.rankings import base, layers


def mask(method, num_layers, groups, num_local, seed=1):
  settings = types.SimpleNamespace(seed=seed)
  search = types.SimpleNamespace(shape=(num_layers, groups), num_local=num_local, settings=settings)
  score_LxG = method(base.Context(search, None))
  return base.Ranking(score_LxG, 0.0).mask(num_local)


def whole(text):
  """ "1.11" -> layers 0, 2 and 3 local."""
  return [c == "1" for c in text]


@pytest.mark.parametrize(
  ("method", "local", "expected"),
  [
    (layers.intr, 4, ".1.1.1.1"),
    (layers.intr, 2, "...1...1"),
    (layers.intr, 6, ".111.111"),
    (layers.intr, 8, "11111111"),
    (layers.intr, 0, "........"),
    (layers.bme, 2, "..1..1.."),
    (layers.bme, 4, ".11..11."),
    (layers.bme, 0, "........"),
  ],
)
def test_masks_of_eight_layers(method, local, expected):
  np.testing.assert_array_equal(mask(method, 8, 1, local)[:, 0], whole(expected))


def test_the_remainder_is_the_next_layers_first_groups():
  # 3 whole layers of 6 and one group: full layers 0, 2, 4 are runs of one, the first takes it.
  np.testing.assert_array_equal(
    mask(layers.intr, 6, 2, 7), [[1, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]
  )
  # One local layer of 6 is the last; the longest run of full layers is 0..4, its middle is 2.
  np.testing.assert_array_equal(np.flatnonzero(mask(layers.intr, 6, 3, 5)), [6, 7, 15, 16, 17])


@given(
  st.sampled_from([layers.rand, layers.intr, layers.bme]),
  st.integers(1, 12),
  st.integers(1, 5),
  st.floats(0, 1),
  st.integers(0, 9),
)
def test_layer_masks_are_whole_layers_and_exact(method, num_layers, groups, share, seed):
  k = round(share * num_layers * groups)
  found = mask(method, num_layers, groups, k, seed)
  assert found.sum() == k
  counts = found.sum(1)
  assert ((counts == 0) | (counts == groups)).sum() >= num_layers - 1


def test_intr_is_even_and_bme_keeps_three_equal_blocks():
  counts = [mask(layers.intr, 30, 3, 45)[l : l + 4].all(1).sum() for l in range(27)]
  assert set(counts) == {2}
  full = ~mask(layers.bme, 30, 3, 45).all(1)
  blocks = [full[:6].sum(), full[10:20].sum(), full[24:].sum()]
  assert sum(blocks) == full.sum() == 15 and max(blocks) - min(blocks) <= 1


def test_random_layers_depend_on_the_seed():
  drawn = {mask(layers.rand, 10, 2, 10, seed).tobytes() for seed in range(6)}
  assert len(drawn) > 3
  np.testing.assert_array_equal(mask(layers.rand, 10, 2, 10), mask(layers.rand, 10, 2, 10))


def test_ties_go_to_the_first_layer_and_group():
  ranking = base.Ranking(np.array([[1.0, 0.0], [0.0, 0.0]]), 0.0)
  np.testing.assert_array_equal(ranking.mask(2), [[0, 1], [1, 0]])


def test_scores_that_are_not_finite_are_refused():
  with pytest.raises(FloatingPointError):
    base.Ranking(np.array([[1.0, np.nan]]), 0.0)


def test_middle_ranks():
  values = np.array([[3.0, 1.0], [3.0, 7.0]])
  np.testing.assert_array_equal(base.middle_ranks(values), [[2.5, 1.0], [2.5, 4.0]])


def test_group_scores_take_neighbouring_heads():
  heads = np.array([[1.0, 3.0, 5.0, 9.0]])
  np.testing.assert_array_equal(base.group_scores(heads, 2, np.mean), [[2.0, 7.0]])
  np.testing.assert_array_equal(base.group_scores(heads, 2, np.max), [[3.0, 9.0]])


@given(st.integers(0, 60), st.integers(1, 12))
def test_spread(total, parts):
  dealt = base.spread(total, parts)
  assert dealt.sum() == total and dealt.max() - dealt.min() <= 1


def test_least_passes_cover_every_method():
  least = {m: rankings.least_passes(m, 30, 3, 8, 5.0) for m in rankings.METHODS}
  assert least["rand"] == 0 and least["dcam"] == 2 and least["fisher"] == 3
  assert least["nll"] == 6 and least["b-layer"] == 5
