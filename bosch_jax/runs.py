"""The folder of a run: claimed before any work, never shared, never half-overwritten."""

import dataclasses
import json
import pathlib

from bosch_jax.journal import Journal
from models.errors import InputError
from models.windows import write_json

CONFIG = "config.json"
FORMAT = "bosch-run/1"
RESULTS = ("mask.json", "mask.png", "result.json", "report.md")


def open_run(
  folder: pathlib.Path, settings: object, header: dict, *, resume: bool, force: bool
) -> Journal:
  """Claims the folder of a run: its journal, locked, then config.json; old results are removed.

  Args:
    folder: where to.
    settings: a frozen dataclass; what config.json records (and what a resumed run must equal,
      but for resume, force and out).
    header: of the journal.
    resume: go on with what is there, if there is a run.
    force: start over, discarding an earlier run.

  Raises:
    InputError: the folder is in use, cannot be written, or holds a run with other settings or
      something else than a run.
  """
  check_folder(folder, settings, resume=resume, force=force)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "journal.jsonl", header, resume)
    if not resume:
      for name in RESULTS:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / CONFIG, {"format": FORMAT, **as_json(settings)})
  except OSError as error:
    raise InputError(
      "--out", folder, f"cannot be written ({error.strerror}); choose another folder"
    ) from None
  return journal


def check_folder(folder: pathlib.Path, settings: object, *, resume: bool, force: bool) -> None:
  """What `open_run` would refuse, checked without touching anything (before a model is loaded)."""
  try:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
      return
    stored = _stored(folder)
  except OSError as error:
    raise InputError(
      "--out", folder, f"cannot be used ({error.strerror}); choose another folder"
    ) from None
  if stored is None:
    raise InputError(
      "--out", folder, "holds files that are not a run of this tool; choose an empty or new folder"
    )
  if resume:
    _check_same(folder, stored, as_json(settings))
  elif not force:
    raise InputError(
      "--out",
      folder,
      "is already used; pass --resume to go on, --force to start over, or another --out",
    )


def _stored(folder: pathlib.Path) -> dict | None:
  """config.json of a run of this tool, or None."""
  try:
    record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def as_json(settings: object) -> dict:
  """The settings as config.json records them: without how the folder itself is treated."""
  record = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
  for field in ("out", "resume", "force"):
    record.pop(field, None)
  return record


def _check_same(folder: pathlib.Path, stored: dict, record: dict, prefix: str = "--") -> None:
  for field, value in record.items():
    old = stored.get(field)
    if isinstance(value, dict) and isinstance(old, dict):
      _check_same(folder, old, value, f"{prefix}{field}.")
    elif old != value:
      raise InputError(
        f"--resume: {prefix}{field.replace('_', '-')}",
        value,
        f"the run in {folder} was made with {old}; give the same value or another --out",
      )
