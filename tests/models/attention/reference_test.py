"""The specification: literal masks, masks against the pair-by-pair oracle, empty rows."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention import as_array, visible
from models.windows import FULL
from tests.models.attention.base import AttentionTestBase, compiled, make, plain, rows


class TestReference(AttentionTestBase):
  """The shared tests that compare packed with unpacked rows, and those of exact zeros; comparing
  the specification with itself is left out."""

  backend = "reference"

  def check(self, *args, **kwargs):
    pass


def matrix(text):
  return np.array([[int(c != ".") for c in line.split()] for line in text.strip().splitlines()])


def mask(windows, positions, segments=None, sinks=0):
  positions = jnp.asarray([positions], jnp.int32)
  segments = jnp.zeros_like(positions) if segments is None else jnp.asarray([segments], jnp.int32)
  windows = jnp.asarray(windows, jnp.int32)
  return np.asarray(visible(windows, positions, segments, positions, segments, sinks)[0], int)


def test_window_of_three():
  expected = matrix("""
    1 . . . . .
    1 1 . . . .
    1 1 1 . . .
    . 1 1 1 . .
    . . 1 1 1 .
    . . . 1 1 1
  """)
  np.testing.assert_array_equal(mask([3], range(6))[0], expected)
  np.testing.assert_array_equal(as_array([3], range(6))[0], expected)


def test_each_head_has_its_own():
  got = mask([1, 2, FULL], range(4))
  np.testing.assert_array_equal(got[0], np.eye(4))
  np.testing.assert_array_equal(got[1], matrix("1 . . .\n1 1 . .\n. 1 1 .\n. . 1 1"))
  np.testing.assert_array_equal(got[2], np.tril(np.ones((4, 4))))


def test_sinks():
  expected = matrix("""
    1 . . . . .
    1 1 . . . .
    1 1 1 . . .
    1 . 1 1 . .
    1 . . 1 1 .
    1 . . . 1 1
  """)
  np.testing.assert_array_equal(mask([2], range(6), sinks=1)[0], expected)
  np.testing.assert_array_equal(as_array([2], range(6), sinks=1)[0], expected)


def test_shared_haystack_and_padding():
  positions, segments = [0, 1, 2, 3, 4, 3, 4, 0], [0, 0, 0, 1, 1, 2, 2, -1]
  expected = matrix("""
    1 . . . . . . .
    1 1 . . . . . .
    . 1 1 . . . . .
    . . 1 1 . . . .
    . . . 1 1 . . .
    . . 1 . . 1 . .
    . . . . . 1 1 .
    . . . . . . . .
  """)
  np.testing.assert_array_equal(mask([2], positions, segments)[0], expected)
  np.testing.assert_array_equal(as_array([2], positions, segments)[0], expected)


def test_packed_documents_do_not_see_each_other():
  positions, segments = [0, 1, 0, 1, 2], [1, 1, 2, 2, 2]
  expected = matrix("1 . . . .\n1 1 . . .\n. . 1 . .\n. . 1 1 .\n. . 1 1 1")
  np.testing.assert_array_equal(mask([FULL], positions, segments)[0], expected)


# Lengths are fixed, so that one compilation serves all examples.
tokens = st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 3)), min_size=9, max_size=9)
sizes = st.sampled_from([1, 2, 5, FULL])


@settings(max_examples=60, deadline=None)
@given(tokens, st.tuples(sizes, sizes), st.sampled_from([0, 3]))
def test_mask_equals_the_oracle(places, windows, sinks):
  positions, segments = zip(*places, strict=True)
  got = mask(windows, positions, segments, sinks)
  np.testing.assert_array_equal(got, as_array(windows, positions, segments, sinks))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 24]), st.integers(1, 30), st.sampled_from([0, 4]))
def test_row_sums_of_one_document(T, window, sinks):
  """Query i sees min(i + 1, w) recent keys, and the sinks before those."""
  i = np.arange(T)
  recent = np.minimum(i + 1, window)
  want = recent + np.minimum(sinks, i + 1 - recent)
  np.testing.assert_array_equal(mask([window], range(T), sinks=sinks)[0].sum(1), want)


def test_a_row_of_windows_per_batch_row():
  positions, segments = plain(2, 4)
  windows = jnp.array([[1, 2], [FULL, 3]], jnp.int32)
  got = np.asarray(visible(windows, positions, segments, positions, segments), int)
  for b in range(2):
    np.testing.assert_array_equal(got[b], as_array(windows[b].tolist(), range(4)))


def test_empty_rows_give_zero_and_finite_gradients():
  places = rows((1, 0, 5), (-1, 0, 3))
  q, k, v, _ = make(1, 8, 2, 1, 4)
  run = TestReference().run

  def loss(q, k, v):
    return (run(q, k, v, (2, 2), *places) ** 2).sum()

  out = compiled(lambda *qkv: run(*qkv, (2, 2), *places))(q, k, v)
  np.testing.assert_array_equal(out[:, 5:], 0)
  for gradient in compiled(jax.grad(loss, (0, 1, 2)))(q, k, v):
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 5:], 0)
