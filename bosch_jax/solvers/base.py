"""What every solver is, and what most of them share."""

import math
from typing import Protocol

import numpy as np


class Solver(Protocol):
  """What the stages need of a solver.

  Attributes:
    best: the best candidate told so far, bool `[n]` with the exact cardinality, or None.
    best_loss: its loss.
    needs_gradient: candidates are gates, float `[n]` in [0, 1], and `tell` takes the gradients of
      the losses by them as a third argument (see `GatesSolver`).
  """

  best: np.ndarray | None
  best_loss: float
  needs_gradient: bool

  def ask(self) -> list[np.ndarray]:
    """Candidates, bool `[n]` each, never seen before; empty when there is nothing left."""

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    """Losses of candidates, in order. Candidates the solver did not ask for are welcome."""


class Best:
  """Keeps the best candidate; ties go to the earlier one, so runs are deterministic."""

  needs_gradient = False

  def __init__(self):
    self.best: np.ndarray | None = None
    self.best_loss = math.inf

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    for candidate, loss in zip(candidates, losses, strict=True):
      if loss < self.best_loss:
        self.best, self.best_loss = candidate.copy(), float(loss)


class Patience:
  """Counts candidates in a row that did not improve.

  Args:
    limit: give up after this many; None: never.
  """

  def __init__(self, limit: int | None):
    self._limit, self._failures = limit, 0

  @property
  def over(self) -> bool:
    return self._limit is not None and self._failures >= self._limit

  def count(self, candidates: int, improved: bool) -> None:
    self._failures = 0 if improved else self._failures + candidates


def bits(size: int, ones) -> np.ndarray:
  """A bit vector with the given positions set."""
  out = np.zeros(size, bool)
  out[list(ones)] = True
  return out
