"""The three stages literally as the paper states them (`--recipe paper`).

Where the paper gives no figure, the choice is ours and named. `bosch_jax.stages` holds the same
stages with our ingredients.
"""

import math

import numpy as np

from bosch_jax.solvers import EnumerateSolver, SwapSolver, bits
from bosch_jax.stages import (
  STAGES,
  Assignment,
  Importance,
  Search,
  layer_groups,
  optimise,
  with_local,
  with_rows,
)

__all__ = ["STAGES", "assign_ratios", "layer_importance", "select_heads"]


def layer_importance(search: Search) -> Importance:
  """Stage 1: per layer, top down, the best choice of ceil(rho G) groups, which then stays local.

  All choices are scored where they are at most `layer_budget`, else a swap search spends that many
  masks. `cost_LxG` is what a group's choices lost on average with it local, less without it (ours:
  the paper keeps the best score only, stage 3 starts somewhere unsaid).
  """
  L, G = search.shape
  k = math.ceil(search.ratio * G)
  z = np.zeros(search.shape, bool)
  cost_LxG, best_L = np.zeros(search.shape), np.zeros(L)
  search.evaluator.rebase(z)
  for l in reversed(range(L)):
    search.evaluator.stage = f"1 layer {l}"
    tried, losses = _search_layer(search, z, l, k)
    best = int(np.argmin(losses))
    z = with_local(z, l, np.flatnonzero(tried[best]))
    best_L[l] = losses[best]
    for g in range(G):
      with_g = np.array([row[g] for row in tried])
      if with_g.any() and not with_g.all():
        cost_LxG[l, g] = losses[with_g].mean() - losses[~with_g].mean()
  return Importance(cost_LxG, best_L, z)


def _search_layer(search: Search, z, layer: int, k: int) -> tuple[list[np.ndarray], np.ndarray]:
  """Every choice of a layer's groups that was scored, with its drop on all contexts."""
  G, most = search.shape[1], search.settings.search.layer_budget

  def drop(rows):
    masks = [with_local(z, layer, np.flatnonzero(row)) for row in rows]
    return search.drop(masks, search.all_contexts)

  if math.comb(G, k) <= most:
    solver, tried, losses = EnumerateSolver(G, k), [], []
  else:
    tried = [bits(G, range(k))]
    losses = list(drop(tried))
    solver = SwapSolver(tried[0], losses[0], np.zeros(G), batch=search.settings.search.swap_batch)
  while len(tried) < most and (rows := solver.ask()):
    found = drop(rows)
    solver.tell(rows, found)
    tried, losses = [*tried, *rows], [*losses, *found]
  return tried, np.array(losses)


def assign_ratios(search: Search, importance: Importance) -> Assignment:
  """Stage 2: layers sorted by weight go into buckets of equal ratio, then layers move to the next
  bucket until exactly K groups are local.

  The weight is the drop against the original model when the layer was visited, as a share of the
  largest. Buckets are 0, 1/G .. 1 (ours), filled by (1 - w) G. Too many local groups: the layers of
  highest weight go down a bucket, one each, then again from the top; too few: the lowest go up.
  """
  L, G = search.shape
  weight_L = np.clip(importance.best_L / max(importance.best_L.max(), 1e-12), 0.0, 1.0)
  counts = np.floor((1.0 - weight_L) * G + 0.5).astype(int)
  hardest_first = np.argsort(-weight_L, kind="stable")
  while (excess := counts.sum() - search.num_local) != 0:
    order = hardest_first if excess > 0 else hardest_first[::-1]
    movable = [l for l in order if (counts[l] > 0 if excess > 0 else counts[l] < G)]
    for l in movable[: abs(excess)]:
      counts[l] -= np.sign(excess)
  z = np.zeros(search.shape, bool)
  for l in range(L):
    # What the cascade chose comes first, then the cheaper groups.
    order = np.lexsort((importance.cost_LxG[l], ~importance.cascade[l]))
    z[l, order[: counts[l]]] = True
  return Assignment(weight_L, importance.cost_LxG, z)


def select_heads(search: Search, assigned: Assignment) -> np.ndarray:
  """Stage 3: groups of layers of equal ratio, easiest first; layers whose turn has not come are
  still full, and each group is committed before the next one starts.

  Returns:
    The mask, bool `[L, G]` with exactly K local groups.
  """
  options, G = search.settings.search, search.shape[1]
  counts_L = assigned.mask.sum(1)
  whole = np.flatnonzero(counts_L == G)
  z = with_rows(np.zeros(search.shape, bool), whole, assigned.mask[whole])
  groups = layer_groups(counts_L, G, options.group_size)
  for i, layers in enumerate(groups):
    search.evaluator.stage = f"3 group {i + 1} of {len(groups)}"
    z = with_rows(z, layers, assigned.mask[layers])
    z = optimise(
      search, z, layers, assigned.cost_LxG, np.repeat(layers, G), options.exchange_patience
    )
  return z
