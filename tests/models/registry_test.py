"""What --model may be."""

import dataclasses

import pytest

import models
from models import InputError, registry
from models.windows import FULL
from tests.models.conftest import TINY, write_tiny_gguf


def test_gguf_path(tmp_path):
  path = tmp_path / "tiny.gguf"
  write_tiny_gguf(path)
  loaded = models.load(str(path))
  assert (loaded.name, loaded.config) == ("tiny.gguf", TINY)
  assert registry.load_config(str(path)) == TINY
  assert loaded.tokenizer.vocab_size == TINY.vocab_size
  assert registry.load_tokenizer(str(path)).encode("ab") == loaded.tokenizer.encode("ab")
  assert loaded.params["layers"]["attn"]["q"]["kernel"].shape == (2, 64, 4, 32)


def test_a_replaced_file_is_read_again(tmp_path):
  path = tmp_path / "tiny.gguf"
  write_tiny_gguf(path)
  registry.load_config(str(path))
  write_tiny_gguf(path, fields={"llama.context_length": 99})
  assert registry.load_config(str(path)).context == 99


@pytest.mark.parametrize("model", ["", "gpt2", "Qwen/Qwen3-1.7B", "smollm2", "."])
def test_anything_else_is_refused(model):
  for function in (registry.load, registry.load_config, registry.load_tokenizer, registry.resolve):
    with pytest.raises(InputError) as info:
      function(model)
    message = str(info.value)
    assert message.startswith(f"--model {model}".rstrip() + ":")
    assert "smollm2-135m" in message and ".gguf" in message


def test_missing_file_is_named():
  with pytest.raises(InputError, match=r"--model none/x\.gguf: cannot be read"):
    registry.load("none/x.gguf")


def test_more_tokens_than_the_model_embeds(tmp_path):
  config = dataclasses.replace(TINY, vocab_size=200)
  write_tiny_gguf(tmp_path / "m.gguf", config, fields={"llama.vocab_size": 200})
  with pytest.raises(InputError, match="264 tokens but embeds 200"):
    registry.load(str(tmp_path / "m.gguf"))


def test_public_names():
  assert {"load", "HeadMask", "ModelConfig", "InputError"} <= set(models.__all__)
  assert all(hasattr(models, name) for name in models.__all__)
  assert models.HeadMask.full(TINY).windows(4, TINY.num_heads).min() == FULL
  with pytest.raises(AttributeError):
    models.nothing  # noqa: B018


def test_default_model(real_model):
  c = real_model.config
  assert real_model.name == "smollm2-135m"
  assert (c.num_layers, c.num_heads, c.num_groups, c.head_dim) == (30, 9, 3, 64)
  assert (c.model_dim, c.ffn_dim, c.vocab_size, c.context) == (576, 1536, 49152, 8192)
  assert (c.rope_theta, c.norm_eps, c.tied_head) == (1e5, 1e-5, True)
  assert registry.load_config("smollm2-135m") == c
