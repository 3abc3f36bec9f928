"""Parameters to a Hugging Face folder: config.json, safetensors in shards, tokenizer."""

import math
import os
import pathlib

import jax
import numpy as np

from models import families, hf_table, safetensors_file
from models.config import ModelConfig
from models.errors import InputError
from models.safetensors_loader import INDEX, SINGLE
from models.tokenizer import Tokenizer
from models.windows import write_json

SHARD_BYTES = 5_000_000_000  # Hugging Face's own default


def save_folder(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: dict,
  tokenizer: Tokenizer | None = None,
  shard_bytes: int = SHARD_BYTES,
  extra: dict | None = None,
  files: dict[str, str] | None = None,
) -> pathlib.Path:
  """Writes a model that Hugging Face loads with the same logits.

  One tensor at a time is brought to the host. Weights keep their dtype, bit for bit.

  Args:
    folder: made if it is not there; must hold no model yet.
    config, params: the model, groups in the order of the checkpoint (see `models.hybridize`).
    tokenizer: its files are written too.
    shard_bytes: largest size of one file; a single larger tensor has a file of its own.
    extra: more fields of config.json.
    files: more files, name -> text.

  Returns:
    The folder.

  Raises:
    InputError: a folder that cannot be written or holds a model already, a dtype that safetensors
      folders do not have, or a model of no Hugging Face family.
    ValueError: parameters of other shapes than the config's.
  """
  folder = pathlib.Path(folder)
  if shard_bytes < 1:
    raise InputError("shard size", shard_bytes, "must be positive; use for example 5000000000")
  if (folder / "config.json").exists():
    raise InputError("export folder", folder, "holds a model already; give another folder")
  tensors = _tensors(config, params)
  dtypes = {dtype for _, _, dtype, _ in tensors}
  if unknown := dtypes - set(safetensors_file.DTYPES.values()):
    raise InputError(
      "export",
      "",
      f"parameters of dtype {listed_names(unknown)} cannot be written; convert them first",
    )
  dtype = listed_names({np.dtype(params["embed"]["embedding"].dtype)})
  values = families.config_to_hf(config, dtype) | (extra or {})
  if tokenizer is not None:
    values |= {
      f"{name}_token_id": i for name, i in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    }
  shards = _shards(tensors, shard_bytes)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    where = {}
    for i, shard in enumerate(shards):
      name = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
      safetensors_file.write(folder / name, shard)
      where |= dict.fromkeys((tensor[0] for tensor in shard), name)
    if len(shards) > 1:
      total = sum(_size(tensor) for tensor in tensors)
      write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    if tokenizer is not None:
      tokenizer.save(folder)
    for name, text in (files or {}).items():
      (folder / name).write_text(text, "utf-8")
    write_json(folder / "config.json", values)  # last: its presence means the folder is complete
  except OSError as error:
    raise InputError(
      "export folder", folder, f"cannot be written ({error.strerror}); give another"
    ) from None
  return folder


def listed_names(dtypes: set) -> str:
  return ", ".join(sorted(np.dtype(d).name for d in dtypes))


def _tensors(config: ModelConfig, params: dict) -> list:
  """(name, shape, dtype, maker) of every tensor, in the table's order."""
  leaves = {
    "/".join(key.key for key in path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  rows = hf_table.table(config)
  if wrong := leaves.keys() ^ {row.target for row in rows}:
    raise ValueError(
      f"parameters that the config does not have, or that are missing: {sorted(wrong)}"
    )
  tensors = []
  for row in rows:
    leaf = leaves[row.target]
    if leaf.shape != row.full_shape:
      raise ValueError(f"{row.target} is {leaf.shape}, the config says {row.full_shape}")
    for index in row.indices():

      def make(row=row, leaf=leaf, index=index):
        return row.to_hf(np.asarray(leaf[index] if index else leaf))

      tensors.append((row.name(index), row.stored, np.dtype(leaf.dtype), make))
  return tensors


def _size(tensor) -> int:
  _, shape, dtype, _ = tensor
  return math.prod(shape) * dtype.itemsize


def _shards(tensors: list, shard_bytes: int) -> list[list]:
  """Tensors in order, a new shard whenever the next one would not fit."""
  shards, used = [[]], 0
  for tensor in tensors:
    if shards[-1] and used + _size(tensor) > shard_bytes:
      shards.append([])
      used = 0
    shards[-1].append(tensor)
    used += _size(tensor)
  return shards
