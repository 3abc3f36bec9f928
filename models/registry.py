"""From what the user calls a model to its configuration, parameters and tokenizer."""

import dataclasses
import pathlib

import jax.numpy as jnp

from models import gguf_loader
from models.config import ModelConfig
from models.download import DEFAULT, default_gguf
from models.errors import InputError
from models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
  """A model ready to run.

  Attributes:
    name: what results call it: the alias, or the file's name.
    config: architecture.
    params: parameter tree (see `models.transformer`).
    tokenizer: its tokenizer.
  """

  name: str
  config: ModelConfig
  params: dict
  tokenizer: Tokenizer


def resolve(model: str) -> pathlib.Path:
  """The GGUF file that `model` stands for; the default model is fetched if it is not cached.

  Args:
    model: "smollm2-135m", or the path of a .gguf file.

  Raises:
    InputError: anything else, or a default model that cannot be had.
  """
  if model == DEFAULT:
    return default_gguf()
  path = pathlib.Path(model).expanduser()
  if path.suffix == ".gguf" or path.is_file():
    return path
  raise InputError(
    "--model", model,
    f"is not known; give {DEFAULT} (the default, fetched by itself) or the path of a .gguf file"
    + (" (folders and Hugging Face ids are not read yet)" if path.is_dir() or "/" in model else ""),
  )


def load_config(model: str) -> ModelConfig:
  """The architecture of a model, without reading its weights.

  Raises:
    InputError: unknown or unreadable model.
  """
  return gguf_loader.config_of(gguf_loader.open_gguf(resolve(model)))


def load(model: str = DEFAULT, dtype=jnp.float32) -> Loaded:
  """Configuration, parameters and tokenizer of a model.

  Args:
    model: "smollm2-135m", or the path of a .gguf file.
    dtype: of the parameters.

  Raises:
    InputError: unknown or unreadable model.
  """
  file = gguf_loader.open_gguf(resolve(model))
  config = gguf_loader.config_of(file)
  tokenizer = Tokenizer.from_gguf(file)
  if tokenizer.vocab_size > config.vocab_size:  # jax would clamp such ids without a word
    raise InputError(
      "--model", file.path,
      f"has {tokenizer.vocab_size} tokens but embeds {config.vocab_size}; give another model",
    )
  name = DEFAULT if model == DEFAULT else file.path.name
  return Loaded(name, config, gguf_loader.load_params(file, config, dtype), tokenizer)
