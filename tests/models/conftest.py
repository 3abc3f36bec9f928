"""Fixtures: the real default model, and a tiny GGUF file with random weights."""

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from models import registry
from models.config import ModelConfig

# Head size times heads differs from the width, so no two axes can be taken for one another.
TINY = ModelConfig(
  vocab_size=264,
  num_layers=2,
  model_dim=64,
  num_heads=4,
  num_groups=2,
  head_dim=32,
  ffn_dim=96,
  context=128,
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


@pytest.fixture(scope="session")
def real_model() -> registry.Loaded:
  """The default model; fetched on first use (93 MB)."""
  return registry.load(registry.DEFAULT)


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
  """GGUF name -> float32 `[out, in]` in Hugging Face's order of q and k rows."""
  rng, c = np.random.default_rng(seed), config
  shapes = {"token_embd": (c.vocab_size, c.model_dim), "output_norm": (c.model_dim,)}
  if not c.tied_head:
    shapes["output"] = (c.vocab_size, c.model_dim)
  for l in range(c.num_layers):
    shapes |= {
      f"blk.{l}.attn_norm": (c.model_dim,),
      f"blk.{l}.attn_q": (c.num_heads * c.head_dim, c.model_dim),
      f"blk.{l}.attn_k": (c.num_groups * c.head_dim, c.model_dim),
      f"blk.{l}.attn_v": (c.num_groups * c.head_dim, c.model_dim),
      f"blk.{l}.attn_output": (c.model_dim, c.num_heads * c.head_dim),
      f"blk.{l}.ffn_norm": (c.model_dim,),
      f"blk.{l}.ffn_gate": (c.ffn_dim, c.model_dim),
      f"blk.{l}.ffn_up": (c.ffn_dim, c.model_dim),
      f"blk.{l}.ffn_down": (c.model_dim, c.ffn_dim),
    }
  return {f"{k}.weight": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
  """Rows as llama.cpp's converter stores them: row 2i is the first half's row i."""
  stored = np.empty_like(w)
  size = len(w) // heads
  for h in range(heads):
    for i in range(size // 2):
      stored[h * size + 2 * i] = w[h * size + i]
      stored[h * size + 2 * i + 1] = w[h * size + size // 2 + i]
  return stored


def quantised(value: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
  """Bytes of a tensor; where the gguf package reads a format only, other numbers of that format."""
  try:
    return gguf.quants.quantize(value, kind)
  except NotImplementedError:
    shape = gguf.quants.quant_shape_to_byte_shape(value.shape, kind)
    # Small bytes: a float16 among them is finite.
    return np.random.default_rng(len(value)).integers(0, 0x3C, shape, np.uint8)


def write_tiny_gguf(path, config=TINY, kind="F32", weights=None, architecture="llama", fields=None):
  """Writes a model with a byte-level tokenizer.

  Args:
    kind: storage format of the matrices; norms are float32.
    weights: `tiny_weights` unless given.
    fields: more metadata, key -> value (bool, int, float or str); None leaves a key out.

  Returns:
    The weights written.
  """
  c, weights = config, tiny_weights(config) if weights is None else weights
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = [*SPECIALS, *alphabet, "he", "ll", "Ġhe", "hell", "<|tool|>"]
  types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) - 1) + [4]
  values = {
    "llama.block_count": c.num_layers,
    "llama.context_length": c.context,
    "llama.embedding_length": c.model_dim,
    "llama.feed_forward_length": c.ffn_dim,
    "llama.attention.head_count": c.num_heads,
    "llama.attention.head_count_kv": c.num_groups,
    "llama.attention.key_length": c.head_dim,
    "llama.rope.dimension_count": c.head_dim,
    "llama.rope.freq_base": c.rope_theta,
    "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
  } | (fields or {})
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in values.items():
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif value is not None:
      writer.add_string(key, value)
  writer.add_array("tokenizer.ggml.tokens", tokens)
  writer.add_array("tokenizer.ggml.token_type", types)
  writer.add_array("tokenizer.ggml.merges", ["h e", "l l", "Ġ he", "he ll"])
  for name, value in weights.items():
    if name.endswith(("attn_q.weight", "attn_k.weight")):
      value = interleaved(value, c.num_heads if "attn_q" in name else c.num_groups)
    kind_of = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
    raw = quantised(value, kind_of)
    writer.add_tensor(name, raw, raw_dtype=kind_of)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return weights
