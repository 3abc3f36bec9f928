"""Every candidate there is."""

import itertools

import numpy as np

from bosch_jax.solvers.base import Best
from bosch_jax.solvers.space import Space


class EnumerateSolver(Best):
  """Every choice of `ones` out of `size` bits, in lexicographic order.

  Args:
    size: n, or the classes of the variables, int `[n]` (see `Space`).
    ones: how many are set (in each class).
    batch: candidates asked for at once; None: all of them.
  """

  def __init__(self, size: int | np.ndarray, ones: int | np.ndarray, *, batch: int | None = None):
    super().__init__()
    self._left, self._batch = iter(Space(size, ones)), batch

  def ask(self) -> list[np.ndarray]:
    return list(itertools.islice(self._left, self._batch))
