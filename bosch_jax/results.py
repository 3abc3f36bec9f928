"""The results of a selection: held-out scores, what the cache saves, and the files they go to."""

import pathlib

import numpy as np

from bosch_jax import interrupts, report
from bosch_jax.evaluator import Evaluator
from bosch_jax.search import Found
from bosch_jax.settings import SelectSettings
from models.config import ModelConfig
from models.windows import HeadMask, write_json


def held_out_scores(evaluator: Evaluator, masks: list[HeadMask]) -> tuple[list[dict], float]:
  """Full attention, all local and each mask on prompts the search never saw.

  Args:
    evaluator: of these prompts; what it has scored before costs nothing. It keeps the scores, but
      not its hidden states.
    masks: those to score.

  Returns:
    For each mask a dict of full, all_local and mask, with: nll (nats per answer token), exact_match
    (share of questions), their standard errors over contexts, n, the number of questions, and
    by_context, both means of every context, for paired differences; and the cost of all in full
    passes over the held-out set.
  """
  evaluator.on_scored = lambda stage, cost: interrupts.check()
  anchors = HeadMask.full(evaluator.config), HeadMask.all_local(evaluator.config)
  before = evaluator.cost
  scores = evaluator.score([m.local for m in (*anchors, *masks)])
  evaluator.forget()
  rows = []
  for nll, exact in zip(scores.nll, scores.exact, strict=True):
    row = {"n": nll.size}
    for field, values in (("nll", nll), ("exact_match", exact)):
      row[field], row[f"{field}_se"] = mean_and_error(values)
    row["by_context"] = {"nll": nll.mean(1).tolist(), "exact_match": exact.mean(1).tolist()}
    rows.append(row)
  full, all_local, *rest = rows
  return [
    {"full": full, "all_local": all_local, "mask": row} for row in rest
  ], evaluator.cost - before


def as_json(
  loaded, settings: SelectSettings, ratio: float, found: Found, held_out: dict, spent: dict
) -> dict:
  """The content of a ratio's result.json; `spent` is what the whole run took besides."""
  return {
    "model": loaded.name,
    "fingerprint": loaded.config.fingerprint,
    "method": settings.method,
    "score": settings.score,
    "seed": settings.seed,
    "ratio": found.mask.ratio,
    "target_ratio": ratio,
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
    "held_out": held_out,
    "cost": {"full_forward_equivalents": found.cost, "alone": found.alone, **spent},
    "kv": kv_facts(loaded.config, found.mask, settings),
  }


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


def write(folder: pathlib.Path, config: ModelConfig, found: list[Found], made: list[dict]) -> str:
  """Writes what was found: for one ratio into the folder, for several into a folder each within.

  Returns:
    What was written, for people to read.
  """
  files = "mask.json, report.md, mask.png, result.json"
  if len(made) == 1:
    write_one(folder, config, found[0], made[0])
    return files
  names = [f"ratio-{result['target_ratio']:g}" for result in made]
  for name, f, result in zip(names, found, made, strict=True):
    (folder / name).mkdir(exist_ok=True)
    write_one(folder / name, config, f, result)
  (folder / "report.md").write_text(report.overview(made, names), encoding="utf-8")
  rows = [
    {"folder": name, **{field: result[field] for field in ("target_ratio", "ratio", "num_local")}}
    | {"held_out": result["held_out"], "cost": result["cost"]}
    for name, result in zip(names, made, strict=True)
  ]
  write_json(folder / "result.json", {"model": made[0]["model"], "ratios": rows})
  return f"report.md, result.json, and in {', '.join(names)}: {files}"


def write_one(folder: pathlib.Path, config: ModelConfig, found: Found, result: dict) -> None:
  """mask.json, mask.png, report.md, and last result.json, whose presence means: done."""
  found.mask.save(
    folder / "mask.json",
    config,
    **{
      name: result[name] for name in ("model", "window", "sinks", "target_ratio", "method", "seed")
    },
    scores={
      name: {
        k: None if v is None else round(v, 5)
        for k, v in result["held_out"][name].items()
        if k != "by_context"
      }
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
