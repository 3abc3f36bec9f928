"""Hugging Face config.json to `ModelConfig` and back, for every family that is run.

A family is a row of `FAMILIES`; all of them share one transformer. A field of config.json is read,
known to change nothing, required to have a neutral value, or refused by name: none is ignored in
silence.
"""

import dataclasses
import json
import math
import pathlib

from models.config import ModelConfig, RopeScaling
from models.errors import InputError

_SHOWN = 5  # faults spelt out in one message; the rest are counted


@dataclasses.dataclass(frozen=True)
class Family:
  """What distinguishes a family from the common decoder.

  Attributes:
    models: what people know it by.
    architecture: class that Hugging Face loads it with.
    rope_theta: where config.json says nothing.
    qk_norm, qkv_bias, moe, nope: features that all of its models have.
    tied_head: where config.json says nothing.
  """

  models: str
  architecture: str
  rope_theta: float = 10000.0
  qk_norm: bool = False
  qkv_bias: bool = False
  moe: bool = False
  nope: bool = False
  tied_head: bool = False


FAMILIES = {
  "llama": Family("Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2", "LlamaForCausalLM"),
  "mistral": Family("Mistral 7B v0.2 and later", "MistralForCausalLM"),
  "qwen2": Family("Qwen2, Qwen2.5", "Qwen2ForCausalLM", qkv_bias=True),
  "qwen3": Family("Qwen3 0.6B to 32B", "Qwen3ForCausalLM", qk_norm=True),
  "qwen3_moe": Family("Qwen3-30B-A3B, 235B-A22B", "Qwen3MoeForCausalLM", qk_norm=True, moe=True),
  "smollm3": Family("SmolLM3", "SmolLM3ForCausalLM", rope_theta=2e6, nope=True, tied_head=True),
}

# Families whose own design has sliding layers: head masks mean something else there.
_SLIDING = {
  "gemma2", "gemma3", "gemma3_text", "gemma3n", "gpt_oss", "cohere2", "olmo3", "ministral", "llama4",
  "llama4_text",
}  # fmt: skip

_HARMLESS = {
  "architectures", "model_type", "transformers_version", "transformers.js_config", "torch_dtype", "dtype",
  "initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "max_window_layers",
  "router_aux_loss_coef", "output_router_logits", "bos_token_id", "eos_token_id", "pad_token_id",
  "unk_token_id", "sep_token_id", "decoder_start_token_id", "is_llama_config", "id2label", "label2id",
  "problem_type", "tokenizer_class", "return_dict", "chunk_size_feed_forward", "prefix", "unsloth_version",
  "unsloth_fixed", "no_rope_layer_interval", "max_sequence_length",
}  # fmt: skip
_NEUTRAL = {  # allowed with these values only; others as well when they are empty (see `_is_empty`)
  "hidden_act": ("silu", "swish"),
  "decoder_sparse_step": (1,),
  "partial_rotary_factor": (1, 1.0),
}
_ROPE_FIELDS = {
  "default": set(),
  "linear": {"factor"},
  "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
  "yarn": {
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "truncate",
  },
}  # fmt: skip
_ROPE_HARMLESS = {"rope_type", "type", "rope_theta", "finetuned"}


class _Fields:
  """The fields of a config.json, taken one by one; what is left over at the end is unknown."""

  def __init__(self, values: dict):
    self.left, self.faults = dict(values), []

  def get(self, name: str, kind: type = int, default=None):
    """A positive number or a bool; anything else is a fault, and a stand-in is returned."""
    value = self.left.pop(name, None)
    if value is None:
      value = default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
      value = float(value)
    right = isinstance(value, kind) and (kind is bool) == isinstance(value, bool)
    if not right or (kind is not bool and not 0 < value < math.inf):
      self.faults.append(f"{name} is missing" if value is None else f"{name} is {value!r:.40}")
      return kind(1)
    return value

  def take(self, name: str):
    return self.left.pop(name, None)


def config_from_hf(values: dict, source: object = "config.json") -> ModelConfig:
  """The architecture that a Hugging Face config.json describes.

  Args:
    values: its content, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or of
      transformers 5 (`rope_parameters`).
    source: named in errors.

  Raises:
    InputError: a family that is not run, or fields that are missing, impossible, unknown, or ask
      for a feature that is not implemented; all of them named at once.
  """
  family, kind = family_of(values, source)
  fields = _Fields(values)
  heads, dim, layers = (
    fields.get(k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers")
  )
  found = {
    "vocab_size": fields.get("vocab_size"),
    "num_layers": layers,
    "model_dim": dim,
    "num_heads": heads,
    "num_groups": fields.get("num_key_value_heads", default=heads),
    "head_dim": fields.get("head_dim", default=128 if kind == "qwen3" else max(dim // heads, 1)),
    "ffn_dim": fields.get("intermediate_size"),
    "context": fields.get("max_position_embeddings"),
    "norm_eps": fields.get("rms_norm_eps", float, default=1e-6),
    "tied_head": fields.get("tie_word_embeddings", bool, default=family.tied_head),
    "qk_norm": family.qk_norm,
    "qkv_bias": family.qkv_bias,
  }
  found |= _rope(fields, family, found["context"])
  if found["rope_scaling"] is not None and found["rope_scaling"].kind == "yarn":
    scaling = found["rope_scaling"]  # stretched by hand, max_position_embeddings often stays behind
    found["context"] = max(found["context"], int(scaling.factor * scaling.original_context))
  if family.moe:
    experts = fields.take("num_local_experts")  # transformers 5 writes this name
    found |= {
      "num_experts": fields.get("num_experts", default=experts),
      "experts_per_token": fields.get("num_experts_per_tok"),
      "moe_ffn_dim": fields.get("moe_intermediate_size"),
      "norm_topk_prob": fields.get("norm_topk_prob", bool, default=False),
    }
  if family.nope:
    found["nope_layers"] = _nope_layers(fields, layers)
  _sliding(fields, kind)
  for name, value in fields.left.items():
    if name in _HARMLESS or name.startswith("_") or value in _NEUTRAL.get(name, ()):
      continue
    if not _is_empty(value):
      known = (
        "is not supported"
        if name in _NEUTRAL or "bias" in name
        else "is not known, and may change results"
      )
      fields.faults.append(f"{name} {value!r:.40} {known}")
  if not fields.faults:
    try:
      return ModelConfig(**found)
    except ValueError as error:
      fields.faults.append(str(error))
  raise InputError(
    "--model",
    source,
    f"describes a model that cannot be run: {listed(fields.faults)}; give another model",
  )


def family_of(values: dict, source: object = "config.json") -> tuple[Family, str]:
  """The family of a config.json, and its model_type.

  Raises:
    InputError: none that is run, weights in a quantised format, or a class of another kind.
  """
  kind = values.get("model_type")
  kind = kind if isinstance(kind, str) else repr(kind)
  known = ", ".join(FAMILIES)
  if kind in _SLIDING:
    raise InputError(
      "--model",
      source,
      f"is of family {kind}, which has sliding-window layers of its own; they would have to be searched "
      f"around, and are not run. Give a model of full attention: {known}",
    )
  if kind not in FAMILIES:
    raise InputError(
      "--model", source, f"is of family {kind:.40}, which is not run; give one of: {known}"
    )
  family = FAMILIES[kind]
  if (found := values.get("architectures")) and found != [family.architecture]:
    raise InputError(
      "--model",
      source,
      f"is of class {found!s:.60}, not a language model; give a {family.architecture}",
    )
  if quantised := values.get("quantization_config"):
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    raise InputError(
      "--model",
      source,
      f"has weights quantised by {method!s:.40}, which are not read; give the unquantised model, or a .gguf file",
    )
  return family, kind


def _rope(fields: _Fields, family: Family, context: int) -> dict:
  """rope_theta and rope_scaling from either spelling."""
  new, old = fields.take("rope_parameters"), fields.take("rope_scaling")
  plain = fields.left.pop("rope_theta", None)
  rope = new or old or {}
  if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
    fields.faults.append(f"rope_parameters {rope!r:.60} is not one set of parameters")
    rope = {}
  kind = str(rope.get("rope_type") or rope.get("type") or "default")
  r = _Fields({key: value for key, value in rope.items() if value is not None})
  theta = _Fields({"rope_theta": r.left.get("rope_theta", plain)})
  out = {
    "rope_theta": theta.get("rope_theta", float, default=family.rope_theta),
    "rope_scaling": None,
  }
  fields.faults += theta.faults
  if kind not in _ROPE_FIELDS:
    fields.faults.append(
      f"rope_scaling of type {kind!r:.40} is not supported (linear, llama3 and yarn are)"
    )
    return out
  for name in r.left.keys() - _ROPE_FIELDS[kind] - _ROPE_HARMLESS:
    if (name, r.left[name]) != ("partial_rotary_factor", 1):
      fields.faults.append(
        f"{name} {r.left[name]!r:.40} in rope_scaling is not known, and may change results"
      )
  if kind == "default":
    return out
  scaling = {"kind": kind}
  if kind != "linear":
    # Older configs of phi's kind keep it outside; transformers prefers that one.
    name = "original_max_position_embeddings"
    original = r.get(name, default=context)
    scaling["original_context"] = fields.get(name, default=original)
  default = context / scaling["original_context"] if kind == "yarn" else None
  scaling["factor"] = r.get("factor", float, default=default)
  if kind == "llama3":
    scaling |= {name: r.get(name, float) for name in ("low_freq_factor", "high_freq_factor")}
  if kind == "yarn":
    scaling |= {
      "beta_fast": r.get("beta_fast", float, default=32.0),
      "beta_slow": r.get("beta_slow", float, default=1.0),
      "truncate": r.get("truncate", bool, default=True),
      "attention_factor": _attention_factor(r, scaling["factor"]),
    }
  fields.faults += [f"{fault} in rope_scaling" for fault in r.faults]
  if not r.faults:
    try:
      out["rope_scaling"] = RopeScaling(**scaling)
    except ValueError as error:
      fields.faults.append(str(error))
  return out


def _attention_factor(r: _Fields, factor: float) -> float:
  """YaRN's factor of cos and sin: given, or a ratio of two mscales, or 0.1 ln(factor) + 1."""

  def mscale(weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

  names = ("mscale", "mscale_all_dim")
  weights = [r.get(name, float) if r.left.get(name) else 0.0 for name in names]
  usual = mscale(weights[0]) / mscale(weights[1]) if all(weights) else mscale(1.0)
  return r.get("attention_factor", float, default=usual)


def _nope_layers(fields: _Fields, layers: int) -> tuple[int, ...]:
  """SmolLM3: every fourth layer, or those marked 0 in no_rope_layers."""
  interval = fields.get("no_rope_layer_interval", default=4)
  marks = fields.take("no_rope_layers")
  if marks is None:
    marks = [int((l + 1) % interval != 0) for l in range(layers)]
  if (
    not isinstance(marks, list) or len(marks) != layers or not all(mark in (0, 1) for mark in marks)
  ):
    fields.faults.append(f"no_rope_layers {marks!r:.40} is not a list of {layers} zeros and ones")
    return ()
  return tuple(l for l, mark in enumerate(marks) if not mark)


def _sliding(fields: _Fields, kind: str) -> None:
  """Refuses sliding layers of the model's own."""
  # Mistral has no switch: a window there is used, and is 4096 where the field is absent.
  default = 4096 if kind == "mistral" else None
  window, used = fields.left.pop("sliding_window", default), fields.take("use_sliding_window")
  types = fields.take("layer_types")
  by_type = types is not None and not (
    isinstance(types, list) and set(map(str, types)) <= {"full_attention"}
  )
  if by_type or used or (kind == "mistral" and window is not None):
    fields.faults.append(
      f"its own sliding window ({f'sliding_window {window}' if window else 'layer_types'}) would change what head masks mean"
    )


def _is_empty(value: object) -> bool:
  """A field that says nothing or switches off changes nothing, whatever its name."""
  return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def listed(faults: list[str]) -> str:
  """The first few faults, and how many more."""
  more = len(faults) - _SHOWN
  return ", ".join(faults[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_config(folder: pathlib.Path) -> dict:
  """The content of a folder's config.json.

  Raises:
    InputError: none there, or not JSON.
  """
  path = pathlib.Path(folder) / "config.json"
  try:
    values = json.loads(path.read_text("utf-8"))
  except OSError as error:
    raise InputError(
      "--model",
      folder,
      f"has no readable config.json ({error.strerror}); give a Hugging Face folder or a .gguf file",
    ) from None
  except ValueError:
    values = None
  if not isinstance(values, dict):
    raise InputError("--model", path, "is not JSON; fetch the model again")
  return values


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> dict:
  """The config.json that Hugging Face reads `config` from, in the form all versions read.

  Raises:
    InputError: a combination of features that no family has.
  """
  c = config
  features = (c.qk_norm, c.qkv_bias, bool(c.num_experts), bool(c.nope_layers))
  kinds = [k for k, f in FAMILIES.items() if (f.qk_norm, f.qkv_bias, f.moe, f.nope) == features]
  if not kinds:
    raise InputError("export", "", f"no Hugging Face family has these features together: {config}")
  kind = kinds[0]
  values = {
    "architectures": [FAMILIES[kind].architecture],
    "model_type": kind,
    "torch_dtype": dtype,
    "vocab_size": c.vocab_size,
    "hidden_size": c.model_dim,
    "intermediate_size": c.ffn_dim,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_groups,
    "head_dim": c.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": c.context,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": c.rope_theta,
    "rope_scaling": _scaling_to_hf(c.rope_scaling),
    "tie_word_embeddings": c.tied_head,
    # Hugging Face's defaults for these may lie beyond a small vocabulary.
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
  }  # fmt: skip
  if kind != "llama":
    values["use_sliding_window"] = False
  if kind != "qwen2":  # there the biases are not a choice, and the field is not known
    values["attention_bias"] = False
  if c.num_experts:
    values |= {
      "num_experts": c.num_experts,
      "num_experts_per_tok": c.experts_per_token,
      "moe_intermediate_size": c.moe_ffn_dim,
      "norm_topk_prob": c.norm_topk_prob,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    }
  if c.nope_layers:
    values["no_rope_layers"] = [int(l not in c.nope_layers) for l in range(c.num_layers)]
  return values


def _scaling_to_hf(scaling: RopeScaling | None) -> dict | None:
  if scaling is None:
    return None
  values = {"rope_type": scaling.kind, "factor": scaling.factor}
  if scaling.kind != "linear":
    values["original_max_position_embeddings"] = scaling.original_context
  names = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
  }.get(scaling.kind, ())
  return values | {name: getattr(scaling, name) for name in names}
