"""config.json: every field is read, harmless, or refused by name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import families
from models.config import ModelConfig, RopeScaling
from models.errors import InputError
from models.hf_table import num_params

# As on huggingface.co, in the form of transformers 4.
QWEN3_06B = {
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
  "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
  "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
  "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B = QWEN3_06B | {
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048,
  "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
  "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
  "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
  "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008],
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
  "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
  "rope_scaling": {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
}  # fmt: skip
ROPE = (
  "rope_type",
  "factor",
  "rope_theta",
  "original_max_position_embeddings",
  "mscale",
  "mscale_all_dim",
)


def refused(values, *words) -> str:
  with pytest.raises(InputError) as info:
    families.config_from_hf(values)
  message = str(info.value)
  assert message.startswith("--model config.json") and "\n" not in message
  for word in words:
    assert word in message, message
  return message


def test_qwen3():
  config = families.config_from_hf(QWEN3_06B)
  assert config == ModelConfig(
    151936, 28, 1024, 16, 8, 128, 3072, 40960, 1e6, 1e-6, True, qk_norm=True
  )
  assert isinstance(config.rope_theta, float)
  assert num_params(config) == 596_049_920  # "0.6B"


def test_qwen3_moe():
  config = families.config_from_hf(QWEN3_30B)
  assert (config.num_experts, config.experts_per_token, config.moe_ffn_dim) == (128, 8, 768)
  assert config.norm_topk_prob and not config.tied_head
  assert num_params(config) == 30_532_122_624  # "30.5B in total, 3.3B activated"
  assert 3.2e9 < num_params(config, active=True) < 3.4e9
  del (renamed := dict(QWEN3_30B))["num_experts"]  # transformers 5
  assert families.config_from_hf(renamed | {"num_local_experts": 128}) == config


def test_llama3():
  config = families.config_from_hf(LLAMA)
  assert (config.head_dim, config.rope_scaling) == (64, RopeScaling("llama3", 32.0, 8192, 1.0, 4.0))
  assert num_params(config) == 1_235_814_400  # "1.23B"


@pytest.mark.parametrize("factor", [2.0, 4.0])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_yarn_as_the_model_card_says(name, factor):
  rope = {name: "yarn", "factor": factor, "original_max_position_embeddings": 32768}
  config = families.config_from_hf(QWEN3_06B | {"rope_scaling": rope})
  assert config.rope_scaling.attention_factor == pytest.approx(
    {2.0: 1.069315, 4.0: 1.138629}[factor], abs=1e-6
  )
  assert config.context == {2.0: 65536, 4.0: 131072}[factor]
  assert config.rope_theta == 1e6


def test_original_context_defaults_to_the_context():
  config = families.config_from_hf(QWEN3_06B | {"rope_scaling": {"rope_type": "yarn", "factor": 4}})
  assert (config.rope_scaling.original_context, config.rope_scaling.factor) == (40960, 4.0)


def test_smollm3_nope_layers():
  values = {
    **LLAMA,
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "rope_scaling": None,
  }
  assert families.config_from_hf(values).nope_layers == (3, 7, 11, 15)
  marks = [1] * 15 + [0]
  assert families.config_from_hf(values | {"no_rope_layers": marks}).nope_layers == (15,)
  refused(values | {"no_rope_layers": [1, 0]}, "no_rope_layers")


@pytest.mark.parametrize(
  "values", [QWEN3_06B, QWEN3_30B, LLAMA], ids=["qwen3", "qwen3_moe", "llama3"]
)
def test_written_and_read_again(values):
  config = families.config_from_hf(values)
  assert families.config_from_hf(json.loads(json.dumps(families.config_to_hf(config)))) == config


@pytest.mark.parametrize(
  "values", [QWEN3_06B, QWEN3_30B, LLAMA], ids=["qwen3", "qwen3_moe", "llama3"]
)
def test_no_field_is_ignored(values):
  """Changing any field changes the configuration, or is refused, or the field is known harmless."""
  before = families.config_from_hf(values)
  for name, value in values.items():
    if isinstance(value, bool):
      other = not value
    elif isinstance(value, int | float):
      other = value * 2
    elif isinstance(value, dict):
      other = None
    else:
      other = ["x"]
    try:
      after = families.config_from_hf(values | {name: other})
    except InputError:
      continue
    # A window that is switched off is not used.
    idle = families._HARMLESS | {"sliding_window"}
    assert (after == before) == (name in idle), name
    assert (after.fingerprint == before.fingerprint) == (name in idle), name


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(ROPE) | st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(
  st.sampled_from([QWEN3_06B, QWEN3_30B, LLAMA]),
  st.dictionaries(
    st.sampled_from(sorted(QWEN3_30B | LLAMA | {"no_rope_layers": 0, "layer_types": 0})),
    JSON,
    max_size=3,
  ),
)
def test_any_damage_is_an_input_error(base, changes):
  try:
    families.config_from_hf(base | changes)
  except InputError as error:
    assert str(error).startswith("--model config.json")


@pytest.mark.parametrize(
  ("base", "changes", "words"),
  [
    (LLAMA, {"model_type": "gemma2"}, ["gemma2", "sliding-window layers of its own"]),
    (LLAMA, {"model_type": "gemma3_text"}, ["gemma3_text", "sliding-window"]),
    (LLAMA, {"model_type": "gpt_oss"}, ["gpt_oss", "sliding-window"]),
    (LLAMA, {"model_type": "mamba"}, ["mamba", "qwen3_moe"]),
    (LLAMA, {"model_type": None}, ["None"]),
    (LLAMA, {"model_type": "mistral", "architectures": None, "rope_scaling": None}, ["sliding_window 4096"]),
    (LLAMA, {"model_type": "mistral", "architectures": None, "sliding_window": 2048}, ["sliding_window 2048"]),
    (QWEN3_06B, {"use_sliding_window": True, "sliding_window": 4096}, ["sliding_window 4096"]),
    (QWEN3_06B, {"layer_types": ["full_attention", "sliding_attention"] * 14}, ["sliding window"]),
    (QWEN3_06B, {"attention_bias": True}, ["attention_bias True is not supported"]),
    (LLAMA, {"mlp_bias": True}, ["mlp_bias True is not supported"]),
    (LLAMA, {"hidden_act": "gelu"}, ["hidden_act 'gelu' is not supported"]),
    (LLAMA, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0 is not known"]),
    (LLAMA, {"embedding_multiplier": 2}, ["embedding_multiplier 2"]),
    (LLAMA, {"rope_interleaved": True}, ["rope_interleaved"]),
    (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
    (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "yarn"]),
    (LLAMA, {"rope_scaling": {"type": "su"}}, ["'su'"]),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, ["'longrope'"]),
    (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, ["factor is missing"]),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, ["mrope_section"]),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor is missing"]),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor 0.5"]),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters"]),
    (LLAMA, {"rope_theta": "big"}, ["rope_theta is 'big'"]),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, ["gptq", ".gguf"]),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
    (LLAMA, {"num_key_value_heads": 5}, ["num_groups 5"]),
    (LLAMA, {"hidden_size": None}, ["hidden_size is missing"]),
    (LLAMA, {"num_hidden_layers": True}, ["num_hidden_layers is True"]),
    (LLAMA, {"rms_norm_eps": -1.0}, ["rms_norm_eps is -1.0"]),
    (QWEN3_30B, {"mlp_only_layers": [0]}, ["mlp_only_layers [0]"]),
    (QWEN3_30B, {"decoder_sparse_step": 2}, ["decoder_sparse_step 2"]),
    (QWEN3_30B, {"num_experts_per_tok": 200}, ["experts_per_token 200"]),
    (QWEN3_30B, {"shared_expert_intermediate_size": 512}, ["shared_expert_intermediate_size 512"]),
    (QWEN3_06B, {"num_experts": 8}, ["num_experts 8"]),
  ],
)  # fmt: skip
def test_refused_by_name(base, changes, words):
  refused(base | changes, *words)


def test_all_faults_in_one_sentence():
  refused(
    LLAMA | {"mlp_bias": True, "hidden_size": 0, "strange": 3},
    "mlp_bias",
    "hidden_size is 0",
    "strange 3",
  )


@pytest.mark.parametrize("text", [None, "not json", "[1]"])
def test_unreadable_config(tmp_path, text):
  if text is not None:
    (tmp_path / "config.json").write_text(text)
  with pytest.raises(InputError, match="--model"):
    families.read_config(tmp_path)


def test_no_family_for_a_mixture():
  config = ModelConfig(50, 2, 32, 4, 2, 8, 64, 128, qk_norm=True, qkv_bias=True)
  with pytest.raises(InputError, match="no Hugging Face family"):
    families.config_to_hf(config)


@pytest.mark.parametrize(
  "changes",
  [
    {"num_experts": 4}, {"num_experts": 4, "experts_per_token": 5, "moe_ffn_dim": 8}, {"norm_topk_prob": True},
    {"nope_layers": (2,)}, {"nope_layers": (1, 0)}, {"num_groups": 3}, {"head_dim": 7},
  ],
)  # fmt: skip
def test_impossible_configs(changes):
  with pytest.raises(ValueError):
    ModelConfig(
      **{
        **dict(
          vocab_size=5,
          num_layers=2,
          model_dim=8,
          num_heads=4,
          num_groups=2,
          head_dim=4,
          ffn_dim=8,
          context=9,
        ),
        **changes,
      }
    )
