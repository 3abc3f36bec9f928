"""The journal: every mask that was scored, on disk before the search goes on.

One JSON object a line. The first line is a header that fixes what the scores depend on (model,
prompts, settings); each further line is one mask scored on some contexts, or one relaxed mask with
the gradient of its loss. Lines are appended and fsynced per batch, so a killed run loses at most the
batch in flight; a torn last line is dropped.
"""

import fcntl
import json
import os
import pathlib

import numpy as np

from models.errors import InputError

FORMAT = "bosch-journal/1"


def mask_key(mask_LxG: np.ndarray) -> str:
  """The bits of a mask, row by row, as hexadecimal digits."""
  return np.packbits(np.asarray(mask_LxG, bool).ravel()).tobytes().hex()


class Journal:
  """Append-only log of scored masks.

  Args:
    path: journal.jsonl of the run; None keeps the log in memory only.
    header: JSON-able facts that must be equal for the scores to be reused.
    resume: read the lines of an earlier run first.

  Attributes:
    lines: the entries of the earlier run, oldest first.

  Raises:
    InputError: the journal on disk was written with another header (names the first difference),
      is damaged before its last line, or is in use by another run.
  """

  def __init__(self, path: str | os.PathLike | None, header: dict, resume: bool = False):
    self.path = pathlib.Path(path) if path is not None else None
    self.lines: list[dict] = []
    self._file = None
    header = json.loads(json.dumps({"format": FORMAT, **header}))
    if self.path is None:
      return
    self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (kept open for appending)
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise InputError(
        "--out", self.path.parent, "is in use by another run; wait for it or choose another folder"
      ) from None
    kept = self._read(header) if resume else 0
    self._file.truncate(kept)
    if not kept:
      self._write([header])

  def _read(self, header: dict) -> int:
    """Reads the lines of the earlier run; returns the bytes of what is whole."""
    kept, entries = 0, []
    lines = self.path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
      try:
        entry = json.loads(line) if line.endswith(b"\n") else None
      except ValueError:
        entry = None
      if not isinstance(entry, dict) or (number > 1 and not _whole(entry)):
        if number == len(lines):
          break  # torn by a crash while it was written; everything before it is whole
        raise InputError(
          "--resume", self.path, f"line {number} is damaged; start over with --force"
        )
      entries.append(entry)
      kept += len(line)
    if not entries:
      return 0
    stored = entries[0]
    for field in [*header, *stored]:
      if stored.get(field) != header.get(field):
        raise InputError(
          f"--resume {self.path}: {field}",
          header.get(field),
          f"the run there was made with {stored.get(field)}; resume with the same settings or choose another --out",
        )
    self.lines = entries[1:]
    return kept

  def append(self, entries: list[dict]) -> None:
    """Writes the entries and waits until they are on disk."""
    if self._file is not None:
      self._write(entries)

  def _write(self, entries: list[dict]) -> None:
    self._file.writelines(json.dumps(entry) + "\n" for entry in entries)
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None


def _whole(entry: dict) -> bool:
  """Whether a line holds a mask with a score for each of its contexts, or a relaxed mask with its
  gradient."""
  if "relaxed" in entry:
    return isinstance(entry.get("loss"), float) and isinstance(entry.get("gradient"), list)
  try:
    count = len(entry["contexts"])
    return isinstance(entry["mask"], str) and count == len(entry["nll"]) == len(entry["exact"])
  except (KeyError, TypeError):
    return False
