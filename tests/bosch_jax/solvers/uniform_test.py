import numpy as np

from bosch_jax.solvers import RandomSolver, bits
from tests.bosch_jax.solvers.planted import run


def test_random_draws_are_seeded_exact_and_end_when_all_are_seen():
  a, b = RandomSolver(6, 3, seed=5), RandomSolver(6, 3, seed=5)
  tried, again = run(a, np.sum, 10**6), run(b, np.sum, 10**6)
  assert len(tried) == 20 == len({c.tobytes() for c in tried})
  np.testing.assert_array_equal(tried, again)


def test_random_draws_are_spread_over_the_whole_space():
  tried = run(RandomSolver(20, 5, seed=0), np.sum, 2000)
  counts = np.sum(tried, 0)
  assert counts.min() > 400 and counts.max() < 600  # 500 each, standard deviation 19


def test_random_never_draws_what_it_was_told():
  solver = RandomSolver(5, 2, seed=0)
  solver.tell([bits(5, [0, 1])], [1.0])
  assert len(run(solver, np.sum, 100)) == 9
