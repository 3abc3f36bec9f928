"""The TPU runtime-window kernel, interpreted, against the reference; and the blocks it visits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.flash_tpu import MAX_SPANS, flash_tpu
from models.windows import FULL
from tests.models.attention.base import AttentionTestBase, RuntimeWindowsTests, make, plain


class TestFlashTPU(RuntimeWindowsTests, AttentionTestBase):
  backend = "flash_tpu"
  options = {"interpret": True, "block": 32}  # noqa: RUF012
  gradients = False

  def test_gradients_are_refused_by_name(self):
    q, k, v, _ = make(1, 16, 2, 1, 32)
    with pytest.raises(NotImplementedError, match="splash"):
      jax.grad(lambda q: self.run(q, k, v, (4, 4), *plain(1, 16)).sum())(q)

  def test_vmap_folds_into_the_batch(self):
    """No loop over candidates: the kernel appears once, with the candidates in its grid."""
    q, k, v, _ = make(2, 64, 2, 1, 32)
    run = jax.vmap(lambda w: self.run(q, k, v, w, *plain(2, 64)))
    jaxpr = str(jax.make_jaxpr(run)(jnp.ones((5, 2), jnp.int32)))
    assert jaxpr.count("pallas_call[") == 1
    assert "grid=(10, 2, 2, 2)" in jaxpr

  def test_too_many_rows_are_refused_by_name(self):
    rows = MAX_SPANS + 1
    shape = jax.ShapeDtypeStruct((rows, 8, 1, 32), jnp.float32)
    places = jax.ShapeDtypeStruct((rows, 8), jnp.int32)
    with pytest.raises(NotImplementedError, match="fewer candidates"):
      jax.eval_shape(lambda q, p: self.run(q, q, q, jnp.array([3]), p, p), shape, places)


def test_kernel_visits_the_minimum():
  """The geometry of 32k tokens, W = 1024, block 512 at a sixteenth of the size."""
  T, window, block = 2048, 64, 32
  row = jnp.array([FULL, window], jnp.int32)
  q, k, v, _ = make(1, T, 2, 2, 8)
  positions, segments = plain(1, T)
  _, visits = flash_tpu(
    q,
    k,
    v,
    row,
    positions=positions,
    segments=segments,
    scale=1.0,
    block=block,
    interpret=True,
    count_visits=True,
  )
  index = np.arange(T // block)
  least = index - np.maximum(0, (index * block - window + 1) // block) + 1
  np.testing.assert_array_equal(visits[0], [index + 1, least])
  full, local = visits[0].sum(1)
  assert (full + local) / (2 * full) == pytest.approx(0.545, abs=6e-4)
  assert (full + 3 * local) / (4 * full) == pytest.approx(0.318, abs=6e-4)
