"""What all solvers promise, one by one."""

import importlib.util

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bosch_jax.solvers import SOLVERS, Space, make_solver
from bosch_jax.solvers.factory import PACKAGES
from models.errors import InputError
from tests.bosch_jax.solvers.planted import planted, relaxed, run, train

EXAMPLES = {"nomad": 4, "nevergrad": 8}


@pytest.fixture(params=SOLVERS)
def name(request):
  if request.param in PACKAGES:
    pytest.importorskip(PACKAGES[request.param])
  return request.param


def solve(name, start, seed, budget, classes=None, **options):
  """The solver and what it tried, on the planted objective of this seed."""
  n = len(start)
  linear, loss = planted(n, seed)
  options = {"budget": budget, **options}
  solver = make_solver(name, start, loss(start), linear, classes=classes, **options)
  if solver.needs_gradient:
    return solver, loss, train(solver, relaxed(n, seed), budget)
  return solver, loss, run(solver, loss, budget)


@pytest.mark.parametrize("name", SOLVERS)
def test_cardinality_is_exact_nothing_is_tried_twice_and_seeds_decide(name):
  if name in PACKAGES:
    pytest.importorskip(PACKAGES[name])

  @settings(
    deadline=None,
    max_examples=EXAMPLES.get(name, 25),
    suppress_health_check=list(HealthCheck),
  )
  @given(st.integers(0, 10**6), st.sampled_from([None, 2, 3]), st.integers(2, 12))
  def check(seed, per_class, n):
    start = np.random.default_rng(seed).random(n) < 0.5
    classes = None if per_class is None else np.arange(n) // per_class
    space = Space.like(start, classes)
    solver, loss, tried = solve(name, start, seed, 60, classes)
    exact = [c for c in tried if c.dtype == bool and c.sum() == start.sum() and c in space]
    if name in ("lazy", "gates"):  # these pass through other points, see their own tests
      assert solver.best in space
    else:
      assert len(exact) == len(tried)
    asked = {c.tobytes() for c in tried if c.dtype == bool}
    assert len(asked) == sum(c.dtype == bool for c in tried)
    if name in ("swap", "random", "nomad", "nevergrad"):
      assert start.tobytes() not in asked
    assert solver.best_loss == min([loss(start), *map(loss, exact)]) == loss(solver.best)
    again = solve(name, start, seed, 60, classes)[2]
    np.testing.assert_array_equal(tried, again)

  check()


@pytest.mark.parametrize(("n", "k"), [(1, 0), (1, 1), (4, 0), (4, 4), (2, 1), (4, 1), (4, 3)])
def test_edge_sizes_end_by_themselves(name, n, k):
  start = np.arange(n) < k
  solver, loss, tried = solve(name, start, 0, 300)
  assert len(tried) < 300 or solver.needs_gradient
  assert len(solver.ask()) == 0
  if name == "swap":  # swaps end in a local optimum, which is one of all where one bit is set
    assert (n, k) != (4, 1) or solver.best_loss == min(map(loss, Space(n, k)))
  elif name not in ("nomad", "nevergrad"):
    assert solver.best_loss == min(map(loss, Space(n, k)))
  assert solver.best in Space(n, k)


@pytest.mark.parametrize("seed", range(3))
def test_the_planted_optimum_of_small_objectives_is_found(name, seed):
  """Ten bits, five of them set, 252 masks: within 130 of them all but the worst must get close."""
  if name in ("enumerate", "random"):
    pytest.skip("enumeration and chance have tests of their own")
  start = np.arange(10) < 5
  solver, loss, _ = solve(name, start, seed, 130)
  values = np.array([loss(b) for b in Space(10, 5)])
  gap = (solver.best_loss - values.min()) / (values.mean() - values.min())
  assert gap <= 0.25, gap


@pytest.mark.parametrize("name", ["swap", "random", "nomad", "nevergrad"])
def test_patience_ends_a_solver_that_does_not_improve(name):
  if name in PACKAGES:
    pytest.importorskip(PACKAGES[name])
  start = np.arange(20) < 10
  solver = make_solver(name, start, 0.0, patience=12, seed=3)
  assert 12 <= len(run(solver, lambda x: 1.0, 1000)) < 12 + 4


def test_an_unknown_solver_is_refused_by_name():
  with pytest.raises(InputError, match=r"anneal.*nevergrad"):
    make_solver("anneal", np.zeros(2, bool), 0.0)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_its_remedy(name, monkeypatch):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda n, *a: None if n == PACKAGES[name] else found(n, *a)
  )
  with pytest.raises(InputError, match=f"{name}.*pip install -r requirements-solvers.txt"):
    make_solver(name, np.zeros(2, bool), 0.0)


def test_an_unknown_optimizer_of_nevergrad_is_refused():
  pytest.importorskip("nevergrad")
  from bosch_jax.solvers import NevergradSolver

  with pytest.raises(InputError, match="NoSuch"):
    NevergradSolver(np.zeros(2, bool), 0.0, optimizer="NoSuch")


def test_several_nomads_run_side_by_side_and_end_with_their_solver():
  pytest.importorskip("PyNomad")
  start = np.arange(12) < 6
  _, loss = planted(12, 0)
  solvers = [make_solver("nomad", start, loss(start), seed=s) for s in (1, 2, 1)]
  tried: list[list] = [[], [], []]
  for _ in range(5):
    for solver, log in zip(solvers, tried, strict=True):
      candidates = solver.ask()
      log += candidates
      solver.tell(candidates, np.array([loss(c) for c in candidates]))
  np.testing.assert_array_equal(tried[0], tried[2])
  assert not np.array_equal(tried[0], tried[1])
  process = solvers[0]._process
  assert process.poll() is None
  solvers.clear()
  del solver
  assert process.poll() is not None


def test_a_nomad_that_dies_is_an_error_not_an_end():
  pytest.importorskip("PyNomad")
  solver = make_solver("nomad", np.arange(12) < 6, 0.0)
  candidates = solver.ask()
  solver._process.kill()
  solver.tell(candidates, np.zeros(len(candidates)))
  with pytest.raises(RuntimeError, match="exit code -9"):
    for _ in range(2):
      solver.ask()
