"""Swaps of one set and one clear bit, guided by what was learned of each bit."""

from collections.abc import Iterator

import numpy as np

from bosch_jax.solvers.base import Best, Patience


class SwapSolver(Best):
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
    self._batch, self._rate, self._patience = batch, rate, Patience(patience)
    self._seen = {self.best.tobytes()}
    self._moves: dict[bytes, list[tuple[int, int]]] = {}
    self._combined: np.ndarray | None = None

  def ask(self) -> list[np.ndarray]:
    if self._combined is not None:
      combined, self._combined = self._combined, None
      return [combined]
    if self._patience.over:
      return []
    out = []
    self._moves = {}
    for clear, put in self._ranked():
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

  def _ranked(self) -> Iterator[tuple[int, int]]:
    """Swaps by predicted change; of equal ones the one of earlier bits."""
    ones, zeros = np.flatnonzero(self.best), np.flatnonzero(~self.best)
    change = self.cost[zeros] - self.cost[ones][:, None]
    allowed = (self._classes[ones][:, None] == self._classes[zeros]).ravel()
    for swap in np.argsort(change.ravel(), kind="stable"):
      if allowed[swap]:
        yield int(ones[swap // len(zeros)]), int(zeros[swap % len(zeros)])

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
    self._patience.count(len(candidates), self.best_loss < before)
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
