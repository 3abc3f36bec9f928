"""Static windows through splash attention, interpreted, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

from models.attention.splash import WindowMask
from tests.models.attention.base import AttentionTestBase, make, plain


class TestSplash(AttentionTestBase):
  backend = "splash"
  options = {"interpret": True, "block": 128}  # noqa: RUF012
  block = 128
  static = True
  shared = False
  packed_sinks = False

  def test_arrays_are_refused_by_name(self):
    q, k, v, _ = make(1, 16, 2, 1, 32)
    with pytest.raises(NotImplementedError, match="flash_tpu"):
      self.run(q, k, v, jnp.array([3, 3]), *plain(1, 16))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, None])
@pytest.mark.parametrize("sinks", [0, 3, 16])
def test_mask_shortcuts_equal_the_comparison(window, sinks):
  """Blocks told empty or whole at once are what comparing every position gives."""
  mask, b = WindowMask(64, window, sinks), 16
  distance = np.arange(64)[:, None] - np.arange(64)
  want = (distance >= 0) & ((distance < (window or 64)) | (np.arange(64) < sinks))
  for i in range(0, 64, b):
    for j in range(0, 64, b):
      np.testing.assert_array_equal(mask[i : i + b, j : j + b], want[i : i + b, j : j + b])
  if not sinks:
    left = None if window is None else window - 1
    plain_mask = splash_lib.LocalMask((64, 64), (left, 0), 0)
    np.testing.assert_array_equal(mask[:64, :64], plain_mask[:64, :64])
