import numpy as np

from tests.train.corpus import number_corpus
from train.data.packing import PackedRows, Row, blank, put
from train.data.pipeline import batches, position
from train.data.retrieval import RetrievalRows


class Numbers:
  """Retrieval text that shows its index: a hundred more than it, then the answer."""

  def example(self, index, length):
    return [1000 + index, 5, 6, 7], [False, False, True, True]


LENGTH = 8
TEXT = PackedRows(number_corpus([9] * 24), LENGTH, held_out=False)


def take(count, **changes):
  options = dict(share=0.5, rows=4, seed=3) | changes
  iterator = batches(TEXT, RetrievalRows(Numbers(), LENGTH, 2.5), **options)
  return [next(iterator) for _ in range(count)], iterator


def firsts(taken) -> list:
  return [batch.tokens[:, 0].tolist() for batch in taken]


def test_rows_of_retrieval_text_count_at_their_answers_only():
  row = RetrievalRows(Numbers(), LENGTH, 2.5)[4]
  wanted = blank(LENGTH)
  put(wanted, 0, np.array([1004, 5, 6, 7]), 1)
  for got, want in zip(row._replace(weights=0), wanted._replace(weights=0), strict=True):
    np.testing.assert_array_equal(got, want)
  assert row.weights.tolist() == [0, 2.5, 2.5, 0, 0, 0, 0, 0]


def test_the_share_is_kept_and_the_order_is_the_seeds():
  taken, _ = take(24)
  rows = np.concatenate(firsts(taken))
  assert isinstance(taken[0], Row) and taken[0].tokens.shape == (4, LENGTH)
  assert (rows >= 1000).sum() == 48
  text = rows[rows < 1000]
  assert len(set(text[:24])) == 24 and sorted(text[:24]) == sorted(text[24:])  # whole epochs
  assert text[:24].tolist() != sorted(text[:24]) and text[:24].tolist() != text[24:].tolist()
  assert firsts(take(24)[0]) == firsts(taken)
  assert firsts(take(24, seed=4)[0]) != firsts(taken)
  assert (np.concatenate(firsts(take(3, share=0.0)[0])) < 1000).all()
  assert (np.concatenate(firsts(take(3, share=1.0)[0])) >= 1000).all()


def test_going_on_at_a_batch_gives_the_next_one():
  taken, iterator = take(7)
  assert position(iterator) == 7
  later, iterator = take(4, start=3)
  assert firsts(later) == firsts(taken)[3:] and position(iterator) == 7


def test_processes_share_every_batch():
  whole = firsts(take(5)[0])
  shares = [firsts(take(5, process=p, processes=2)[0]) for p in (0, 1)]
  for n in range(5):
    assert sorted(shares[0][n] + shares[1][n]) == sorted(whole[n])
    assert len(shares[0][n]) == 2
