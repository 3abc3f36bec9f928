import numpy as np
import pytest

from bosch_jax.statistics import average, mean_and_error, paired


def test_mean_and_error_by_hand():
  assert mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1 / np.sqrt(3)))
  assert mean_and_error([4.0]) == (4.0, None)


def test_an_average_of_equal_errors_shrinks_with_the_root_of_their_number():
  assert average([(1.0, 0.2), (3.0, 0.2), (2.0, 0.2), (2.0, 0.2)]) == pytest.approx((2.0, 0.1))
  assert average([(1.0, None), (3.0, 0.2)]) == (2.0, None)


def test_paired_differences_cancel_what_the_contexts_share():
  rng = np.random.default_rng(0)
  hard = rng.normal(0, 10, 50)
  difference, error = paired(hard + 1 + rng.normal(0, 0.1, 50), hard)
  assert difference == pytest.approx(1, abs=0.1) and error < 0.05
  assert mean_and_error(hard)[1] > 1
