"""Reordering kv groups changes no logit, and can be undone bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import plan
from models.config import ModelConfig
from models.hybridize import dehybridize, hybridize, static_windows
from models.transformer import Transformer
from models.windows import FULL, HeadMask

CONFIG = ModelConfig(
  vocab_size=50,
  num_layers=3,
  model_dim=24,
  num_heads=8,
  num_groups=4,
  head_dim=8,
  ffn_dim=16,
  context=64,
)
MASK = HeadMask([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]])


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bias and qk norm"])
def setup(request):
  model = Transformer(dataclasses.replace(CONFIG, qkv_bias=request.param, qk_norm=request.param))
  tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 50)
  windows = jnp.asarray(MASK.windows(5, CONFIG.num_heads))
  params = model.init(jax.random.key(0), tokens, windows)["params"]
  rng = np.random.default_rng(
    0
  )  # biases start at zero and norms at one, which would hide a mistake
  params = jax.tree.map(lambda p: p + rng.normal(0, 0.3, p.shape).astype(p.dtype), params)
  return model, params, tokens, windows


def test_logits_are_unchanged(setup):
  model, params, tokens, windows = setup
  hybrid = hybridize(params, MASK, CONFIG)
  rows = jnp.asarray(static_windows(hybrid.full_groups, 5, CONFIG), jnp.int32)
  before = model.apply({"params": params}, tokens, windows)
  after = model.apply({"params": hybrid.params}, tokens, rows)
  np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
  # Without moving the windows along, the logits do change: the test can fail.
  wrong = model.apply({"params": hybrid.params}, tokens, windows)
  assert np.abs(wrong - before).max() > 1e-3


def test_round_trip_is_exact(setup):
  _, params, _, _ = setup
  hybrid = hybridize(params, MASK, CONFIG)
  back = dehybridize(hybrid.params, hybrid.order, CONFIG)
  jax.tree.map(np.testing.assert_array_equal, back, params)


def test_order_and_counts(setup):
  _, params, _, _ = setup
  hybrid = hybridize(params, MASK, CONFIG)
  assert hybrid.full_groups == (2, 4, 1)
  np.testing.assert_array_equal(hybrid.order, [[1, 3, 0, 2], [0, 1, 2, 3], [2, 0, 1, 3]])
  rows = static_windows(hybrid.full_groups, 5, CONFIG)
  assert rows[0] == (FULL,) * 4 + (5,) * 4 and hash(rows)
  assert all(len(plan.runs(row, CONFIG.num_groups)) <= 2 for row in rows)


def test_mask_of_another_model_is_refused(setup):
  _, params, _, _ = setup
  with pytest.raises(ValueError, match="3 layers of 4 groups"):
    hybridize(params, HeadMask(np.zeros((2, 4), bool)), CONFIG)
