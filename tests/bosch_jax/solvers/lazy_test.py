import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch_jax.solvers import LazySolver, Space, bits
from tests.bosch_jax.solvers.planted import planted, run


def submodular(n, seed):
  """Costs that only grow as bits are set: linear and positive pair interactions."""
  rng = np.random.default_rng(seed)
  linear, pairs = rng.exponential(size=n), np.triu(rng.exponential(size=(n, n)), 1)
  pairs *= rng.random((n, n)) < 0.2
  return lambda x: float(linear @ x + x @ pairs @ x)


def greedy(loss, n, ones):
  """Probes everything at every step."""
  current, path = np.zeros(n, bool), [np.zeros(n, bool)]
  for _ in range(ones):
    tried = [(loss(current | bits(n, [i])), i) for i in np.flatnonzero(~current)]
    current = current | bits(n, [min(tried)[1]])
    path.append(current)
  return path


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 14), st.integers(1, 4))
def test_where_costs_only_grow_it_walks_the_greedy_path_with_fewer_probes(seed, ones, batch):
  n, loss = 14, submodular(14, seed)
  solver = LazySolver(np.zeros(n, bool), 0.0, Space(n, ones), batch=batch)
  tried = run(solver, loss, 10**6)
  wanted = greedy(loss, n, ones)
  assert sorted(solver.path) == list(range(ones + 1))
  for k, mask in enumerate(wanted):
    np.testing.assert_array_equal(solver.path[k][0], mask)
    assert solver.path[k][1] == (loss(mask) if k else 0.0)
  np.testing.assert_array_equal(solver.best, wanted[-1])
  assert solver.best_loss == (loss(wanted[-1]) if ones else 0.0)
  everything = sum(n - k for k in range(ones))
  assert len(tried) <= everything
  if batch == 1 and ones >= 10:
    assert len(tried) < 0.8 * everything


@settings(deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.integers(1, 5))
def test_the_path_is_exact_and_no_probe_is_repeated(seed, per_class, clearing, batch):
  rng = np.random.default_rng(seed)
  n = 12
  classes = np.repeat(np.arange(4), 3) if per_class else np.zeros(n, int)
  space = Space.like(rng.random(n) < 0.5, classes)
  _, loss = planted(n, seed)
  start = np.full(n, clearing)
  solver = LazySolver(start, None, space, batch=batch)
  tried = run(solver, loss, 10**6)
  assert solver.best in space and solver.best_loss == loss(solver.best)
  assert len({c.tobytes() for c in tried}) == len(tried)
  np.testing.assert_array_equal(tried[0], start)
  sizes = sorted(solver.path)
  assert sizes == list(
    range(min(start.sum(), space.ones.sum()), max(start.sum(), space.ones.sum()) + 1)
  )
  for k, (mask, path_loss) in solver.path.items():
    assert mask.sum() == k and path_loss == loss(mask)
  for small, large in itertools.pairwise(sizes):
    assert (solver.path[small][0] <= solver.path[large][0]).all()
  for candidate in tried:
    for members, ones in zip(space.members, space.ones, strict=True):
      count = candidate[members].sum()
      assert count >= ones if clearing else count <= ones


def test_a_longer_path_goes_on_from_a_shorter_one():
  """Every ratio is read off one run."""
  _, loss = planted(16, seed=4)
  long = LazySolver(np.zeros(16, bool), 0.0, Space(16, 12))
  run(long, loss, 10**6)
  for ones in (4, 8):
    short = LazySolver(np.zeros(16, bool), 0.0, Space(16, ones))
    run(short, loss, 10**6)
    np.testing.assert_array_equal(short.best, long.path[ones][0])


def test_a_good_first_guess_saves_the_first_sweep():
  n, rng = 20, np.random.default_rng(0)
  linear = rng.exponential(size=n)
  solver = LazySolver(np.zeros(n, bool), 0.0, Space(n, 10), cost=linear)
  tried = run(solver, lambda x: float(linear @ x), 10**6)
  assert len(tried) == 10
  np.testing.assert_array_equal(solver.best, bits(n, np.argsort(linear)[:10]))


@pytest.mark.parametrize("clearing", [False, True])
def test_what_it_believes_keeps_the_path_and_takes_the_cheapest_known_bits(clearing):
  linear = np.array([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
  start = np.full(6, clearing)
  solver = LazySolver(start, 0.0, Space(6, 3))
  loss = lambda x: float(linear[x != clearing].sum())  # noqa: E731
  run(solver, loss, 7)
  believed = solver.believed()
  np.testing.assert_array_equal(believed != clearing, bits(6, [1, 2, 4]))
  assert solver.best is None  # the path is not there yet


def test_no_path_sets_bits_of_one_class_and_clears_bits_of_another():
  with pytest.raises(ValueError, match="clear"):
    LazySolver(np.array([True, False]), 0.0, Space(np.array([0, 1]), [0, 1]))
