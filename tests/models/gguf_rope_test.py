"""Llama 3's rotary divisors in GGUF files: parameters recovered, logits against Hugging Face torch."""

import dataclasses
import math

import gguf
import numpy as np
import pytest

from models import gguf_loader, registry
from models.config import RopeScaling
from models.errors import InputError
from tests.models import spm_tokenizer_test as spm
from tests.models.conftest import TINY, interleaved, tiny_weights, write_tiny_gguf
from tests.models.hf_tiny import LLAMA3, hf_logits, hf_model, load, logits, random_ids


def divisors(theta, head_dim, factor, low=1.0, high=4.0, context=8192) -> np.ndarray:
  """What llama.cpp's converter writes, by the published formula, one frequency at a time."""
  out = []
  for i in range(0, head_dim, 2):
    wavelength = 2 * math.pi * theta ** (i / head_dim)
    if wavelength < context / high:
      out.append(1.0)
    elif wavelength > context / low:
      out.append(factor)
    else:
      smooth = (context / wavelength - low) / (high - low)
      out.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(out, np.float32)


def write(path, tensor, theta=500000.0, head_dim=128):
  config = dataclasses.replace(TINY, rope_theta=theta, head_dim=head_dim)
  weights = tiny_weights(config) | {"rope_freqs.weight": np.asarray(tensor, np.float32)}
  write_tiny_gguf(path, config, weights=weights)
  return config


@pytest.mark.parametrize("factor", [8.0, 32.0, 3.7])
@pytest.mark.parametrize(("theta", "head_dim"), [(5e5, 128), (5e5, 64), (1e4, 32)])
def test_factor_is_recovered(tmp_path, factor, theta, head_dim):
  config = write(tmp_path / "m.gguf", divisors(theta, head_dim, factor), theta, head_dim)
  scaling = RopeScaling("llama3", factor, 8192, 1.0, 4.0)
  read, params = gguf_loader.load_gguf(tmp_path / "m.gguf")
  assert read == dataclasses.replace(config, rope_scaling=scaling)
  assert "rope_freqs" not in params


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factor_where_even_the_slowest_frequency_is_on_the_ramp(tmp_path, factor):
  tensor = divisors(1000.0, 32, factor)
  assert 2 < tensor[-1] < factor / 2
  write(tmp_path / "m.gguf", tensor, 1000.0, 32)
  scaling = gguf_loader.load_gguf(tmp_path / "m.gguf")[0].rope_scaling
  assert scaling.factor == pytest.approx(factor, rel=1e-4)


def test_divisors_of_one_change_nothing(tmp_path):
  for theta in (5e5, 100.0):  # at 100, every frequency would be kept under any factor
    config = write(tmp_path / "m.gguf", np.ones(64), theta)
    assert gguf_loader.load_gguf(tmp_path / "m.gguf")[0] == config


GOOD = divisors(5e5, 128, 8.0)


@pytest.mark.parametrize(
  "tensor",
  [
    divisors(5e5, 128, 8.0, context=4096),
    divisors(5e5, 128, 8.0, low=1.1),
    divisors(5e5, 128, 8.0, high=3.9),
    divisors(4e5, 128, 8.0),
    GOOD[:32],
    GOOD.reshape(8, 8),
    GOOD[::-1],
    1 / GOOD,
    -GOOD,
    np.zeros(64),
    np.full(64, 8.0),
    np.where(np.arange(64) == 40, GOOD * 1.001, GOOD),
  ],
  ids=[
    "context", "low", "high", "theta", "short", "shape", "order", "inverse", "sign", "zero", "linear",
    "one",
  ],
)  # fmt: skip
def test_other_divisors_are_refused(tmp_path, tensor):
  write(tmp_path / "m.gguf", tensor)
  with pytest.raises(InputError, match=r"rope_freqs\.weight that does not hold the 64 divisors"):
    registry.load_config(str(tmp_path / "m.gguf"))


def test_tensor_that_is_not_finite(tmp_path):
  write(tmp_path / "m.gguf", np.where(np.arange(64) == 40, np.nan, GOOD))
  with pytest.raises(InputError, match=r"undefined numbers in rope_freqs\.weight"):
    gguf_loader.load_gguf(tmp_path / "m.gguf")


def write_llama(path, model, vocabulary, tensor):
  """A Hugging Face Llama as llama.cpp's converter writes it."""
  c = model.config
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_block_count(c.num_hidden_layers)
  writer.add_context_length(c.max_position_embeddings)
  writer.add_embedding_length(c.hidden_size)
  writer.add_feed_forward_length(c.intermediate_size)
  writer.add_head_count(c.num_attention_heads)
  writer.add_head_count_kv(c.num_key_value_heads)
  writer.add_rope_dimension_count(c.head_dim)
  writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
  writer.add_layer_norm_rms_eps(c.rms_norm_eps)
  writer.add_vocab_size(c.vocab_size)
  spm.write_vocabulary(writer, vocabulary)
  names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
  for name, p in model.named_parameters():
    value = p.detach().numpy()
    for part, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads)):
      if f"{part}_proj" in name:
        value = interleaved(value, heads)
    writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value)
  if tensor is not None:
    writer.add_tensor("rope_freqs.weight", tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize("factor", [8.0, None])
def test_logits_of_llama(tmp_path, factor):
  """A whole Llama file, SentencePiece vocabulary included, far beyond the original context."""
  vocabulary = spm.processor(spm.trained(tmp_path))
  rope = {"rope_type": "default", "rope_theta": 5e5}
  if factor is not None:
    rope = LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192}
  model = hf_model(
    "llama", vocab_size=480, hidden_size=96, max_position_embeddings=131072, rope_parameters=rope
  )
  tensor = None if factor is None else divisors(5e5, 16, factor)
  write_llama(tmp_path / "m.gguf", model, vocabulary, tensor)
  loaded = registry.load(str(tmp_path / "m.gguf"))
  model.save_pretrained(tmp_path / "hf")
  assert loaded.config == load(tmp_path / "hf")[0]
  assert loaded.tokenizer.encode("the river") == vocabulary.encode("the river")
  ids = random_ids(400)
  for start in (0, 100_000):
    positions = np.arange(start, start + 400)[None]
    ours = logits(loaded.config, loaded.params, ids, positions)
    np.testing.assert_allclose(ours, hf_logits(model, ids, positions), rtol=0, atol=1e-4)
  if factor is not None:  # the scaling is seen
    unscaled = dataclasses.replace(loaded.config, rope_scaling=None)
    assert np.abs(ours - logits(unscaled, loaded.params, ids, positions)).max() > 0.01
