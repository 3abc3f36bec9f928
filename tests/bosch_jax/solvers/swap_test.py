import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch_jax.solvers import SwapSolver, bits
from tests.bosch_jax.solvers.planted import planted, run


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.booleans())
def test_swaps_keep_every_class_exact_and_never_repeat(seed, per_class):
  rng = np.random.default_rng(seed)
  n = 24
  classes = np.repeat(np.arange(6), 4) if per_class else None
  start = rng.random(n) < 0.5
  linear, loss = planted(n, seed)
  solver = SwapSolver(start, loss(start), linear, classes=classes)
  tried = run(solver, loss, 150)
  for candidate in tried:
    assert candidate.sum() == start.sum()
    if per_class:
      np.testing.assert_array_equal(candidate.reshape(6, 4).sum(1), start.reshape(6, 4).sum(1))
  assert len({c.tobytes() for c in [start, *tried]}) == len(tried) + 1
  assert solver.best_loss == min([loss(start), *map(loss, tried)])


@pytest.mark.parametrize(
  ("n", "k", "budget", "least"), [(32, 16, 200, 0.9), (64, 32, 300, 0.75), (90, 45, 400, 0.75)]
)
def test_swaps_close_most_of_the_gap_on_planted_objectives(n, k, budget, least):
  """Share of the gap from the mean random choice to the best known (a long run), blind start."""
  closed = []
  for seed in range(3):
    _, loss = planted(n, seed)
    rng = np.random.default_rng(seed)
    randoms = [loss(bits(n, rng.permutation(n)[:k])) for _ in range(300)]
    start = bits(n, rng.permutation(n)[:k])
    best = SwapSolver(start, loss(start), np.zeros(n))
    run(best, loss, 20000)
    solver = SwapSolver(start, loss(start), np.zeros(n))
    run(solver, loss, budget)
    closed.append((np.mean(randoms) - solver.best_loss) / (np.mean(randoms) - best.best_loss))
  assert np.mean(closed) >= least, closed


def test_swaps_end_in_a_local_optimum_when_nothing_is_left():
  _linear, loss = planted(8, seed=3)
  start = bits(8, range(4))
  solver = SwapSolver(start, loss(start), np.zeros(8))
  run(solver, loss, 10**6)
  for clear, put in itertools.product(np.flatnonzero(solver.best), np.flatnonzero(~solver.best)):
    neighbour = solver.best.copy()
    neighbour[clear], neighbour[put] = False, True
    assert loss(neighbour) >= solver.best_loss
  assert solver.ask() == []


def test_patience_stops_a_solver_that_does_not_improve():
  solver = SwapSolver(bits(8, range(4)), 0.0, np.zeros(8), batch=4, patience=8)
  assert len(run(solver, lambda x: 1.0, 10**6)) == 8


@pytest.mark.parametrize(("size", "ones"), [(4, 0), (4, 4)])
def test_nothing_to_exchange(size, ones):
  start = bits(size, range(ones))
  assert SwapSolver(start, 0.0, np.zeros(size)).ask() == []
