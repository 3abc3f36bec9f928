"""Writes a tiny random Llama as a GGUF file with a tokenizer trained on the spot."""

import json
import pathlib

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

from bosch_jax import haystacks, niah, words

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer() -> tokenizers.Tokenizer:
  """A byte-level tokenizer that knows the words of NIAH prompts; `SPECIAL` have ids 0, 1, 2."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=900, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
  )
  texts = [*haystacks.NOISE, niah.INTRO, niah.NEEDLE, niah.QUESTION, *niah.LEADS.values()] * 9
  texts += [
    f" {word}" for value in vars(words).values() if isinstance(value, tuple) for word in value
  ]
  backend.train_from_iterator(texts, trainer)
  return backend


def write_tiny_gguf(
  path: pathlib.Path, *, layers=4, heads=6, groups=3, head_dim=8, ffn=48, context=512, seed=0
) -> pathlib.Path:
  """A model of `layers` layers and random weights whose tokenizer knows the words of NIAH prompts."""
  backend = train_tokenizer()
  vocab = sorted(backend.get_vocab(), key=backend.get_vocab().get)
  merges = json.loads(backend.to_str())["model"]["merges"]

  writer = gguf.GGUFWriter(path, "llama")
  dim = heads * head_dim
  writer.add_block_count(layers)
  writer.add_context_length(context)
  writer.add_embedding_length(dim)
  writer.add_feed_forward_length(ffn)
  writer.add_head_count(heads)
  writer.add_head_count_kv(groups)
  writer.add_rope_freq_base(10000.0)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_rope_dimension_count(head_dim)
  writer.add_vocab_size(len(vocab))
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  writer.add_token_list(vocab)
  writer.add_token_types([3 if token in SPECIAL else 1 for token in vocab])
  writer.add_token_merges(
    [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
  )
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_add_bos_token(False)
  writer.add_chat_template(TEMPLATE)

  rng = np.random.default_rng(seed)

  def add(name, *shape):
    values = rng.normal(0, 2.0 / np.sqrt(shape[-1]), shape) if len(shape) > 1 else np.ones(shape)
    writer.add_tensor(f"{name}.weight", values.astype(np.float32))

  add("token_embd", len(vocab), dim)
  add("output_norm", dim)
  for l in range(layers):
    block = f"blk.{l}."
    add(block + "attn_norm", dim)
    add(block + "ffn_norm", dim)
    add(block + "attn_q", heads * head_dim, dim)
    add(block + "attn_k", groups * head_dim, dim)
    add(block + "attn_v", groups * head_dim, dim)
    add(block + "attn_output", dim, heads * head_dim)
    add(block + "ffn_gate", ffn, dim)
    add(block + "ffn_up", ffn, dim)
    add(block + "ffn_down", dim, ffn)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path
