"""`python run.py select`: calibration prompts, search, held-out table, run folder."""

import pathlib
import resource
import time

import numpy as np
from rich.console import Console

from bosch_jax import interrupts, report, runs
from bosch_jax.evaluator import Evaluator
from bosch_jax.niah import make_niah
from bosch_jax.progress import SearchProgress
from bosch_jax.prompts import PromptSet
from bosch_jax.search import Found, search
from bosch_jax.settings import SelectSettings
from models import registry
from models.config import ModelConfig
from models.digest import weights_digest
from models.errors import InputError
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
  folder, claim = settings.folder, {"resume": settings.resume, "force": settings.force}
  runs.check_folder(folder, settings, **claim)
  settings.check_model(registry.load_config(settings.model))
  loaded = registry.load(settings.model, settings.dtype)
  calibration, held_out = (
    prompts(loaded.tokenizer, settings, split) for split in ("calibration", "held_out")
  )
  header = {
    "fingerprint": loaded.config.fingerprint,
    "weights": weights_digest(loaded.params),
    "prompts": calibration.digest,
    **runs.as_json(settings),
  }
  interrupts.check()
  # Only now is anything written: whatever the model or the prompts refuse leaves no trace.
  journal = runs.open_run(folder, settings, header, **claim)
  with SearchProgress(Console(stderr=True), settings.budget) as progress:
    evaluator = Evaluator(
      loaded.config,
      loaded.params,
      calibration,
      settings.window,
      sinks=settings.sinks,
      journal=journal,
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
    "warning": found.warning,
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
      "peak_memory_bytes": peak_memory(),
    },
    "kv": kv_facts(loaded.config, found.mask, settings),
  }
  write_outputs(folder, loaded.config, found, result)
  console = Console()
  console.print(report.terminal_table(result))
  if found.warning:
    console.print(f"warning: {found.warning}", style="yellow", soft_wrap=True, markup=False)
  console.print(
    f"written to {folder}/: mask.json, report.md, mask.png, result.json",
    soft_wrap=True,
    highlight=False,
    markup=False,
  )
  return result


def peak_memory() -> int:
  """Highest resident memory of this process in bytes."""
  status = pathlib.Path("/proc/self/status")
  if status.exists():  # Linux, where getrusage's peak also counts the process that started this one
    return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def prompts(tokenizer, settings: SelectSettings, split: str) -> PromptSet:
  """The calibration or held-out prompts of a run.

  Raises:
    InputError: they do not fit the context, or a needle lies among the sinks (a local head would
      see it, and the score would reward that).
  """
  made = make_niah(
    tokenizer,
    context=settings.context,
    window=settings.window,
    samples=settings.samples if split == "calibration" else settings.held_out,
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


def held_out_scores(
  loaded, held_out: PromptSet, mask: HeadMask, settings: SelectSettings
) -> tuple[dict, float]:
  """Full attention, all local and the mask on prompts the search never saw.

  Returns:
    For each of full, all_local and mask: nll (nats per answer token), exact_match (share of
    questions), their standard errors over contexts, and n, the number of questions; and the cost
    in full passes over the held-out set.
  """
  evaluator = Evaluator(
    loaded.config, loaded.params, held_out, settings.window, sinks=settings.sinks
  )
  evaluator.on_scored = lambda stage, cost: interrupts.check()
  masks = {
    "full": HeadMask.full(loaded.config),
    "all_local": HeadMask.all_local(loaded.config),
    "mask": mask,
  }
  scores = evaluator.score([m.local for m in masks.values()])
  out = {}
  for i, name in enumerate(masks):
    out[name] = {"n": scores.nll[i].size}
    for field, values in (("nll", scores.nll[i]), ("exact_match", scores.exact[i])):
      out[name][field], out[name][f"{field}_se"] = mean_and_error(values)
  return out, evaluator.cost


def mean_and_error(values_BxQ: np.ndarray) -> tuple[float, float | None]:
  """Mean over questions, and its standard error over contexts (questions of one context share a
  haystack, so contexts are the independent unit); None for a single context."""
  means_B = np.asarray(values_BxQ, np.float64).mean(1)
  if len(means_B) < 2:
    return float(means_B.mean()), None
  return float(means_B.mean()), float(means_B.std(ddof=1) / np.sqrt(len(means_B)))


def kv_facts(config: ModelConfig, mask: HeadMask, settings: SelectSettings) -> dict:
  """Bytes of the key/value cache (bf16) at the model's full context, full and hybrid."""
  tokens = config.context
  sizes = {
    "full": config.kv_bytes(tokens),
    "all_local": HeadMask.all_local(config).kv_bytes(
      config, tokens, settings.window, settings.sinks
    ),
    "mask": mask.kv_bytes(config, tokens, settings.window, settings.sinks),
  }
  return {
    "tokens": tokens,
    "bytes_full": sizes["full"],
    "bytes_hybrid": sizes["mask"],
    "bytes": sizes,
  }


def write_outputs(folder: pathlib.Path, config: ModelConfig, found: Found, result: dict) -> None:
  """mask.json, mask.png, report.md, and last result.json, whose presence means: done."""
  found.mask.save(
    folder / "mask.json",
    config,
    **{
      name: result[name] for name in ("model", "window", "sinks", "target_ratio", "method", "seed")
    },
    scores={
      name: {k: None if v is None else round(v, 5) for k, v in result["held_out"][name].items()}
      for name in ("full", "all_local", "mask")
    },
  )
  weights = np.array([layer["weight"] for layer in found.layers])
  report.draw_mask(
    folder / "mask.png",
    found.mask.local,
    weights,
    f"{result['model']}: {found.mask.num_local} of {config.total_groups} groups local",
  )
  (folder / "report.md").write_text(report.markdown(result), encoding="utf-8")
  write_json(folder / "result.json", result)
