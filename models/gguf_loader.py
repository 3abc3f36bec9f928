"""GGUF files to (config, parameters): read tensor by tensor, dequantised, stacked by layer."""

import concurrent.futures
import dataclasses
import math
import os
import re

import gguf
import jax.numpy as jnp
import numpy as np

from models import gguf_rope
from models.config import ModelConfig
from models.errors import InputError
from models.gguf_file import GGUFFile, open_gguf

_SHOWN = 5  # faults spelt out in one message; the rest are counted

# Architectures of the common decoder, and what each adds to it.
_ARCHITECTURES = {
  "llama": {},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  # Not written in files: of this architecture the weights of a token's experts always sum to 1.
  "qwen3moe": {"qk_norm": True, "norm_topk_prob": True},
}
# Keys of the architecture that `config_of` reads or that change nothing. Any other one is refused:
# it may stand for a feature that would be ignored here without a word.
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_NEUTRAL = {  # allowed with these values only
  "expert_count": (0,),
  "expert_used_count": (0,),
  "rope.scaling.type": ("none",),
  "rope.scale_linear": (1.0,),
  "attention.causal": (True,),
}


def config_of(file: GGUFFile) -> ModelConfig:
  """The architecture a GGUF file describes.

  Raises:
    InputError: an architecture that is not read, or fields that are missing, impossible, or ask
      for a feature that would change results and is not implemented; all of them named at once.
  """
  fields, faults = dict(file.fields), []
  architecture = fields.get("general.architecture")
  if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
    raise InputError(
      "--model",
      file.path,
      f"is of architecture {architecture!r:.40}, and only {', '.join(_ARCHITECTURES)} are read from "
      "GGUF files; give another model, or a Hugging Face folder",
    )

  def get(key, default=None, kind=int):
    value = fields.pop(f"{architecture}.{key}", default)
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
      faults.append(f"{architecture}.{key} is {'missing' if value is None else f'{value!r:.40}'}")
      return kind(1)
    return value

  heads, dim = get("attention.head_count"), get("embedding_length")
  head_dim = get("attention.key_length", max(dim // heads, 1))
  tokens = fields.get("tokenizer.ggml.tokens")
  found = {
    "vocab_size": get("vocab_size", len(tokens) if isinstance(tokens, list) else None),
    "num_layers": get("block_count"),
    "model_dim": dim,
    "num_heads": heads,
    "num_groups": get("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "ffn_dim": get("feed_forward_length"),
    "context": get("context_length"),
    "rope_theta": get("rope.freq_base", 10000.0, float),
    # Written as float32: 9.99999974e-06 was 1e-05, and is again.
    "norm_eps": float(f"{get('attention.layer_norm_rms_epsilon', kind=float):.6g}"),
    "tied_head": "output.weight" not in file.tensors,
    **_ARCHITECTURES[architecture],
  }
  if architecture == "qwen3moe":
    found |= {
      "num_experts": get("expert_count"),
      "experts_per_token": get("expert_used_count"),
      "moe_ffn_dim": get("expert_feed_forward_length"),
    }
  for key in ("attention.value_length", "rope.dimension_count"):
    if (size := fields.pop(f"{architecture}.{key}", head_dim)) != head_dim:
      faults.append(f"{architecture}.{key} {size} differs from the head size {head_dim}")
  for key, value in fields.items():
    prefix, _, name = key.partition(".")
    if prefix == architecture and name not in _HARMLESS and value not in _NEUTRAL.get(name, ()):
      faults.append(f"{key} {value!r:.40} is not supported")
  if not faults:
    try:
      config = ModelConfig(**found)
    except ValueError as error:
      faults.append(str(error))
    else:
      scaling = gguf_rope.llama3_scaling(file, config) if _has_divisors(file) else None
      return dataclasses.replace(config, rope_scaling=scaling)
  raise InputError(
    "--model",
    file.path,
    f"describes a model that cannot be run: {_list(faults)}; give another model",
  )


def _has_divisors(file: GGUFFile) -> bool:
  """Whether the file's architecture scales its rotary frequencies by a tensor, and it is there."""
  return file.fields["general.architecture"] == "llama" and gguf_rope.TENSOR in file.tensors


def _list(faults: list[str]) -> str:
  more = len(faults) - _SHOWN
  text = ", ".join(faults[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
  return "".join(c if c.isprintable() else "?" for c in text)  # names of a damaged file


def _half_rotation(w_OxD: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q and k from ggml's interleaved rotary order to half-rotation order."""
  out, width = w_OxD.shape
  return w_OxD.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _table(
  c: ModelConfig, interleaved: bool
) -> list[tuple[str, tuple[int, ...], str, tuple[int, ...], object]]:
  """(GGUF name as a regex, stored shape, parameter path, shape of one layer, transform).

  The transform takes what is stored, `[out, in]`, to something that reshapes to a layer's shape.
  `interleaved`: rows of q and k stand in ggml's rotary order, as in every file of type llama.
  """
  V, D, K = c.vocab_size, c.model_dim, c.head_dim
  H, G = c.num_heads, c.num_groups
  same, transposed, layer = np.asarray, np.transpose, r"blk\.(\d+)\."

  def each_transposed(w):
    return w.swapaxes(1, 2)

  def rotary(heads):
    return (lambda w: _half_rotation(w, heads).T) if interleaved else transposed

  rows = [
    (r"token_embd\.weight", (V, D), "embed/embedding", (V, D), same),
    (r"output_norm\.weight", (D,), "final_norm/scale", (D,), same),
    (layer + r"attn_norm\.weight", (D,), "layers/attn_norm/scale", (D,), same),
    (layer + r"ffn_norm\.weight", (D,), "layers/mlp_norm/scale", (D,), same),
    (layer + r"attn_q\.weight", (H * K, D), "layers/attn/q/kernel", (D, H, K), rotary(H)),
    (layer + r"attn_k\.weight", (G * K, D), "layers/attn/k/kernel", (D, G, K), rotary(G)),
    (layer + r"attn_v\.weight", (G * K, D), "layers/attn/v/kernel", (D, G, K), transposed),
    (layer + r"attn_output\.weight", (D, H * K), "layers/attn/o/kernel", (H, K, D), transposed),
  ]
  E, F = c.num_experts, c.moe_ffn_dim or c.ffn_dim
  for name, (out, width) in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
    if E:  # the matrices of all experts in one tensor
      pattern, target = rf"ffn_{name}_exps\.weight", f"layers/mlp/experts/{name}/kernel"
      rows.append((layer + pattern, (E, out, width), target, (E, width, out), each_transposed))
    else:
      pattern, target = rf"ffn_{name}\.weight", f"layers/mlp/{name}/kernel"
      rows.append((layer + pattern, (out, width), target, (width, out), transposed))
  if E:
    pattern = layer + r"ffn_gate_inp\.weight"
    rows.append((pattern, (E, D), "layers/mlp/router/kernel", (D, E), transposed))
  for name, heads in (("q", H), ("k", G), ("v", G)):
    if c.qkv_bias:
      target = f"layers/attn/{name}/bias"
      rows.append((layer + rf"attn_{name}\.bias", (heads * K,), target, (heads, K), same))
    if c.qk_norm and name != "v":
      target = f"layers/attn/{name}_norm/scale"
      rows.append((layer + rf"attn_{name}_norm\.weight", (K,), target, (K,), same))
  if not c.tied_head:
    rows.append((r"output\.weight", (V, D), "head/kernel", (D, V), transposed))
  return rows


def load_params(file: GGUFFile, config: ModelConfig, dtype=jnp.float32) -> dict:
  """The parameter tree of `models.transformer`.

  Beside the tree itself, memory holds one stacked parameter and a few single tensors.

  Args:
    dtype: of the returned arrays.

  Raises:
    InputError: tensors missing, unexpected, mis-shaped or of an unknown format; all of them named
      at once, before any weight is read.
  """
  table = _table(config, interleaved=file.fields["general.architecture"] == "llama")
  _check_tensors(file, config, table)
  params = {}
  with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
    for pattern, _, target, shape, transform in table:
      names = _names(pattern, config.num_layers)
      stacked = np.empty((len(names), *shape), jnp.dtype(dtype))

      def fill(i, names=names, stacked=stacked, transform=transform, shape=shape):
        stacked[i] = transform(file.read(names[i])).reshape(shape)

      list(pool.map(fill, range(len(names))))  # numpy lets go of the interpreter while it computes
      node = params
      *parents, leaf = target.split("/")
      for parent in parents:
        node = node.setdefault(parent, {})
      node[leaf] = jnp.asarray(stacked if "blk" in pattern else stacked[0])
      del stacked
  return params


def _names(pattern: str, num_layers: int) -> list[str]:
  """Names a regex of the table stands for, in order of the layers."""
  name = pattern.replace("\\.", ".")
  if r"(\d+)" not in name:
    return [name]
  return [name.replace(r"(\d+)", str(l)) for l in range(num_layers)]


def _check_tensors(file: GGUFFile, config: ModelConfig, table: list) -> None:
  faults, expected = [], {}
  # A damaged layer count must not make a list of billions of names: one past the file will do.
  layers = min(config.num_layers, len(file.tensors) + 1)
  for pattern, stored, *_ in table:
    expected |= dict.fromkeys(_names(pattern, layers), stored)
  for name, shape in expected.items():
    if name not in file.tensors:
      faults.append(f"{name} is missing")
    elif file.tensors[name].shape != shape:
      faults.append(f"{name} has shape {file.tensors[name].shape} instead of {shape}")
  read = expected.keys() | ({gguf_rope.TENSOR} if _has_divisors(file) else set())
  for name in file.tensors.keys() - read:
    known = any(re.fullmatch(pattern, name) for pattern, *_ in table)
    faults.append(f"{name} is {'of a layer beyond the last' if known else 'unexpected'}")
  for kind in {t.kind for t in file.tensors.values()}:
    try:
      _, size = gguf.GGML_QUANT_SIZES[kind]
      gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
      faults.append(f"format {kind.name} cannot be read")
  if faults:
    faults.sort()
    raise InputError(
      "--model",
      file.path,
      f"does not hold the tensors of its model: {_list(faults)}; "
      "fetch the file again or give another model",
    )


def load_gguf(path: str | os.PathLike, dtype=jnp.float32) -> tuple[ModelConfig, dict]:
  """Configuration and parameters of a model in a GGUF file.

  Args:
    path: the file, in any quantisation format that the `gguf` package reads.
    dtype: of the parameters.

  Returns:
    The configuration, and the parameter tree of `models.transformer`.

  Raises:
    InputError: whatever is wrong with the file, in one sentence.
  """
  file = open_gguf(path)
  config = config_of(file)
  return config, load_params(file, config, dtype)
