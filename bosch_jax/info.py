"""`python run.py models` and `python run.py info`: what can be run, and what a ratio would save."""

import dataclasses

from rich.console import Console
from rich.table import Table

from bosch_jax.report import human_bytes
from models.config import ModelConfig
from models.errors import InputError

# How each family was verified; tests/models/hf_parity_test.py is where.
_VERIFIED = "logits within 1e-4 of Hugging Face torch, and written back with equal logits"
_GGUF = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}


@dataclasses.dataclass(frozen=True)
class ModelsSettings:
  """List the model families that can be run, and how each was verified."""


@dataclasses.dataclass(frozen=True)
class InfoSettings:
  """Show a model's layers, head groups, parameters and key/value cache, and what a ratio saves."""

  model: str = "smollm2-135m"
  """Model: smollm2-135m, a .gguf file, a Hugging Face folder, or an id such as Qwen/Qwen3-1.7B."""
  ratio: float = 0.5
  """Share of key/value head groups that would become local."""
  window: int = 1024
  """Tokens a local head would see, itself included."""
  context: int = 0
  """Tokens to reckon the cache for. Default: the model's own context."""

  def __post_init__(self):
    if not 0 <= self.ratio <= 1:
      raise InputError("--ratio", self.ratio, "must be a share from 0 to 1; use for example 0.5")
    if self.window < 1:
      raise InputError("--window", self.window, "must be a positive integer; use 1 or more")
    if self.context < 0:
      raise InputError(
        "--context", self.context, "must be positive; leave it out for the model's own"
      )


def models_command(settings: ModelsSettings) -> None:
  """Prints the families."""
  from models.families import FAMILIES

  table = Table("family", "models", "read from", title="model families", title_justify="left")
  for name, family in FAMILIES.items():
    table.add_row(name, family.models, "safetensors, GGUF" if name in _GGUF else "safetensors")
  console = Console()
  console.print(table)
  console.print(
    f"Verified for each: {_VERIFIED}, on random models of four GQA ratios (tests/models/hf_parity_test.py).\n"
    "GGUF files: every quantisation the gguf package dequantises; byte-level vocabularies of Llama 3, Qwen and SmolLM2, "
    "SentencePiece ones of Llama 2 and Mistral; llama3 scaling (other scalings and Mixtral's experts are refused).\n"
    "Rotary scaling: linear, llama3, yarn. Refused by name: families with sliding-window layers of their own "
    "(Gemma 2 and 3, gpt-oss, Qwen2 with use_sliding_window), and any config.json field that is not known.\n"
    "Default model: smollm2-135m (family llama), fetched by itself.",
    highlight=False,
  )


def info_command(settings: InfoSettings) -> None:
  """Prints the facts of one model; reads its configuration only.

  Raises:
    InputError: unknown or unreadable model, or a context beyond it.
  """
  from models import registry

  config = registry.load_config(settings.model)
  table = Table(show_header=False, title=settings.model, title_justify="left")
  for name, value in facts(config, settings).items():
    table.add_row(name, value)
  Console().print(table, highlight=False)


def facts(config: ModelConfig, settings: InfoSettings) -> dict[str, str]:
  """What `info` prints, by row."""
  from models.hf_table import num_params
  from models.windows import num_local_for

  c, tokens = config, settings.context or config.context
  if tokens > c.context:
    raise InputError(
      "--context", tokens, f"is beyond this model's {c.context} tokens; use at most that"
    )
  local = num_local_for(settings.ratio, c.total_groups)
  full_bytes = c.kv_bytes(tokens)
  kept = min(tokens, settings.window)
  hybrid_bytes = (full_bytes // c.total_groups) * (c.total_groups - local)
  hybrid_bytes += c.kv_bytes(kept) // c.total_groups * local
  total, active = num_params(c), num_params(c, active=True)
  rope = f"theta {c.rope_theta:g}"
  if c.rope_scaling:
    rope += f", {c.rope_scaling.kind} x {c.rope_scaling.factor:g}"
  if c.nope_layers:
    rope += f", none in {len(c.nope_layers)} layers"
  features = [
    name
    for name, there in (
      ("q/k norm", c.qk_norm), ("q/k/v bias", c.qkv_bias), ("tied head", c.tied_head)
    )
    if there
  ]  # fmt: skip
  rows = {
    "layers": str(c.num_layers),
    "query heads": f"{c.num_heads} of {c.head_dim} dimensions",
    "head groups": f"{c.num_groups} a layer ({c.heads_per_group} query heads each), {c.total_groups} in all",
    "width": f"{c.model_dim}, feed-forward {c.ffn_dim}" if not c.num_experts else str(c.model_dim),
    "vocabulary": str(c.vocab_size),
    "context": f"{c.context} tokens",
    "rotary embedding": rope,
  }
  if c.num_experts:
    rows["experts"] = f"{c.experts_per_token} of {c.num_experts} a token, {c.moe_ffn_dim} wide each"
  if features:
    rows["features"] = ", ".join(features)
  return rows | {
    "parameters": _count(total) + (f", {_count(active)} of them active" if c.num_experts else ""),
    "KV cache": f"{human_bytes(c.kv_bytes(1))} a token, {human_bytes(full_bytes)} at {tokens} tokens (bf16)",
    f"at ratio {settings.ratio:g}, window {settings.window}": f"{local} of {c.total_groups} groups local, {human_bytes(hybrid_bytes)}: saves "
    f"{100 * (1 - hybrid_bytes / full_bytes):.1f}%",
    "fingerprint": c.fingerprint,
  }


def _count(number: int) -> str:
  return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
