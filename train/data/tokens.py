"""Text tokenised once, to arrays on disk that are mapped into memory and never read whole."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable

import numpy as np

from models.download import cache_folder
from models.errors import InputError
from models.tokenizer import Tokenizer
from models.windows import write_json
from train.data.sources import Part, held_out, parts

FORMAT = "bosch-tokens/1"
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Documents as ids.

  Attributes:
    tokens_N: uint16 or uint32, all documents one after another; each ends with the model's
      end-of-text token, if it has one.
    bounds_D1: int64 `[documents + 1]`; document d is `tokens_N[bounds_D1[d] : bounds_D1[d + 1]]`.
    held_out_D: bool.
    digest: of tokenizer and sources; another text or tokenizer has another digest.
  """

  tokens_N: np.ndarray
  bounds_D1: np.ndarray
  held_out_D: np.ndarray
  digest: str

  def documents(self, held_out: bool) -> np.ndarray:
    """int64 `[n, 2]`: start and end of every document of one side of the split."""
    spans = np.stack([self.bounds_D1[:-1], self.bounds_D1[1:]], axis=1)
    return spans[self.held_out_D == held_out]


def prepare(
  source: str,
  tokenizer: Tokenizer,
  folder: pathlib.Path | None = None,
  notice: Callable[[str], None] = lambda text: None,
) -> Corpus:
  """The corpus of a source, from the cache if it was tokenised before.

  Several processes may prepare the same corpus at once: each writes a folder of its own, and the
  first to finish gives it the final name.

  Args:
    source: see `sources.parts`.
    tokenizer: the model's.
    folder: of the cache; None = tokens/ in the user's cache folder.
    notice: told when tokenising begins and how much there is.

  Raises:
    InputError: a source that cannot be read, is empty, or has nothing to hold out, or a cache that
      cannot be written.
  """
  found = parts(source)
  identity = {
    "format": FORMAT,
    "tokenizer": tokenizer.fingerprint,
    "sources": [[part.name, part.digest] for part in found],
  }
  digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
  folder = (folder or cache_folder() / "tokens").expanduser()
  try:
    if not (folder / digest / MANIFEST).exists():
      notice(f"tokenising {source}")
      _write(folder, digest, source, identity, tokenizer, found)
    arrays = {
      name: np.load(folder / digest / f"{name}.npy", mmap_mode="r")
      for name in ("tokens_N", "bounds_D1", "held_out_D")
    }
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise InputError(
      "--cache", folder / digest, f"cannot be used ({reason}); remove it or give another folder"
    ) from None
  return Corpus(**arrays, digest=digest)


def _write(folder, digest, source, identity, tokenizer: Tokenizer, found: list[Part]) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=folder))
  try:
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    bounds, held = [0], []
    with open(partial / "raw", "wb") as raw:
      for ids, out in _documents(found, tokenizer):
        np.array(ids + end, kind).tofile(raw)
        bounds.append(bounds[-1] + len(ids) + len(end))
        held.append(out)
    held = _both_sides(source, bounds, held)
    bounds = np.array(bounds if len(bounds) == len(held) + 1 else _cut(bounds), np.int64)
    raw = np.memmap(partial / "raw", kind, mode="r")
    tokens = np.lib.format.open_memmap(partial / "tokens_N.npy", "w+", kind, raw.shape)
    for start in range(0, len(raw), 2**24):
      tokens[start : start + 2**24] = raw[start : start + 2**24]
    tokens.flush()
    del raw, tokens
    (partial / "raw").unlink()
    np.save(partial / "bounds_D1.npy", bounds)
    np.save(partial / "held_out_D.npy", np.array(held, bool))
    facts = {"source": source, "documents": len(held), "tokens": int(bounds[-1]), **identity}
    write_json(partial / MANIFEST, facts)
    try:
      os.rename(partial, folder / digest)
    except OSError:
      if not (folder / digest / MANIFEST).exists():
        raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _documents(found: list[Part], tokenizer: Tokenizer) -> Iterable[tuple[list[int], bool]]:
  """Ids of every document that is not blank, and whether it is held out."""
  for part in found:
    for number, text in enumerate(part.documents()):
      if text.strip():
        out = held_out(f"{part.name} {number}" if part.lines else part.name)
        yield tokenizer.encode(text), out


def _both_sides(source: str, bounds: list[int], held: list[bool]) -> list[bool]:
  """The split, mended where chance left one side of a small corpus empty.

  A corpus of one document is cut: its last twentieth is held out.
  """
  if not held:
    raise InputError("--data", source, "holds no text; give files with text in them")
  if len(held) == 1:
    if bounds[1] < 40:
      raise InputError("--data", source, f"holds only {bounds[1]} tokens; give more text")
    return [False, True]
  if all(held) or not any(held):
    return [False] * (len(held) - 1) + [True]
  return held


def _cut(bounds: list[int]) -> list[int]:
  return [0, bounds[1] - bounds[1] // 20, bounds[1]]
