"""`python run.py compare`: many runs of `select`, and what they say together."""

import contextlib
import io
import pathlib
import shutil
from collections.abc import Callable

from rich.console import Console

from bosch_jax import compare_html, compare_plots, compare_report, interrupts, recovery, runs
from bosch_jax.compare_settings import CompareSettings
from bosch_jax.report import text_table
from bosch_jax.select import calibration_prompts, prompts, select
from bosch_jax.settings import SelectSettings
from bosch_jax.shared import Shared
from models import registry
from models.errors import InputError
from models.windows import write_json

FREE = ("methods", "seeds")  # what a resumed comparison may have otherwise: cells of their own
RESULTS = ("compare.json", "compare.md", "report.html", *compare_plots.FILES)
OF_RECOVERY = (recovery.RESULT, compare_plots.RECOVERY)


def compare(settings: CompareSettings, make_recipe: Callable) -> dict:
  """Runs every cell that is not finished, then writes tables, plots and the report; with --cpt it
  then trains, and writes them again with the recovery curves.

  Args:
    settings: what `python run.py compare` was given.
    make_recipe: see `recovery.Recovery`.

  Returns:
    The content of compare.json (see `compare_report.summary`).

  Raises:
    InputError: anything a user can put right.
  """
  if settings.devices.coordinator is not None:
    raise InputError(
      "--coordinator", "", "is for one select at a time; run the cells as select commands instead"
    )
  folder, claim = settings.folder, {"resume": settings.resume, "force": settings.force}
  runs.check_folder(folder, settings, **claim, free=FREE)
  settings.check_model(config := registry.load_config(settings.model))
  console = Console(stderr=True)
  training = recovery.Recovery(settings, make_recipe) if settings.recovery.cpt else None
  check_prompts(settings, console)
  header = {"fingerprint": config.fingerprint, **runs.without(runs.as_json(settings), FREE)}
  # Holds the folder for this process.
  journal = runs.open_run(folder, settings, header, **claim, free=FREE)
  if not settings.resume:
    for name in ("cells", recovery.RUNS):
      shutil.rmtree(folder / name, ignore_errors=True)
    for name in OF_RECOVERY:
      (folder / name).unlink(missing_ok=True)
  # A report is of the methods and seeds asked for now.
  for name in (*RESULTS, compare_plots.RECOVERY):
    (folder / name).unlink(missing_ok=True)
  run_cells(settings, console)
  result = compare_report.summary(settings)
  write(folder, result | recovery.load(settings))
  if training:
    training.run(console)
    write(folder, result := result | recovery.load(settings))
  journal.close()
  shown = Console()
  for field in ("nll", "exact_match"):
    shown.print(text_table(compare_report.TITLES[field], compare_report.method_rows(result, field)))
  if training:
    shown.print(
      text_table(compare_report.RECOVERY, compare_report.recovery_rows(result["recovery"]))
    )
  written = ", ".join(n for n in (*RESULTS, *OF_RECOVERY) if (folder / n).exists())
  shown.print(f"written to {folder}/: {written}", soft_wrap=True, highlight=False, markup=False)
  return result


def check_prompts(settings: CompareSettings, console: Console) -> None:
  """Makes the prompts of every cell that is not finished, so that none of them fails hours later.

  Raises:
    InputError: see `select.prompts`.
  """
  waiting = {
    seed: settings.cell(method, seed)  # prompts are the same for all methods
    for method, seed in settings.cells
    if not (settings.resume and finished(settings.cell(method, seed)))
  }
  with console.status("making the prompts of all seeds"):
    tokenizer = registry.load_tokenizer(settings.model) if waiting else None
    for cell in waiting.values():
      interrupts.check()
      calibration_prompts(tokenizer, cell)
      prompts(tokenizer, cell, "held_out", cell.held_out)


def finished(cell: SelectSettings) -> bool:
  return (cell.folder / "result.json").exists()


def run_cells(settings: CompareSettings, console: Console) -> None:
  """Runs of `select`, seed by seed, gone on with if they were stopped; finished ones are left alone.
  The model is loaded once, and what methods have in common on a seed's held-out prompts scored once.

  Raises:
    InputError: a cell's folder holds a run with other settings, or what `select` raises.
  """
  shared = Shared()
  for number, (method, seed) in enumerate(settings.cells, 1):
    interrupts.check()
    cell = settings.cell(method, seed)
    if finished(cell):
      runs.check_folder(cell.folder, cell, resume=True, force=False)
      continue
    resumed = settings.cell(method, seed, resume=(cell.folder / runs.JOURNAL).exists())
    console.print(f"cell {number} of {len(settings.cells)}: {method}, seed {seed}", highlight=False)
    with contextlib.redirect_stdout(io.StringIO()):  # its table is in its folder
      select(resumed, shared)


def write(folder: pathlib.Path, result: dict) -> None:
  """All files; compare.json last, whose presence means: done."""
  compare_plots.draw(folder, result)
  (folder / "compare.md").write_text(compare_report.markdown(result), encoding="utf-8")
  (folder / "report.html").write_text(compare_html.page(folder, result), encoding="utf-8")
  write_json(folder / "compare.json", result)
