"""Rows of synthetic retrieval text: a haystack with needles, then questions about them."""

from typing import Protocol

import numpy as np

from train.data.packing import Row, blank, put

ENDLESS = 2**31 - 1


class Retrieval(Protocol):
  """Where such text comes from; `run.py` passes one in, because train does not import the method."""

  def example(self, index: int, length: int) -> tuple[list[int], list[bool]]:
    """Ids of example `index`, at most `length`, and which of them are answers."""

  def questions(self, samples: int):
    """Held-out questions that no example shares a key or value with: `samples` contexts as arrays
    `tokens_BxT`, `positions_BxT`, `segments_BxT`, `answer_BxQxA`, `target_BxQxA`, `valid_BxQxA`."""


class RetrievalRows:
  """One example a row, without an end; only answers count in the loss.

  Args:
    retrieval: makes the examples.
    length: T.
    weight: what the prediction of an answer token counts, beside 1 for a token of text.
  """

  def __init__(self, retrieval: Retrieval, length: int, weight: float):
    self._retrieval, self._length, self._weight = retrieval, length, weight

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> Row:
    ids, answers = self._retrieval.example(index, self._length)
    row = blank(self._length)
    ids = np.array(ids, np.int32)
    put(row, 0, ids, 1, self._weight * np.array(answers[1:], np.float32))
    return row
