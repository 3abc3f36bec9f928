"""Ranking by the loss itself: each group local alone."""

import numpy as np

from bosch_jax.rankings.base import Context
from bosch_jax.stages import with_local


def nll(context: Context) -> np.ndarray:
  """NLL: rise of the answers' NLL when one group alone is local; low = local.

  Source: after the loss-guided layer choice of arXiv 2606.27791; at the level of groups it is ours.
  Cost: a probe in layer l starts from the full model's states there, so it takes (L - l) / L of a
  pass. As many contexts are used as the budget pays for, all of them if it does.
  """
  search, evaluator = context.search, context.evaluator
  (L, G), contexts = context.shape, search.all_contexts
  each = (G * (L + 1) / 2 + 1) / len(contexts)  # and once the full model's states
  used = contexts[: max(1, min(len(contexts), int(context.left / each)))]
  full = np.zeros(context.shape, bool)
  before = evaluator.score([full], used).nll.mean(dtype=np.float64)
  evaluator.rebase(full)
  rise_LxG = np.zeros(context.shape)
  for l in reversed(range(L)):
    evaluator.stage = f"ranking layer {l}"
    after = evaluator.score([with_local(full, l, [g]) for g in range(G)], used).nll
    rise_LxG[l] = after.mean((1, 2), dtype=np.float64) - before
  return rise_LxG
