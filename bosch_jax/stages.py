"""The three stages of BOSCH (paper, section "Three stages"), as functions of a `Search`.

Bits are `[L, G]`, True = local. Losses are the objective L(z), lower is better, 1 unit being the
whole way from full attention to all local.
"""

import dataclasses
import math

import numpy as np

from bosch_jax.evaluator import Evaluator
from bosch_jax.objective import Objective
from bosch_jax.solvers import EnumerateSolver, Solver, SwapSolver


@dataclasses.dataclass
class Search:
  """What every stage works with.

  Attributes:
    evaluator: scores masks.
    kind: "nll" or "accuracy".
    ratio, num_local, alpha: the target and the penalty weight.
    screen: contexts that candidates are screened on before the others are spent on them.
    budget: full-forward equivalents; no batch starts once it is spent.
    solver_batch: candidates a swap solver proposes at once.
  """

  evaluator: Evaluator
  kind: str
  ratio: float
  num_local: int
  alpha: float
  screen: list[int]
  budget: float
  solver_batch: int = 4

  def __post_init__(self):
    L, G = self.evaluator.config.num_layers, self.evaluator.config.num_groups
    self.shape = (L, G)
    full, local = np.zeros(self.shape, bool), np.ones(self.shape, bool)
    self._objectives = {}
    self.evaluator.stage = "anchors"
    for contexts in (None, self.screen):
      scores = self.evaluator.score([full, local], contexts).score(self.kind)
      self._objectives[contexts is None] = Objective(*scores, self.ratio, self.alpha)

  @property
  def anchors(self) -> Objective:
    """The objective on all calibration contexts, which holds the anchor scores."""
    return self._objectives[True]

  @property
  def left(self) -> float:
    """Budget not yet spent."""
    return self.budget - self.evaluator.cost

  def loss(self, masks: list[np.ndarray], screen: bool = False) -> np.ndarray:
    """L(z) on all contexts, or on the screening contexts only."""
    scores = self.evaluator.score(masks, self.screen if screen else None)
    return self._objectives[not screen](scores.score(self.kind), masks)

  def race(self, masks: list[np.ndarray], incumbent: np.ndarray) -> np.ndarray:
    """Losses on all contexts for the masks that beat the incumbent on the screening contexts, and
    the screened loss difference added to the incumbent's loss for the rest (which stay worse)."""
    before = self.loss([incumbent])[0]
    difference = self.loss(masks, screen=True) - self.loss([incumbent], screen=True)[0]
    losses = before + np.maximum(difference, 1e-9)
    promoted = [i for i in np.argsort(difference, kind="stable") if difference[i] < 0]
    for i in promoted:
      losses[i] = self.loss([masks[i]])[0]
    return losses


@dataclasses.dataclass(frozen=True)
class Importance:
  """What stage 1 learned.

  Attributes:
    cost_LxG: loss each group adds when it becomes local, the layers above being localised already.
    best_L: loss of the cascade after each layer was committed.
    cascade: bool `[L, G]`, the groups committed on the way.
  """

  cost_LxG: np.ndarray
  best_L: np.ndarray
  cascade: np.ndarray


def layer_importance(search: Search, tolerance: float) -> Importance:
  """Stage 1: from the top layer down, probe the groups of a layer; the layers visited stay local.

  The top-down order makes a probe at layer l cost (L - l) / L of a pass. Per layer, every single
  group is probed, then the best ceil(rho G) are committed - fewer where a group alone costs more
  than `tolerance`, since a cascade that has lost the answers measures nothing any more.
  """
  L, G = search.shape
  k = math.ceil(search.ratio * G)
  z = np.zeros(search.shape, bool)
  cost, best = np.zeros(search.shape), np.zeros(L)
  current = search.loss([z], screen=True)[0]
  search.evaluator.rebase(z)
  for l in reversed(range(L)):
    search.evaluator.stage = f"1 layer {l}"
    probes = [with_bits(z, l, [g]) for g in range(G)]
    cost[l] = search.loss(probes, screen=True) - current
    order = np.argsort(cost[l], kind="stable")
    chosen = [g for g in order[:k] if cost[l, g] <= tolerance]
    if len(chosen) > 1:
      joint = search.loss([with_bits(z, l, chosen)], screen=True)[0]
      extra = joint - current - cost[l, chosen].sum()
      if joint - current > tolerance * len(chosen):
        chosen = chosen[:1]
        cost[l, order[1:]] += max(extra, 0.0)
        joint = search.loss([with_bits(z, l, chosen)], screen=True)[0]
      current = joint
    elif chosen:
      current = cost[l, chosen[0]] + current
    z = with_bits(z, l, chosen)
    best[l] = current
  return Importance(cost, best, z)


def with_bits(z: np.ndarray, layer: int, groups) -> np.ndarray:
  """A copy of z with these groups of a layer local."""
  z = z.copy()
  z[layer, list(groups)] = True
  return z
