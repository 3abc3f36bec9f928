"""`python run.py evaluate`: masks on held-out tasks, by generation and by teacher forcing."""

import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bosch_jax import evaluate_report, interrupts, runs
from bosch_jax.evaluate_settings import Columns, EvaluateSettings, columns
from bosch_jax.evaluator import Evaluator
from bosch_jax.journal import Journal, mask_key
from bosch_jax.tasks.niah_tasks import TaskSet, make_task, string_match
from models import registry
from models.digest import weights_digest
from models.generate import Generator
from models.registry import Loaded
from models.windows import HeadMask, write_json

RESULTS = ("evaluate.json", "evaluate.md", "evaluate.png")
Sets = dict[tuple[int, str], TaskSet]  # by length and task


def evaluate(settings: EvaluateSettings) -> dict:
  """Measures masks and writes the run's folder.

  Args:
    settings: what `python run.py evaluate` was given.

  Returns:
    The content of evaluate.json (see `evaluate_report.summary`).

  Raises:
    InputError: anything a user can put right.
  """
  folder, claim = settings.folder, {"resume": settings.resume, "force": settings.force}
  runs.check_folder(folder, settings, **claim)
  measured = columns(settings, registry.load_config(settings.model))
  loaded = registry.load(settings.model, settings.dtype)
  sets = task_sets(settings, measured, loaded)
  header = {
    "fingerprint": loaded.config.fingerprint,
    "weights": weights_digest(loaded.params),
    "masks": {name: mask_key(mask.local) for name, mask in measured.masks.items()},
    "prompts": digest(sets),
    **runs.as_json(settings),
  }
  interrupts.check()
  journal = runs.open_run(folder, settings, header, **claim)
  if not settings.resume:
    for name in RESULTS:
      (folder / name).unlink(missing_ok=True)
  cells = measure(settings, measured, loaded, sets, journal)
  journal.close()
  result = evaluate_report.summary(settings, measured, loaded, sets, cells)
  evaluate_report.write(folder, result)
  write_json(folder / "evaluate.json", result)  # last: its presence means done
  console = Console()
  for table in evaluate_report.terminal_tables(result):
    console.print(table)
  console.print(
    f"written to {folder}/: {', '.join(RESULTS)}", soft_wrap=True, highlight=False, markup=False
  )
  return result


def task_sets(settings: EvaluateSettings, measured: Columns, loaded: Loaded) -> Sets:
  """The contexts of every length and task."""
  made = {}
  for length in dict.fromkeys(settings.lengths):
    for name in settings.tasks:
      interrupts.check()
      made[length, name] = make_task(
        loaded.tokenizer,
        name,
        context=length,
        window=measured.window,
        sinks=measured.sinks,
        samples=settings.samples,
        essay="essay" if settings.essay is None else str(settings.essay),
        seed=settings.seed,
      )
  return made


def digest(sets: Sets) -> str:
  """64 hex digits of all contexts and expected answers."""
  total = hashlib.sha256()
  for (length, name), tasks in sets.items():
    total.update(f"{length} {name} {tasks.prompts.digest} {tasks.answers};".encode())
  return total.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
  """What one mask did on one task at one length.

  Attributes:
    found: for each context, which of the expected strings the generated text contains.
    nll_B: float64, nats per token of the answer written out.
    exact_B: bool, every token of it is the most likely one.
  """

  found: list[list[bool]]
  nll_B: np.ndarray
  exact_B: np.ndarray

  @classmethod
  def of(cls, rows: list[dict]) -> "Cell":
    return cls(
      [row["found"] for row in rows],
      np.array([row["nll"] for row in rows], np.float64),
      np.array([row["exact"] for row in rows], bool),
    )

  @property
  def match_B(self) -> np.ndarray:
    """float64, RULER's string_match_all of each context."""
    return np.array([np.mean(found) for found in self.found])


def measure(
  settings: EvaluateSettings, measured: Columns, loaded: Loaded, sets: Sets, journal: Journal
) -> dict[tuple[str, int, str], Cell]:
  """Everything that the journal does not hold yet is generated and scored; then all of it.

  Returns:
    A cell for every column, length and task.
  """
  known: dict[tuple, dict] = {}
  for entry in journal.lines:
    _remember(known, entry)
  total = len(measured.masks) * sum(map(len, sets.values()))
  progress = Progress(
    TextColumn("{task.description:<32}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    TextColumn("answers, left"),
    TimeRemainingColumn(),
    console=(console := Console(stderr=True)),
    disable=not console.is_terminal,
  )
  with progress:
    bar = progress.add_task("starting", total=total, completed=len(known))
    runner = None
    for name, mask in measured.masks.items():
      for (length, task), tasks in sets.items():
        label = f"{name}: {task}, {length}"
        progress.update(bar, description=label)
        rows = [row for row in range(len(tasks)) if (name, length, task, row) not in known]
        if rows and progress.disable:
          console.print(label, highlight=False)
        for part in _parts(rows, settings.batch):
          runner = runner or Runner(loaded, measured)
          entry = {
            "mask": mask_key(mask.local),
            "column": name,
            "length": length,
            "task": task,
            "contexts": part,
            **runner.run(mask, tasks, part, settings),
          }
          journal.append([entry])
          _remember(known, entry)
          progress.advance(bar, len(part))
          interrupts.check()
  return {
    (name, length, task): Cell.of([known[name, length, task, row] for row in range(len(tasks))])
    for name in measured.masks
    for (length, task), tasks in sets.items()
  }


class Runner:
  """The model, ready to answer with any mask: masks are data to it, so all share what is compiled.

  Args:
    loaded: the model.
    measured: window and sinks.
  """

  def __init__(self, loaded: Loaded, measured: Columns):
    self._loaded, self._measured = loaded, measured
    self._generator = Generator(loaded, window=measured.window, sinks=measured.sinks)
    self._evaluator: Evaluator | None = None

  def run(
    self, mask: HeadMask, tasks: TaskSet, rows: list[int], settings: EvaluateSettings
  ) -> dict:
    """Answers some contexts: what is generated, what of the answer it contains, and how likely the
    answer was, all JSON-able lists with one item per row."""
    size = min(settings.batch, settings.samples)
    padded = rows + [rows[-1]] * (size - len(rows))  # one size, one compilation
    output = self._generator.generate(
      [tasks.ids(row) for row in padded], max_tokens=settings.max_tokens, mask=mask,
      between=interrupts.check,
    )  # fmt: skip
    texts = [completion.text for completion in output.completions[: len(rows)]]
    scores = self._evaluator_of(tasks).score([mask.local], rows)
    return {
      "text": texts,
      "found": [
        string_match(text, tasks.answers[row]) for text, row in zip(texts, rows, strict=True)
      ],
      "nll": scores.nll[0, :, 0].tolist(),
      "exact": scores.exact[0, :, 0].astype(int).tolist(),
    }

  def _evaluator_of(self, tasks: TaskSet) -> Evaluator:
    """The same one as long as the task is the same."""
    if self._evaluator is None or self._evaluator.prompts is not tasks.prompts:
      self._evaluator = Evaluator(
        self._loaded.config,
        self._loaded.params,
        tasks.prompts,
        self._measured.window,
        sinks=self._measured.sinks,
      )
      self._evaluator.on_scored = lambda stage, cost: interrupts.check()
    return self._evaluator


def _remember(known: dict, entry: dict) -> None:
  for i, row in enumerate(entry["contexts"]):
    key = (entry["column"], entry["length"], entry["task"], row)
    known[key] = {field: entry[field][i] for field in ("found", "nll", "exact")}


def _parts(rows: list[int], size: int) -> Iterator[list[int]]:
  for i in range(0, len(rows), size):
    yield rows[i : i + size]
