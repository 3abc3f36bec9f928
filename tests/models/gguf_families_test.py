"""GGUF files of Qwen2, Qwen3 and Qwen3-MoE against Hugging Face torch: names, no permutation, biases,
norms, experts."""

import inspect

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from models import gguf_file, gguf_loader, registry
from models.errors import InputError
from models.tokenizer import Tokenizer
from tests.models.conftest import SPECIALS, TEMPLATE
from tests.models.hf_tiny import hf_logits, hf_model, load, logits, random_ids, transformers
from tests.models.tokenizer_test import TEXTS

VOCAB = 331
QUANTISED = {"F32": 1e-4, "Q8_0": 0.2}


@pytest.fixture(scope="module")
def vocabulary():
  """Tokens and merges of a byte-level BPE trained on the texts of tokenizer_test."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=SPECIALS,
    show_progress=False,
  )
  backend.train_from_iterator(TEXTS * 3, trainer)
  vocab = backend.get_vocab()
  import json

  merges = [tuple(m) for m in json.loads(backend.to_str())["model"]["merges"]]
  return sorted(vocab, key=vocab.get), merges


def tensors(model):
  """Names and values of a model; gate and up of its experts, one tensor in torch, apart."""
  for name, p in model.named_parameters():
    value = p.detach().numpy()
    if name.endswith("experts.gate_up_proj"):
      for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
        yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    elif name.endswith("experts.down_proj"):
      yield f"{name}.weight", value
    else:
      yield name, value


def write_gguf(path, model, family, vocabulary, kind="F32", pre="qwen2", drop=()):
  """A Hugging Face model as llama.cpp's converter writes it; tensor names by the gguf package."""
  c, (tokens, merges) = model.config, vocabulary
  writer = gguf.GGUFWriter(path, family)
  writer.add_block_count(c.num_hidden_layers)
  writer.add_context_length(c.max_position_embeddings)
  writer.add_embedding_length(c.hidden_size)
  writer.add_feed_forward_length(c.intermediate_size)
  writer.add_head_count(c.num_attention_heads)
  writer.add_head_count_kv(c.num_key_value_heads)
  if family != "qwen2":
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
  if family == "qwen3moe":
    writer.add_expert_count(c.num_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
  writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
  writer.add_layer_norm_rms_eps(c.rms_norm_eps)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
  writer.add_token_merges([" ".join(merge) for merge in merges])
  writer.add_eos_token_id(2)
  writer.add_chat_template(TEMPLATE)
  names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
  for name, value in tensors(model):
    target = names.get_name(name, try_suffixes=(".weight", ".bias"))
    chosen = gguf.GGMLQuantizationType["F32" if value.ndim == 1 or "gate_inp" in target else kind]
    if target not in drop:
      writer.add_tensor(target, gguf.quants.quantize(value, chosen), raw_dtype=chosen)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "qwen3moe"])
def model(request):
  """hidden_size 64 and intermediate_size 96: whole blocks of 32 for Q8_0."""
  changes = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
  }
  family = request.param
  if family != "qwen2":
    changes["head_dim"] = 32  # times 4 heads is not the width
  if family == "qwen3moe":
    changes |= {"moe_intermediate_size": 32, "num_experts": 5, "norm_topk_prob": True}
  return family, hf_model(
    family.replace("moe", "_moe"), tie_word_embeddings=family == "qwen3", **changes
  )


@pytest.mark.parametrize("kind", QUANTISED)
def test_logits(tmp_path, model, vocabulary, kind):
  family, torch_model = model
  write_gguf(tmp_path / "m.gguf", torch_model, family, vocabulary, kind)
  loaded = registry.load(str(tmp_path / "m.gguf"))
  assert (loaded.config.qk_norm, loaded.config.qkv_bias) == (family != "qwen2", family == "qwen2")
  torch_model.save_pretrained(tmp_path / "hf")
  config, params = load(tmp_path / "hf")
  assert loaded.config == config and loaded.config.fingerprint == config.fingerprint
  ids = random_ids(40)
  ours, theirs = logits(loaded.config, loaded.params, ids), hf_logits(torch_model, ids)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=QUANTISED[kind] * np.abs(theirs).max())
  if kind == "F32":
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    import jax

    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


@pytest.mark.parametrize("model", ["qwen3moe"], indirect=True)
@pytest.mark.parametrize(
  ("field", "value", "words"),
  [
    ("expert_count", 6, "ffn_gate_inp.weight has shape (5, 64) instead of (6, 64)"),
    ("expert_used_count", 6, "experts_per_token 6"),
    ("expert_used_count", None, "qwen3moe.expert_used_count is missing"),
    ("expert_feed_forward_length", 64, "instead of (5, 64, 64)"),
    ("expert_shared_count", 1, "qwen3moe.expert_shared_count 1 is not supported"),
  ],
)
def test_expert_fields_that_do_not_fit(tmp_path, model, vocabulary, field, value, words):
  write_gguf(tmp_path / "m.gguf", model[1], model[0], vocabulary)
  file = gguf_file.open_gguf(tmp_path / "m.gguf")
  file.fields[f"qwen3moe.{field}"] = value
  with pytest.raises(InputError) as info:
    gguf_loader.load_params(file, gguf_loader.config_of(file))
  assert words in str(info.value)


def test_a_bias_norm_or_router_that_is_missing(tmp_path, model, vocabulary):
  family, torch_model = model
  name = {
    "qwen2": "blk.0.attn_k.bias",
    "qwen3": "blk.1.attn_k_norm.weight",
    "qwen3moe": "blk.1.ffn_gate_inp.weight",
  }[family]
  write_gguf(tmp_path / "m.gguf", torch_model, family, vocabulary, drop=(name,))
  with pytest.raises(InputError, match=f"{name} is missing"):
    registry.load(str(tmp_path / "m.gguf"))


def test_ids_equal_hugging_face(tmp_path, model, vocabulary):
  family, torch_model = model
  write_gguf(tmp_path / "m.gguf", torch_model, family, vocabulary)
  ours = Tokenizer.from_gguf(tmp_path / "m.gguf")
  tokens, merges = vocabulary
  theirs = transformers.Qwen2Tokenizer(
    vocab={t: i for i, t in enumerate(tokens)}, merges=merges, additional_special_tokens=SPECIALS
  )
  assert ours.vocab_size == len(tokens)
  for text in TEXTS:
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text

  @settings(max_examples=150, deadline=None)
  @given(st.text(max_size=60))
  def any_text(text):
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]

  any_text()


def test_ids_of_llama_3_follow_its_published_rule(tmp_path, model, vocabulary):
  """Hugging Face's converter of Llama 3 vocabularies holds the rule: its pattern, and whole words."""
  family, torch_model = model
  write_gguf(tmp_path / "m.gguf", torch_model, family, vocabulary, pre="llama-bpe")
  ours = Tokenizer.from_gguf(tmp_path / "m.gguf")
  tokens, merges = vocabulary
  rule = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
  theirs = tokenizers.Tokenizer(
    tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=True)
  )
  theirs.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(rule), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  theirs.add_special_tokens(SPECIALS)
  for text in [*TEXTS, "1234567 12,345", "it's 42"]:
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
  assert ours.decode(ours.encode("1234567 it's")) == "1234567 it's"
