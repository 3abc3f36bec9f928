"""What a run shows while it goes on, and the picture it leaves."""

import importlib.util
import pathlib
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from models.errors import InputError


class TrainProgress:
  """A bar with loss, tokens per second, MFU and time left; on a pipe, a line now and then.

  Args:
    console: where to draw.
    steps: updates of the whole run.
    start: updates done before.
    tokens: of one update.
    share: of an update per second that would be the peak of all devices (flops / peak).
  """

  def __init__(self, console: Console, steps: int, start: int, tokens: int, share: float):
    self._console, self._steps, self._tokens, self._share = console, steps, tokens, share
    self._progress = Progress(
      TextColumn("cpt"),
      BarColumn(bar_width=24),
      TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[shown]}"),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._progress.add_task("cpt", total=steps, completed=start, shown="")
    self._seconds: list[float] = []
    self._said = 0.0

  def __enter__(self) -> "TrainProgress":
    self._progress.start()
    return self

  def __exit__(self, *_) -> None:
    self._progress.stop()

  def update(self, step: int, loss: float, seconds: float) -> dict:
    """Called after every update.

    Returns:
      What it measured: tokens_per_s and mfu.
    """
    self._seconds = [*self._seconds[-19:], seconds]
    middle = sorted(self._seconds)[len(self._seconds) // 2]
    measured = {"tokens_per_s": self._tokens / seconds, "mfu": self._share / seconds}
    left = int((self._steps - step) * middle)
    shown = (
      f"loss {loss:.4f}  {self._tokens / middle:,.0f} tokens/s  MFU {self._share / middle:.0%}"
      f"  left {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    )
    self._progress.update(self._task, completed=step, shown=shown)
    if self._progress.disable and time.monotonic() - self._said > 30:
      self._said = time.monotonic()
      self._console.print(f"cpt {step}/{self._steps}  {shown}", highlight=False)
    return measured

  def note(self, text: str) -> None:
    self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def event_writer(folder: pathlib.Path):
  """A TensorBoard writer.

  Raises:
    InputError: tensorboardX is not installed.
  """
  if importlib.util.find_spec("tensorboardX") is None:
    raise InputError("--tensorboard", "", "needs tensorboardX: pip install tensorboardX")
  import tensorboardX

  return tensorboardX.SummaryWriter(str(folder), flush_secs=10)


def draw_curve(path: pathlib.Path, records: list[dict], title: str) -> None:
  """curve.png: training loss, and the held-out losses with full attention's as a line."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
  updates = [r for r in records if "loss" in r]
  axes[0].plot([r["step"] for r in updates], [r["loss"] for r in updates], color="#1f5f8b")
  axes[0].set_title("training loss")
  for axis, name, label in (
    (axes[1], "retrieval_nll", "held-out retrieval, NLL per answer token"),
    (axes[2], "text_nll", "held-out text, NLL per token"),
  ):
    points = [r for r in records if name in r and r.get("model") != "full"]
    axis.plot([r["step"] for r in points], [r[name] for r in points], "o-", color="#1f5f8b")
    for r in records:
      if r.get("model") == "full":
        axis.axhline(r[name], color="#888888", linestyle="--", label="full attention, untrained")
        axis.legend(fontsize=8)
    axis.set_title(label)
  for axis in axes:
    axis.set_xlabel("updates")
    axis.grid(alpha=0.3)
  figure.suptitle(title, fontsize=10, parse_math=False)
  figure.savefig(path, dpi=120)
  plt.close(figure)
