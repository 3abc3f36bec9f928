"""`python run.py select`: calibration prompts, search, held-out table, run folder."""

import pathlib
import resource
import sys
import time

import numpy as np
from rich.console import Console

from bosch_jax import report, runs
from bosch_jax.evaluator import Evaluator
from bosch_jax.journal import Journal
from bosch_jax.niah import make_niah
from bosch_jax.progress import SearchProgress
from bosch_jax.prompts import PromptSet
from bosch_jax.search import Found, search
from bosch_jax.settings import SelectSettings
from models import registry
from models.config import ModelConfig
from models.windows import HeadMask, write_json


def select(settings: SelectSettings) -> dict:
  """Runs a selection and writes its folder.

  Args:
    settings: what `python run.py select` was given.

  Returns:
    The content of result.json.

  Raises:
    InputError: anything a user can put right; nothing half-written is left behind.
  """
  wall, cpu = time.monotonic(), time.process_time()
  settings.check_model(registry.load_config(settings.model))
  folder = runs.open_run(
    settings.folder, settings, resume=settings.resume, force=settings.force
  )
  try:
    loaded = registry.load(settings.model)
    calibration, held_out = (
      prompts(loaded.tokenizer, settings, split) for split in ("calibration", "held_out")
    )
    journal = Journal(
      folder / "journal.jsonl",
      {"fingerprint": loaded.config.fingerprint, "prompts": calibration.digest, **runs.as_json(settings)},
      settings.resume,
    )
  except BaseException:
    runs.discard(folder)
    raise
  with SearchProgress(Console(stderr=True), settings.budget) as progress:
    evaluator = Evaluator(
      loaded.config, loaded.params, calibration, settings.window, sinks=settings.sinks, journal=journal
    )
    found = search(evaluator, settings, progress)
    progress.note("held-out prompts")
    scored, held_out_cost = held_out_scores(loaded, held_out, found.mask, settings)
  journal.close()
  result = {
    "model": loaded.name,
    "fingerprint": loaded.config.fingerprint,
    "method": settings.method,
    "score": settings.score,
    "seed": settings.seed,
    "ratio": found.mask.ratio,
    "target_ratio": settings.ratio,
    "num_local": found.mask.num_local,
    "num_groups": loaded.config.total_groups,
    "window": settings.window,
    "sinks": settings.sinks,
    "context": settings.context,
    "task": settings.task,
    "haystack": settings.haystack,
    "anchors": found.anchors,
    "stages": found.stages,
    "layers": found.layers,
    "held_out": scored,
    "cost": {
      "full_forward_equivalents": evaluator.cost,
      "held_out_forward_equivalents": held_out_cost,
      "masks_scored": evaluator.masks_scored,
      "cpu_seconds": time.process_time() - cpu,
      "wall_seconds": time.monotonic() - wall,
      "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    },
    "kv": kv_facts(loaded.config, found.mask, settings),
  }
  write_outputs(folder, loaded.config, found, result)
  console = Console()
  console.print(report.terminal_table(result))
  console.print(f"written to {folder}/: mask.json, report.md, mask.png, result.json", soft_wrap=True, highlight=False)
  return result


def prompts(tokenizer, settings: SelectSettings, split: str) -> PromptSet:
  """The calibration or held-out prompts of a run."""
  return make_niah(
    tokenizer,
    context=settings.context,
    window=settings.window + settings.sinks,
    samples=settings.samples if split == "calibration" else settings.held_out,
    task=settings.task,
    haystack=settings.haystack,
    seed=settings.seed,
    split=split,
  )


def held_out_scores(loaded, held_out: PromptSet, mask: HeadMask, settings: SelectSettings) -> tuple[dict, float]:
  """Full attention, all local and the mask on prompts the search never saw.

  Returns:
    For each of full, all_local and mask: nll (nats per answer token), exact_match (share of
    questions), their standard errors over contexts, and n, the number of questions; and the cost
    in full passes over the held-out set.
  """
  evaluator = Evaluator(loaded.config, loaded.params, held_out, settings.window, sinks=settings.sinks)
  masks = {"full": HeadMask.full(loaded.config), "all_local": HeadMask.all_local(loaded.config), "mask": mask}
  scores = evaluator.score([m.local for m in masks.values()])
  out = {}
  for i, name in enumerate(masks):
    out[name] = {"n": scores.nll[i].size}
    for field, values in (("nll", scores.nll[i]), ("exact_match", scores.exact[i])):
      out[name][field], out[name][f"{field}_se"] = mean_and_error(values)
  return out, evaluator.cost


def mean_and_error(values_BxQ: np.ndarray) -> tuple[float, float]:
  """Mean over questions, and its standard error over contexts (questions of one context share a
  haystack, so contexts are the independent unit); 0 for a single context."""
  means_B = np.asarray(values_BxQ, np.float64).mean(1)
  error = means_B.std(ddof=1) / np.sqrt(len(means_B)) if len(means_B) > 1 else 0.0
  return float(means_B.mean()), float(error)


def kv_facts(config: ModelConfig, mask: HeadMask, settings: SelectSettings) -> dict:
  """Bytes of the key/value cache (bf16) at the model's full context, full and hybrid."""
  tokens = config.context
  sizes = {
    "full": config.kv_bytes(tokens),
    "all_local": HeadMask.all_local(config).kv_bytes(config, tokens, settings.window, settings.sinks),
    "mask": mask.kv_bytes(config, tokens, settings.window, settings.sinks),
  }
  return {"tokens": tokens, "bytes_full": sizes["full"], "bytes_hybrid": sizes["mask"], "bytes": sizes}


def write_outputs(folder: pathlib.Path, config: ModelConfig, found: Found, result: dict) -> None:
  """mask.json, mask.png, report.md, and last result.json, whose presence means: done."""
  found.mask.save(
    folder / "mask.json", config,
    **{name: result[name] for name in ("model", "window", "sinks", "target_ratio", "method", "seed")},
    scores={
      name: {field: round(value, 5) for field, value in result["held_out"][name].items()}
      for name in ("full", "all_local", "mask")
    },
  )
  weights = np.array([layer["weight"] for layer in found.layers])
  report.draw_mask(
    folder / "mask.png", found.mask.local, weights,
    f"{result['model']}: {found.mask.num_local} of {config.total_groups} groups local",
  )
  (folder / "report.md").write_text(report.markdown(result))
  write_json(folder / "result.json", result)
