"""Solvers side by side on planted objectives of the real size, at fixed numbers of evaluations.

Every contender starts from the same random bits and knows nothing else; each loss it learns counts,
that of the start too. A gradient counts as three evaluations (a backward pass costs about two
forward ones). Regret is the share of the gap between a random choice and the best known that is
still open: 0 is the best known, 1 is chance.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from itertools import filterfalse

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import output
from benchmarks.planted import KINDS, Planted, best_known, planted
from bosch_jax.solvers import LazySolver, Space, SwapSolver, make_solver, require
from models.errors import InputError

GRADIENT = 3  # evaluations a gradient counts as
CONTENDERS = ("random", "swap", "lazy", "lazy + swap", "gates", "nomad", "nevergrad")


@dataclasses.dataclass(frozen=True)
class Options:
  """What to compare.

  Attributes:
    solvers: contenders; one whose package is missing gets a row that says so.
    kinds: objectives, see benchmarks/planted.py.
    layers, groups: the bits are layers x groups.
    ones: numbers of bits to set.
    budgets: evaluations.
    seeds: objectives of each kind.
    batch: candidates asked for at once.
    out: folder for solvers.json, solvers.md and solvers.png.
  """

  solvers: tuple[str, ...] = CONTENDERS
  kinds: tuple[str, ...] = KINDS
  layers: int = 30
  groups: int = 3
  ones: tuple[int, ...] = (45, 68, 79)
  budgets: tuple[int, ...] = (50, 200)
  seeds: int = 3
  batch: int = 4
  out: str = "runs/bench-solvers"

  def __post_init__(self):
    n = self.layers * self.groups
    for flag, values, known in (
      ("--solvers", self.solvers, CONTENDERS),
      ("--kinds", self.kinds, KINDS),
    ):
      for value in values:
        if value not in known:
          raise InputError(flag, value, f"is not known; use some of: {', '.join(known)}")
    for field in ("layers", "groups", "seeds", "batch"):
      if getattr(self, field) < 1:
        raise InputError(
          f"--{field}", getattr(self, field), "must be a positive integer; use 1 or more"
        )
    for ones in self.ones:
      if not 0 < ones < n:
        raise InputError("--ones", ones, f"leaves nothing to choose; use 1 to {n - 1}")
    for budget in self.budgets:
      if budget < 4:
        raise InputError("--budgets", budget, "is too small for a start and one gradient; use 4")


@dataclasses.dataclass(frozen=True)
class Instance:
  """One objective, its space, the common start, and the figures regret is measured with."""

  kind: str
  ones: int
  cardinality: str
  seed: int
  objective: Planted
  classes: np.ndarray | None
  start: np.ndarray
  best: float
  chance: float

  def regret(self, loss: float) -> float:
    return (loss - self.best) / (self.chance - self.best)


def instances(options: Options):
  """Every kind x number of ones x cardinality (in total, or in every layer) x seed."""
  n = options.layers * options.groups
  for kind in options.kinds:
    for seed in range(options.seeds):
      objective = planted(kind, n, seed)
      for ones in options.ones:
        for cardinality in ("total", "per layer"):
          classes = (
            None if cardinality == "total" else np.repeat(range(options.layers), options.groups)
          )
          rng = np.random.default_rng(seed)
          start = Space(n, ones).top(rng.random(n))
          space = Space.like(start, classes)
          draws = [objective(space.top(rng.random(n))) for _ in range(200)]
          best, chance = best_known(objective, space), float(np.mean(draws))
          yield Instance(
            kind, ones, cardinality, seed, objective, classes, start, best, chance
          )  # fmt: skip


class Count:
  """The objective with a price: the best loss of an allowed candidate after every evaluation."""

  def __init__(self, objective: Planted, space: Space, budget: int):
    self._objective, self._space, self.left = objective, space, budget
    self.trace: list[float] = []

  def __call__(self, x: np.ndarray, price: int = 1) -> float:
    loss = self._objective(x)
    before = self.trace[-1] if self.trace else np.inf
    allowed = x.dtype == bool and x in self._space
    self.trace += [min(before, loss) if allowed else before] * price
    self.left -= price
    return loss


def drive(solver, count: Count) -> None:
  """Asks and tells until the solver or the budget ends."""
  while count.left > 0 and (candidates := solver.ask()[: count.left]):
    solver.tell(candidates, np.array([count(c) for c in candidates]))


def solve(name: str, instance: Instance, options: Options, budget: int) -> list[float]:
  """Best loss after each of `budget` evaluations (the last one stays, for solvers that end)."""
  space = Space.like(instance.start, instance.classes)
  count = Count(instance.objective, space, budget)
  loss = count(instance.start)
  if name == "gates":
    _gates(instance, loss, count)
  elif name.startswith("lazy"):
    _lazy(name, instance, space, count, options)
  else:
    solver = make_solver(
      name,
      instance.start,
      loss,
      classes=instance.classes,
      batch=options.batch,
      seed=instance.seed + 1,
      budget=budget,
    )
    drive(solver, count)
  trace = count.trace[:budget]
  return trace + trace[-1:] * (budget - len(trace))


def _gates(instance: Instance, loss: float, count: Count) -> None:
  steps = (count.left - 2) // GRADIENT
  solver = make_solver("gates", instance.start, loss, classes=instance.classes, budget=steps + 2)
  while count.left > 0 and (candidates := solver.ask()[: count.left]):
    relaxed = candidates[0].dtype != bool
    losses = np.array([count(c, GRADIENT if relaxed else 1) for c in candidates])
    gradients = [instance.objective.gradient(c) if relaxed else None for c in candidates]
    solver.tell(candidates, losses, gradients)


def _lazy(name: str, instance: Instance, space: Space, count: Count, options: Options) -> None:
  """One probe at a time; the last evaluation of a path that does not arrive is of its guess."""
  solver = LazySolver(np.zeros(space.size, bool), None, space)
  while count.left > 1 and (candidates := solver.ask()):
    solver.tell(candidates, np.array([count(c) for c in candidates]))
  if solver.best is None:
    guess = solver.believed()
    solver.tell([guess], [count(guess)])
  if name == "lazy + swap":
    swap = SwapSolver(
      solver.best,
      solver.best_loss,
      np.nan_to_num(solver.cost, neginf=0.0),
      classes=instance.classes,
      batch=options.batch,
    )
    drive(swap, count)


def missing(name: str) -> bool:
  """Whether the contender is a solver whose optional package is not installed."""
  try:
    require(name)
  except InputError:
    return True
  return False


def measure(options: Options, progress: Callable[[str], None] = lambda text: None) -> list[dict]:
  """One record per installed contender, instance and budget.

  Raises:
    InputError: none of the contenders is installed.
  """
  names = list(filterfalse(missing, options.solvers))
  if not names:
    require(options.solvers[0])
  records, shown = [], None
  for instance in instances(options):
    if shown != (shown := (instance.kind, instance.seed)):
      progress(f"{instance.kind} objective {instance.seed + 1} of {options.seeds}")
    for name in names:
      began = time.process_time()
      # A run of those that do not plan for their budget passes through the smaller ones.
      planned = (
        options.budgets if name in ("gates", "lazy", "lazy + swap") else (max(options.budgets),)
      )
      traces = {budget: solve(name, instance, options, budget) for budget in planned}
      seconds = time.process_time() - began
      for budget in options.budgets:
        loss = traces.get(budget, traces[max(planned)])[budget - 1]
        records.append({
          "solver": name, "kind": instance.kind, "ones": instance.ones,
          "cardinality": instance.cardinality, "seed": instance.seed, "budget": budget,
          "loss": loss, "best_known": instance.best, "chance": instance.chance,
          "regret": instance.regret(loss), "cpu_s": seconds,
        })  # fmt: skip
  return records


def summary(records: list[dict], **chosen) -> tuple[float, float] | None:
  """Mean regret and its standard error over the records that match, or None without any.

  Objectives, not settings, are the independent draws: records of one seed and kind are averaged
  first. With a single draw the standard error is nan.
  """
  draws: dict = {}
  for r in records:
    if all(r[field] == value for field, value in chosen.items()):
      draws.setdefault((r["kind"], r["seed"]), []).append(r["regret"])
  if not draws:
    return None
  means = np.array([np.mean(values) for values in draws.values()])
  error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
  return float(means.mean()), float(error)


def rows(records: list[dict], options: Options) -> list[list[str]]:
  """The table: one row per contender, a column per kind and budget; regret in percent."""
  out = []
  for name in options.solvers:
    row = [f"{name} (not installed)" if missing(name) else name]
    for kind in options.kinds:
      for budget in options.budgets:
        found = summary(records, solver=name, kind=kind, budget=budget)
        row.append("-" if found is None else _percent(*found))
    out.append(row)
  return out


def _percent(mean: float, error: float) -> str:
  return f"{100 * mean:.1f}" + ("" if np.isnan(error) else f" ±{100 * error:.1f}")


def markdown(records: list[dict], options: Options) -> str:
  """The table over everything, then one for each cardinality and number of ones."""
  heads = ["solver"] + [f"{kind}, {budget}" for kind in options.kinds for budget in options.budgets]
  text = "Regret in percent of the gap between chance and the best known, ± one standard error.\n"
  parts: list[tuple[str, list[dict]]] = [("all", records)]
  for cardinality in ("total", "per layer"):
    for ones in options.ones:
      part = [r for r in records if r["cardinality"] == cardinality and r["ones"] == ones]
      parts.append((f"{ones} of {options.layers * options.groups}, {cardinality}", part))
  for title, part in parts:
    lines = [heads, ["---"] * len(heads), *rows(part, options)]
    text += f"\n## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
  return text


def plot(records: list[dict], options: Options, path: pathlib.Path) -> None:
  """Regret against evaluations, a panel per kind."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  width = 4.2 * len(options.kinds)
  figure, axes = pyplot.subplots(1, len(options.kinds), figsize=(width, 4), squeeze=False)
  for axis, kind in zip(axes[0], options.kinds, strict=True):
    for name in filterfalse(missing, options.solvers):
      points = [summary(records, solver=name, kind=kind, budget=b) for b in options.budgets]
      means, errors = np.array(points).T
      axis.errorbar(
        options.budgets, 100 * means, 100 * np.nan_to_num(errors), marker="o", ms=3, label=name
      )
    axis.set(xscale="log", title=kind, xlabel="evaluations", ylabel="regret, %")
    axis.set_xticks(options.budgets, [str(b) for b in options.budgets])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
  axes[0][-1].legend(fontsize=7)
  figure.tight_layout()
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


def main(options: Options) -> list[dict]:
  """Measures, prints the table, and writes solvers.json, solvers.md and solvers.png."""
  console = Console()
  records = measure(options, lambda text: print(f"solvers: {text}", file=sys.stderr, flush=True))
  table = Table(
    title="Regret, % of the gap between chance and the best known",
    box=box.SIMPLE, pad_edge=False, collapse_padding=True,
  )  # fmt: skip
  table.add_column("solver", min_width=len("lazy + swap"))
  for kind in options.kinds:
    for budget in options.budgets:
      table.add_column(f"{kind}\n{budget}", justify="right")
  for row in rows(records, options):
    table.add_row(*row)
  console.print(table)
  folder = output.write(options.out, "solvers", output.with_platform(options, records))
  (folder / "solvers.md").write_text(markdown(records, options))
  plot(records, options, folder / "solvers.png")
  console.print(f"written to {folder}/solvers.json, solvers.md and solvers.png")
  return records
