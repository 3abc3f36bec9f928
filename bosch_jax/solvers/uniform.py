"""Uniform random search, what every other solver has to beat."""

import numpy as np

from bosch_jax.solvers.base import Best, Patience
from bosch_jax.solvers.space import Space


class RandomSolver(Best):
  """Uniform draws with `ones` of `size` bits set, without repetition.

  Args:
    size: n, or the classes of the variables, int `[n]` (see `Space`).
    ones: how many are set (in each class).
    seed: of the draws.
    batch: candidates asked for at once.
    patience: give up after this many draws in a row that did not improve; None: never.
  """

  def __init__(
    self,
    size: int | np.ndarray,
    ones: int | np.ndarray,
    *,
    seed: int,
    batch: int = 8,
    patience: int | None = None,
  ):
    super().__init__()
    self._space, self._batch, self._patience = Space(size, ones), batch, Patience(patience)
    self._rng, self._seen = np.random.default_rng(seed), set()

  def ask(self) -> list[np.ndarray]:
    out = []
    while (
      not self._patience.over and len(out) < self._batch and len(self._seen) < self._space.count
    ):
      candidate = self._space.top(self._rng.random(self._space.size))
      if candidate.tobytes() not in self._seen:
        self._seen.add(candidate.tobytes())
        out.append(candidate)
    return out

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    before = self.best_loss
    super().tell(candidates, losses)
    self._seen.update(c.tobytes() for c in candidates if c in self._space)
    self._patience.count(len(candidates), self.best_loss < before)
