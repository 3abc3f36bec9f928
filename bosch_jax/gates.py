"""The default recipe: the three stages on gates trained by gradient (ours).

Single probes, of groups or of whole layers, miss what the paper calls entanglement: groups that are
redundant one by one and critical together. Here all groups are relaxed at once (`models.relaxed`)
and compete for the K places under the loss itself, while a falling temperature makes them binary.
Gradients only propose; whatever stage 3 accepts was scored by true forward passes.
"""

import math

import numpy as np

from bosch_jax.evaluator import GRADIENT_PASSES
from bosch_jax.solvers import GatesSolver, Space
from bosch_jax.stages import Assignment, Importance, Search, optimise, weights

STAGES = (
  "layer importance: gates of all groups trained together",
  "adaptive ratios: the places each layer's gates won",
  "head selection: exchanges between any two groups",
)
KEPT = 0.5  # of an easier ratio's logits, so that gates are soft enough again to change
MOST_STEPS = 160  # what a budget pays for beyond them goes into contexts a step: gates end better
DOUBT = 0.1  # drop that the dearest group is guessed to cost; what exchanges measure corrects it


def layer_importance(search: Search) -> Importance:
  """Stage 1: trains the gates of all groups together (`solvers.GatesSolver`), each step on the
  gradient of `gate_contexts` of the calibration contexts and `gate_pool` others, in shuffled turns:
  on few contexts, gates come to fit those. Where that made more than `MOST_STEPS`, steps get more
  contexts instead.

  Where an easier ratio of the same run has trained gates, these begin from there: with its logits,
  and with as many local groups. So several ratios cost little more than the hardest alone.
  """
  options, evaluator = search.settings.search, search.evaluator
  contexts = len(evaluator.contexts)
  paid = options.gate_share * search.left * evaluator.calibration / GRADIENT_PASSES
  size = options.gate_contexts * max(1, math.ceil(paid / options.gate_contexts / MOST_STEPS))
  size = min(size, contexts)
  num_before, logits = search.known.get("gates", (search.num_local, None))
  first = options.gate_first if logits is None else num_before / search.num_local
  solver = GatesSolver(
    Space(math.prod(search.shape), search.num_local),
    steps=int(paid / size),
    rate=options.gate_rate,
    warm=options.gate_warm,
    cold=options.gate_cold,
    first=first,
    decay=options.gate_decay,
    logits=None if logits is None else KEPT * logits,
  )
  rng, turn = np.random.default_rng(search.settings.seed), []
  evaluator.stage = "1 gates"
  while (gates := solver.ask()[0]).dtype != bool:
    if len(turn) < size:
      turn = [*rng.permutation(contexts), *turn]
    chosen, turn = sorted(map(int, turn[-size:])), turn[:-size]
    loss, gradient_LxG = evaluator.relax(gates.reshape(search.shape), chosen)
    solver.tell([gates], [loss], [gradient_LxG.ravel()])
  search.known["gates"] = search.num_local, solver.logits
  z = gates.reshape(search.shape)
  return Importance(-solver.logits.reshape(search.shape), np.zeros(len(z)), z)


def assign_ratios(search: Search, importance: Importance) -> Assignment:
  """Stage 2: each layer's count is what its gates won of the K places."""
  del search
  cost_LxG = 1.0 / (1.0 + np.exp(-importance.cost_LxG.astype(np.float64)))
  return Assignment(weights(cost_LxG), cost_LxG, importance.cascade)


def select_heads(search: Search, assigned: Assignment) -> np.ndarray:
  """Stage 3: exchanges between any two groups, those in doubt first, the total kept.

  An exchange has to win by `confidence` standard errors: with a few contexts and many tries, luck
  wins more than the small gains that gates leave.

  Returns:
    The mask, bool `[L, G]` with exactly K local groups.
  """
  options = search.settings.search
  search.evaluator.stage = "3 exchanges"
  every = np.arange(search.shape[0])
  guess_LxG = DOUBT * assigned.cost_LxG
  patience, confidence = options.exchange_patience, options.confidence
  return optimise(search, assigned.mask, every, guess_LxG, None, patience, confidence)
