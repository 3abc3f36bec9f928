"""From what the user calls a model to its configuration, parameters and tokenizer."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from models import gguf_loader, hybrid_folder, safetensors_loader
from models.config import ModelConfig
from models.download import DEFAULT, HUB_ID, default_gguf, hub_folder
from models.errors import InputError
from models.gguf_file import open_gguf
from models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
  """A model ready to run.

  Attributes:
    name: what results call it: the alias, the id, or the name of the file or folder.
    config: architecture.
    params: parameter tree (see `models.transformer`).
    tokenizer: its tokenizer.
  """

  name: str
  config: ModelConfig
  params: dict
  tokenizer: Tokenizer


def resolve(model: str, weights: bool = True) -> pathlib.Path:
  """The GGUF file or Hugging Face folder that `model` stands for, fetched if need be.

  Args:
    model: "smollm2-135m", the path of a .gguf file or of a Hugging Face folder, or the id of a
      model on huggingface.co, such as "Qwen/Qwen3-1.7B".
    weights: False = the configuration is enough.

  Raises:
    InputError: anything else, or a model that cannot be had.
  """
  if model == DEFAULT:
    return default_gguf()
  path = pathlib.Path(model).expanduser()
  if path.suffix == ".gguf" or path.is_file() or (model and (path / "config.json").is_file()):
    return path
  if HUB_ID.fullmatch(model) and not path.exists():
    return hub_folder(model, weights)
  raise InputError(
    "--model",
    model,
    ("is a folder without config.json" if path.is_dir() else "is not known")
    + f"; give {DEFAULT} (the default, fetched by itself), the path of a .gguf file, a Hugging Face folder "
    "with config.json, or an id such as Qwen/Qwen3-1.7B",
  )


def load_config(model: str) -> ModelConfig:
  """The architecture of a model, without reading its weights.

  Raises:
    InputError: unknown or unreadable model.
  """
  path = resolve(model, weights=False)
  if path.is_dir():
    return hybrid_folder.read_config(path)[0]
  return gguf_loader.config_of(open_gguf(path))


def load_tokenizer(model: str) -> Tokenizer:
  """The tokenizer of a model, without reading its weights.

  Raises:
    InputError: unknown or unreadable model.
  """
  path = resolve(model, weights=False)
  return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(open_gguf(path))


def load(model: str = DEFAULT, dtype=jnp.float32, sharding=None) -> Loaded:
  """Configuration, parameters and tokenizer of a model.

  Args:
    model: as in `resolve`.
    dtype: of the parameters.
    sharding: where parameters of a Hugging Face folder shall lie (see
      `models.safetensors_loader.load_params`); None = the default device.

  Raises:
    InputError: unknown or unreadable model.
  """
  path = resolve(model)
  if path.is_dir():
    config, tokenizer = hybrid_folder.read_config(path)[0], Tokenizer.from_folder(path)
    name = (
      model if HUB_ID.fullmatch(model) and not pathlib.Path(model).exists() else path.resolve().name
    )
  else:
    file = open_gguf(path)
    config, tokenizer = gguf_loader.config_of(file), Tokenizer.from_gguf(file)
    name = DEFAULT if model == DEFAULT else path.name
  if tokenizer.vocab_size > config.vocab_size:  # jax would clamp such ids without a word
    raise InputError(
      "--model",
      path,
      f"has {tokenizer.vocab_size} tokens but embeds {config.vocab_size}; give another model",
    )
  weights = load_params(path, dtype, sharding) if path.is_dir() else _gguf(file, dtype, sharding)
  return Loaded(name, *weights, tokenizer)


def load_params(path: pathlib.Path, dtype=jnp.float32, sharding=None) -> tuple[ModelConfig, dict]:
  """Configuration and parameters of a .gguf file or Hugging Face folder; arguments as in `load`,
  and of a folder the stored dtype if that is None."""
  if path.is_dir():
    config, order = hybrid_folder.read_config(path)
    params = safetensors_loader.load_params(path, config, dtype, sharding)
    return config, hybrid_folder.restore(params, order, config)
  return _gguf(gguf_loader.open_gguf(path), dtype, sharding)


def _gguf(file: gguf_loader.GGUFFile, dtype, sharding) -> tuple[ModelConfig, dict]:
  config = gguf_loader.config_of(file)
  params = gguf_loader.load_params(file, config, dtype)
  if sharding is not None:
    params = jax.tree_util.tree_map_with_path(
      lambda where, p: jax.device_put(p, sharding("/".join(key.key for key in where), p.shape)),
      params,
    )
  return config, params
