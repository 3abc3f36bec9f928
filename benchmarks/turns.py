"""Contenders that take turns with a longer piece of work.

A machine's clock may change by a tenth within a minute, as others use it. Timed in turns, all
contenders see the same machine; timed one after another, one may see a faster one.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass
class Contender:
  """What is timed, and what it took so far.

  Attributes:
    run: one turn; returns the work that it did, in a unit of its own (answers, FLOPs).
    done: the work of all turns.
    cpu, wall: their CPU and wall seconds.
  """

  run: Callable[[], float]
  done: float = 0.0
  cpu: float = 0.0
  wall: float = 0.0

  def turn(self) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    self.done += self.run()
    self.cpu += time.process_time() - cpu
    self.wall += time.perf_counter() - wall


class Turns:
  """Gives the contenders their turns, in order.

  Args:
    contenders: at least one.
    every: CPU seconds of the longer work before the next turn is due.
  """

  def __init__(self, contenders: Sequence[Contender], every: float):
    self._contenders, self._every, self._owed = list(contenders), every, 0.0
    self._order = itertools.cycle(self._contenders)

  def worked(self, cpu: float) -> None:
    """The longer work took `cpu` seconds more: runs the turns that are due."""
    self._owed += cpu
    while self._owed >= self._every:
      self._owed -= self._every
      next(self._order).turn()

  def finish(self) -> None:
    """A turn for whoever had none, because the longer work was short."""
    for contender in self._contenders:
      if not contender.wall:
        contender.turn()
