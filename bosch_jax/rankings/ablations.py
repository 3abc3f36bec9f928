"""Ablations of the search: what is left when a part of it is taken away.

They come as a ranking of two values, 0 for the groups of the mask that was found and 1 for the
others, so that masks are made in one way.
"""

import dataclasses

import numpy as np

from bosch_jax.evaluator import Evaluator, Scores
from bosch_jax.rankings.base import Context, spread
from bosch_jax.stages import ANCHORS, Search, optimise


def b_single(context: Context) -> np.ndarray:
  """B-single: stage 1's per-layer choices are the mask; no layer gets more than its share.

  Source: the paper's ablation. Ours: counts differ by one between layers where K asks for it (the
  paper's ceil(rho G) a layer would not meet K); in each layer what stage 1's cascade chose comes
  first, then the cheaper groups.
  """
  L = context.shape[0]
  importance = context.recipe.layer_importance(context.search)
  z = np.zeros(context.shape, bool)
  for l, count in enumerate(spread(context.search.num_local, L)):
    z[l, np.lexsort((importance.cost_LxG[l], ~importance.cascade[l]))[:count]] = True
  return (~z).astype(np.float64)


def b_multi(context: Context) -> np.ndarray:
  """B-multi: stage 3 alone, at one uniform ratio. All layers form one group of equal ratio, their
  bits are optimised jointly by swaps within layers, from a random start, while the budget lasts.

  Source: the paper's ablation; start and solver are ours.
  """
  L, G = context.shape
  rng = np.random.default_rng(context.search.settings.seed)
  z = np.zeros(context.shape, bool)
  for l, count in enumerate(spread(context.search.num_local, L)):
    z[l, rng.permutation(G)[:count]] = True
  context.evaluator.stage = "3 one ratio"
  patience = context.search.settings.search.exchange_patience
  layer_LxG = np.repeat(np.arange(L), G)
  z = optimise(
    context.search, z, np.arange(L), np.zeros(context.shape), classes=layer_LxG, patience=patience
  )
  return (~z).astype(np.float64)


def b_layer(context: Context) -> np.ndarray:
  """B-layer: the same search with whole layers as variables. K // G layers become local; where G
  does not divide K, the first K mod G groups of the cheapest layer left do, too.

  Source: the paper's ablation; the remainder is ours.
  """
  L, G = context.shape
  whole = context.search.num_local // G
  cost_L, local_L = np.zeros(L), np.zeros(L, bool)
  if 0 < whole < L:
    left = max(1, int(context.search.left)) + int(ANCHORS)  # which are scored
    settings = dataclasses.replace(context.search.settings, budget=left)
    search = Search(LayerEvaluator(context.evaluator), settings, whole / L)
    importance = context.recipe.layer_importance(search)
    assigned = context.recipe.assign_ratios(search, importance)
    local_L = context.recipe.select_heads(search, assigned)[:, 0]
    cost_L = assigned.cost_LxG[:, 0]
  place_L = np.argsort(np.lexsort((cost_L, ~local_L)), kind="stable")
  return place_L[:, None] * float(G) + np.arange(G)[None]


class LayerEvaluator:
  """An evaluator whose masks have one bit a layer, `[L, 1]`, for all of its groups.

  Args:
    evaluator: does the work; costs, stages and the journal are its own.
  """

  def __init__(self, evaluator: Evaluator):
    self._evaluator = evaluator
    self._groups = evaluator.config.num_groups
    self.config = dataclasses.replace(evaluator.config, num_groups=1)
    self.contexts, self.calibration = evaluator.contexts, evaluator.calibration

  @property
  def cost(self) -> float:
    return self._evaluator.cost

  @property
  def stage(self) -> str:
    return self._evaluator.stage

  @stage.setter
  def stage(self, name: str) -> None:
    self._evaluator.stage = name

  def rebase(self, mask_Lx1: np.ndarray) -> None:
    self._evaluator.rebase(self._expand(mask_Lx1))

  def score(self, masks, contexts=None) -> Scores:
    return self._evaluator.score([self._expand(mask_Lx1) for mask_Lx1 in masks], contexts)

  def relax(self, share_Lx1: np.ndarray, contexts) -> tuple[float, np.ndarray]:
    loss, gradient_LxG = self._evaluator.relax(self._expand(share_Lx1), contexts)
    return loss, gradient_LxG.sum(1, keepdims=True)

  def _expand(self, x_Lx1: np.ndarray) -> np.ndarray:
    return np.repeat(x_Lx1, self._groups, axis=1)
