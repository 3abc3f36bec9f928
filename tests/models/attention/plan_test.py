"""Which blocks are visited: literal drawings, the minimum at 32k, and never too few."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention import as_array, plan
from models.windows import FULL


def blocks(windows, positions, segments, size, sinks=0):
  positions, segments = (jnp.asarray([x], jnp.int32) for x in (positions, segments))
  summary = plan.summarise(positions, segments, size)
  return plan.needed(jnp.asarray([windows], jnp.int32), summary, summary, sinks)


def test_one_document():
  got = np.asarray(blocks([5, FULL], range(24), [0] * 24, 4)[0], int)
  np.testing.assert_array_equal(got[1], np.tril(np.ones((6, 6))))
  # Keys 4i - 4 .. 4i + 3: the block itself and the one before.
  np.testing.assert_array_equal(got[0], np.tril(np.triu(np.ones((6, 6)), -1)))


def test_one_key_more_takes_one_block_more():
  """Exactly at the edge: the first query of a block reaches back w - 1 keys."""
  assert np.asarray(blocks([5], range(24), [0] * 24, 4))[0, 0, 5].sum() == 2
  assert np.asarray(blocks([6], range(24), [0] * 24, 4))[0, 0, 5].sum() == 3


def test_packed_documents_skip_each_other():
  got = blocks([FULL], [*range(8)] * 2, [1] * 8 + [2] * 8, 4)
  expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
  np.testing.assert_array_equal(np.asarray(got[0, 0], int), expected)


def test_spans_put_a_far_sink_first():
  got = plan.spans(blocks([4], range(32), [0] * 32, 4, sinks=1))
  row = [int(x[0, 0, 6]) for x in got]
  assert row == [0, 5, 6, 3]
  assert [int(plan.block_at(*row[:3], t)) for t in range(5)] == [0, 5, 6, 6, 6]


def test_padding_visits_nothing():
  got = plan.spans(blocks([FULL], range(8), [0] * 4 + [-1] * 4, 4))
  np.testing.assert_array_equal(got.count[0, 0], [1, 0])


@pytest.mark.parametrize(
  ("tokens", "local", "share"), [(32768, 0.5, 0.545), (32768, 0.75, 0.318), (8192, 0.5, 0.665),
                                 (8192, 0.75, 0.498)]
)  # fmt: skip
def test_share_of_causal_work(tokens, local, share):
  """W = 1024, block 512."""
  n = int(4 * local)
  visits = plan.visited([FULL] * (4 - n) + [1024] * n, tokens, 512)
  full = plan.visited([FULL] * 4, tokens, 512)
  assert visits.sum() / full.sum() == pytest.approx(share, abs=6e-4)


@settings(max_examples=80, deadline=None)
@given(
  st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 3)), min_size=12, max_size=12),
  st.tuples(st.sampled_from([1, 3, 7]), st.sampled_from([2, FULL])),
  st.sampled_from([0, 2]),
)
def test_every_visible_pair_is_in_a_visited_block(places, windows, sinks):
  positions, segments = zip(*places, strict=True)
  spans = plan.spans(blocks(windows, positions, segments, 4, sinks))
  mask = as_array(windows, positions, segments, sinks)
  for h in range(2):
    for i in range(3):
      first, second, last, count = (int(x[0, h, i]) for x in spans)
      visited = {int(plan.block_at(first, second, last, t)) for t in range(count)}
      rows = mask[h, 4 * i : 4 * i + 4]
      assert set(np.flatnonzero(rows.any(0)) // 4) <= visited
      assert len(visited) == count


def test_runs():
  assert plan.runs((FULL,) * 4 + (8,) * 2, 3) == [(0, 2, FULL), (2, 3, 8)]
  assert plan.runs((8, FULL, 8), 3) == [(0, 1, 8), (1, 2, FULL), (2, 3, 8)]
