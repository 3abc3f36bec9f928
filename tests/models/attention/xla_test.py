"""The CPU backends against the reference, and their memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import attention
from models.attention.xla import static
from models.windows import FULL
from tests.models.attention.base import (
  AttentionTestBase,
  RuntimeWindowsTests,
  compiled,
  make,
  plain,
  rows,
)


class TestBlocked(RuntimeWindowsTests, AttentionTestBase):
  backend = "blocked"
  block = 64  # what T = 64 .. 127 uses; longer cases use larger ones


class TestStatic(AttentionTestBase):
  backend = "static"
  static = True

  @pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 4, 32), (8, 4, 32), (8, 1, 128)])
  def test_tiles_of_several_groups_or_of_fewer_queries(self, heads, groups, head_dim):
    """Few heads a group share a tile, many take a smaller one backward; rows differ in documents."""
    documents = rows((1, 0, 100), (2, 0, 50)), rows((1, 0, 30), (-1, 0, 20), (2, 0, 100))
    places = tuple(jnp.concatenate(x) for x in zip(*documents, strict=True))
    arrays = make(2, 150, heads, groups, head_dim)
    for windows in ((FULL,) * heads, (40,) * heads):
      self.check(arrays, windows, places, layout="packed")

  def test_arrays_are_refused_by_name(self):
    q, k, v, _ = make(1, 16, 2, 1, 32)
    with pytest.raises(NotImplementedError, match="blocked"):
      self.run(q, k, v, jnp.array([3, 3]), *plain(1, 16))

  def test_mixed_windows_in_a_group_are_refused_by_name(self):
    q, k, v, _ = make(1, 16, 2, 1, 32)
    with pytest.raises(NotImplementedError, match="kv group 0"):
      self.run(q, k, v, (3, 4), *plain(1, 16))


@pytest.mark.parametrize("backend", ["static", "blocked"])
def test_a_window_below_one_sees_nothing(backend):
  """As the reference has it: nothing, not everything, for a distance without its sign."""
  q, k, v, _ = make(1, 140, 3, 3, 32)
  row = (-1, 0, FULL)
  want = attention(q, k, v, row, backend="reference")
  got = attention(q, k, v, row if backend == "static" else jnp.asarray(row), backend=backend)
  np.testing.assert_allclose(got, want, atol=3e-6)
  assert not np.asarray(got)[:, :, :2].any()


def test_long_rows_of_mixed_windows():
  """Several blocks of full size, where bounds matter: both backends."""
  q, k, v, _ = make(1, 1100, 2, 2, 32)
  row = (FULL, 300)
  want = compiled(lambda *x: attention(*x, row, backend="reference"))(q, k, v)
  for backend, windows in (("static", row), ("blocked", jnp.asarray(row, jnp.int32))):
    run = compiled(lambda *x, b=backend, w=windows: attention(*x, w, backend=b))
    got = run(q, k, v)
    np.testing.assert_allclose(got, want, atol=3e-6)


def temporary_bytes(function, tokens, heads=2):
  shape = jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.float32)
  return jax.jit(function).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("window", [1024, FULL])
def test_memory_is_linear_forward_and_backward(window):
  """No S x S array: doubling the length doubles the temporaries at most, and they stay small."""

  def gradients(q, k, v):
    T = q.shape[1]
    positions, segments = plain(1, T)

    def loss(q, k, v):
      kw = {"positions": positions, "segments": segments, "scale": 0.125}
      return static(q, k, v, (window,) * 2, **kw).sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)

  small, large = temporary_bytes(gradients, 8192), temporary_bytes(gradients, 32768)
  assert large < 4.4 * small
  assert large < 12 * 32768 * 2 * 64 * 4  # a dozen arrays of the size of q; S x S would be 8.6 GB
