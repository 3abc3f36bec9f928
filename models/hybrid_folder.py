"""A hybrid model as a Hugging Face folder: natively where a family can say it, else with a torch module.

config.json's field `bosch` records what was done, so that the folder can be read back:

    format      "bosch-hybrid/1"
    model_type  of the family the model was before
    window, sinks
    local       L rows of G zeros and ones, in the order of the folder's weights; 1 = local
    order       null, or L rows: group g was group order[g] before (full ones were moved to the front)
"""

import os
import pathlib

import numpy as np

from models import export, families
from models.config import ModelConfig
from models.errors import InputError
from models.hybridize import dehybridize, hybridize
from models.tokenizer import Tokenizer
from models.windows import HeadMask

FORMAT = "bosch-hybrid/1"
MODULE, CACHE = (
  pathlib.Path(__file__).parent / "hf_hybrid" / f"{name}.py"
  for name in ("modeling_bosch", "hybrid_cache")
)
# Families that have a window of their own choice in every layer, and those that have one for all.
_BY_LAYER = {"qwen2", "qwen3", "smollm3"}
_FOR_ALL = {"qwen3_moe", "llama"}
_NATIVE_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def native_fields(
  kind: str, mask: HeadMask, window: int, sinks: int
) -> tuple[dict | None, str | None]:
  """What config.json must say for a family to run a mask by itself.

  Args:
    kind: model_type as `families.config_to_hf` names it.

  Returns:
    The fields and None, or None and why there are none.
  """
  local_L, mixed_L = mask.local.all(1), mask.local.any(1) & ~mask.local.all(1)
  if not mask.num_local:
    return {}, None
  if mixed_L.any():
    return None, f"{mixed_L.sum()} layers have local and full groups side by side"
  if sinks:
    return None, f"{sinks} sinks are kept, and no family keeps any"
  if kind in _BY_LAYER:
    types = ["sliding_attention" if local else "full_attention" for local in local_L]
    fields = {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    first = int(np.argmax(local_L))
    if kind != "smollm3" and local_L[first:].all():  # older readers know only this field
      fields["max_window_layers"] = first
    return fields, None
  if kind in _FOR_ALL and local_L.all():
    if kind == "llama":  # Mistral is Llama with a window
      names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
      return {**names, "sliding_window": window}, None
    return {"use_sliding_window": True, "sliding_window": window}, None
  return None, f"a {kind} model has one window for all layers or none"


def save_hybrid(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: dict,
  mask: HeadMask,
  window: int,
  sinks: int = 0,
  tokenizer: Tokenizer | None = None,
  *,
  permute: bool = True,
  native: bool | None = None,
  shard_bytes: int = export.SHARD_BYTES,
) -> bool:
  """Writes config.json, weights, tokenizer and, where needed, the torch modules.

  Args:
    folder: made if it is not there; must hold no model yet.
    config, params: the model, groups in the order of the checkpoint.
    mask, window, sinks: which groups are local, and what they see.
    permute: move the full groups of each layer to the front, so that torch slices instead of
      gathering; native folders keep their order.
    native: True = without custom code or not at all, False = with it, None = natively if possible.

  Returns:
    Whether the folder is native.

  Raises:
    InputError: native asked for and impossible, or as `export.save_folder`.
  """
  kind = families.config_to_hf(config)["model_type"]
  fields, reason = native_fields(kind, mask, window, sinks)
  if native and fields is None:
    raise InputError(
      "--form", "native", f"cannot say this mask: {reason}; leave it out, or give --form custom"
    )
  is_native = fields is not None and native is not False
  files = {} if is_native else {path.name: path.read_text("utf-8") for path in (MODULE, CACHE)}
  record = {
    "format": FORMAT,
    "model_type": kind,
    "window": window,
    "sinks": sinks,
    "local": mask.local.astype(int).tolist(),
    "order": None,
  }
  if not is_native:
    architecture = f"Bosch{families.FAMILIES[kind].architecture}"
    module = MODULE.stem
    fields = {
      "model_type": f"bosch_{kind}",  # not the family's: its own class would ignore the windows
      "architectures": [architecture],
      "auto_map": {
        "AutoConfig": f"{module}.{architecture.replace('ForCausalLM', 'Config')}",
        "AutoModelForCausalLM": f"{module}.{architecture}",
      },
    }
    if permute:
      hybrid = hybridize(params, mask, config)
      params = hybrid.params
      record["local"] = np.sort(mask.local, axis=1).astype(int).tolist()
      record["order"] = hybrid.order.tolist()
  extra = {**fields, "bosch": record}
  export.save_folder(folder, config, params, tokenizer, shard_bytes, extra, files)
  return is_native


def read_config(folder: str | os.PathLike) -> tuple[ModelConfig, np.ndarray | None]:
  """The architecture of a Hugging Face folder, hybrid or not.

  Returns:
    The model as it was before it became hybrid, and the order its groups were put in (int
    `[L, G]`) or None.

  Raises:
    InputError: as `families.config_from_hf`, or a damaged field `bosch`.
  """
  path = pathlib.Path(folder) / "config.json"
  values = families.read_config(folder)
  record = values.pop("bosch", None)
  if record is None:
    return families.config_from_hf(values, path), None
  kind = record.get("model_type") if isinstance(record, dict) else None
  if kind not in families.FAMILIES or record.get("format") != FORMAT:
    raise _damaged(path)
  for name in (*_NATIVE_FIELDS, "auto_map"):
    values.pop(name, None)
  values |= {"model_type": kind, "architectures": [families.FAMILIES[kind].architecture]}
  config = families.config_from_hf(values, path)
  if record.get("order") is None:
    return config, None
  shape = (config.num_layers, config.num_groups)
  try:
    order = np.array(record["order"], dtype=int)
  except (ValueError, TypeError):
    raise _damaged(path) from None
  if order.shape != shape or (np.sort(order, 1) != np.arange(shape[1])).any():
    raise _damaged(path)
  return config, order


def _damaged(path) -> InputError:
  return InputError(
    "--model", path, f"has a damaged field 'bosch' (expected {FORMAT}); export the model again"
  )


def restore(params: dict, order: np.ndarray | None, config: ModelConfig) -> dict:
  """Parameters of a folder in the order of the original checkpoint."""
  return params if order is None else dehybridize(params, order, config)
