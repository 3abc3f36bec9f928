"""Where training text comes from: files, a Hugging Face dataset, or the running Python itself.

A source is a list of parts. A part has a name, a digest of its bytes, and documents; it is the unit
that is either trained on or held out, so no text of a held-out file is ever trained on.
"""

import dataclasses
import hashlib
import importlib.util
import io
import json
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterator

from models.download import HUB_ID
from models.errors import InputError

PYTHON = "python"
TEXT = (".txt", ".md", ".rst", ".py")
LINES, TABLE = (".jsonl", ".ndjson"), ".parquet"
FIELDS = ("text", "content")
# Of the standard library: what is not a module's source or documentation.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
HELD_OUT_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Part:
  """One file or table.

  Attributes:
    name: relative to its source, so that a moved corpus is the same corpus.
    digest: sha256 of its content, or another name of the content that never changes.
    documents: yields its texts, in order.
    lines: its documents are independent of each other, so that the split may be between them.
  """

  name: str
  digest: str
  documents: Callable[[], Iterator[str]]
  lines: bool = False


def parts(source: str) -> list[Part]:
  """The parts of a source.

  Args:
    source: "python"; a file or a folder of text, JSONL or parquet files; or the id of a dataset
      on huggingface.co, "owner/name" or "owner/name:configuration".

  Raises:
    InputError: none of them, or a package that reading it needs is not installed.
  """
  if source == PYTHON:
    return python_parts()
  path = pathlib.Path(source).expanduser()
  if path.is_file():
    return [_file(path, path.name)]
  if path.is_dir():
    known = (*TEXT, *LINES, TABLE)
    files = sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
    if not files:
      raise InputError("--data", source, f"holds no file of a known kind ({', '.join(known)})")
    return [_file(p, p.relative_to(path).as_posix()) for p in files]
  if HUB_ID.fullmatch(source.split(":")[0]):
    return [_hub(source)]
  raise InputError(
    "--data",
    source,
    f"is not there; give {PYTHON} (text that ships with Python), a file or folder of "
    "text, JSONL or parquet files, or a dataset id such as owner/name",
  )


def held_out(name: str) -> bool:
  """Whether a part (or a line of one) is held out: by a hash of its name, about one in twenty."""
  first = hashlib.sha256(f"bosch held out {name}".encode()).digest()[:4]
  return int.from_bytes(first, "big") < HELD_OUT_SHARE * 2**32


def python_parts() -> list[Part]:
  """Documentation topics and module sources of the running Python."""
  from pydoc_data import topics

  found = []
  for name in sorted(topics.topics):
    text = topics.topics[name]
    digest = hashlib.sha256(text.encode()).hexdigest()
    found.append(Part(f"topic {name}", digest, lambda text=text: iter([text])))
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  for path in sorted(root.rglob("*.py")):
    relative = path.relative_to(root)
    if not _LEFT_OUT & set(relative.parts) and relative.parts[0] != "pydoc_data":
      found.append(_file(path, relative.as_posix()))
  return found


def _file(path: pathlib.Path, name: str) -> Part:
  readers = {".parquet": (_table, True)} | dict.fromkeys(LINES, (_json_lines, True))
  reader, lines = readers.get(path.suffix, (_text, False))
  try:
    with open(path, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise InputError(
      "--data", path, f"cannot be read ({error.strerror}); give another file"
    ) from None
  return Part(name, digest, lambda: reader(path), lines)


def _decoded(path: pathlib.Path) -> str:
  try:
    return path.read_bytes().decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise InputError(
      "--data",
      path,
      f"is not UTF-8 text (byte {error.start}); convert it, or leave it out",
    ) from None


def _text(path: pathlib.Path) -> Iterator[str]:
  # Line ends as Python's text files have them.
  yield io.StringIO(_decoded(path), newline=None).read()


def _json_lines(path: pathlib.Path) -> Iterator[str]:
  for number, line in enumerate(re.split("\r?\n", _decoded(path)), 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except ValueError:
      raise InputError("--data", path, f"line {number} is not JSON; mend or remove it") from None
    yield _field(record if isinstance(record, dict) else {}, path, f"line {number}")


def _table(path: pathlib.Path) -> Iterator[str]:
  if importlib.util.find_spec("pyarrow") is None:
    raise InputError("--data", path, "needs pyarrow to be read: pip install pyarrow")
  import pyarrow
  import pyarrow.parquet

  try:
    file = pyarrow.parquet.ParquetFile(path)
    column = next((name for name in FIELDS if name in file.schema_arrow.names), FIELDS[0])
    for batch in file.iter_batches(columns=[column] if file.schema_arrow.names else None):
      for record in batch.to_pylist():
        yield _field(record, path, "a row")
  except pyarrow.ArrowException as error:
    raise InputError("--data", path, f"is no parquet file ({error!s:.80}); mend it") from None


def _field(record: dict, where: object, place: str) -> str:
  for name in FIELDS:
    if isinstance(record.get(name), str):
      return record[name]
  raise InputError("--data", where, f"{place} has no text in a field named {' or '.join(FIELDS)}")


def _hub(source: str) -> Part:
  name, _, configuration = source.partition(":")
  if importlib.util.find_spec("datasets") is None:
    raise InputError("--data", source, "needs datasets to be fetched: pip install datasets")
  import datasets

  try:
    rows = datasets.load_dataset(name, configuration or None, split="train")
  except Exception as error:  # the library raises its own, the hub's and the network's
    raise InputError(
      "--data", source, f"cannot be had ({type(error).__name__}: {error!s:.120}); give a folder"
    ) from None

  def documents():
    for row in rows:
      yield _field(row, source, "a row")

  return Part(name, rows._fingerprint, documents, lines=True)
