"""What every ranking costs and what its mask is worth, beside the search, in one run.

Each method has an evaluator of its own, so that none profits from what another scored. Passes are
full-forward equivalents on the calibration set (a gradient counts 3); the two anchors and the score
of the finished mask are not counted to a ranking. CPU seconds hold compilation.
"""

import dataclasses
import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks import output
from bosch_jax import rankings
from bosch_jax.evaluator import Evaluator
from bosch_jax.progress import SearchProgress
from bosch_jax.report import with_error
from bosch_jax.results import held_out_scores
from bosch_jax.search import search
from bosch_jax.select import calibration_prompts, prompts
from bosch_jax.settings import SelectSettings
from models import registry
from models.errors import InputError

ALL = ("bosch", *rankings.METHODS)


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    methods: names as for `python run.py select --method`.
    model, ratio, window, context, samples, held_out, budget, seed: as in `python run.py select`.
    out: folder for rankings.json.
  """

  methods: tuple[str, ...] = ALL
  model: str = "smollm2-135m"
  ratio: float = 0.75
  window: int = 32
  context: int = 256
  samples: int = 8
  held_out: int = 16
  budget: int = 55
  seed: int = 1
  out: str = "runs/bench-rankings"

  def __post_init__(self):
    if unknown := [method for method in self.methods if method not in ALL]:
      raise InputError("--methods", unknown[0], f"is not known; use some of {', '.join(ALL)}")

  def settings(self, method: str) -> SelectSettings:
    shared = dataclasses.asdict(self)
    del shared["methods"], shared["out"]
    return SelectSettings(method=method, **shared | {"ratio": (self.ratio,)})


def measure(options: Options, progress=lambda text: None) -> dict:
  """Figures of every method.

  Raises:
    InputError: settings that a method cannot have.
  """
  every = {method: options.settings(method) for method in options.methods}
  loaded = registry.load(options.model)
  for settings in every.values():
    settings.check_model(loaded.config)
  (calibration,) = calibration_prompts(loaded.tokenizer, settings)
  held_out = prompts(loaded.tokenizer, settings, "held_out", settings.held_out)
  found, rows = {}, {}
  for method, settings in every.items():
    progress(method)
    evaluator = Evaluator(
      loaded.config, loaded.params, calibration, options.window, calibration=options.samples
    )
    cpu = time.process_time()
    quiet = SearchProgress(Console(quiet=True), settings.budget)
    found[method] = search(evaluator, settings, options.ratio, quiet)
    last = found[method].stages[-1]
    rows[method] = {
      "passes": last.get("ranking_cost", found[method].cost),
      "cpu_seconds": time.process_time() - cpu,
      "calibration_nll": last["nll"],
    }
  progress("held-out prompts")
  masks = [f.mask for f in found.values()]
  evaluator = Evaluator(loaded.config, loaded.params, held_out, options.window)
  scores, _ = held_out_scores(evaluator, masks)
  for (method, row), score in zip(rows.items(), scores, strict=True):
    row |= {"held_out": score["mask"], "mask": found[method].mask.local.astype(int).tolist()}
  return {
    "options": dataclasses.asdict(options),
    "methods": rows,
    "held_out": {name: scores[0][name] for name in ("full", "all_local")},
  }


def table(facts: dict) -> Table:
  """Cost and quality of every method."""
  o = facts["options"]
  result = Table(
    title=f"{o['model']}, ratio {o['ratio']:g}, context {o['context']}, window {o['window']}, seed {o['seed']}"
  )
  for column in ("method", "passes", "CPU s", "calibration NLL", "held-out NLL", "exact match"):
    result.add_column(column, justify="left" if column == "method" else "right")
  for method, found in facts["methods"].items():
    score = found["held_out"]
    result.add_row(
      method,
      f"{found['passes']:.1f}",
      f"{found['cpu_seconds']:.0f}",
      f"{found['calibration_nll']:.3f}",
      with_error(score["nll"], score["nll_se"], 3),
      with_error(score["exact_match"], score["exact_match_se"], 2),
    )
  return result


def main(options: Options) -> dict:
  """Measures, prints, and writes rankings.json."""
  console = Console()
  facts = measure(options, lambda text: print(f"rankings: {text}", file=sys.stderr, flush=True))
  console.print(table(facts))
  for name, score in facts["held_out"].items():
    shown = with_error(score["nll"], score["nll_se"], 3)
    console.print(f"held-out NLL, {name.replace('_', ' ')}: {shown}", highlight=False)
  folder = output.write(options.out, "rankings", facts)
  console.print(f"written to {folder}/rankings.json")
  return facts
