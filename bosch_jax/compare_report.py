"""What the cells of a comparison say together: compare.json's content and the tables."""

import itertools
import json
import pathlib

import numpy as np

from bosch_jax.compare_settings import CompareSettings
from bosch_jax.report import with_error
from bosch_jax.statistics import mean_and_error, paired
from models.windows import HeadMask

FIELDS = ("nll", "exact_match")
TITLES = {
  "nll": "Held-out answer NLL, nats per token (lower is better)",
  "exact_match": "Held-out exact match, % of questions (higher is better)",
}
RECOVERY = "Recovery by continual pretraining"
ANCHORS = {"full": "full attention", "all_local": "all local"}


def cell_folder(settings: CompareSettings, method: str, seed: int, ratio: float) -> pathlib.Path:
  """Where `select` left the mask of one ratio."""
  folder = settings.cell(method, seed).folder
  return folder if len(settings.ratios) == 1 else folder / f"ratio-{ratio:g}"


def summary(settings: CompareSettings) -> dict:
  """The content of compare.json.

  Returns:
    Besides what was compared: `cells`, every mask with its own figures; `anchors` and
    `table[method][ratio]`, means over all held-out contexts of all seeds with their standard errors
    (`_se`) and the standard deviation of the seeds' own means (`_seed_sd`, None for one seed);
    `cost[method]`, the means over seeds of what all ratios took together and, as `alone[ratio]`, of what
    one takes in a run of its own; `paired[method][ratio]`,
    the mean difference to `reference` over the same contexts and its standard error; `best[ratio]`,
    the method of lowest NLL; `turnover[method]["a-b"]`, head turnover between two ratios, and
    `jaccard[ratio]`, the distances between the methods' masks, both averaged over seeds; `local`,
    the share of seeds in which a group is local, `[L][G]` by method and ratio.
  """
  seeds = range(1, settings.seeds + 1)
  results, masks = {}, {}
  for method, seed, ratio in itertools.product(settings.methods, seeds, settings.ratios):
    folder = cell_folder(settings, method, seed, ratio)
    key = method, ratio, seed
    results[key] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    record = json.loads((folder / "mask.json").read_text(encoding="utf-8"))
    masks[key] = HeadMask(np.array(record["swa"], bool))
  first = results[settings.methods[0], settings.ratios[0], 1]
  values = {
    key: {field: result["held_out"]["mask"]["by_context"][field] for field in FIELDS}
    for key, result in results.items()
  }

  def pooled(method: str, ratio: float, field: str) -> np.ndarray:
    return np.concatenate([values[method, ratio, seed][field] for seed in seeds])

  def entry(by_seed: list[dict]) -> dict:
    made: dict = {"contexts": sum(len(v["nll"]) for v in by_seed)}
    for field in FIELDS:
      made[field], made[f"{field}_se"] = mean_and_error(np.concatenate([v[field] for v in by_seed]))
      means = [np.mean(v[field]) for v in by_seed]
      made[f"{field}_seed_sd"] = float(np.std(means, ddof=1)) if len(means) > 1 else None
    return made

  reference = "bosch" if "bosch" in settings.methods else settings.methods[0]
  table, differences, local, costs, turnover = {}, {}, {}, {}, {}
  for method in settings.methods:
    table[method], differences[method], local[method] = {}, {}, {}
    for ratio in settings.ratios:
      name = f"{ratio:g}"
      table[method][name] = entry([values[method, ratio, seed] for seed in seeds])
      differences[method][name] = made = {}
      for field in FIELDS:
        pair = pooled(method, ratio, field), pooled(reference, ratio, field)
        made[field], made[f"{field}_se"] = paired(*pair)
      local[method][name] = np.mean(
        [masks[method, ratio, seed].local for seed in seeds], axis=0
      ).tolist()
    costs[method] = _cost([[results[method, ratio, s] for ratio in settings.ratios] for s in seeds])
    costs[method]["alone"] = {
      f"{ratio:g}": float(np.mean([results[method, ratio, s]["cost"]["alone"] for s in seeds]))
      for ratio in settings.ratios
    }
    turnover[method] = {
      f"{a:g}-{b:g}": float(
        np.mean([masks[method, a, s].turnover(masks[method, b, s]) for s in seeds])
      )
      for a, b in itertools.combinations(settings.ratios, 2)
    }
  anchors = {
    name: entry(
      [results[settings.methods[0], settings.ratios[0], s]["held_out"][name]["by_context"] for s in seeds]
    )
    for name in ANCHORS
  }  # fmt: skip
  return {
    **{name: first[name] for name in ("model", "fingerprint", "num_groups", "window", "sinks")},
    **{name: first[name] for name in ("context", "task", "haystack", "score")},
    "samples": settings.samples,
    "held_out": settings.held_out,
    "budget": settings.budget,
    "ratios": list(settings.ratios),
    "methods": list(settings.methods),
    "seeds": settings.seeds,
    "reference": reference,
    "cells": [
      {
        "method": method,
        "ratio": ratio,
        "seed": seed,
        "folder": str(cell_folder(settings, method, seed, ratio).relative_to(settings.folder)),
        "num_local": result["num_local"],
        **result["held_out"]["mask"],
        "cost": result["cost"],
        "warning": result["warning"],
      }
      for (method, ratio, seed), result in results.items()
    ],
    "anchors": anchors,
    "table": table,
    "cost": costs,
    "paired": differences,
    "best": {
      f"{ratio:g}": min(settings.methods, key=lambda m, r=f"{ratio:g}": table[m][r]["nll"])
      for ratio in settings.ratios
    },
    "turnover": turnover,
    "jaccard": {f"{ratio:g}": _jaccard(settings, masks, ratio) for ratio in settings.ratios},
    "local": local,
  }


def _cost(by_seed: list[list[dict]]) -> dict:
  """Mean over seeds of what the ratios of a run took together."""
  passes = [sum(r["cost"]["full_forward_equivalents"] for r in run) for run in by_seed]
  return {
    "full_forward_equivalents": float(np.mean(passes)),
    # Whole runs: every ratio's result repeats them.
    "cpu_seconds": float(np.mean([run[0]["cost"]["cpu_seconds"] for run in by_seed])),
    "masks_scored": float(np.mean([run[0]["cost"]["masks_scored"] for run in by_seed])),
  }


def _jaccard(settings: CompareSettings, masks: dict, ratio: float) -> list[list[float]]:
  seeds = range(1, settings.seeds + 1)
  return [
    [
      float(np.mean([masks[a, ratio, s].jaccard(masks[b, ratio, s]) for s in seeds]))
      for b in settings.methods
    ]
    for a in settings.methods
  ]


# --- tables --------------------------------------------------------------------------------------


def _shown(entry: dict, field: str) -> str:
  scale, digits = (1, 3) if field == "nll" else (100, 1)
  error = entry[f"{field}_se"]
  return with_error(scale * entry[field], None if error is None else scale * error, digits)


def title(method: str) -> str:
  return method.upper()


def method_rows(result: dict, field: str) -> list[list[str]]:
  """Header and rows, methods against ratios as in the paper; * = best by the figure shown, ~ = within one
  of its standard errors."""
  rows = [["method", *(f"{ratio:g} local" for ratio in result["ratios"])]]
  for name, shown in ANCHORS.items():
    rows.append([shown, *([_shown(result["anchors"][name], field)] * len(result["ratios"]))])
  for method in result["methods"]:
    row = [title(method)]
    for ratio in result["ratios"]:
      entry = result["table"][method][f"{ratio:g}"]
      row.append(_shown(entry, field) + _mark(result, field, f"{ratio:g}", entry))
    rows.append(row)
  return rows


def _mark(result: dict, field: str, ratio: str, entry: dict) -> str:
  entries = [result["table"][method][ratio] for method in result["methods"]]
  sign = 1 if field == "nll" else -1
  best = min(entries, key=lambda e: sign * e[field])
  if entry[field] == best[field]:
    return " *"
  return " ~" if sign * (entry[field] - best[field]) <= (best[f"{field}_se"] or 0.0) else ""


def paired_rows(result: dict) -> list[list[str]]:
  """Header and rows: NLL of each method minus the reference's, on the same contexts."""
  rows = [["method", *(f"{ratio:g} local" for ratio in result["ratios"])]]
  for method in result["methods"]:
    if method != result["reference"]:
      entries = [result["paired"][method][f"{ratio:g}"] for ratio in result["ratios"]]
      rows.append([title(method), *(_shown(entry, "nll") for entry in entries)])
  return rows


def cost_rows(result: dict) -> list[list[str]]:
  rows = [["method", "passes, all ratios", "one ratio alone", "masks scored", "CPU seconds"]]
  for method in result["methods"]:
    cost = result["cost"][method]
    rows.append(
      [
        title(method),
        f"{cost['full_forward_equivalents']:.1f}",
        f"{np.mean(list(cost['alone'].values())):.1f}",
        f"{cost['masks_scored']:.0f}",
        f"{cost['cpu_seconds']:.0f}",
      ]
    )
  return rows


def turnover_rows(result: dict) -> list[list[str]]:
  """Header and rows: head turnover in percent, methods against pairs of ratios."""
  pairs = list(result["turnover"][result["methods"][0]])
  return [
    ["method", *(" to ".join(pair.split("-")) for pair in pairs)],
    *(
      [title(method), *(f"{100 * result['turnover'][method][pair]:.0f}" for pair in pairs)]
      for method in result["methods"]
    ),
  ]


def jaccard_rows(result: dict, ratio: str) -> list[list[str]]:
  return [
    ["", *map(title, result["methods"])],
    *(
      [title(method), *(f"{distance:.2f}" for distance in row)]
      for method, row in zip(result["methods"], result["jaccard"][ratio], strict=True)
    ),
  ]


def recovery_rows(made: dict) -> list[list[str]]:
  """Header and rows: held-out losses before and after training, full attention's above them."""
  names = ("retrieval NLL before", "after", "gap closed", "half of it by update", "answered whole")
  rows = [["method", *names, "text NLL before", "after"]]
  full = made["full"]
  exact = f"{100 * full['retrieval_exact']:.0f}%"
  losses = [f"{full[name]:.3f}" for name in ("retrieval_nll", "text_nll")]
  rows.append([ANCHORS["full"], losses[0], "", "", "", exact, losses[1], ""])
  for method, facts in made["methods"].items():
    before, after = facts["points"][0], facts["points"][-1]
    closed, half = facts["gap_closed"], facts["half_at"]
    rows.append(
      [
        title(method),
        f"{before['retrieval_nll']:.3f}",
        f"{after['retrieval_nll']:.3f}",
        "-" if closed is None else f"{100 * closed:.0f}%",
        "-" if half is None else str(half),
        f"{100 * after['retrieval_exact']:.0f}%",
        f"{before['text_nll']:.3f}",
        f"{after['text_nll']:.3f}",
      ]
    )
  return rows


def sections(result: dict) -> list[tuple[str, str, list[list[str]] | None, str | None]]:
  """The report: heading, text, table and picture of each section."""
  contexts = result["anchors"]["full"]["contexts"]
  notes = (
    f"± is one standard error over {contexts} held-out contexts of {result['seeds']} seeds; * marks the best of a"
    " column, ~ what lies within one standard error of it."
  )
  made = [(TITLES[field], notes, method_rows(result, field), None) for field in FIELDS]
  if len(result["methods"]) > 1:
    made.append(
      (
        f"Paired differences to {title(result['reference'])}",
        "NLL of a method minus the reference's, on the same contexts; above 0 the reference is better.",
        paired_rows(result),
        None,
      )
    )
  made.append(
    (
      "Cost against quality",
      "One pass is a full-attention forward over the calibration prompts, a backward pass counts as two. A"
      " run makes the masks of all ratios: first its whole cost, with what the ratios share counted once, then"
      " that of a ratio in a run of its own, mean over ratios; all of them means over seeds. The plot shows a"
      " ratio alone.",
      cost_rows(result),
      "cost.png",
    )
  )
  if len(result["ratios"]) > 1:
    made.append(
      (
        "Head turnover between ratios",
        "1 - |A and B| / sqrt(|A| |B|) of the two sets of local groups, in percent, mean over seeds.",
        turnover_rows(result),
        None,
      )
    )
  if len(result["methods"]) > 1:
    for ratio in result["jaccard"]:
      text = "Jaccard distances between the sets of local groups, mean over seeds."
      made.append(
        (f"Distances between masks, {ratio} local", text, jaccard_rows(result, ratio), None)
      )
    made.append(("Distances between masks, drawn", "0 is the same mask.", None, "jaccard.png"))
  made.append(
    (
      "Masks",
      "Groups down, layers across, the output layer at the right; shade is the share of seeds in which a group is local.",
      None,
      "masks.png",
    )
  )
  if "recovery" in result:
    trained = result["recovery"]
    text = (
      f"The same {trained['updates']} updates ({trained['tokens'] / 1e6:.2f} million tokens) from each method's mask"
      f" of seed {trained['seed']} at {trained['ratio']:g} local, with the same data; full attention is untrained."
    )
    made.append((RECOVERY, text, recovery_rows(trained), "recovery.png"))
  return made


def overview(result: dict) -> str:
  """What was compared, in a paragraph."""
  return (
    f"{result['model']}, {result['num_groups']} head groups, window {result['window']}, context {result['context']}"
    f" ({result['task']} needles in {result['haystack']}); {result['samples']} calibration and {result['held_out']} held-out"
    f" contexts per seed, a budget of {result['budget']} passes a ratio."
  )


def markdown(result: dict) -> str:
  """compare.md."""
  lines = [f"# Head selection methods on {result['model']}", "", overview(result)]
  for heading, text, table, picture in sections(result):
    lines += ["", f"## {heading}", "", text]
    if table:
      header, *rows = table
      lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
      lines += ["| " + " | ".join(row) + " |" for row in rows]
    if picture:
      lines += ["", f"![{heading}]({picture})"]
  return "\n".join([*lines, ""])
