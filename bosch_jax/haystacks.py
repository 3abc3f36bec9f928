"""The text that needles hide in: an endless stream of sentences for each kind of haystack."""

import functools
import pathlib
import re
from collections.abc import Callable

from models.errors import InputError

NOISE = (
  "The grass is green.",
  "The sky is blue.",
  "The sun is yellow.",
  "Here we go.",
  "There and back again.",
)


def sentences(haystack: str, start: float) -> Callable[[int], str]:
  """The text as a function of the sentence's number, without an end (it begins again).

  Args:
    haystack: "noise", RULER's five sentences over and over; "essay", the documentation that
      ships with CPython (so it differs between Python versions); or a folder of .txt and .md files.
    start: in [0, 1), where in an essay to begin. Noise always begins with its first sentence.

  Raises:
    InputError: no such haystack, or a folder without usable sentences.
  """
  if haystack == "noise":
    return lambda i: NOISE[i % len(NOISE)]
  text = documentation() if haystack == "essay" else folder_text(haystack)
  first = int(start * len(text))
  return lambda i: text[(first + i) % len(text)]


@functools.cache
def documentation() -> tuple[str, ...]:
  """Sentences of the Python documentation topics, in the order of the topics' names."""
  from pydoc_data import topics  # half a megabyte: only when asked for

  return split("\n\n".join(topics.topics[name] for name in sorted(topics.topics)))


@functools.cache
def folder_text(path: str) -> tuple[str, ...]:
  """Sentences of all .txt and .md files below a folder, in the order of their paths."""
  folder = pathlib.Path(path)
  if not folder.is_dir():
    raise InputError("--haystack", path, "is not noise, essay or a folder; give one of them")
  files = sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md") and p.is_file())
  text = split("\n\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files))
  if not text:
    raise InputError(
      "--haystack", path, "holds no prose; put .txt or .md files with whole sentences there"
    )
  return text


def split(text: str) -> tuple[str, ...]:
  """The plain prose sentences of a text, 4 to 24 words long, line breaks removed.

  Listings, tables, mark-up and anything that could be taken for a needle (a number of five or
  more digits, special tokens) are left out. Short sentences let the needles spread in a short
  context.
  """
  found = []
  for paragraph in re.split(r"\n\s*\n", text):
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
      prose = re.fullmatch(r"[A-Z][\w ,;:'’()\"“”–-]*[.!?]", sentence)
      if prose and 4 <= len(sentence.split()) <= 24 and not re.search(r"\d{5}", sentence):
        found.append(sentence)
  return tuple(found)
