"""The GPU kernels, interpreted, against the reference, forward and backward."""

import jax.numpy as jnp
import pytest

from models.windows import FULL
from tests.models.attention.base import AttentionTestBase, RuntimeWindowsTests, make, plain


class TestTriton(RuntimeWindowsTests, AttentionTestBase):
  backend = "triton"
  options = {"interpret": True, "block": 32}  # noqa: RUF012

  def test_unequal_blocks(self):
    """With a head_dim above 64 the default block of 128 tokens has key blocks of 64."""
    large = TestTriton()
    large.options = {"interpret": True}
    large.check(make(1, 200, 2, 1, 80), (FULL, 33), plain(1, 200))

  def test_large_heads_are_refused_by_name(self):
    q, k, v, _ = make(1, 16, 1, 1, 256)
    with pytest.raises(NotImplementedError, match="blocked"):
      self.run(q, k, v, jnp.array([3]), *plain(1, 16))
