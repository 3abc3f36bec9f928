"""Hugging Face safetensors folders to the parameter tree, tensor by tensor."""

import concurrent.futures
import json
import os
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from models import hf_table
from models.config import ModelConfig
from models.errors import InputError
from models.families import listed
from models.safetensors_file import DTYPES, Entry, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Tables of frequencies that old checkpoints carry along; they follow from config.json.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


def open_folder(folder: str | os.PathLike) -> dict[str, Entry]:
  """Every tensor of a folder, from the files its index names, or from model.safetensors.

  Raises:
    InputError: no weights there, or files missing, damaged, or without a tensor the index names.
  """
  folder = pathlib.Path(folder)
  if not (folder / INDEX).exists():
    if not (folder / SINGLE).exists():
      other = next((p.name for p in folder.glob("*.bin")), None)
      raise InputError(
        "--model",
        folder,
        f"has no {SINGLE} and no {INDEX}"
        + (f" ({other} is a pickle, which is not read)" if other else "")
        + "; give a folder of safetensors",
      )
    return read_header(folder / SINGLE)
  try:
    where = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    files = sorted(set(where.values()))
    if not all(isinstance(f, str) and pathlib.PurePath(f).name == f for f in files):
      raise ValueError
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    raise InputError("--model", folder / INDEX, "is damaged; fetch the model again") from None
  if absent := [f for f in files if not (folder / f).is_file()]:
    raise InputError(
      "--model", folder, f"lacks {listed(absent)}, named in {INDEX}; fetch the model again"
    )
  shards = {f: read_header(folder / f) for f in files}
  if lost := [n for n, f in where.items() if n not in shards[f]]:
    raise InputError(
      "--model", folder, f"does not hold {listed(lost)} where {INDEX} says; fetch the model again"
    )
  return {name: shards[f][name] for name, f in where.items()}


def load_params(
  folder: str | os.PathLike,
  config: ModelConfig,
  dtype=jnp.float32,
  sharding: Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None = None,
) -> dict:
  """The parameter tree of `models.transformer`, read lazily.

  Beside the tree itself, memory holds one stacked parameter and a few single tensors.

  Args:
    folder: of safetensors, in one file or several.
    config: its architecture.
    dtype: of the returned arrays; the stored type if that is None.
    sharding: from a parameter's path ("layers/attn/q/kernel") and shape to where it shall lie, for
      example `NamedSharding`s of a mesh. None = the default device.

  Raises:
    InputError: tensors missing, unexpected, mis-shaped or of a type that is not read; all of them
      named at once, before any weight is read.
  """
  entries, rows = open_folder(folder), hf_table.table(config)
  _check(entries, config, rows, folder)
  params: dict = {}
  with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
    for row in rows:
      indices = list(row.indices())
      stored = [entries[row.name(index)] for index in indices]
      kind = (
        jnp.dtype(dtype) if dtype is not None else np.result_type(*(DTYPES[e.kind] for e in stored))
      )
      stacked = np.empty(row.full_shape, kind)

      def fill(i, row=row, indices=indices, stored=stored, stacked=stacked):
        stacked[indices[i]] = row.to_ours(stored[i].read())

      list(pool.map(fill, range(len(indices))))
      *parents, leaf = row.target.split("/")
      node = params
      for parent in parents:
        node = node.setdefault(parent, {})
      node[leaf] = _place(stacked, sharding and sharding(row.target, row.full_shape))
      del stacked, fill
  return params


def _place(value: np.ndarray, sharding) -> jax.Array:
  if sharding is None:
    array = jnp.asarray(value)
  else:
    # Only this process's slices are copied to its devices, so it serves several hosts too.
    array = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
  return jax.block_until_ready(array)  # copies run late, and would hold on to `value`


def _check(
  entries: dict[str, Entry], config: ModelConfig, rows: list[hf_table.Row], folder
) -> None:
  expected = {row.name(index): row.stored for row in rows for index in row.indices()}
  faults = []
  for name, shape in expected.items():
    if name not in entries:
      faults.append(f"{name} is missing")
    elif entries[name].shape != shape:
      faults.append(f"{name} has shape {entries[name].shape} instead of {shape}")
    elif entries[name].kind not in DTYPES:
      faults.append(f"{name} is of type {entries[name].kind:.20}, which is not read")
  for name in entries.keys() - expected.keys():
    if name == "lm_head.weight" and config.tied_head:
      if not _same(entries, name, "model.embed_tokens.weight"):
        faults.append("lm_head.weight differs from the embedding that config.json ties it to")
    elif not _DERIVED.fullmatch(name):
      beyond = hf_table.find(rows, name)
      faults.append(
        f"{name} is {'of a layer or expert beyond the last' if beyond else 'unexpected'}"
      )
  if faults:
    raise InputError(
      "--model",
      folder,
      f"does not hold the tensors its config.json describes: {listed(sorted(faults))}; fetch the model again",
    )


def _same(entries: dict[str, Entry], a: str, b: str) -> bool:
  """Two tensors are equal bit for bit."""
  if b not in entries or (entries[a].kind, entries[a].shape) != (entries[b].kind, entries[b].shape):
    return False
  first, second = (entries[name].read() for name in (a, b))
  return first.tobytes() == second.tobytes()
