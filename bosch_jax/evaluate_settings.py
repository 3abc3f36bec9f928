"""Every setting of `python run.py evaluate`, and the masks it names."""

import dataclasses
import hashlib
import pathlib
from typing import Annotated, Literal

import tyro

from bosch_jax.tasks.niah_tasks import NIAH, SIX
from models.config import ModelConfig
from models.errors import InputError, flag
from models.windows import HeadMask

REFERENCES = ("full", "all_local")


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
  """Measure masks on tasks the search never saw: needle tasks, answered by generation.

  Full attention and all heads local stand beside every mask, on the same contexts.
  """

  mask: Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
  """mask.json of one or several runs, to be measured and compared with each other."""
  model: str = "smollm2-135m"
  """Model: smollm2-135m (fetched once, 93 MB), a .gguf file, a Hugging Face folder, or an id such as
  Qwen/Qwen3-1.7B."""
  tasks: tuple[str, ...] = ("niah",)
  """niah (RULER's eight needle tasks), or some of them by name."""
  average: tuple[str, ...] = SIX
  """Tasks that the average is taken over, as far as they are measured. The paper averages six and does
  not name them."""
  lengths: tuple[int, ...] = (256, 512)
  """Tokens of a prompt with its answer."""
  samples: int = 20
  """Contexts of every task and length."""
  max_tokens: int = 128
  """Most tokens generated for an answer (RULER: 128)."""
  window: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
  """Tokens a local head sees, itself included. Default: what the masks were searched with."""
  essay: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = (
    None
  )
  """Folder of .txt and .md files for the tasks with an essay. Default: documentation that ships with
  Python."""
  batch: int = 8
  """Prompts generated at once; memory grows with it."""
  seed: int = 1
  """Seed of the contexts; needles are never those of a search, whatever the seed."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Number format of parameters, activations and cache."""
  out: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
  """Folder of the run. Default: runs/ and a name made of the settings."""
  resume: bool = False
  """Go on with the stopped run in --out."""
  force: bool = False
  """Start over in --out, discarding what is there."""

  def __post_init__(self):
    for field in ("tasks", "average"):
      object.__setattr__(self, field, _task_names(f"--{field}", getattr(self, field)))
    if not self.mask:
      raise InputError("--mask", "", "is missing; give the mask.json of a run")
    if not self.lengths:
      raise InputError("--lengths", "", "is empty; give for example 256 512")
    for field in ("lengths", "samples", "max_tokens", "window", "batch", "seed"):
      values = getattr(self, field)
      for value in values if isinstance(values, tuple) else (values,):
        if value is not None and not 1 <= value < 2**31:
          raise InputError(flag(field), value, "must be a positive integer; use 1 or more")
    if self.resume and self.force:
      raise InputError("--force and --resume", "", "contradict each other; give one of them")

  @property
  def folder(self) -> pathlib.Path:
    """Where the run is written."""
    if self.out is not None:
      return pathlib.Path(self.out)
    record = {k: v for k, v in vars(self).items() if k not in ("out", "resume", "force")}
    model = pathlib.Path(self.model.removesuffix(".gguf")).name or "model"
    digest = hashlib.sha256(repr(sorted(record.items())).encode()).hexdigest()[:6]
    return pathlib.Path("runs") / f"{model}-evaluate-{mask_names(self.mask)[0]}-{digest}"


@dataclasses.dataclass(frozen=True)
class Columns:
  """What is measured.

  Attributes:
    masks: by name, `REFERENCES` first.
    window, sinks: of their local heads.
  """

  masks: dict[str, HeadMask]
  window: int
  sinks: int


def columns(settings: EvaluateSettings, config: ModelConfig) -> Columns:
  """Reads the masks.

  Raises:
    InputError: a mask that cannot be read or belongs to another model, masks of different windows
      or sinks, or a length that does not suit the model or the window.
  """
  masks = {"full": HeadMask.full(config), "all_local": HeadMask.all_local(config)}
  facts = {}
  for name, path in zip(mask_names(settings.mask), settings.mask, strict=True):
    masks[name], record = HeadMask.load(path, config)
    facts[path] = (settings.window or record.get("window"), record.get("sinks", 0))
  (first, (window, sinks)), *others = facts.items()
  if not isinstance(window, int) or not isinstance(sinks, int) or window < 1 or sinks < 0:
    raise InputError("mask", first, "records no usable window or sinks; give --window")
  for path, fact in others:
    if fact != (window, sinks):
      raise InputError(
        "--mask",
        path,
        f"was made for a window and sinks of {fact[0]} and {fact[1]}, {first} for {window} and {sinks}; "
        "evaluate them apart, or give --window where only that differs",
      )
  for length in settings.lengths:
    if length > config.context:
      raise InputError(
        "--lengths", length, f"is beyond this model's {config.context} tokens; use at most that"
      )
    if length <= window:
      raise InputError(
        "--lengths", length, f"must be more than the window of {window}, or every head is full"
      )
  return Columns(masks, window, sinks)


def mask_names(paths: tuple[pathlib.Path, ...]) -> list[str]:
  """A name for every mask: its folder's, or the file's own, made unique."""
  names = []
  for path in map(pathlib.Path, paths):
    stem = path.absolute().parent.name if path.name == "mask.json" else path.stem
    name, number = stem or "mask", 2
    while name in (*names, *REFERENCES):
      name, number = f"{stem}-{number}", number + 1
    names.append(name)
  return names


def _task_names(field: str, given: tuple[str, ...]) -> tuple[str, ...]:
  """The tasks that are meant by names, comma-separated or not, in the table's order."""
  names = [name for text in given for name in text.split(",") if name]
  for name in names:
    if name not in ("niah", *NIAH):
      raise InputError(field, name, f"is no task here; use niah, or some of {', '.join(NIAH)}")
  if not names:
    raise InputError(field, "", "is empty; use niah for all needle tasks")
  return tuple(name for name in NIAH if name in names or "niah" in names)
