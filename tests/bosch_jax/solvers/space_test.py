import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch_jax.solvers import Space, bits


@st.composite
def spaces(draw, most=8):
  n = draw(st.integers(1, most))
  classes = np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
  mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
  return Space.like(mask, classes), mask, classes


@given(spaces())
def test_a_space_holds_exactly_what_has_the_right_counts(drawn):
  space, mask, classes = drawn
  wanted = {
    bits_.tobytes()
    for bits_ in (np.array(b, bool) for b in itertools.product([0, 1], repeat=len(mask)))
    if all(bits_[classes == c].sum() == mask[classes == c].sum() for c in set(classes.tolist()))
  }
  listed = list(space)
  assert len(listed) == space.count == len(wanted)
  assert {b.tobytes() for b in listed} == wanted
  assert mask in space
  assert not any(np.logical_xor(mask, bits(len(mask), [i])) in space for i in range(len(mask)))


@given(spaces(), st.integers(0, 1000))
def test_the_top_of_keys_maximises_their_sum(drawn, seed):
  space, _, _ = drawn
  keys = np.random.default_rng(seed).normal(size=space.size)
  top = space.top(keys)
  assert top in space
  assert keys[top].sum() >= max(keys[b].sum() for b in space) - 1e-12


@given(spaces(), st.integers(0, 1000))
def test_projection_is_the_nearest_feasible_point(drawn, seed):
  """No feasible point is nearer: (x - p) . (q - p) <= 0 for every vertex q of the polytope."""
  space, _, _ = drawn
  gates = 2 * np.random.default_rng(seed).normal(size=space.size)
  nearest = space.project(gates)
  assert nearest.min() >= 0 and nearest.max() <= 1
  for members, ones in zip(space.members, space.ones, strict=True):
    np.testing.assert_allclose(nearest[members].sum(), ones, atol=1e-9)
  for vertex in space:
    assert (gates - nearest) @ (vertex - nearest) <= 1e-9


def test_equal_keys_set_the_earlier_bits():
  assert Space(4, 2).top(np.zeros(4)).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
  ("classes", "ones"), [(3, 4), (3, -1), (np.array([0, 1]), [1]), (np.array([0, 1]), [2, 0])]
)
def test_counts_that_do_not_fit_are_refused(classes, ones):
  with pytest.raises(ValueError, match=r"ones|classes"):
    Space(classes, ones)
