"""The journal: every mask that was scored, on disk before the search goes on.

One JSON object a line. The first line is a header that fixes what the scores depend on (model,
prompts, settings); each further line is one mask scored on some contexts. Lines are appended and
fsynced per batch, so a killed run loses at most the batch in flight; a torn last line is dropped.
"""

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
    InputError: the journal on disk was written with another header (names the first difference).
  """

  def __init__(self, path: str | os.PathLike | None, header: dict, resume: bool = False):
    self.path = pathlib.Path(path) if path is not None else None
    self.lines: list[dict] = []
    self._file = None
    header = json.loads(json.dumps({"format": FORMAT, **header}))
    if self.path is None:
      return
    if resume and self.path.exists() and self.path.stat().st_size:
      self._read(header)
    else:
      self._file = open(self.path, "w")
      self._write([header])

  def _read(self, header: dict) -> None:
    kept, entries = 0, []
    for line in self.path.read_bytes().splitlines(keepends=True):
      try:
        entry = json.loads(line) if line.endswith(b"\n") else None
      except ValueError:
        entry = None
      if entry is None:
        break  # torn by a crash while it was written; everything before it is whole
      entries.append(entry)
      kept += len(line)
    stored = entries[0] if entries else header
    for field in [*header, *stored]:
      if stored.get(field) != header.get(field):
        raise InputError(
          f"--resume {self.path}: {field}", header.get(field),
          f"the run there was made with {stored.get(field)}; resume with the same settings or choose another --out",
        )
    self.lines = entries[1:]
    self._file = open(self.path, "r+")
    self._file.truncate(kept)
    self._file.seek(kept)
    if not entries:
      self._write([header])

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
