"""Every setting of `python run.py cpt`, and what is checked before any work begins."""

import dataclasses
import hashlib
import pathlib
from typing import Annotated, Literal

import tyro

from models.config import ModelConfig
from models.errors import InputError, flag

Folder = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class MeshOptions:
  """How devices are arranged; the three multiply to the number of devices."""

  data: int = 1
  """Copies of the parameters, each with rows of its own."""
  fsdp: int = 0
  """Devices that parameters and rows are split over; 0 = all that are left."""
  tensor: int = 1
  """Devices that heads, feed-forward width and vocabulary are split over."""

  def __post_init__(self):
    for field, least in (("data", 1), ("fsdp", 0), ("tensor", 1)):
      if getattr(self, field) < least:
        raise InputError(f"--mesh.{field}", getattr(self, field), f"must be {least} or more")


@dataclasses.dataclass(frozen=True)
class HostOptions:
  """Several processes, one per host; all are started with the same other flags."""

  coordinator: str = ""
  """Address of process 0, host:port, or auto where the cluster says so; empty = one process."""
  processes: int = 1
  """Number of processes."""
  process: int = 0
  """Number of this one."""

  def __post_init__(self):
    if self.processes < 1 or not 0 <= self.process < self.processes:
      raise InputError(
        "--hosts.process", self.process, f"must be 0 to {max(self.processes, 1) - 1}"
      )
    if self.processes > 1 and not self.coordinator:
      raise InputError("--hosts.coordinator", "", "is needed with several processes: host:port")


@dataclasses.dataclass(frozen=True)
class CptSettings:
  """Continual pretraining of a hybrid: brings back what local heads cost in long contexts.

  The defaults train the embedded 135M model on text that ships with Python and on synthetic
  retrieval text, on a CPU, in about half an hour.
  """

  mask: str = ""
  """mask.json of a run of select; or full, or local (every head)."""
  model: str = "smollm2-135m"
  """Model: smollm2-135m, a .gguf file, a Hugging Face folder, or an id such as Qwen/Qwen3-1.7B."""
  data: str = "python"
  """Text: python (documentation and sources of the running Python), a file or folder of text, JSONL
  or parquet files, or a Hugging Face dataset id."""
  steps: int = 120
  """Updates."""
  batch: int = 4
  """Rows of a micro-batch, over all devices."""
  accumulate: int = 1
  """Micro-batches of one update."""
  sequence: int = 384
  """Tokens of a row."""
  retrieval: float = 0.5
  """Share of rows that are retrieval text: needles in a haystack, and questions."""
  retrieval_weight: float = 8.0
  """What an answer token of retrieval text counts in the loss, beside 1 for a token of text."""
  context: int = 256
  """Tokens of a retrieval prompt with its answer, in training and in the held-out questions."""
  window: int = 0
  """Tokens a local head sees, itself included; 0 = as the mask was made for."""
  distill: float = 0.0
  """Weight of the divergence from the full-attention model in the loss, from 0 to 1; the rest is
  next-token loss."""
  train: str = "all"
  """Parameters to train: all, attention, layers, or a regular expression on their names."""
  lr: float = 2e-4
  """Highest learning rate."""
  schedule: Literal["cosine", "wsd"] = "cosine"
  """After the warm-up: a cosine to a tenth, or a plateau and a linear decay to zero."""
  warmup: int = 10
  """Updates of linear warm-up."""
  decay: float = 0.2
  """Share of the updates that wsd decays over."""
  clip: float = 1.0
  """Largest norm of the gradient."""
  weight_decay: float = 0.01
  """Of matrices; norms and biases have none."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Number format of the computation; master weights and optimizer are float32."""
  remat: Literal["none", "dots", "full"] = "none"
  """What the backward pass computes again to save memory: nothing, all but products, every layer."""
  chunk: int = 1024
  """Tokens whose logits exist at once."""
  seed: int = 1
  """Seed of the order of the data and of the retrieval text."""
  eval_every: int = 30
  """Updates between evaluations; there is one before the first and one after the last."""
  eval_rows: int = 16
  """Held-out rows of text."""
  eval_contexts: int = 16
  """Held-out retrieval contexts of four questions."""
  save_every: int = 30
  """Updates between checkpoints; the last update is always saved."""
  keep: int = 2
  """Latest checkpoints to keep, beside the best by held-out retrieval loss."""
  out: Folder = None
  """Folder of the run. Default: runs/ and a name made of the settings."""
  resume: bool = False
  """Go on with the stopped run in --out."""
  force: bool = False
  """Start over in --out, discarding what is there."""
  export: Folder = None
  """At the end, write the trained model there as a Hugging Face folder, with its mask."""
  cache: Folder = None
  """Folder of tokenised text. Default: tokens/ in the user's cache folder."""
  tensorboard: bool = False
  """Also write TensorBoard events (needs tensorboardX)."""
  mesh: MeshOptions = dataclasses.field(default_factory=MeshOptions)
  hosts: HostOptions = dataclasses.field(default_factory=HostOptions)

  def __post_init__(self):
    if not self.mask:
      raise InputError(
        "--mask", "", "is needed: the mask.json that select wrote, or full, or local"
      )
    whole = ("steps", "batch", "accumulate", "sequence", "context", "chunk", "seed", "eval_every")
    for field in (*whole, "eval_rows", "eval_contexts", "save_every", "keep"):
      if getattr(self, field) < 1:
        raise InputError(flag(field), getattr(self, field), "must be positive; use 1 or more")
    for field in ("lr", "clip", "retrieval_weight"):
      if not getattr(self, field) > 0:
        example = CptSettings.__dataclass_fields__[field].default
        raise InputError(
          flag(field), getattr(self, field), f"must be above 0; use for example {example:g}"
        )
    for field in ("warmup", "window", "weight_decay"):
      if getattr(self, field) < 0:
        raise InputError(flag(field), getattr(self, field), "must not be negative; use 0 or more")
    for field in ("retrieval", "distill", "decay"):
      if not 0 <= getattr(self, field) <= 1:
        raise InputError(flag(field), getattr(self, field), "must be a share from 0 to 1")
    if self.context > self.sequence:
      raise InputError(
        "--context", self.context, f"must fit a row; use at most --sequence {self.sequence}"
      )
    if self.resume and self.force:
      raise InputError("--force and --resume", "", "contradict each other; give one of them")

  def check_model(self, config: ModelConfig) -> None:
    """What can only be checked once the model is known.

    Raises:
      InputError: rows longer than the model's context.
    """
    if self.sequence > config.context:
      raise InputError(
        "--sequence",
        self.sequence,
        f"is beyond this model's {config.context} tokens; use at most that",
      )

  @property
  def rows(self) -> int:
    """Rows of one update."""
    return self.accumulate * self.batch

  @property
  def folder(self) -> pathlib.Path:
    """Where the run is written."""
    if self.out is not None:
      return pathlib.Path(self.out)
    mask = self.mask if self.mask in ("full", "local") else pathlib.Path(self.mask).parent.name
    digest = hashlib.sha256(repr(self.identity()).encode()).hexdigest()[:6]
    return pathlib.Path("runs") / f"cpt-{mask}-{self.steps}x{self.rows}x{self.sequence}-{digest}"

  def identity(self) -> dict:
    """The settings that decide what is computed; a resumed run must have the same."""
    record = dataclasses.asdict(self)
    apart = ("out", "resume", "force", "export", "cache", "tensorboard", "mesh", "hosts", "keep")
    return {name: value for name, value in record.items() if name not in (*apart, "save_every")}
