"""Retrieval text for training: true answers, reproducible, apart from the held-out questions."""

import re

import numpy as np
import pytest

from bosch_jax.niah import split_of
from bosch_jax.retrieval import Retrieval
from tests.bosch_jax.niah_test import NEEDLE, PLAIN

WINDOW, CONTEXT = 32, 256
RETRIEVAL = Retrieval(PLAIN, CONTEXT, WINDOW, 1)


def answered(ids, answers) -> list[str]:
  """The answers, each a run of marked tokens."""
  marks = "".join("x" if mark else " " for mark in answers)
  return [PLAIN.decode(ids[m.start() : m.end()]).strip() for m in re.finditer("x+", marks)]


@pytest.mark.parametrize("index", range(6))
def test_every_answer_is_the_number_that_the_text_gives(index):
  ids, answers = RETRIEVAL.example(index, 600)
  text = PLAIN.decode(ids)
  needles = dict(NEEDLE.findall(text))
  asked = re.findall(r"What is the special magic number for ([a-z]+ [a-z]+) mentioned", text)
  assert len(needles) == len(asked) == 4
  assert answered(ids, answers) == [needles[key] for key in asked]
  for key, value in needles.items():
    assert split_of(key) == split_of(value) == "calibration"


def test_the_same_index_is_the_same_text_and_another_is_not():
  one, again, other = (RETRIEVAL.example(index, 600)[0] for index in (3, 3, 4))
  assert one == again and one != other
  assert Retrieval(PLAIN, CONTEXT, WINDOW, 2).example(3, 600)[0] != one
  kinds = {"The grass is green." in PLAIN.decode(RETRIEVAL.example(i, 600)[0]) for i in range(8)}
  assert kinds == {True, False}


def test_questions_that_do_not_fit_are_left_out_whole():
  ids, answers = RETRIEVAL.example(0, 600)
  for length in (CONTEXT, 300, 340):
    short, marks = RETRIEVAL.example(0, length)
    assert short == ids[: len(short)] and marks == answers[: len(short)] and marks[-1]
    assert len(short) <= length + 1  # the last token is only predicted
    assert 1 <= len(answered(short, marks)) < 4


def test_held_out_questions_share_nothing_with_examples():
  made = RETRIEVAL.questions(3)
  for tokens, segments in zip(made.tokens_BxT, made.segments_BxT, strict=True):
    for pair in NEEDLE.findall(PLAIN.decode(tokens[segments == 0])):
      assert all(split_of(text) == "held_out" for text in pair)
  assert made.context <= CONTEXT and np.all(made.valid_BxQxA.any(-1))
