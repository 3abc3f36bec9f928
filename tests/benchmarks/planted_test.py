import numpy as np
import pytest

from benchmarks.planted import KINDS, best_known, planted
from bosch_jax.solvers import Space


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [None, np.repeat(np.arange(4), 3)])
def test_the_best_known_of_small_objectives_is_the_optimum(kind, classes):
  for seed in range(3):
    objective = planted(kind, 12, seed)
    space = Space.like(np.arange(12) % 3 > 0, classes)
    optimum = min(objective(x) for x in space)
    assert best_known(objective, space) == pytest.approx(optimum, abs=1e-9)


def test_redundant_pairs_are_nearly_free_alone_and_dear_together():
  objective = planted("redundant", 30, seed=0)
  one, other = np.argwhere(objective.pairs)[0]
  alone = [objective(np.arange(30) == i) for i in (one, other)]
  assert sum(alone) < 0.5 and objective(np.isin(range(30), (one, other))) > sum(alone) + 1.0
  assert np.count_nonzero(objective.pairs) == 10  # 20 of 30 bits


def test_plateaus_have_few_levels_and_a_smooth_objective_does_not():
  draws = np.random.default_rng(0).random((200, 30)) < 0.5
  levels = {kind: len({planted(kind, 30, 0)(x) for x in draws}) for kind in KINDS}
  assert levels["plateaus"] < 60 and levels["quadratic"] == 200


@pytest.mark.parametrize("kind", ["quadratic", "redundant"])
def test_the_gradient_is_the_change_of_the_loss(kind):
  objective, gates = planted(kind, 9, 1), np.random.default_rng(0).random(9)
  steps = 1e-6 * np.eye(9)
  changes = [(objective(gates + s) - objective(gates - s)) / 2e-6 for s in steps]
  np.testing.assert_allclose(objective.gradient(gates), changes, rtol=1e-5, atol=1e-7)
