"""The default recipe: the three stages on gates trained by gradient (ours).

Single probes, of groups or of whole layers, miss what the paper calls entanglement: groups that are
redundant one by one and critical together. Here all groups are relaxed at once (`models.relaxed`)
and compete for the K places under the loss itself, while a falling temperature makes them binary.
Gradients only propose; whatever stage 3 accepts was scored by true forward passes.
"""

import math

import numpy as np

from bosch_jax.evaluator import GRADIENT_PASSES
from bosch_jax.solvers import GatesSolver, Space, bits
from bosch_jax.stages import Assignment, Importance, Search, optimise, weights

STAGES = (
  "layer importance: gates of all groups trained together",
  "adaptive ratios: the places each layer's gates won, single flips around them",
  "head selection: exchanges between any two groups",
)


def layer_importance(search: Search) -> Importance:
  """Stage 1: trains the gates of all groups together (`solvers.GatesSolver`), each step on the
  gradient of `gate_contexts` contexts, in shuffled turns."""
  options, contexts = search.settings.search, len(search.all_contexts)
  size = min(options.gate_contexts, contexts)
  solver = GatesSolver(
    Space(math.prod(search.shape), search.num_local),
    steps=int(options.gate_share * search.left / (GRADIENT_PASSES * size / contexts)),
    rate=options.gate_rate,
    warm=options.gate_warm,
    cold=options.gate_cold,
    first=options.gate_first,
  )
  rng, turn = np.random.default_rng(search.settings.seed), []
  search.evaluator.stage = "1 gates"
  while (gates := solver.ask()[0]).dtype != bool:
    if len(turn) < size:
      turn = [*rng.permutation(contexts), *turn]
    chosen, turn = sorted(map(int, turn[-size:])), turn[:-size]
    loss, gradient_LxG = search.evaluator.relax(gates.reshape(search.shape), chosen)
    solver.tell([gates], [loss], [gradient_LxG.ravel()])
  z = gates.reshape(search.shape)
  return Importance(-solver.logits.reshape(search.shape), np.zeros(len(z)), z)


def assign_ratios(search: Search, importance: Importance) -> Assignment:
  """Stage 2: each layer's count is what its gates won of the K places.

  Then single flips, each scored on `flip_share` of the contexts, tell stage 3 what a group costs
  around this mask: every full group, and as many local ones, those nearest to the threshold first.
  """
  z, options = importance.cascade, search.settings.search
  search.evaluator.rebase(z)
  search.evaluator.stage = "2 flips"
  full = np.flatnonzero(~z.ravel())
  order = np.argsort(-importance.cost_LxG.ravel(), kind="stable")
  near = order[z.ravel()[order]][: max(len(full), options.flips - len(full))]
  cost = np.zeros(z.size)
  for turn, group in enumerate(sorted([*full, *near], reverse=True)):
    if search.left <= 0:
      break
    contexts = search.some(options.flip_share, turn)
    flipped = z ^ bits(z.size, [group]).reshape(z.shape)
    change = float(np.diff(search.drop([z, flipped], contexts))[0])
    cost[group] = -change if z.flat[group] else change
  cost_LxG = cost.reshape(z.shape)
  return Assignment(weights(cost_LxG), cost_LxG, z)


def select_heads(search: Search, assigned: Assignment) -> np.ndarray:
  """Stage 3: exchanges between any two groups, the total kept, until the budget is spent.

  Returns:
    The mask, bool `[L, G]` with exactly K local groups.
  """
  search.evaluator.stage = "3 exchanges"
  every = np.arange(search.shape[0])
  patience = search.settings.search.exchange_patience
  return optimise(search, assigned.mask, every, assigned.cost_LxG, None, patience)
