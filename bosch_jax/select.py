"""`python run.py select`: calibration prompts, search, held-out table, run folder."""

import dataclasses
import pathlib
import resource
import time

import numpy as np
from rich.console import Console

from bosch_jax import devices, interrupts, report, results, runs
from bosch_jax.contexts import shares
from bosch_jax.evaluator import Evaluator
from bosch_jax.journal import Journal
from bosch_jax.niah import make_niah
from bosch_jax.progress import SearchProgress
from bosch_jax.prompts import PromptSet
from bosch_jax.search import search
from bosch_jax.settings import SelectSettings
from bosch_jax.shared import Shared
from models import registry
from models.digest import weights_digest
from models.errors import InputError


def select(settings: SelectSettings, shared: Shared | None = None) -> list[dict]:
  """Runs a selection and writes its folder. Of several processes all compute, and the first writes.

  Args:
    settings: what `python run.py select` was given.
    shared: what earlier runs of this process made, and what this one leaves to the next; None =
      nothing. Results are the same; seconds, peak memory and `held_out_forward_equivalents` are
      those of this run in its place, without what it found made.

  Returns:
    For each ratio the content of its result.json.

  Raises:
    InputError: anything a user can put right; nothing half-written is left behind.
  """
  wall, cpu = time.monotonic(), time.process_time()
  shared = shared or Shared()
  folder, claim = settings.folder, {"resume": settings.resume, "force": settings.force}
  mesh = devices.start(settings.devices)
  devices.on_first(lambda: runs.check_folder(folder, settings, **claim))
  settings.check_model(registry.load_config(settings.model))
  loaded = shared.load(settings)
  calibration = calibration_prompts(loaded.tokenizer, settings)
  held_out = prompts(loaded.tokenizer, settings, "held_out", settings.held_out)
  header = {
    "fingerprint": loaded.config.fingerprint,
    "weights": weights_digest(loaded.params),
    "prompts": "+".join(p.digest for p in calibration),
    **runs.as_json(settings),
  }
  interrupts.check()
  # Only now is anything written: whatever the model or the prompts refuse leaves no trace.
  journal = open_journal(folder, settings, header, claim)
  shown = Console(stderr=True, quiet=not devices.is_first())
  with SearchProgress(shown, settings.budget * len(settings.ratio)) as progress:
    evaluator = Evaluator(
      loaded.config,
      loaded.params,
      calibration[0],
      settings.window,
      also=[(p, w) for p, (_, w) in zip(calibration[1:], settings.lengths[1:], strict=True)],
      sinks=settings.sinks,
      journal=journal,
      mesh=mesh,
      calibration=settings.samples,
    )
    shared.loaded = dataclasses.replace(loaded, params=evaluator.params)  # where they lie now
    # One evaluator: what one ratio's search has scored costs the next one nothing.
    known = {}
    found = {r: search(evaluator, settings, r, progress, known) for r in sorted(settings.ratio)}
    found = {ratio: found[ratio] for ratio in settings.ratio}
    progress.note("held-out prompts")
    masks = [f.mask for f in found.values()]
    scored, held_out_cost = results.held_out_scores(
      shared.evaluator(held_out, settings, mesh), masks
    )
  journal.close()
  spent = {
    "held_out_forward_equivalents": held_out_cost,
    "masks_scored": evaluator.masks_scored,
    "cpu_seconds": time.process_time() - cpu,
    "wall_seconds": time.monotonic() - wall,
    "peak_memory_bytes": peak_memory(),
  }
  made = [
    results.as_json(loaded, settings, ratio, found[ratio], scores, spent)
    for ratio, scores in zip(found, scored, strict=True)
  ]
  if devices.is_first():
    written = results.write(folder, loaded.config, list(found.values()), made)
    console = Console()
    console.print(report.terminal_table(made))
    for warning in {f.warning: None for f in found.values() if f.warning}:
      console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    console.print(f"written to {folder}/: {written}", soft_wrap=True, highlight=False, markup=False)
  return made


def open_journal(folder: pathlib.Path, settings: SelectSettings, header: dict, claim: dict):
  """The run's journal: the first process holds the file, all know the lines of an earlier run."""
  opened: list[Journal] = []

  def open_run() -> list[dict]:
    opened.append(runs.open_run(folder, settings, header, **claim))
    return opened[0].lines

  lines = devices.on_first(open_run)
  if opened:
    return opened[0]
  journal = Journal(None, {})
  journal.lines = lines
  return journal


def peak_memory() -> int:
  """Highest resident memory of this process in bytes."""
  status = pathlib.Path("/proc/self/status")
  if status.exists():  # Linux, where getrusage's peak also counts the process that started this one
    return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def calibration_prompts(tokenizer, settings: SelectSettings) -> list[PromptSet]:
  """The calibration prompts of a run, and behind them those of the gates: a set for each length.

  Raises:
    InputError: see `prompts`.
  """
  sizes = shares(settings.samples + settings.pool, len(settings.lengths))
  return [
    prompts(
      tokenizer, dataclasses.replace(settings, also=(), context=c, window=w), "calibration", n
    )
    for (c, w), n in zip(settings.lengths, sizes, strict=True)
  ]


def prompts(tokenizer, settings: SelectSettings, split: str, samples: int) -> PromptSet:
  """Prompts of one length.

  Raises:
    InputError: they do not fit the context, or a needle lies among the sinks (a local head would
      see it, and the score would reward that).
  """
  made = make_niah(
    tokenizer,
    context=settings.context,
    window=settings.window,
    samples=samples,
    task=settings.task,
    haystack=settings.haystack,
    seed=settings.seed,
    split=split,
  )
  first = int(np.round(made.depth_BxQ * made.haystack_B[:, None]).min())
  if first < settings.sinks:
    raise InputError(
      "--sinks",
      settings.sinks,
      f"reaches into the text that is searched (a needle begins at token {first}); use at most {first}",
    )
  return made
