"""Streamed text is the text: whole characters, and nothing of a stop string."""

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from models.text_stream import TextStream
from models.tokenizer import Tokenizer
from tests.integration.tiny_gguf import TEMPLATE, train_tokenizer

TEXT = "naïve 日本語 🎉🇫🇷, the grass is green."


@pytest.fixture(scope="module")
def tokenizer():
  return Tokenizer(train_tokenizer(), TEMPLATE, 1, 2)


def test_characters_come_whole(tokenizer):
  ids = tokenizer.encode(TEXT)
  stream = TextStream(tokenizer)
  pieces = [stream.add(i) for i in ids]
  assert "".join(pieces) == TEXT == stream.text and stream.close() == ""
  assert not any("\ufffd" in piece for piece in pieces)
  assert "" in pieces and "日" in pieces  # a character of three tokens waits for its last


def test_an_unfinished_character_is_shown_at_the_end(tokenizer):
  ids = tokenizer.encode("a日")[:-1]
  stream = TextStream(tokenizer)
  assert [stream.add(i) for i in ids] == ["a", "", ""]
  assert stream.close() == "\ufffd" and stream.text == tokenizer.decode(ids)


def test_random_bytes(tokenizer):
  """What a model without sense writes: streamed and whole text are the same."""
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  ids = [tokenizer.encode(x)[0] for x in "aé日🎉"] + list(range(3, 3 + len(alphabet)))
  rng = np.random.default_rng(0)
  for _ in range(200):
    row, stream = rng.choice(ids, 12).tolist(), TextStream(tokenizer, ["zzzz"])
    text = "".join([stream.add(i) for i in row]) + stream.close()
    assert text == stream.text == tokenizer.decode(row)


@pytest.mark.parametrize(
  ("stops", "want", "stopped"),
  [
    (["green"], "the grass is ", "green"),
    (["grass is", "is"], "the ", "grass is"),
    (["is", "grass is"], "the ", "grass is"),  # what begins first ends the text
    (["gras!", "green!"], "the grass is green.", None),  # held back, then given out
    (["."], "the grass is green", "."),
    (["the"], "", "the"),
  ],
)
def test_stop_strings(tokenizer, stops, want, stopped):
  stream, given = TextStream(tokenizer, stops), ""
  for i in tokenizer.encode("the grass is green."):
    given += stream.add(i)
    assert want.startswith(given)
    if stream.stopped:
      break
  given += stream.close()
  assert (given, stream.text, stream.stopped) == (want, want, stopped)


def test_text_that_may_begin_a_stop_string_waits(tokenizer):
  stream = TextStream(tokenizer, ["s is red"])
  given = [stream.add(i) for i in tokenizer.encode("grass is")]
  assert "".join(given) == "gras"
  assert stream.close() == "s is" and stream.text == "grass is"
