"""Documents packed into rows of equal length, none seen by another.

A row of T tokens predicts T next tokens; a piece of a document takes one token more than it
predicts. Two documents, a b c d e and x y z, in a row of eight:

    token      a b c d  x y  .  .
    target     b c d e  y z  .  .
    weight     1 1 1 1  1 1  0  0
    position   0 1 2 3  0 1  0  0
    segment    1 1 1 1  2 2 -1 -1
"""

import bisect
from typing import NamedTuple

import numpy as np

from train.data.tokens import Corpus

PADDING = -1


class Row(NamedTuple):
  """What one row (or, stacked, a batch) of training holds; the layout that
  `models.attention.attention` calls packed.

  Attributes:
    tokens: int32 `[T]`, 0 in padding.
    targets: int32 `[T]`, the next token.
    weights: float32 `[T]`, what the prediction counts in the loss.
    positions: int32 `[T]`, within the document.
    segments: int32 `[T]`, documents from 1 up; -1 = padding.
  """

  tokens: np.ndarray
  targets: np.ndarray
  weights: np.ndarray
  positions: np.ndarray
  segments: np.ndarray


def blank(length: int) -> Row:
  """A row of nothing but padding, to be filled."""
  zeros = [np.zeros(length, kind) for kind in (np.int32, np.int32, np.float32, np.int32)]
  return Row(*zeros, np.full(length, PADDING, np.int32))


def put(row: Row, start: int, ids: np.ndarray, segment: int, weights=1.0) -> int:
  """Writes a piece into a row from `start` on; returns where the next may begin."""
  stop = start + len(ids) - 1
  row.tokens[start:stop], row.targets[start:stop] = ids[:-1], ids[1:]
  row.weights[start:stop] = weights
  row.positions[start:stop] = np.arange(stop - start)
  row.segments[start:stop] = segment
  return stop


def cut(spans_Dx2: np.ndarray, length: int) -> np.ndarray:
  """int64 `[pieces, 2]`: start of each piece and the number of tokens it predicts, at most
  `length`. Pieces of one document share a token, so every token but the first is predicted once."""
  pieces = []
  for start, end in spans_Dx2:
    first = np.arange(start, end - 1, length)
    pieces.append(np.stack([first, np.minimum(length, end - 1 - first)], axis=1))
  return np.concatenate(pieces) if pieces else np.zeros((0, 2), np.int64)


def best_fit(sizes_P: np.ndarray, length: int) -> list[list[int]]:
  """Pieces in rows: longest first, each into the fullest row that has room for it.

  Args:
    sizes_P: sizes, at most `length`.
    length: room of a row.

  Returns:
    For each row the indices of its pieces.
  """
  rows: list[list[int]] = []
  open_rows: dict[int, list[int]] = {}  # room left -> rows
  rooms: list[int] = []  # the keys of open_rows, rising
  for piece in np.argsort(-sizes_P, kind="stable").tolist():
    size = int(sizes_P[piece])
    at = bisect.bisect_left(rooms, size)
    if at == len(rooms):
      row, room = len(rows), length
      rows.append([])
    else:
      room = rooms[at]
      row = open_rows[room].pop()
      if not open_rows[room]:
        del open_rows[room], rooms[at]
    rows[row].append(piece)
    if left := room - size:
      if left not in open_rows:
        open_rows[left] = []
        bisect.insort(rooms, left)
      open_rows[left].append(row)
  return rows


class PackedRows:
  """All rows of one side of a corpus's split, made when they are asked for.

  Args:
    corpus: the documents.
    length: T.
    held_out: which side.
  """

  def __init__(self, corpus: Corpus, length: int, held_out: bool):
    self._tokens, self._length = corpus.tokens_N, length
    self._pieces = cut(corpus.documents(held_out), length)
    self._rows = best_fit(self._pieces[:, 1], length)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Row:
    row, start = blank(self._length), 0
    for segment, piece in enumerate(self._rows[index], 1):
      first, size = self._pieces[piece]
      start = put(row, start, self._tokens[first : first + size + 1], segment)
    return row
