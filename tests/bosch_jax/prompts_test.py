"""Packing: the layout written out, and that it changes nothing about what a token sees."""

import numpy as np
import pytest

from bosch_jax.prompts import PromptSet, pack
from models.attention.reference import visible


def small() -> PromptSet:
  return pack(
    [[10, 11, 12], [20]],
    [[([30, 31], [40]), ([32], [41, 42])], [([33], [43]), ([34, 35], [44, 45])]],
    [[0.0, 0.5], [0.25, 1.0]],
  )


def test_layout_of_a_small_example():
  prompts = small()
  np.testing.assert_array_equal(
    prompts.tokens_BxT,
    [[10, 11, 12, 30, 31, 40, 32, 41, 42, 0, 0, 0, 0, 0, 0, 0],
     [20, 33, 43, 34, 35, 44, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
  )  # fmt: skip
  np.testing.assert_array_equal(
    prompts.positions_BxT,
    [[0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 0, 0, 0, 0, 0, 0],
     [0, 1, 2, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
  )  # fmt: skip
  np.testing.assert_array_equal(
    prompts.segments_BxT,
    [[0, 0, 0, 1, 1, 1, 2, 2, 2, -1, -1, -1, -1, -1, -1, -1],
     [0, 1, 1, 2, 2, 2, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1]],
  )  # fmt: skip
  np.testing.assert_array_equal(prompts.answer_BxQxA, [[[4, 0], [6, 7]], [[1, 0], [4, 5]]])
  np.testing.assert_array_equal(prompts.target_BxQxA, [[[40, 0], [41, 42]], [[43, 0], [44, 45]]])
  np.testing.assert_array_equal(
    prompts.valid_BxQxA, [[[True, False], [True, True]], [[True, False], [True, True]]]
  )
  np.testing.assert_array_equal(prompts.haystack_B, [3, 1])
  assert (len(prompts), prompts.num_questions, prompts.context) == (2, 2, 6)
  for array, dtype in [
    (prompts.tokens_BxT, "int32"),
    (prompts.valid_BxQxA, "bool"),
    (prompts.depth_BxQ, "float32"),
  ]:
    assert array.dtype == dtype
    assert not array.flags.writeable


def test_take_keeps_the_length_and_the_order():
  prompts = small()
  taken = prompts.take([1, 0, 1])
  assert taken.tokens_BxT.shape == (3, 16)
  np.testing.assert_array_equal(taken.target_BxQxA[2], prompts.target_BxQxA[1])
  assert prompts.take(range(1)).tokens_BxT[0, 0] == 10


def test_unpacked_rows_are_plain_prompts():
  plain = small().unpack()
  np.testing.assert_array_equal(
    plain.tokens_BxT,
    [[10, 11, 12, 30, 31, 40, 0, 0],
     [10, 11, 12, 32, 41, 42, 0, 0],
     [20, 33, 43, 0, 0, 0, 0, 0],
     [20, 34, 35, 44, 45, 0, 0, 0]],
  )  # fmt: skip
  np.testing.assert_array_equal(plain.segments_BxT[3], [0, 0, 0, 0, 0, -1, -1, -1])
  np.testing.assert_array_equal(plain.positions_BxT[3], [0, 1, 2, 3, 4, 0, 0, 0])
  np.testing.assert_array_equal(plain.answer_BxQxA[:, 0], [[4, 0], [3, 4], [1, 0], [2, 3]])
  np.testing.assert_array_equal(plain.target_BxQxA[:, 0], [[40, 0], [41, 42], [43, 0], [44, 45]])
  np.testing.assert_array_equal(plain.depth_BxQ[:, 0], [0.0, 0.5, 0.25, 1.0])
  assert plain.unpack().digest == plain.digest


@pytest.mark.parametrize("window", [1, 2, 3, 100])
@pytest.mark.parametrize("sinks", [0, 1])
def test_packed_tokens_see_what_unpacked_tokens_see(window, sinks):
  packed, windows = small(), np.array([window], np.int32)
  plain = packed.unpack()

  def mask(prompts):
    layout = prompts.positions_BxT, prompts.segments_BxT
    return np.asarray(visible(windows, *layout, *layout, sinks))[:, 0]

  packed_BxTxT, plain_BxTxT = mask(packed), mask(plain)
  for b in range(len(packed)):
    for q in range(packed.num_questions):
      segments_T = packed.segments_BxT[b]
      own = np.flatnonzero((segments_T == 0) | (segments_T == q + 1))
      n = len(own)
      row = b * packed.num_questions + q
      np.testing.assert_array_equal(packed_BxTxT[b][np.ix_(own, own)], plain_BxTxT[row, :n, :n])
      others = np.setdiff1d(np.arange(len(segments_T)), own)
      assert not packed_BxTxT[b][np.ix_(own, others)].any()


def test_digest_names_the_content():
  prompts = small()
  assert prompts.digest == small().digest
  assert len(prompts.digest) == 64
  assert prompts.digest != prompts.take([1, 0]).digest
  wider = pack([[1, 2]], [[([3], [4])]], multiple=16)
  assert wider.digest != pack([[1, 2]], [[([3], [4])]]).digest


def test_lengths_round_up_to_the_multiple():
  for multiple, T in [(1, 4), (4, 4), (8, 8), (128, 128)]:
    assert pack([[1, 2]], [[([3], [4])]], multiple=multiple).tokens_BxT.shape == (1, T)


@pytest.mark.parametrize(
  "haystacks, questions",
  [
    ([], []),
    ([[1]], []),
    ([[1]], [[]]),
    ([[1], [2]], [[([3], [4])], [([3], [4]), ([3], [4])]]),
    ([[1]], [[([], [4])]]),
    ([[1]], [[([3], [])]]),
  ],
)
def test_what_cannot_be_packed_is_refused(haystacks, questions):
  with pytest.raises(ValueError):
    pack(haystacks, questions)


def test_arrays_that_do_not_fit_together_are_refused():
  prompts = small()
  with pytest.raises(ValueError, match="target_BxQxA"):
    PromptSet(
      prompts.tokens_BxT,
      prompts.positions_BxT,
      prompts.segments_BxT,
      prompts.answer_BxQxA,
      prompts.target_BxQxA[:, :1],
      prompts.valid_BxQxA,
      prompts.depth_BxQ,
    )
