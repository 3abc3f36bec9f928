"""Lazy greedy elimination: one run that passes through every cardinality on its way."""

import heapq
import math

import numpy as np

from bosch_jax.solvers.base import Best
from bosch_jax.solvers.space import Space


class LazySolver(Best):
  """Sets (or clears) one bit after the other, always the one that costs least at this point.

  The costs are true single-bit probes, kept in a priority queue. A step makes all of them stale,
  but most stay nearly right: only a bit that reaches the top of the queue is probed again at the
  current point, and if it is still the cheapest it is taken. Where interactions make bits dearer,
  never cheaper, this takes the same path as probing everything at every step (Minoux's accelerated
  greedy algorithm, 1978), for a small part of its probes.

  Candidates have the cardinalities of the path, so `best` is None before the path has reached the
  wanted one (unless something else was told); `path` holds one bit vector for every cardinality
  on the way.

  Args:
    start: bool `[n]`, where the path begins.
    start_loss: its loss; None: it is asked for first.
    space: what to reach. In every class it may ask for more ones than `start` has, or in every
      class for fewer: the path only sets bits, or only clears them.
    cost: float `[n]`, first guess of what changing each bit adds to the loss; None: every bit is
      probed once first.
    batch: bits probed at once. With more than one, the runners-up are probed together with the
      top of the queue, which costs more probes and fewer turns.

  Attributes:
    path: `{number of ones: (bool [n], loss)}`, from `start` to where it is now.
    cost: what changing each bit added to the loss when it was last probed; the guess before.

  Raises:
    ValueError: the space asks for more ones in one class and for fewer in another.
  """

  def __init__(
    self,
    start: np.ndarray,
    start_loss: float | None,
    space: Space,
    *,
    cost: np.ndarray | None = None,
    batch: int = 1,
  ):
    super().__init__()
    start = np.asarray(start, bool)
    self._space, self._batch = space, batch
    self._missing = space.ones - np.array([int(start[members].sum()) for members in space.members])
    if self._missing.min(initial=0) < 0 < self._missing.max(initial=0):
      raise ValueError("the path would have to set bits of one class and clear bits of another")
    self._setting = bool(self._missing.max(initial=0) > 0)
    self._missing = np.abs(self._missing)
    self._class = np.zeros(space.size, int)
    for label, members in enumerate(space.members):
      self._class[members] = label
    self._current, self._loss = start.copy(), start_loss
    self.cost = np.full(space.size, -math.inf) if cost is None else np.array(cost, np.float64)
    self._after = np.full(space.size, np.nan)  # loss the last probe of each bit found
    self._probed_at = np.full(space.size, -1)  # length of the path at that time
    self.path: dict[int, tuple[np.ndarray, float]] = {}
    self._queue = [(self.cost[i], int(i)) for i in np.flatnonzero(start != self._setting)]
    heapq.heapify(self._queue)
    if start_loss is not None:
      self._arrive(float(start_loss))

  def ask(self) -> list[np.ndarray]:
    if self._loss is None:
      return [self._current.copy()]
    if not self._missing.any():
      return []
    top = []
    while self._queue and len(top) < self._batch:
      entry = heapq.heappop(self._queue)
      if self._missing[self._class[entry[1]]]:  # bits of a finished class leave the queue
        top.append(entry)
    for entry in top:
      heapq.heappush(self._queue, entry)
    return [self._with(bit) for _, bit in top if self._probed_at[bit] < len(self.path)]

  def tell(self, candidates: list[np.ndarray], losses: np.ndarray) -> None:
    for candidate, loss in zip(candidates, losses, strict=True):
      if candidate in self._space:
        super().tell([candidate], [loss])
      changed = np.flatnonzero(candidate != self._current)
      if self._loss is None and len(changed) == 0:
        self._arrive(float(loss))
      elif self._loss is not None and len(changed) == 1 and candidate[changed[0]] == self._setting:
        bit = int(changed[0])
        self.cost[bit], self._after[bit] = loss - self._loss, loss
        self._probed_at[bit] = len(self.path)
    self._queue = [(self.cost[bit], bit) for _, bit in self._queue]
    heapq.heapify(self._queue)
    self._advance()

  def believed(self) -> np.ndarray:
    """The bit vector of the wanted cardinality that the costs known now suggest: the path with its
    cheapest next bits. Nobody has probed it; for a search whose budget ends before the path.

    Returns:
      bool `[n]`, in the space.
    """
    known = np.where(np.isfinite(self.cost), self.cost, np.inf)  # unprobed bits come last
    done = np.where(self._current, np.inf, -np.inf)
    open_bits = self._current != self._setting
    wanted = -known if self._setting else known
    return self._space.top(np.where(open_bits, wanted, done))

  def _advance(self) -> None:
    """Takes the bit at the top of the queue if its cost is true at this point."""
    while self._queue and not self._missing[self._class[self._queue[0][1]]]:
      heapq.heappop(self._queue)
    if self._queue and self._probed_at[self._queue[0][1]] == len(self.path):
      _, bit = heapq.heappop(self._queue)
      self._current = self._with(bit)
      self._missing[self._class[bit]] -= 1
      self._arrive(float(self._after[bit]))

  def _arrive(self, loss: float) -> None:
    self._loss = loss
    self.path[int(self._current.sum())] = (self._current.copy(), loss)
    if not self._missing.any():
      super().tell([self._current], [loss])

  def _with(self, bit: int) -> np.ndarray:
    candidate = self._current.copy()
    candidate[bit] = self._setting
    return candidate
