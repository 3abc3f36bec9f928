"""`python run.py export`: a model and its mask as a Hugging Face folder that torch runs as a hybrid."""

import dataclasses
import json
import pathlib
import shutil
from typing import Annotated, Literal

import tyro

from bosch_jax import model_card
from models.config import ModelConfig
from models.errors import InputError
from models.windows import HeadMask, write_json

GENERATION = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class ExportSettings:
  """Write a model with its mask as a Hugging Face folder.

  transformers loads it with trust_remote_code=True and keeps a hybrid cache; a mask of whole layers
  needs no code where the family has layer windows.
  """

  mask: Annotated[pathlib.Path, tyro.conf.arg(metavar="FILE")]
  """mask.json of a run, or the folder it is in."""
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")]
  """Folder to write; must be new or empty."""
  model: str = "smollm2-135m"
  """The model the mask was made for: smollm2-135m, a .gguf file, a Hugging Face folder, or an id."""
  checkpoint: Annotated[
    pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
  ] = None
  """Weights to export instead of the model's own: a Hugging Face folder of safetensors. Default: none."""
  form: Literal["auto", "native", "custom"] = "auto"
  """native: no custom code, for masks of whole layers only; custom: with the torch module; auto: native
  where that is possible."""
  permute: bool = True
  """Put the full groups of each layer first, so that torch slices groups instead of gathering them;
  --no-permute keeps the model's own order."""
  dtype: Literal["auto", "float32", "bfloat16"] = "auto"
  """Number format of the weights. auto: as stored; float32 from a .gguf file."""


def export_command(settings: ExportSettings) -> pathlib.Path:
  """Writes the folder in one step: a stopped export leaves no half of it under its name.

  Returns:
    The folder.

  Raises:
    InputError: a mask of another model, a folder that is in use, a checkpoint that cannot be read,
      or a native form that cannot be.
  """
  from rich.console import Console

  from models import hybrid_folder, registry

  check_out(settings.out)
  config = registry.load_config(settings.model)
  path = settings.mask / "mask.json" if settings.mask.is_dir() else settings.mask
  mask, record = HeadMask.load(path, config)
  window, sinks = (
    _count(path, record, name, least) for name, least in (("window", 1), ("sinks", 0))
  )
  source, params, tokenizer = read_weights(settings, config)
  partial = settings.out.with_name(settings.out.name + ".partial")
  try:
    if partial.exists():  # of a stopped export
      shutil.rmtree(partial)
    native = hybrid_folder.save_hybrid(
      partial,
      config,
      params,
      mask,
      window,
      sinks,
      tokenizer,
      permute=settings.permute,
      native={"auto": None, "native": True, "custom": False}[settings.form],
    )
    shutil.copyfile(path, partial / "mask.json")
    _copy_generation(source, partial)
    bytes_per_number = next(iter(params["embed"].values())).dtype.itemsize
    facts = model_card.Facts(config, mask, record, model_card.result_beside(path, record), native)
    card = model_card.markdown(facts, bytes_per_number, settings.checkpoint)
    (partial / "README.md").write_text(card, "utf-8")
    partial.rename(settings.out)
  except OSError as error:
    raise InputError(
      "--out", settings.out, f"cannot be written ({error.strerror}); give another folder"
    ) from None
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  how = "" if native else ", trust_remote_code=True"
  Console().print(
    f"written to {settings.out}/: {'native, no custom code' if native else 'with modeling_bosch.py'}; "
    f'load it with AutoModelForCausalLM.from_pretrained("{settings.out}"{how})',
    soft_wrap=True,
    highlight=False,
    markup=False,
  )
  return settings.out


def check_out(out: pathlib.Path) -> None:
  """Refuses a folder that is in use, before any work."""
  try:
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
  except OSError as error:
    raise InputError(
      "--out", out, f"cannot be used ({error.strerror}); give another folder"
    ) from None
  if not free:
    raise InputError("--out", out, "exists and is not empty; give another folder, or remove it")


def read_weights(settings: ExportSettings, config: ModelConfig):
  """The folder or file the weights come from, the parameters in the checkpoint's order, the tokenizer.

  Every kind of checkpoint that can be exported is told apart here.

  Raises:
    InputError: a checkpoint of another kind, or of another model than the mask's.
  """
  from models import registry
  from models.tokenizer import Tokenizer

  source = registry.resolve(settings.model)
  tokenizer_source = source
  if settings.checkpoint is not None:
    source = settings.checkpoint
    if not (source / "config.json").is_file():
      raise InputError(
        "--checkpoint",
        source,
        "is not a checkpoint that can be exported; give a Hugging Face folder (config.json and safetensors)",
      )
    if (source / "tokenizer.json").is_file():
      tokenizer_source = source
  read_tokenizer = Tokenizer.from_folder if tokenizer_source.is_dir() else Tokenizer.from_gguf
  tokenizer = read_tokenizer(tokenizer_source)
  dtype = settings.dtype
  if dtype == "auto":
    dtype = None if source.is_dir() else "float32"
  found, params = registry.load_params(source, dtype)
  if found.fingerprint != config.fingerprint:
    raise InputError(
      "--checkpoint",
      source,
      f"is another model (fingerprint {found.fingerprint}) than the mask's ({config.fingerprint}); "
      "give a checkpoint of that model",
    )
  return source, params, tokenizer


def _count(path: pathlib.Path, record: dict, name: str, least: int) -> int:
  value = record.get(name)
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise InputError(
      "mask", path, f"has no usable {name!r} ({value!r:.20}); use an unedited mask.json"
    )
  return value


def _copy_generation(source: pathlib.Path, folder: pathlib.Path) -> None:
  """generation_config.json of the source, if any; its choice of a cache would be another's."""
  if not source.is_dir() or not (source / GENERATION).is_file():
    return
  try:
    values = json.loads((source / GENERATION).read_text("utf-8"))
  except ValueError:
    raise InputError("--model", source / GENERATION, "is not JSON; fetch the model again") from None
  write_json(folder / GENERATION, {k: v for k, v in values.items() if k != "cache_implementation"})
