"""The progress bar of a search: stage, best score, cost and time left."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class SearchProgress:
  """Shows how much of the budget is spent; on a pipe it prints one line per stage instead.

  Args:
    console: where to draw.
    budget: full-forward equivalents that make the bar full.
  """

  def __init__(self, console: Console, budget: float):
    self._console, self._budget = console, budget
    self._progress = Progress(
      TextColumn("{task.description:<18}"),
      BarColumn(bar_width=24),
      TextColumn("{task.completed:5.1f}/{task.total:.0f} passes  {task.fields[best]}"),
      TimeElapsedColumn(),
      TextColumn("left {task.fields[left]}"),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._progress.add_task("starting", total=budget, best="", left="?")
    self._last = ""
    self._first: tuple[float, float] | None = None

  def __enter__(self) -> "SearchProgress":
    self._progress.start()
    return self

  def __exit__(self, *_) -> None:
    self._progress.stop()

  def update(self, stage: str, cost: float, best: float | None) -> None:
    """Called after every batch of scores.

    Args:
      stage: name of the stage.
      cost: full-forward equivalents spent so far.
      best: best calibration NLL at the wanted ratio so far, if there is one.
    """
    now = time.monotonic()
    self._first = self._first or (now, cost)
    began, had = self._first
    left = "?"
    if cost > had and cost > 0.02 * self._budget:
      seconds = max(0.0, self._budget - cost) * (now - began) / (cost - had)
      left = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
    shown = "" if best is None else f"best NLL {best:.3f}"
    self._progress.update(
      self._task, description=stage, completed=min(cost, self._budget), best=shown, left=left
    )
    group = stage.split(" layer")[0]
    if self._progress.disable and group != self._last:
      self._console.print(f"{stage}: {cost:.1f} passes spent {shown}".rstrip(), highlight=False)
    self._last = group

  def note(self, text: str) -> None:
    """Names work that is not counted in passes."""
    self._progress.update(self._task, description=text, left="0:00")
    if self._progress.disable:
      self._console.print(text, highlight=False)
