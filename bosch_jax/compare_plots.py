"""The pictures of a comparison: cost against quality, all masks, distances between masks, recovery by training."""

import itertools
import pathlib

import numpy as np

from bosch_jax.compare_report import title

FILES = ("cost.png", "masks.png", "jaccard.png")
RECOVERY = "recovery.png"
_MARKERS = "osD^v<>PX*hp"


def draw(folder: pathlib.Path, result: dict) -> None:
  """Writes `FILES` into the folder, and `RECOVERY` if something was trained."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  pictures = dict(zip(FILES, (cost, masks, jaccard), strict=True))
  if "recovery" in result:
    pictures[RECOVERY] = recovery
  for name, make in pictures.items():
    figure = make(plt, result)
    figure.savefig(folder / name, dpi=110)
    plt.close(figure)


def between_decades(value: float, _) -> str:
  """Labels of a logarithmic axis at 2 and 5 only: more would lie over each other."""
  return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def cost(plt, result: dict):
  """A panel per ratio: held-out NLL over what this ratio alone takes by a method."""
  ratios, methods = result["ratios"], result["methods"]
  figure, panels = plt.subplots(
    1, len(ratios), squeeze=False, figsize=(1.6 + 3 * len(ratios), 4.2), layout="constrained"
  )
  colors = plt.get_cmap("tab20")
  for panel, ratio in zip(panels[0], ratios, strict=True):
    for i, method in enumerate(methods):
      entry = result["table"][method][f"{ratio:g}"]
      panel.errorbar(
        max(result["cost"][method]["alone"][f"{ratio:g}"], 0.5),
        entry["nll"],
        yerr=entry["nll_se"] or 0.0,
        fmt=_MARKERS[i % len(_MARKERS)],
        color=colors(i % 20),
        capsize=2,
        label=title(method),
      )
    panel.axhline(result["anchors"]["full"]["nll"], color="black", linewidth=1, linestyle=":")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(between_decades)
    panel.tick_params(which="both", labelsize=8)
    panel.set_title(f"{ratio:g} local", fontsize=10)
    panel.set_xlabel("full passes")
  panels[0][0].set_ylabel("held-out answer NLL (dotted: full attention)")
  handles, labels = panels[0][0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=min(8, len(labels)), frameon=False
  )
  return figure


def masks(plt, result: dict):
  """Methods down, ratios across: the share of seeds in which each group is local."""
  ratios, methods = result["ratios"], result["methods"]
  layers, groups = np.shape(result["local"][methods[0]][f"{ratios[0]:g}"])
  figure, panels = plt.subplots(
    len(methods),
    len(ratios),
    squeeze=False,
    sharex=True,
    sharey=True,
    figsize=(1.5 + 2.2 * len(ratios), 0.8 + len(methods) * max(0.9, 0.05 * groups)),
    layout="constrained",
  )
  for row, method in zip(panels, methods, strict=True):
    for panel, ratio in zip(row, ratios, strict=True):
      # Layers run across, so that many methods fit on a page.
      image = panel.imshow(
        np.transpose(result["local"][method][f"{ratio:g}"]),
        vmin=0, vmax=1, cmap="Blues_r", aspect="auto",
      )  # fmt: skip
      panel.set_yticks(range(groups) if groups <= 4 else [0, groups - 1])
      panel.set_xticks(sorted({0, layers // 2, layers - 1}))
      panel.tick_params(labelsize=7)
    row[0].set_ylabel(title(method), fontsize=8)
  for panel, ratio in zip(panels[0], ratios, strict=True):
    panel.set_title(f"{ratio:g} local", fontsize=10)
  for panel in panels[-1]:
    panel.set_xlabel("layer (output right)", fontsize=8)
  figure.colorbar(
    image, ax=panels.ravel().tolist(), label="dark: full, light: local", shrink=0.6, aspect=40
  )
  return figure


def jaccard(plt, result: dict):
  """A panel per ratio, two in a row: distances between the methods' masks."""
  ratios, methods = result["ratios"], result["methods"]
  columns, size = min(2, len(ratios)), 1.4 + 0.25 * len(methods)
  rows = -(-len(ratios) // columns)
  figure, panels = plt.subplots(
    rows, columns, squeeze=False, figsize=(1.6 + size * columns, size * rows), layout="constrained"
  )
  names = [title(method) for method in methods]
  for panel, ratio in itertools.zip_longest(panels.flat, ratios):
    if ratio is None:
      panel.axis("off")
      continue
    image = panel.imshow(result["jaccard"][f"{ratio:g}"], vmin=0, vmax=1, cmap="viridis")
    panel.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    panel.set_yticks(range(len(names)), names, fontsize=7)
    panel.set_title(f"{ratio:g} local", fontsize=10)
  figure.colorbar(image, ax=panels.ravel().tolist(), label="Jaccard distance", shrink=0.6)
  return figure


def recovery(plt, result: dict):
  """Held-out losses against updates, a line for each method; dashed: full attention, untrained."""
  made = result["recovery"]
  figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
  colors = plt.get_cmap("tab10" if len(made["methods"]) <= 10 else "tab20").colors
  for panel, field, label in (
    (panels[0], "retrieval_nll", "held-out retrieval, NLL per answer token"),
    (panels[1], "text_nll", "held-out text, NLL per token"),
  ):
    for i, (method, facts) in enumerate(made["methods"].items()):
      panel.plot(
        [point["step"] for point in facts["points"]],
        [point[field] for point in facts["points"]],
        marker=_MARKERS[i % len(_MARKERS)],
        markersize=4,
        color=colors[i % 20],
        label=title(method),
      )
    panel.axhline(made["full"][field], color="black", linewidth=1, linestyle="--")
    panel.set_title(label, fontsize=10)
    panel.set_xlabel("updates (dashed: full attention, untrained)")
    panel.grid(alpha=0.3)
  panels[0].set_yscale("log")
  panels[0].yaxis.set_major_formatter("{x:g}")
  panels[0].yaxis.set_minor_formatter(between_decades)
  panels[0].tick_params(which="both", labelsize=8)
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=min(8, len(labels)), frameon=False
  )
  return figure
