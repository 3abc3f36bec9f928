"""Tiny Hugging Face models with random weights, and this project's logits of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import families, safetensors_loader
from models.config import ModelConfig
from models.transformer import Transformer
from models.windows import FULL

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# No two sizes are equal, and no size is a multiple of all others: axes cannot be confused.
SIZES = {
  "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
  "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
SPECIFIC = {
  "llama": {},
  "mistral": {"sliding_window": None},
  "qwen2": {},
  "qwen3": {"head_dim": 16},
  "qwen3_moe": {"head_dim": 16, **MOE},
  "smollm3": {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 64,
  "rope_theta": 1e4,
}
LLAMA3 = {
  "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 5e5,
  "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def hf_model(family: str, seed: int = 0, **changes):
  """A model of a family whose random weights make attention sharp and every weight count."""
  values = {**SIZES, **SPECIFIC[family], **changes}
  config_class, model_class = (
    getattr(transformers, families.FAMILIES[family].architecture.replace("ForCausalLM", suffix))
    for suffix in ("Config", "ForCausalLM")
  )
  torch.manual_seed(seed)
  model = model_class(config_class(**values)).eval()
  with torch.no_grad():
    for name, p in model.named_parameters():
      p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1 and name.endswith("weight")))
  return model


def hf_logits(model, ids_BxT: np.ndarray, positions_BxT=None) -> np.ndarray:
  positions = None if positions_BxT is None else torch.tensor(np.asarray(positions_BxT))
  with torch.no_grad():
    return model(torch.tensor(ids_BxT), position_ids=positions).logits.float().numpy()


def load(folder, dtype=jnp.float32) -> tuple[ModelConfig, dict]:
  config = families.config_from_hf(families.read_config(folder))
  return config, safetensors_loader.load_params(folder, config, dtype)


# What is compiled for one short text is quicker in all without optimisation.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def _apply(config: ModelConfig):
  return quick_jit(Transformer(config).apply)


def logits(
  config: ModelConfig, params: dict, ids_BxT: np.ndarray, positions_BxT=None
) -> np.ndarray:
  windows = jnp.full((config.num_layers, config.num_heads), FULL, jnp.int32)
  positions = None if positions_BxT is None else jnp.asarray(positions_BxT, jnp.int32)
  return np.asarray(
    _apply(config)({"params": params}, jnp.asarray(ids_BxT, jnp.int32), windows, positions)
  )


def random_ids(length: int, rows: int = 1, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (rows, length))
