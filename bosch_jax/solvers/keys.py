"""Real-valued optimisers over bits of exact cardinality: one real key per bit.

The bits with the highest keys of every class are set, so every key vector is a candidate of the
space, and every candidate has key vectors. Many keys mean the same candidate: those are answered
from memory, so a candidate is asked for once.
"""

import math
from collections.abc import Callable

import numpy as np

from bosch_jax.solvers.base import Best, Patience
from bosch_jax.solvers.space import Space

# Keys in a row that were answered from memory before an optimiser counts as out of ideas.
MOST_REPEATS = 500


class KeySolver(Best):
  """Turns proposals of keys into candidates never seen before.

  Subclasses give `_propose()`: the next keys with a function that takes their loss, or None when
  there are no more before the waiting ones are answered.

  Args:
    start: bool `[n]`, the incumbent; it fixes the cardinality of every class.
    start_loss: its loss.
    classes: int `[n]`; None: one class.
    batch: candidates asked for at once, at most.
    patience: give up after this many candidates in a row that did not improve; None: never.
  """

  def __init__(
    self,
    start: np.ndarray,
    start_loss: float,
    *,
    classes: np.ndarray | None,
    batch: int,
    patience: int | None,
  ):
    super().__init__()
    self._space, self._batch, self._patience = Space.like(start, classes), batch, Patience(patience)
    self._known: dict[bytes, float] = {}
    self._waiting: dict[bytes, list[Callable[[float], None]]] = {}
    self._repeats = 0
    self.tell([np.asarray(start, bool)], [start_loss])

  def _propose(self) -> tuple[np.ndarray, Callable[[float], None]] | None:
    raise NotImplementedError

  def ask(self) -> list[np.ndarray]:
    out: list[np.ndarray] = []
    while (
      len(out) < self._batch
      and not self._patience.over
      and len(self._known) + len(self._waiting) < self._space.count
      and self._repeats < MOST_REPEATS
      and (proposal := self._propose())
    ):
      keys, answer = proposal
      candidate = self._space.top(keys)
      name = candidate.tobytes()
      if name in self._known:
        self._repeats += 1
        answer(self._known[name])
      elif name in self._waiting:
        self._repeats += 1
        self._waiting[name].append(answer)
      else:
        self._repeats = 0
        self._waiting[name] = [answer]
        out.append(candidate)
    return out

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    before = self.best_loss
    super().tell(candidates, losses)
    for candidate, loss in zip(candidates, losses, strict=True):
      if candidate in self._space:
        self._known[candidate.tobytes()] = float(loss)
      for answer in self._waiting.pop(candidate.tobytes(), []):
        answer(float(loss))
    self._patience.count(len(candidates), self.best_loss < before or before == math.inf)


def first_keys(start: np.ndarray, cost: np.ndarray | None) -> np.ndarray:
  """Keys that mean `start`, evenly spread over (0, 1): set bits first, cheap ones before dear ones.

  Args:
    start: bool `[n]`.
    cost: float `[n]`, what each bit is guessed to cost when set; None: nothing is known.

  Returns:
    float64 `[n]`.
  """
  n = len(start)
  cost = np.zeros(n) if cost is None else np.asarray(cost, np.float64)
  keys = np.empty(n)
  keys[np.lexsort((cost, ~np.asarray(start, bool)))] = (np.arange(n)[::-1] + 0.5) / max(n, 1)
  return keys
