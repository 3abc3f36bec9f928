"""BOSCH from end to end: anchors, the three stages, the mask."""

import dataclasses

import numpy as np

from bosch_jax import gates, interrupts, paper, stages
from bosch_jax.evaluator import Evaluator
from bosch_jax.progress import SearchProgress
from bosch_jax.rankings.registry import RANKINGS, rank
from bosch_jax.settings import SelectSettings
from models.windows import HeadMask

RECIPES = {"default": gates, "probes": stages, "paper": paper}


@dataclasses.dataclass(frozen=True)
class Found:
  """The outcome of a search.

  Attributes:
    mask: exactly round-half-up(ratio * N) local groups.
    anchors: calibration scores of the two anchor masks, `{"full": ..., "all_local": ...}`.
    stages: for each stage its name, what it did, the calibration NLL of its mask and its cost, that
      of scoring this mask included; for a ranking also `ranking_cost`, what the ranking takes without
      it, even where an earlier ratio has paid for it.
    layers: for each layer its weight, number of local groups and what its groups cost; a ranking's
      scores take the place of costs.
    warning: what makes the result doubtful, or None.
    cost: full-forward equivalents spent on this ratio; those of a run's ratios add up to what it took.
    alone: the same with what easier ratios have paid for: the anchors, the ranking, or the gates
      that this one's began from.
  """

  mask: HeadMask
  anchors: dict
  stages: list[dict]
  layers: list[dict]
  warning: str | None
  cost: float
  alone: float


def search(
  evaluator: Evaluator,
  settings: SelectSettings,
  ratio: float,
  progress: SearchProgress,
  known: dict | None = None,
) -> Found:
  """Runs the search that the settings ask for, for one of their ratios.

  Args:
    evaluator: scores masks on the calibration prompts; its cost counts from where a resumed
      journal left it.
    settings: of the run.
    ratio: the share of groups that become local.
    progress: told after every batch of scores.
    known: what easier ratios of the run have learned: rankings (see `rank`), gates, and under
      "spent" what they took.
  """
  config, known = evaluator.config, {} if known is None else known
  began, log = evaluator.cost, []

  def note(name: str, what: str, mask: np.ndarray, **facts) -> None:
    nll = float(evaluator.score([mask]).nll.mean())
    spent = evaluator.cost - began - sum(entry["cost"] for entry in log)
    entry = {"name": name, "what": what, "nll": nll, "cost": spent, "num_local": int(mask.sum())}
    log.append(entry | facts)

  def scored(stage: str, cost: float) -> None:
    interrupts.check()
    progress.update(stage, cost, s.best_nll if s else None)

  s = None
  evaluator.on_scored = scored
  s = stages.Search(evaluator, settings, ratio, known)
  warning = None
  if not s.objective.measures:
    warning = (
      f"by {settings.score}, full attention is no better than all local on these prompts, so they do not "
      "show what a head is needed for; use another model, a smaller --context or --score nll"
    )
  shared = stages.ANCHORS - (evaluator.cost - began)
  note("anchor", "full attention", np.zeros(s.shape, bool))
  searched = 0 < s.num_local < config.total_groups
  if searched and "gates" in known:
    shared = known["spent"]
  if not searched:
    mask, cost = np.full(s.shape, s.num_local > 0), np.zeros(s.shape)
    weights = np.zeros(len(mask))
  elif settings.method != "bosch":
    before = evaluator.cost
    ranking = rank(settings.method, s, RECIPES[settings.search.recipe], known)
    shared += ranking.cost - (evaluator.cost - before)
    mask, cost = ranking.mask(s.num_local), ranking.score_LxG
    weights = stages.weights(cost - cost.min())
    note(settings.method, RANKINGS[settings.method][0], mask, ranking_cost=ranking.cost)
  else:
    recipe = RECIPES[settings.search.recipe]
    importance = recipe.layer_importance(s)
    note("1", recipe.STAGES[0], importance.cascade)
    assigned = recipe.assign_ratios(s, importance)
    note("2", recipe.STAGES[1], assigned.mask)
    mask = recipe.select_heads(s, assigned)
    note("3", recipe.STAGES[2], mask)
    cost, weights = assigned.cost_LxG, assigned.weight_L
  known["spent"] = evaluator.cost - began + shared
  return Found(
    HeadMask(mask),
    {"full": s.objective.full, "all_local": s.objective.all_local},
    log,
    [
      {
        "layer": l,
        "weight": float(weights[l]),
        "num_local": int(mask[l].sum()),
        "group_cost": cost[l].tolist(),
      }
      for l in range(len(mask))
    ],
    warning,
    evaluator.cost - began,
    evaluator.cost - began + shared,
  )
