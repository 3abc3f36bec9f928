"""The folder of a run: claimed, locked, and resumed only as what it is."""

import fcntl
import json
import pathlib
import shutil

from models.errors import InputError, flag
from models.windows import write_json
from train.settings import CptSettings

CONFIG, LOCK, METRICS, CHECKPOINTS = "config.json", "lock", "metrics.jsonl", "checkpoints"
FORMAT = "bosch-cpt/1"
RESULTS = (METRICS, "result.json", "curve.png", "mask.json", "tensorboard", CHECKPOINTS)


def check(folder: pathlib.Path, settings: CptSettings) -> None:
  """Refuses a folder that this run may not use, before anything is loaded; touches nothing.

  Raises:
    InputError: it holds something else than such a run, a finished or stopped run without
      --resume or --force, or, with --resume, a run with other settings.
  """
  try:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
      return
    stored = _stored(folder)
  except OSError as error:
    raise InputError(
      "--out", folder, f"cannot be used ({error.strerror}); choose another"
    ) from None
  if stored is None:
    raise InputError(
      "--out", folder, "holds files that are not a run of cpt; choose an empty or new folder"
    )
  if settings.resume:
    for field, value in json.loads(json.dumps(settings.identity())).items():
      if stored.get(field) != value:
        raise InputError(
          f"--resume: {flag(field)}",
          value,
          f"the run in {folder} was made with {stored.get(field)}; give the same or another --out",
        )
  elif not settings.force:
    raise InputError(
      "--out", folder, "is already used; pass --resume to go on, --force to start over"
    )


def claim(folder: pathlib.Path, settings: CptSettings):
  """Locks the folder for this process and writes config.json; with --force, old results go.

  Returns:
    The lock: an open file, to be kept while the run goes on.

  Raises:
    InputError: in use by another process, or not writable.
  """
  check(folder, settings)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "w")  # noqa: SIM115 - the caller keeps it open
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise InputError(
        "--out", folder, "is in use by another run; wait for it, or choose another"
      ) from None
    if not settings.resume:
      for name in RESULTS:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    write_json(folder / CONFIG, {"format": FORMAT, **settings.identity()})
  except OSError as error:
    raise InputError(
      "--out", folder, f"cannot be written ({error.strerror}); choose another"
    ) from None
  return lock


def _stored(folder: pathlib.Path) -> dict | None:
  try:
    record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
  return record if isinstance(record, dict) and record.get("format") == FORMAT else None


class Metrics:
  """metrics.jsonl: one line per update and per evaluation.

  Args:
    path: the file; lines behind `step` are of updates that will be made again, and go.
    step: the update that the run stands at.
  """

  def __init__(self, path: pathlib.Path, step: int):
    self.records = [r for r in read(path) if r["step"] <= step]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(r) + "\n" for r in self.records), encoding="utf-8")
    partial.replace(path)
    self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - see close

  def write(self, record: dict) -> None:
    self.records.append(record)
    self._file.write(json.dumps(record) + "\n")
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def read(path: pathlib.Path) -> list[dict]:
  """The records of a metrics file; a last line cut off by a kill is left out."""
  records = []
  if path.exists():
    for line in path.read_text(encoding="utf-8").splitlines():
      try:
        records.append(json.loads(line))
      except ValueError:
        break
  return records
