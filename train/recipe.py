"""One recipe of continual pretraining for several masks: what a comparison is handed."""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil
from collections.abc import Callable

import jax
from flax import traverse_util

from models import registry
from models.hf_table import table
from train import cpt, partition, run_folder, subset
from train.data.sources import parts
from train.settings import CptSettings

POINTS = 8  # evaluations behind the one before the first update


class Recipe:
  """The defaults of cpt, but for what a comparison fixes.

  Args:
    model: as `CptSettings.model`.
    context: tokens of a retrieval prompt; rows are half as long again, as far as the model goes.
    updates: of every run.
    choices: other fields of `CptSettings`.

  Raises:
    InputError: see `CptSettings`, and whatever of data, parameters and devices can be refused
      before any weights are read.
  """

  def __init__(self, *, model: str, context: int, updates: int, **choices):
    config = registry.load_config(model)
    devices = jax.device_count()
    batch = -(-CptSettings.batch // devices) * devices
    self._settings = CptSettings(
      mask="full", model=model, context=context, sequence=min(context + context // 2, config.context),
      steps=updates, eval_every=max(1, updates // POINTS), batch=batch, keep=1, **choices,
    )  # fmt: skip
    self._settings.check_model(config)
    parts(self._settings.data)
    shapes = {row.target: row.full_shape for row in table(config)}
    subset.split(traverse_util.unflatten_dict(shapes, sep="/"), self._settings.train)
    mesh = partition.make_mesh(**dataclasses.asdict(self._settings.mesh))
    partition.check(mesh, shapes, batch, config, ())  # a tensor axis of 1 divides every window

  def settings(self, mask: pathlib.Path, folder: pathlib.Path) -> CptSettings:
    """Of the run from one mask; it goes on with what is in its folder.

    Raises:
      InputError: that is a run by another recipe, or from another mask.
    """
    begun = (folder / run_folder.CONFIG).exists()
    made = dataclasses.replace(self._settings, mask=str(mask), out=folder, resume=begun)
    if begun:
      run_folder.check(folder, made)
    return made

  def run(self, mask: pathlib.Path, folder: pathlib.Path, make_retrieval: Callable) -> dict:
    """Trains from one mask, goes on where that was stopped, or reads what it came to.

    A finished run has no checkpoints any more: weights and moments of every mask would be many
    times the model.

    Args:
      mask: mask.json.
      folder: of the run.
      make_retrieval: see `train.setup.set_up`.

    Returns:
      result.json's content, and "points", its evaluations in the order of updates.

    Raises:
      InputError: see `settings` and `train.cpt.main`.
      KeyboardInterrupt: the run was told to stop, and is saved.
    """
    settings = self.settings(mask, folder)
    if not settings.resume:
      shutil.rmtree(folder, ignore_errors=True)  # a claim that a kill cut short
    result = _finished(folder)
    if result is None:
      with contextlib.redirect_stdout(io.StringIO()):  # its table is in its folder
        result = cpt.main(settings, make_retrieval)
      if result["updates"] < settings.steps:
        raise KeyboardInterrupt
    shutil.rmtree(folder / run_folder.CHECKPOINTS, ignore_errors=True)
    records = run_folder.read(folder / run_folder.METRICS)
    points = [r for r in records if "text_nll" in r and r.get("model") != "full"]
    return {**result, "points": points}


def _finished(folder: pathlib.Path) -> dict | None:
  path = folder / "result.json"
  if not path.exists():
    return None
  result = json.loads(path.read_text(encoding="utf-8"))
  return result if result["updates"] == result["of"] else None
