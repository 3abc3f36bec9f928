import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch_jax.solvers import GatesSolver, Space
from tests.bosch_jax.solvers.planted import relaxed, train


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 12))
def test_gates_keep_every_sum_and_round_to_exact_cardinality(seed, per_class, steps):
  rng = np.random.default_rng(seed)
  classes = np.repeat(np.arange(4), 3) if per_class else None
  space = Space.like(rng.random(12) < 0.5, classes)
  solver = GatesSolver(space, steps=steps)
  tried = train(solver, relaxed(12, seed))
  gates, rounded = tried[:steps], tried[steps:]
  assert len(gates) == steps and len(rounded) == 1
  for i, candidate in enumerate(gates):
    assert candidate.dtype == np.float64 and candidate.min() >= 0 and candidate.max() <= 1
    share = 1.0 if i == steps - 1 else min(1.0, 0.5 + i / max(1, 0.5 * steps) / 2)
    for members, ones in zip(space.members, space.ones, strict=True):
      full = ones == len(members) or ones == 0  # nothing to choose once all are wanted
      if not full or share == 1:
        np.testing.assert_allclose(candidate[members].sum(), share * ones, atol=1e-6)
  assert all(candidate.dtype == bool and candidate in space for candidate in rounded)
  assert solver.best_loss == min(relaxed(12, seed)(c)[0] for c in rounded)


def test_gates_find_the_planted_optimum_of_small_objectives():
  """Eight objectives of 10 bits, five set: the optimum of most, and never far from it."""
  gaps = []
  for seed in range(8):
    loss = relaxed(10, seed)
    space = Space(10, 5)
    values = sorted(loss(b)[0] for b in space)
    solver = GatesSolver(space, steps=100)
    train(solver, loss)
    gaps.append((solver.best_loss - values[0]) / (np.mean(values) - values[0]))
  assert np.mean(np.array(gaps) < 1e-9) >= 0.75 and max(gaps) < 0.3, gaps


def test_a_cost_common_to_all_bits_does_not_hide_what_tells_them_apart():
  rng = np.random.default_rng(0)
  linear = 100.0 + 0.01 * rng.normal(size=30)
  space = Space(30, 10)
  solver = GatesSolver(space, steps=30)
  train(solver, lambda g: (float(linear @ g), linear))
  np.testing.assert_array_equal(solver.best, space.top(-linear))


def test_two_runs_are_the_same():
  runs = [train(GatesSolver(Space(12, 6), steps=20), relaxed(12, 1)) for _ in range(2)]
  np.testing.assert_array_equal(*runs)


def test_gates_without_a_gradient_are_refused():
  solver = GatesSolver(Space(4, 2), steps=2)
  assert solver.needs_gradient
  with pytest.raises(ValueError, match="gradient"):
    solver.tell(solver.ask(), np.zeros(1))


def test_gates_begin_with_given_logits_and_settle_as_the_rate_falls():
  loss, space = relaxed(10, 3), Space(10, 5)
  moved = {}
  for decay in (1.0, 0.01):
    solver = GatesSolver(
      space, steps=40, decay=decay, first=1.0, logits=np.arange(10) / 10, warm=0.2
    )
    (begun,) = solver.ask()
    assert (np.diff(begun) > 0).all() and begun.sum() == pytest.approx(5)
    logits = [solver.logits]
    for _ in range(40):
      (candidate,) = solver.ask()
      value, gradient = loss(candidate)
      solver.tell([candidate], [value], [gradient])
      logits.append(solver.logits)
    steps = np.abs(np.diff(logits, axis=0)).max(1)
    moved[decay] = steps[-5:].mean() / steps[:5].mean()
  assert moved[0.01] < 0.2 * moved[1.0]
