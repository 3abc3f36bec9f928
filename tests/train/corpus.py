"""Small corpora on disk, and a tokenizer without a model."""

import pathlib

import numpy as np

from bosch_jax import haystacks
from models.tokenizer import Tokenizer
from tests.integration.tiny_gguf import SPECIAL, train_tokenizer
from train.data.tokens import Corpus


def tokenizer() -> Tokenizer:
  backend = train_tokenizer()
  backend.add_special_tokens(SPECIAL)
  return Tokenizer(backend, eos_id=0)


def write_corpus(folder: pathlib.Path, files: int = 40, sentences: int = 10) -> pathlib.Path:
  """Text files of real sentences."""
  folder.mkdir(parents=True, exist_ok=True)
  text = haystacks.documentation()
  for i in range(files):
    (folder / f"{i}.txt").write_text(" ".join(text[i * sentences : (i + 1) * sentences]))
  return folder


def number_corpus(lengths, held_out=()) -> Corpus:
  """Documents of the numbers 0, 1, 2 .. all different."""
  bounds = np.concatenate([[0], np.cumsum(lengths)])
  out = np.isin(np.arange(len(lengths)), held_out)
  return Corpus(np.arange(bounds[-1], dtype=np.uint32), bounds, out, "numbers")
