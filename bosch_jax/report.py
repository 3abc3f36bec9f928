"""What a run leaves for people: the table in the terminal, mask.png and report.md."""

import pathlib
from collections.abc import Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

NAMES = {"full": "full attention", "all_local": "all local"}


def rows(results: list[dict]) -> list[tuple[str, ...]]:
  """Header and rows of the table, on held-out prompts: full, all local and the mask of each result."""
  total, context = results[0]["num_groups"], results[0]["kv"]["tokens"]
  table = [("", "local", "answer NLL", "exact match", f"KV at {context} tokens")]
  lines = [("full", 0, results[0]), ("all_local", total, results[0])]
  lines += [("mask", result["num_local"], result) for result in results]
  for column, local, result in lines:
    scores, kv = result["held_out"][column], result["kv"]["bytes"][column]
    table.append(
      (
        NAMES.get(column, f"{result['method'].upper()} mask"),
        f"{local} of {total}",
        with_error(scores["nll"], scores["nll_se"], 3),
        with_error(scores["exact_match"], scores["exact_match_se"], 2),
        f"{human_bytes(kv)} {kv / result['kv']['bytes_full']:4.0%}",
      )
    )
  return table


def human_bytes(number: float) -> str:
  """ "22.5 KiB", "180.0 MiB", "3.50 GiB"."""
  for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1)):
    if number >= unit:
      return f"{number / unit:.{digits}f} {name}"
  return f"{number / 2**10:.1f} KiB"


def with_error(value: float, error: float | None, digits: int) -> str:
  """ "0.123 ± 0.005"; without an error where there is only one context."""
  return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def terminal_table(results: list[dict]) -> Table:
  """The closing table for the terminal."""
  result = results[0]
  n = result["held_out"]["mask"]["n"]
  return text_table(
    f"{escape(result['model'])}: {n} held-out questions, context {result['context']}, window {result['window']}",
    rows(results),
    "center",
  )


def text_table(title: str, rows: Sequence[Sequence[str]], justify: str = "left") -> Table:
  """A table for the terminal from its header and rows: names on the left, figures on the right."""
  header, *body = rows
  table = Table(title=title, title_justify=justify)
  for i, name in enumerate(header):
    table.add_column(name, justify="left" if i == 0 else "right")
  for row in body:
    table.add_row(*row)
  return table


def markdown_table(results: list[dict]) -> list[str]:
  """The same table in Markdown, and what it was measured on."""
  header, *body = rows(results)
  result = results[0]
  return [
    "| " + " | ".join(header) + " |",
    "|---" * len(header) + "|",
    *("| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in body),
    "",
    f"Measured on {result['held_out']['mask']['n']} questions the search never saw"
    f" ({result['task']} needles in {result['haystack']}, {result['context']} tokens). NLL is in nats per answer token, lower is better;"
    " exact match is the share of questions whose answer greedy decoding gets whole; ± is one standard error over contexts.",
  ]


def markdown(result: dict) -> str:
  """report.md: the table, what it means, what it cost and how it was found."""
  cost, stages = result["cost"], result["stages"]
  alone = f" ({cost['alone']:.1f} if this ratio were searched alone)"
  shared = alone if cost["alone"] - cost["full_forward_equivalents"] > 0.05 else ""
  warning = ["", f"**Warning: {result['warning']}**"] if result["warning"] else []
  lines = [
    f"# Head mask for {result['model']}",
    "",
    f"{result['num_local']} of {result['num_groups']} key/value head groups see only the last {result['window']} tokens"
    f" (asked for: {result['target_ratio']:g}, true share {result['ratio']:.4f}); the others keep the whole context.",
    *warning,
    "",
    *markdown_table([result]),
    "",
    "![which heads are local](mask.png)",
    "",
    "## How it was found",
    "",
    "| stage | what | calibration NLL | passes |",
    "|---|---|---|---|",
    *(f"| {s['name']} | {s['what']} | {s['nll']:.3f} | {s['cost']:.1f} |" for s in stages),
    "",
    f"Cost: {cost['full_forward_equivalents']:.1f} full forward passes over the calibration set{shared}; the whole run scored"
    f" {cost['masks_scored']} masks in {cost['cpu_seconds']:.0f} CPU seconds, {cost['wall_seconds']:.0f} s on the clock, and its"
    f" held-out table took {cost['held_out_forward_equivalents']:.1f} passes more.",
    "",
    "mask.json is the mask, result.json has all figures; config.json has the settings of the run, journal.jsonl every score.",
    "",
  ]
  return "\n".join(lines)


def overview(results: list[dict], folders: list[str]) -> str:
  """report.md of a run with several ratios."""
  passes = sum(result["cost"]["full_forward_equivalents"] for result in results)
  lines = [
    f"# Head masks for {results[0]['model']}",
    "",
    *markdown_table(results),
    "",
    *(
      f"- [{result['target_ratio']:g} local]({name}/report.md): {name}/mask.json"
      for name, result in zip(folders, results, strict=True)
    ),
    "",
    f"Cost: {passes:.1f} full forward passes over the calibration set for all of them,"
    f" {results[0]['cost']['wall_seconds']:.0f} s on the clock.",
    "",
  ]
  return "\n".join(lines)


def draw_mask(path: pathlib.Path, local_LxG: np.ndarray, weight_L: np.ndarray, title: str) -> None:
  """mask.png: layers x groups, local or full, beside the weight stage 2 gave each layer."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt
  from matplotlib.colors import ListedColormap
  from matplotlib.patches import Patch

  layers, groups = local_LxG.shape
  local, full = "#d9e2ec", "#1f5f8b"
  figure, (left, right) = plt.subplots(
    1,
    2,
    sharey=True,
    figsize=(3.6 + 0.3 * groups, 1.4 + 0.19 * layers),
    width_ratios=(max(groups, 2) * 0.35, 2),
    layout="constrained",
  )
  left.imshow(
    local_LxG, cmap=ListedColormap([full, local]), vmin=0, vmax=1, aspect="auto", origin="lower"
  )
  left.set_xticks(range(groups))
  left.set_yticks(range(layers), minor=True)
  left.set_xticks(np.arange(groups) - 0.5, minor=True)
  left.set_yticks(np.arange(layers) - 0.5, minor=True)
  left.grid(which="minor", color="white", linewidth=1)
  left.tick_params(which="minor", length=0)
  left.set_xlabel("group")
  left.set_ylabel("layer (output on top)")
  right.barh(range(layers), weight_L, color=full)
  right.set_xlim(0, 1)
  right.set_xlabel("layer weight\n(1 = hardest to localise)")
  figure.legend(
    handles=[Patch(color=full, label="full context"), Patch(color=local, label="window only")],
    loc="outside lower center",
    ncols=2,
    frameon=False,
  )
  figure.suptitle(title, fontsize=10, parse_math=False)
  figure.savefig(path, dpi=150)
  plt.close(figure)
