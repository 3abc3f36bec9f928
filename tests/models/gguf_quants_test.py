"""Every quantisation format that the gguf package can dequantise is read, and no other."""

import dataclasses

import gguf
import numpy as np
import pytest

from models import gguf_loader
from models.errors import InputError
from tests.models.conftest import TINY, write_tiny_gguf

# Blocks of up to 256 numbers along the inner axis of every matrix.
WIDE = dataclasses.replace(TINY, num_layers=1, model_dim=256, head_dim=64, ffn_dim=256)


def is_read(kind) -> bool:
  _, size = gguf.GGML_QUANT_SIZES[kind]
  try:
    gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
  except NotImplementedError:
    return False
  return True


READ = [kind.name for kind in gguf.GGML_QUANT_SIZES if is_read(kind)]


def test_the_formats_people_use_are_among_them():
  used = {"F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q4_0", "IQ4_XS", "MXFP4"}
  assert used <= set(READ)


@pytest.mark.parametrize("name", READ)
def test_format(tmp_path, name):
  write_tiny_gguf(tmp_path / "m.gguf", WIDE, name)
  config, params = gguf_loader.load_gguf(tmp_path / "m.gguf")
  assert config == WIDE
  written = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
  for target, tensor in {
    "embedding": written["token_embd.weight"],
    "gate": written["blk.0.ffn_gate.weight"],
  }.items():
    assert tensor.tensor_type.name == name
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert value.std() > 0
    ours = (
      params["embed"]["embedding"]
      if target == "embedding"
      else params["layers"]["mlp"]["gate"]["kernel"][0].T
    )
    np.testing.assert_array_equal(ours, value)


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I32", "F64"])
def test_formats_that_are_not_read(tmp_path, name):
  write_tiny_gguf(tmp_path / "m.gguf", WIDE, name)
  with pytest.raises(InputError, match=f"format {name} cannot be read"):
    gguf_loader.load_gguf(tmp_path / "m.gguf")
