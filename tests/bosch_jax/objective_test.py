import numpy as np
import pytest

from bosch_jax.objective import Objective


def test_anchors_score_one_and_zero_and_the_penalty_is_quadratic():
  objective = Objective(full=-0.1, all_local=-3.6, ratio=0.5, alpha=2.0)
  np.testing.assert_allclose(objective.normalised([-0.1, -3.6, -1.85]), [1, 0, 0.5])
  half = np.array([[1, 0], [0, 1]], bool)
  most = np.array([[1, 1], [0, 1]], bool)
  assert objective([-0.1, -0.1], [half, most]) == pytest.approx([-1.0, -1.0 + 2 * 0.25**2])


def test_anchors_the_wrong_way_round_never_turn_the_search_round():
  objective = Objective(full=-3.0, all_local=-1.0, ratio=0.5)
  mask = np.array([[1, 0]], bool)
  assert not objective.measures
  assert objective([-1.0], [mask]) < objective([-2.0], [mask])


def test_anchors_that_do_not_differ_stay_finite():
  assert np.isfinite(Objective(0.0, 0.0, 0.5)([0.0], [np.zeros((1, 2), bool)])).all()
