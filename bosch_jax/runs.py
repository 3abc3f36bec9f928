"""The folder of a run: claimed before any work, never shared, never half-overwritten."""

import dataclasses
import json
import pathlib
import shutil

from models.errors import InputError
from models.windows import write_json

CONFIG = "config.json"
OURS = (CONFIG, "journal.jsonl", "mask.json", "mask.png", "result.json", "report.md")


def open_run(folder: pathlib.Path, settings: object, *, resume: bool, force: bool) -> pathlib.Path:
  """Makes the folder of a run and writes config.json.

  Args:
    folder: where to.
    settings: a frozen dataclass; what config.json records (and what a resumed run must equal,
      but for resume, force and out).
    resume: the folder of a stopped run is expected.
    force: files of an earlier run are removed.

  Raises:
    InputError: the folder is in use, cannot be written, or holds a run with other settings.
  """
  record = as_json(settings)
  path = folder / CONFIG
  used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
  if resume and path.is_file():
    _check_same(path, record)
  elif used and not (force and path.is_file()):
    if force or not path.is_file():
      raise InputError("--out", folder, "holds files that are not a run of this tool; choose an empty or new folder")
    raise InputError("--out", folder, "is already used; pass --resume to go on, --force to start over, or another --out")
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if not resume:
      for name in OURS:
        (folder / name).unlink(missing_ok=True)
    write_json(path, record)
  except OSError as error:
    raise InputError("--out", folder, f"cannot be written ({error.strerror}); choose another folder") from None
  return folder


def discard(folder: pathlib.Path) -> None:
  """Takes back a folder in which nothing was scored, so a refused run leaves nothing behind."""
  journal = folder / "journal.jsonl"
  if not journal.exists():
    (folder / CONFIG).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
      shutil.rmtree(folder)


def as_json(settings: object) -> dict:
  """The settings as config.json records them: without how the folder itself is treated."""
  record = dataclasses.asdict(settings)
  for field in ("out", "resume", "force"):
    record.pop(field, None)
  return record


def _check_same(path: pathlib.Path, record: dict) -> None:
  try:
    stored = json.loads(path.read_text())
  except ValueError:
    raise InputError("--resume", path, "is damaged; start over with --force") from None
  for field, value in record.items():
    if stored.get(field) != value:
      raise InputError(
        f"--resume: --{field.replace('_', '-')}", value,
        f"the run in {path.parent} was made with {stored.get(field)}; give the same value or another --out",
      )
