"""Checkpoints of a run: everything one update needs to go on as if nothing had happened."""

import json
import pathlib
import shutil
from collections.abc import Callable

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from models.errors import InputError
from train.hosts import barrier, first
from train.layers import layout
from train.step import State

_WHOLE = ("_CHECKPOINT_METADATA", "state/_METADATA", "run/metadata")


class Checkpoints:
  """Saves in the background; keeps the latest few and the best.

  Args:
    folder: of the steps; made if it is not there.
    identity: what a run must have in common with a checkpoint to go on from it: nested dicts of
      plain values ("model", "mask", "weights", "data", "settings").
    keep: latest steps to keep.
  """

  def __init__(self, folder: pathlib.Path, identity: dict, keep: int):
    self._folder, self._identity = folder.absolute(), json.loads(json.dumps(identity))
    if first():
      self._folder.mkdir(parents=True, exist_ok=True)
      for path in self._folder.iterdir():
        if path.is_dir() and not _complete(path):
          shutil.rmtree(path)  # what a kill left of a save; never restored, and in the way of one
    barrier("checkpoints tidied")
    best = checkpoint_managers.BestN(
      get_metric_fn=lambda metrics: metrics["held_out"],
      reverse=True,
      n=1,
      keep_checkpoints_without_metrics=False,
    )
    policy = checkpoint_managers.AnyPreservationPolicy([checkpoint_managers.LatestN(keep), best])
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policy, enable_async_checkpointing=True, create=False
      ),
    )

  def latest(self) -> int | None:
    """The last whole step, or None."""
    return self._manager.latest_step()

  def steps(self) -> list[int]:
    return sorted(self._manager.all_steps())

  def save(
    self, step: int, state: Callable[[], State], position: int, held_out: float | None
  ) -> None:
    """Writes a step, in the background; one that is there already is left alone.

    Args:
      state: makes the stacked form, which may be a copy; not called for a step that is there.
      position: batches taken from the data.
      held_out: what the best step is chosen by, lower is better; None = not measured yet.
    """
    if step in self._manager.all_steps():
      return
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state()._asdict()),
        run=ocp.args.JsonSave({"position": position, **self._identity}),
      ),
      metrics=None if held_out is None else {"held_out": held_out},
    )

  def restore(self, state: State, step: int | None = None) -> tuple[State, int]:
    """A step, on whatever devices the given state lies.

    Args:
      state: with the shapes, dtypes and shardings wanted, or its `layout`.
      step: default the last.

    Returns:
      The state, and the batches taken from the data.

    Raises:
      InputError: it is of another run; the message names what differs.
    """
    step = self.latest() if step is None else step
    record = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
    compare(self._folder / str(step), record, self._identity)
    restored = self._manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(layout(state)._asdict()))
    )
    return State(**restored.state), record["position"]

  def close(self) -> None:
    """Waits for what is being written."""
    self._manager.wait_until_finished()
    self._manager.close()


def compare(where: pathlib.Path, stored: dict, wanted: dict, prefix: str = "") -> None:
  """Refuses a checkpoint that differs, by the name of the first difference."""
  for name, value in wanted.items():
    old = stored.get(name)
    if isinstance(value, dict) and isinstance(old, dict):
      compare(where, old, value, f"{prefix}{name} ")
    elif old != value:
      shown = "" if isinstance(value, list | dict) or isinstance(old, list | dict) else f" {old!s}"
      raise InputError(
        "checkpoint",
        where,
        f"is of another run: its {prefix}{name}{shown} is not this run's"
        f"{shown and f' {value!s}'}; give the same, or another --out",
      )


def _complete(path: pathlib.Path) -> bool:
  return path.name.isdigit() and all((path / name).is_file() for name in _WHOLE)
