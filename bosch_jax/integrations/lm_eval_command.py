"""`python run.py lm-eval`: tasks of lm-eval on a model, whole or with a head mask."""

import dataclasses
import json
import pathlib
from typing import Annotated, Literal

import tyro
from rich.console import Console

from models.errors import InputError, flag
from models.windows import write_json


@dataclasses.dataclass(frozen=True)
class LmEvalSettings:
  """Run tasks of lm-eval (LongBench, RULER, GSM8K ...) on a model, whole or with a head mask.

  Needs requirements-eval.txt. Task data come from where lm-eval takes them, mostly a model hub.
  """

  tasks: tuple[str, ...] = ()
  """Names of tasks or groups, as lm-eval knows them (python -m lm_eval ls tasks)."""
  mask: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
  """mask.json of a run. Default: none, every head sees the whole context."""
  model: str = "smollm2-135m"
  """Model: smollm2-135m (fetched once, 93 MB), a .gguf file, a Hugging Face folder, or an id such as
  Qwen/Qwen3-1.7B."""
  include: Annotated[
    pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
  ] = None
  """Folder with task files (.yaml) of your own."""
  chat: bool = False
  """Put prompts into the model's chat format."""
  fewshot: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
  """Examples in each prompt. Default: the task's."""
  limit: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
  """First samples of each task only. Default: all."""
  metadata: str = ""
  """JSON for tasks that ask for it, such as RULER: '{"max_seq_lengths": [4096], "pretrained": "folder"}'."""
  batch: int = 1
  """Prompts computed at once; memory grows with it."""
  max_length: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
  """Most tokens of a prompt with its answer. Default: the model's context."""
  window: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
  """Tokens a local head sees. Default: what the mask was searched with."""
  seed: int = 0
  """Seed of tasks that draw their answers, and of few-shot examples."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Number format of parameters, activations and cache."""
  out: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
  """Where to write all results, samples included, as JSON. Default: the table is printed only."""

  def __post_init__(self):
    if not self.tasks:
      raise InputError("--tasks", "", "is missing; give for example gsm8k")
    for field in ("batch", "limit", "max_length", "window"):
      if (value := getattr(self, field)) is not None and value < 1:
        raise InputError(flag(field), value, "must be a positive integer; use 1 or more")
    if self.fewshot is not None and self.fewshot < 0:
      raise InputError("--fewshot", self.fewshot, "must not be negative; use 0 or more")
    if self.window is not None and self.mask is None:
      raise InputError("--window", self.window, "belongs to a --mask; give that too")
    if self.include is not None and not self.include.is_dir():
      raise InputError("--include", self.include, "is not a folder; give one with .yaml task files")
    if self.out is not None and not self.out.absolute().parent.is_dir():
      raise InputError("--out", self.out, "has no folder to be written to; make it first")
    object.__setattr__(
      self, "tasks", tuple(name for text in self.tasks for name in text.split(",") if name)
    )
    _metadata(self.metadata)


def lm_eval_command(settings: LmEvalSettings) -> dict:
  """Runs the tasks and prints lm-eval's table.

  Returns:
    The results of `lm_eval.simple_evaluate`.

  Raises:
    InputError: lm-eval is missing, or anything else a user can put right.
  """
  from bosch_jax.integrations.lm_eval import HybridLM  # refuses where lm-eval is missing

  import lm_eval  # isort: skip
  from lm_eval.tasks import TaskManager
  from lm_eval.utils import make_table

  metadata = _metadata(settings.metadata)
  manager = TaskManager(
    include_path=None if settings.include is None else str(settings.include), metadata=metadata
  )
  for name in settings.tasks:
    if not manager.match_tasks([name]):
      raise InputError("--tasks", name, "is not known to lm-eval; see python -m lm_eval ls tasks")
  model = HybridLM(
    settings.model,
    settings.mask and str(settings.mask),
    window=settings.window,
    batch_size=settings.batch,
    max_length=settings.max_length,
    dtype=settings.dtype,
    seed=settings.seed,
  )
  results = lm_eval.simple_evaluate(
    model,
    tasks=list(settings.tasks),
    num_fewshot=settings.fewshot,
    limit=settings.limit,
    apply_chat_template=settings.chat,
    fewshot_as_multiturn=settings.chat,
    task_manager=manager,
    random_seed=settings.seed,
    fewshot_random_seed=settings.seed,
    metadata=metadata,
    log_samples=settings.out is not None,
  )
  print(make_table(results))
  if settings.out is not None:
    write_json(settings.out, json.loads(json.dumps(results, default=str)))
    Console().print(f"written to {settings.out}", soft_wrap=True, highlight=False, markup=False)
  return results


def _metadata(text: str) -> dict:
  """Raises InputError if the text is not a JSON object."""
  try:
    record = json.loads(text or "{}")
  except ValueError:
    record = None
  if not isinstance(record, dict):
    raise InputError("--metadata", text, "is not a JSON object; use '{\"name\": value}'")
  return record
