"""The default recipe: the three stages on gates trained by gradient (ours).

Single probes, of groups or of whole layers, miss what the paper calls entanglement: groups that are
redundant one by one and critical together. Here all groups are relaxed at once (`models.relaxed`)
and the shares compete for the K places under the true loss, while a temperature makes them binary.
Gradients only propose; whatever stage 3 accepts was scored by true forward passes.
"""

import numpy as np
import optax

from bosch_jax.evaluator import GRADIENT_PASSES
from bosch_jax.solvers import bits
from bosch_jax.stages import Assignment, Importance, Search, optimise, weights

STAGES = (
  "layer importance: gates of all groups trained together",
  "adaptive ratios: the places each layer's gates won, single flips around them",
  "head selection: exchanges between any two groups",
)


def layer_importance(search: Search) -> Importance:
  """Stage 1: trains a logit for every group, all layers together.

  The shares are `soft_top_k` of the logits, so exactly K groups' worth is local at every step. Every
  step takes the gradient on `gate_contexts` contexts, in shuffled turns, and Adam moves the logits;
  the temperature falls from `gate_warm` to `gate_cold` geometrically.
  """
  options, K = search.settings.search, search.num_local
  contexts = len(search.all_contexts)
  size = min(options.gate_contexts, contexts)
  steps = int(options.gate_share * search.left / (GRADIENT_PASSES * size / contexts))
  temperatures = np.geomspace(options.gate_warm, options.gate_cold, max(steps, 1))
  rng = np.random.default_rng(search.settings.seed)
  adam = optax.adam(options.gate_rate, b1=0.9, b2=0.95, eps=1e-4)
  logits_LxG = np.zeros(search.shape, np.float32)
  state, turn = adam.init(logits_LxG), []
  search.evaluator.stage = "1 gates"
  for temperature in temperatures[:steps]:
    if len(turn) < size:
      turn = [*rng.permutation(contexts), *turn]
    chosen, turn = sorted(map(int, turn[-size:])), turn[:-size]
    share_LxG = soft_top_k(logits_LxG, K, temperature)
    _, gradient_LxG = search.evaluator.relax(share_LxG, chosen)
    gradient_LxG = through_soft_top_k(gradient_LxG, share_LxG, temperature)
    update_LxG, state = adam.update(gradient_LxG.astype(np.float32), state)
    logits_LxG = logits_LxG + np.asarray(update_LxG)
  z = top_k(logits_LxG, K)
  return Importance(-logits_LxG.astype(np.float64), np.zeros(len(z)), z)


def soft_top_k(logits: np.ndarray, k: int, temperature: float) -> np.ndarray:
  """Shares in [0, 1] that sum to k: sigmoid((logits - t) / temperature), t found by bisection."""
  logits = np.asarray(logits, np.float64)
  reach = 40.0 * temperature
  low, high = logits.min() - reach, logits.max() + reach
  for _ in range(80):
    threshold = (low + high) / 2
    shares = 1 / (1 + np.exp(np.clip((threshold - logits) / temperature, -60, 60)))
    low, high = (threshold, high) if shares.sum() > k else (low, threshold)
  return shares


def through_soft_top_k(gradient, shares, temperature: float) -> np.ndarray:
  """The gradient in the logits, from that in the shares: with slopes w = s (1 - s) / temperature it
  is w (g - sum(w g) / sum(w)), since the threshold moves to keep the sum."""
  slopes = shares * (1 - shares) / temperature
  return slopes * (gradient - (slopes * gradient).sum() / max(slopes.sum(), 1e-12))


def top_k(values_LxG: np.ndarray, k: int) -> np.ndarray:
  """bool `[L, G]`, the k largest; ties go to the first."""
  order = np.argsort(-values_LxG.ravel(), kind="stable")
  return bits(values_LxG.size, order[:k]).reshape(values_LxG.shape)


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
