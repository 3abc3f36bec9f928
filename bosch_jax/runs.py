"""The folder of a run: claimed before any work, never shared, never half-overwritten."""

import dataclasses
import json
import pathlib
from collections.abc import Collection

from bosch_jax.journal import FORMAT as JOURNAL_FORMAT
from bosch_jax.journal import Journal
from models.errors import InputError
from models.windows import write_json

CONFIG = "config.json"
JOURNAL = "journal.jsonl"
FORMAT = "bosch-run/1"
# What a resumed run may have otherwise.
NOT_RECORDED = ("out", "resume", "force", "devices", "recovery")
RESULTS = ("mask.json", "mask.png", "result.json", "report.md")


def open_run(
  folder: pathlib.Path,
  settings: object,
  header: dict,
  *,
  resume: bool,
  force: bool,
  free: Collection[str] = (),
) -> Journal:
  """Claims the folder of a run: its journal, locked, then config.json; old results are removed.

  Args:
    folder: where to.
    settings: a frozen dataclass; what config.json records (and what a resumed run must equal,
      but for `NOT_RECORDED` and `free`).
    header: of the journal.
    resume: go on with what is there, if there is a run.
    force: start over, discarding an earlier run.
    free: fields that a resumed run may have otherwise; config.json then records the newer ones.

  Raises:
    InputError: the folder is in use, cannot be written, or holds a run with other settings or
      something else than a run.
  """
  check_folder(folder, settings, resume=resume, force=force, free=free)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / JOURNAL, header, resume)
    if not resume:
      for name in RESULTS:
        (folder / name).unlink(missing_ok=True)
    write_json(folder / CONFIG, {"format": FORMAT, **as_json(settings)})
  except OSError as error:
    raise InputError(
      "--out", folder, f"cannot be written ({error.strerror}); choose another folder"
    ) from None
  return journal


def check_folder(
  folder: pathlib.Path,
  settings: object,
  *,
  resume: bool,
  force: bool,
  free: Collection[str] = (),
) -> None:
  """What `open_run` would refuse, checked without touching anything (before a model is loaded)."""
  try:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
      return
    stored, only_claimed = _stored(folder), _only_claimed(folder)
  except OSError as error:
    raise InputError(
      "--out", folder, f"cannot be used ({error.strerror}); choose another folder"
    ) from None
  if stored is None and not only_claimed:
    raise InputError(
      "--out", folder, "holds files that are not a run of this tool; choose an empty or new folder"
    )
  if resume and only_claimed:
    return  # the journal's header says whether it is the same run
  if resume:
    _check_same(folder, stored, without(as_json(settings), free))
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


def _only_claimed(folder: pathlib.Path) -> bool:
  """Whether a run was killed here between its journal and its config.json."""
  names = {path.name for path in folder.iterdir()}
  if JOURNAL not in names or not names <= {JOURNAL, CONFIG + ".partial"}:
    return False
  begun = (folder / JOURNAL).read_bytes()
  header = json.dumps({"format": JOURNAL_FORMAT})[:-1].encode()
  return begun[: len(header)] == header[: len(begun)]


def as_json(settings: object) -> dict:
  """The settings as config.json records them: without how the folder itself is treated, where
  the run computes, and what is done with its results."""
  record = dataclasses.asdict(settings)
  for field in NOT_RECORDED:
    record.pop(field, None)
  return json.loads(json.dumps(record, default=str))  # as it is read back: tuples are lists


def without(record: dict, fields: Collection[str]) -> dict:
  """The record but for these fields."""
  return {field: value for field, value in record.items() if field not in fields}


def _check_same(folder: pathlib.Path, stored: dict, record: dict) -> None:
  for field, value in record.items():
    old = stored.get(field)
    if isinstance(value, dict) and isinstance(old, dict):
      _check_same(folder, old, value)  # groups of flags have no prefix
    elif old != value:
      raise InputError(
        f"--resume: --{field.replace('_', '-')}",
        value,
        f"the run in {folder} was made with {old}; give the same value or another --out",
      )
