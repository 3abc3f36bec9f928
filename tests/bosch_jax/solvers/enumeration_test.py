import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bosch_jax.solvers import EnumerateSolver, bits
from tests.bosch_jax.solvers.planted import planted, run


@given(st.integers(1, 6), st.data())
def test_enumeration_is_complete_and_finds_the_best(size, data):
  ones = data.draw(st.integers(0, size))
  _, loss = planted(size, seed=size)
  solver = EnumerateSolver(size, ones)
  tried = run(solver, loss, 10**6)
  everything = [bits(size, c) for c in itertools.combinations(range(size), ones)]
  assert len(tried) == len(everything) and all(c.sum() == ones for c in tried)
  assert solver.best_loss == min(loss(c) for c in everything)


def test_classes_are_enumerated_together_in_batches():
  solver = EnumerateSolver(np.array([0, 1, 0, 1, 1]), np.array([1, 2]), batch=4)
  first = solver.ask()
  tried = [*first, *solver.ask()]
  assert len(first) == 4 and len(tried) == 6 == len({c.tobytes() for c in tried})
  assert all(c[[0, 2]].sum() == 1 and c[[1, 3, 4]].sum() == 2 for c in tried)
  assert solver.ask() == []
