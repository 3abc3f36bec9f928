import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.train.corpus import number_corpus
from train.data.packing import PackedRows, best_fit, blank, put


def test_the_picture_in_the_module():
  row = blank(8)
  start = put(row, 0, np.array([1, 2, 3, 4, 5]), 1)
  put(row, start, np.array([6, 7, 8]), 2)
  assert row.tokens.tolist() == [1, 2, 3, 4, 6, 7, 0, 0]
  assert row.targets.tolist() == [2, 3, 4, 5, 7, 8, 0, 0]
  assert row.weights.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
  assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
  assert row.segments.tolist() == [1, 1, 1, 1, 2, 2, -1, -1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 16))
def test_every_next_token_is_predicted_once_and_from_its_own_document(lengths, length):
  corpus = number_corpus(lengths)
  rows = PackedRows(corpus, length, held_out=False)
  seen = []
  for row in (rows[i] for i in range(len(rows))):
    real = row.weights > 0
    assert np.array_equal(row.targets[real], row.tokens[real] + 1)
    assert np.array_equal(real, row.segments > 0)
    seen += row.targets[real].tolist()
    document = np.searchsorted(corpus.bounds_D1, row.tokens[real], side="right")
    assert np.array_equal(
      document, np.searchsorted(corpus.bounds_D1, row.targets[real], side="right")
    )
    for segment in set(row.segments[real]):
      here = row.segments == segment
      assert row.positions[here].tolist() == list(range(here.sum()))
      assert len(set(document[row.segments[real] == segment])) == 1
  firsts = set(corpus.bounds_D1[:-1].tolist())
  assert sorted(seen) == [i for i in range(sum(lengths)) if i not in firsts]


@given(st.lists(st.integers(1, 10), max_size=40))
def test_rows_are_never_over_full_and_hold_every_piece_once(sizes):
  rows = best_fit(np.array(sizes, int), 10)
  assert sorted(piece for row in rows for piece in row) == list(range(len(sizes)))
  assert all(sum(sizes[piece] for piece in row) <= 10 for row in rows)
  # No two rows could be one.
  loads = sorted(sum(sizes[piece] for piece in row) for row in rows)
  assert len(loads) < 2 or loads[0] + loads[1] > 10


def test_the_sides_of_the_split_share_nothing():
  corpus = number_corpus([20, 30, 25], held_out=[1])
  tokens = [
    {t for i in range(len(rows)) for t in rows[i].tokens[rows[i].weights > 0].tolist()}
    for rows in (PackedRows(corpus, 8, side) for side in (False, True))
  ]
  assert not tokens[0] & tokens[1] and tokens[1] <= set(range(20, 50))
