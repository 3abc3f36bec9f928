"""Black-box solvers over bits with exact cardinality, behind one ask/tell interface.

A solver never sees the model. `ask()` gives a batch of candidate bit vectors (an empty batch: it
has nothing left to try); `tell()` gives their losses back, lower is better. Cardinality is exact by
construction: within a class of variables (a layer, or all of them) ones are only ever exchanged
with zeros.
"""

import itertools
import math
from typing import Protocol

import numpy as np


class Solver(Protocol):
  """What the stages need of a solver."""

  best: np.ndarray | None
  best_loss: float

  def ask(self) -> list[np.ndarray]:
    """Candidates, bool `[n]` each, never seen before; empty when there is nothing left."""

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    """Losses of candidates, in order."""


class _Best:
  """Keeps the best candidate; ties go to the earlier one, so runs are deterministic."""

  def __init__(self):
    self.best: np.ndarray | None = None
    self.best_loss = math.inf

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    for candidate, loss in zip(candidates, losses, strict=True):
      if loss < self.best_loss:
        self.best, self.best_loss = candidate.copy(), float(loss)


class EnumerateSolver(_Best):
  """Every choice of `ones` out of `size` bits, in lexicographic order, one batch."""

  def __init__(self, size: int, ones: int):
    super().__init__()
    self._left = [bits(size, chosen) for chosen in itertools.combinations(range(size), ones)]

  def ask(self) -> list[np.ndarray]:
    batch, self._left = self._left, []
    return batch


class RandomSolver(_Best):
  """Uniform draws with `ones` of `size` bits set, without repetition."""

  def __init__(self, size: int, ones: int, *, seed: int, batch: int = 8):
    super().__init__()
    self._size, self._ones, self._batch = size, ones, batch
    self._rng, self._seen = np.random.default_rng(seed), set()

  def ask(self) -> list[np.ndarray]:
    out = []
    total = math.comb(self._size, self._ones)
    while len(out) < self._batch and len(self._seen) < total:
      candidate = bits(self._size, self._rng.permutation(self._size)[: self._ones])
      if candidate.tobytes() not in self._seen:
        self._seen.add(candidate.tobytes())
        out.append(candidate)
    return out


class SwapSolver(_Best):
  """Best-improvement swaps, guided by marginals learned on the way.

  From the incumbent, a swap clears one bit and sets another of the same class. The solver keeps an
  estimate of what every bit costs when set, `cost[n]`; swaps are tried in order of the predicted
  change `cost[set] - cost[clear]`, and every told loss corrects the estimates (a delta rule on the
  two bits). Swaps of one batch that each improve and do not touch each other are tried together
  next, which walks several steps for the price of one.

  Args:
    start: bool `[n]`, the incumbent; its loss is `start_loss`.
    start_loss: loss of `start`.
    cost: float `[n]`, first guess of the loss each bit adds when set.
    classes: int `[n]`; bits are exchanged within a class only. None: one class, so the total
      alone is fixed.
    batch: candidates asked for at once.
    rate: step of the delta rule.
    patience: give up after this many swaps in a row that did not improve; None: never.
  """

  def __init__(
    self,
    start: np.ndarray,
    start_loss: float,
    cost: np.ndarray,
    *,
    classes: np.ndarray | None = None,
    batch: int = 4,
    rate: float = 0.5,
    patience: int | None = None,
  ):
    super().__init__()
    self.best, self.best_loss = np.asarray(start, bool).copy(), float(start_loss)
    self.cost = np.array(cost, np.float64)
    self._classes = np.zeros(len(start), int) if classes is None else np.asarray(classes)
    self._batch, self._rate, self._patience = batch, rate, patience
    self._seen = {self.best.tobytes()}
    self._moves: dict[bytes, list[tuple[int, int]]] = {}
    self._combined: np.ndarray | None = None
    self._failures = 0

  def ask(self) -> list[np.ndarray]:
    if self._combined is not None:
      combined, self._combined = self._combined, None
      return [combined]
    if self._patience is not None and self._failures >= self._patience:
      return []
    out = []
    self._moves = {}
    for _, clear, put in self._ranked():
      candidate = self.best.copy()
      candidate[clear], candidate[put] = False, True
      if candidate.tobytes() in self._seen:
        continue
      self._seen.add(candidate.tobytes())
      self._moves[candidate.tobytes()] = [(clear, put)]
      out.append(candidate)
      if len(out) == self._batch:
        break
    return out

  def _ranked(self) -> list[tuple[float, int, int]]:
    swaps = [
      (self.cost[put] - self.cost[clear], int(clear), int(put))
      for clear in np.flatnonzero(self.best)
      for put in np.flatnonzero(~self.best)
      if self._classes[clear] == self._classes[put]
    ]
    return sorted(swaps)

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    incumbent, before = self.best.copy(), self.best_loss
    improving = []
    for candidate, loss in zip(candidates, losses, strict=True):
      moves = self._moves.get(candidate.tobytes(), [])
      for clear, put in moves:
        error = (loss - before) - (self.cost[put] - self.cost[clear])
        self.cost[put] += self._rate * error / 2
        self.cost[clear] -= self._rate * error / 2
      if loss < before:
        improving.append((loss, moves))
    super().tell(candidates, losses)
    self._failures = 0 if self.best_loss < before else self._failures + len(candidates)
    self._combine(incumbent, sorted(improving, key=lambda pair: pair[0]))

  def _combine(self, incumbent: np.ndarray, improving: list) -> None:
    combined, touched, used = incumbent.copy(), set(), 0
    for _, moves in improving:
      bits_touched = {bit for move in moves for bit in move}
      if moves and not bits_touched & touched:
        touched |= bits_touched
        used += 1
        for clear, put in moves:
          combined[clear], combined[put] = False, True
    if used > 1 and combined.tobytes() not in self._seen:
      self._seen.add(combined.tobytes())
      self._combined = combined
      self._moves = {}


def bits(size: int, ones) -> np.ndarray:
  """A bit vector with the given positions set."""
  out = np.zeros(size, bool)
  out[list(ones)] = True
  return out
