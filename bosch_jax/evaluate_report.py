"""What an evaluation leaves: evaluate.json's content, tables in Markdown and terminal, the picture."""

import itertools
import pathlib
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from bosch_jax.report import NAMES, text_table, with_error
from bosch_jax.statistics import average, mean_and_error, paired
from bosch_jax.tasks.niah_tasks import DEPTHS

if TYPE_CHECKING:
  from bosch_jax.evaluate import Cell, Sets
  from bosch_jax.evaluate_settings import Columns, EvaluateSettings
  from models.registry import Loaded

AVERAGE = "average"
# Field -> how its values are read from a cell, one per context.
FIELDS = {
  "string_match": lambda cell: cell.match_B,
  "exact_match": lambda cell: cell.exact_B,
  "nll": lambda cell: cell.nll_B,
}


def summary(
  settings: "EvaluateSettings",
  measured: "Columns",
  loaded: "Loaded",
  sets: "Sets",
  cells: "dict[tuple[str, int, str], Cell]",
) -> dict:
  """The content of evaluate.json.

  Returns:
    Besides what was measured: `scores[column][length][task]` with string_match, exact_match and nll,
    their standard errors over contexts (`_se`), and n, the number of contexts; the task "average"
    is the mean over the averaged tasks. `depths[column][length]` has one entry per fifth of the
    haystack: the share of the strings expected there that were found, n, how many, and nll of the
    answers whose needles begin there (their mean depth, where an answer has several). `paired` has,
    for each two columns (all local aside) and each task, the mean difference a - b over the contexts
    and its standard error.
  """
  averaged = [name for name in settings.average if name in settings.tasks]
  names, lengths = list(measured.masks), list(dict.fromkeys(settings.lengths))
  scores: dict = {
    name: {
      str(length): _scores(cells, name, length, settings.tasks, averaged) for length in lengths
    }
    for name in names
  }
  depths = {
    name: {str(length): _depths(sets, cells, name, length) for length in lengths} for name in names
  }
  differences = [
    {"a": a, "b": b, "length": length, "task": task, **_paired(cells, a, b, length, tasks)}
    for b, a in itertools.combinations([name for name in names if name != "all_local"], 2)
    for length in lengths
    for task, tasks in [
      *((task, [task]) for task in settings.tasks),
      *([(AVERAGE, averaged)] if averaged else []),
    ]
  ]
  return {
    "model": loaded.name,
    "fingerprint": loaded.config.fingerprint,
    "masks": {
      name: {
        "num_local": mask.num_local,
        "num_groups": loaded.config.total_groups,
        "path": None if i < 2 else str(settings.mask[i - 2]),
      }
      for i, (name, mask) in enumerate(measured.masks.items())
    },
    "window": measured.window,
    "sinks": measured.sinks,
    "tasks": list(settings.tasks),
    "averaged": averaged,
    "lengths": lengths,
    "samples": settings.samples,
    "max_tokens": settings.max_tokens,
    "essay": None if settings.essay is None else str(settings.essay),
    "seed": settings.seed,
    "scores": scores,
    "depths": depths,
    "paired": differences,
  }


def _scores(cells, name, length, tasks, averaged) -> dict:
  table: dict = {}
  for task in tasks:
    cell = cells[name, length, task]
    table[task] = {"n": len(cell.found)}
    for field, of in FIELDS.items():
      table[task][field], table[task][f"{field}_se"] = mean_and_error(of(cell))
  if averaged:
    table[AVERAGE] = {"n": sum(table[task]["n"] for task in averaged)}
    for field in FIELDS:
      pairs = [(table[task][field], table[task][f"{field}_se"]) for task in averaged]
      table[AVERAGE][field], table[AVERAGE][f"{field}_se"] = average(pairs)
  return table


def _depths(sets, cells, name, length) -> list[dict]:
  found: list[list[bool]] = [[] for _ in range(DEPTHS)]
  nll: list[list[float]] = [[] for _ in range(DEPTHS)]
  for (at, task), tasks in sets.items():
    if at != length:
      continue
    cell = cells[name, length, task]
    for row, depths in enumerate(tasks.depths):
      nll[_fifth(np.mean(depths))].append(cell.nll_B[row])
      for depth, hit in zip(depths, cell.found[row], strict=True):
        found[_fifth(depth)].append(hit)
  return [
    {
      "from": i / DEPTHS,
      "to": (i + 1) / DEPTHS,
      "n": len(found[i]),
      "string_match": float(np.mean(found[i])) if found[i] else None,
      "nll": float(np.mean(nll[i])) if nll[i] else None,
    }
    for i in range(DEPTHS)
  ]


def _fifth(depth: float) -> int:
  return min(int(depth * DEPTHS), DEPTHS - 1)


def _paired(cells, a, b, length, tasks) -> dict:
  record = {}
  for field, of in FIELDS.items():
    pairs = [paired(of(cells[a, length, task]), of(cells[b, length, task])) for task in tasks]
    record[field], record[f"{field}_se"] = average(pairs)
  return record


# --- tables --------------------------------------------------------------------------------------


def short(task: str) -> str:
  return task.removeprefix("niah_").replace("_", " ")


def column_name(name: str) -> str:
  return NAMES.get(name, name)


def score_rows(result: dict, length: int, field: str) -> list[list[str]]:
  """Header and rows of one table: columns of the run against tasks; shares in percent."""
  scale, digits = (1, 3) if field == "nll" else (100, 1)
  tasks = result["tasks"] + ([AVERAGE] if result["averaged"] else [])
  averaged = f"mean of {len(result['averaged'])}"
  table = [["", "local", *(averaged if task == AVERAGE else short(task) for task in tasks)]]
  for name, mask in result["masks"].items():
    row = [column_name(name), f"{mask['num_local']} of {mask['num_groups']}"]
    for task in tasks:
      entry = result["scores"][name][str(length)][task]
      error = entry[f"{field}_se"]
      row.append(with_error(scale * entry[field], None if error is None else scale * error, digits))
    table.append(row)
  return table


def paired_rows(result: dict) -> list[list[str]]:
  """Header and rows: differences of the average (or of every task, where none is averaged)."""
  table = [["length", "task", "difference", "string match, points", "answer NLL"]]
  for entry in result["paired"]:
    if result["averaged"] and entry["task"] != AVERAGE:
      continue
    error = entry["string_match_se"]
    table.append(
      [
        str(entry["length"]),
        short(entry["task"]),
        f"{column_name(entry['a'])} - {column_name(entry['b'])}",
        with_error(100 * entry["string_match"], None if error is None else 100 * error, 1),
        with_error(entry["nll"], entry["nll_se"], 3),
      ]
    )
  return table


TITLES = {
  "string_match": "string match, % of the expected strings that the generated text contains",
  "exact_match": "exact match, % of answers of which every token is the most likely one",
  "nll": "answer NLL, nats per token",
}


def terminal_tables(result: dict) -> list[Table]:
  """One table of string match per length."""
  return [
    text_table(
      f"{length} tokens: {TITLES['string_match']}", score_rows(result, length, "string_match")
    )
    for length in result["lengths"]
  ]


def markdown_table(rows: list[list[str]]) -> list[str]:
  """Lines of a Markdown table, header first."""
  header, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
  return [
    "| " + " | ".join(header) + " |",
    "|---" * len(header) + "|",
    *("| " + " | ".join(row) + " |" for row in body),
  ]


def markdown(result: dict) -> str:
  """evaluate.md."""
  lines = [
    f"# Masks of {result['model']} on needle tasks",
    "",
    f"Window {result['window']}"
    + (f", {result['sinks']} sinks" if result["sinks"] else "")
    + f"; {result['samples']} contexts per task and length that no search saw, seed {result['seed']};"
    f" greedy, at most {result['max_tokens']} tokens. ± is one standard error over contexts.",
  ]
  if result["averaged"]:
    lines += ["", "The mean is over " + ", ".join(short(task) for task in result["averaged"]) + "."]
  for length in result["lengths"]:
    lines += ["", f"## {length} tokens"]
    for field, title in TITLES.items():
      lines += ["", title[0].upper() + title[1:], ""]
      lines += markdown_table(score_rows(result, length, field))
  lines += ["", "## Differences on the same contexts", ""]
  lines += markdown_table(paired_rows(result))
  lines += [
    "",
    "## By depth and length",
    "",
    "![string match by depth and length](evaluate.png)",
    "",
  ]
  return "\n".join(lines)


def write(folder: pathlib.Path, result: dict) -> None:
  """evaluate.md and evaluate.png."""
  draw(folder / "evaluate.png", result)
  (folder / "evaluate.md").write_text(markdown(result), encoding="utf-8")


def draw(path: pathlib.Path, result: dict) -> None:
  """A panel per column: string match by the needle's depth (down) and the length (across)."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  names, lengths = list(result["masks"]), result["lengths"]
  figure, panels = plt.subplots(
    1,
    len(names),
    sharey=True,
    squeeze=False,
    figsize=(1.2 + len(names) * max(1.9, 0.7 * len(lengths)), 3.4),
    layout="constrained",
  )
  for panel, name in zip(panels[0], names, strict=True):
    values = np.array(
      [
        [
          np.nan if (value := result["depths"][name][str(length)][i]["string_match"]) is None
          else 100 * value
          for length in lengths
        ]
        for i in range(DEPTHS)
      ]
    )  # fmt: skip
    image = panel.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
      if not np.isnan(value):
        panel.text(
          j, i, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black"
        )
    panel.set_title(column_name(name), fontsize=9, parse_math=False)
    panel.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    panel.set_xlabel("tokens")
  edges = [f"{100 * i // DEPTHS}-{100 * (i + 1) // DEPTHS}%" for i in range(DEPTHS)]
  panels[0][0].set_yticks(range(DEPTHS), edges)
  panels[0][0].set_ylabel("depth of the needle")
  figure.colorbar(image, ax=panels[0].tolist(), label="string match, %")
  figure.savefig(path, dpi=130)
  plt.close(figure)
