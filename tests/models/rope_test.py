"""Rotary frequencies against Hugging Face's, bit for bit where torch allows."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig, RopeScaling
from models.rope import frequencies, rope_angles, rope_tables, rotate, switched

BASE = ModelConfig(61, 1, 256, 2, 1, 128, 8, 40960, rope_theta=1e6)
SCALED = {
  "none": None,
  "linear": RopeScaling("linear", 2.0),
  "llama3": RopeScaling("llama3", 32.0, 8192),
  "yarn2": RopeScaling("yarn", 2.0, 32768, attention_factor=1.0693147180559945),
  "yarn4": RopeScaling("yarn", 4.0, 32768, attention_factor=1.138629436111989),
  "yarn4 untruncated": RopeScaling(
    "yarn", 4.0, 32768, truncate=False, attention_factor=1.138629436111989
  ),
}


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_equal_hugging_face(name, head_dim, theta):
  pytest.importorskip("torch")
  from transformers import Qwen3Config
  from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

  from models.families import config_to_hf

  scaling = SCALED[name]
  config = dataclasses.replace(
    BASE, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, qk_norm=True
  )
  theirs = Qwen3RotaryEmbedding(Qwen3Config(**config_to_hf(config)))
  ours = frequencies(config)
  assert ours.dtype == np.float32
  assert np.mean(ours == theirs.inv_freq.numpy()) > 0.9
  np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=5e-7)
  factor = scaling.attention_factor if scaling else 1.0
  assert theirs.attention_scaling == pytest.approx(factor, rel=1e-12)


def test_plain_frequencies_written_out():
  config = dataclasses.replace(BASE, head_dim=8, rope_theta=1e4)
  np.testing.assert_allclose(frequencies(config), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_keeps_short_waves_and_divides_long_ones():
  plain = frequencies(dataclasses.replace(BASE, rope_theta=5e5))
  scaled = frequencies(dataclasses.replace(BASE, rope_theta=5e5, rope_scaling=SCALED["llama3"]))
  ratio = plain / scaled
  assert ratio[0] == 1 and ratio[-1] == 32 and (np.diff(ratio) >= 0).all()


def test_angles_are_float32_at_far_positions():
  """bf16 positions would be wrong above 256, and a theta in bf16 sooner."""
  positions = jnp.array([[0, 257, 131071]], jnp.int32)
  cos, sin = rope_angles(positions, BASE)
  exact = np.array([0, 257, 131071])[:, None] * frequencies(BASE).astype(np.float64)
  assert cos.dtype == sin.dtype == jnp.float32
  # A float32 near 131071 is exact to 0.008, and an angle is no more exact than that.
  np.testing.assert_allclose(cos[0, :, 0], np.cos(exact), atol=0.008)
  np.testing.assert_allclose(sin[0, :2, 0], np.sin(exact[:2]), atol=2e-5)


@pytest.mark.parametrize("rotary", [True, False])
def test_layers_without_rotation(rotary):
  config = dataclasses.replace(BASE, head_dim=8, rope_scaling=SCALED["yarn4"])
  x = jnp.ones((1, 5, 2, 8))
  positions = jnp.arange(5, dtype=jnp.int32)[None]
  out = rotate(x, *switched(*rope_angles(positions, config), jnp.bool(rotary)))
  if rotary:
    np.testing.assert_array_equal(out, rotate(x, *rope_angles(positions, config)))
  else:
    np.testing.assert_array_equal(out, x)  # the attention factor belongs to the rotation


def test_impossible_scalings():
  for changes in (
    {"kind": "dynamic"},
    {"factor": 0.5},
    {"original_context": 0},
    {"low_freq_factor": 4.0},
  ):
    with pytest.raises(ValueError):
      RopeScaling(**{"kind": "llama3", "factor": 2.0, "original_context": 64, **changes})


@pytest.mark.parametrize("scaling", [None, "yarn4"])
def test_tables_hold_the_angles(scaling):
  config = dataclasses.replace(BASE, rope_scaling=scaling and SCALED[scaling])
  positions = jnp.array([[0, 1, 2, 7, 300], [5, 0, 0, 1, 2]], jnp.int32)
  for table, angle in zip(
    rope_tables(positions, config), rope_angles(positions, config), strict=True
  ):
    chex.assert_trees_all_close(table, angle, rtol=1e-6, atol=1e-6)
