"""All rankings by name, behind one function."""

from collections.abc import Callable
from types import ModuleType

import numpy as np

from bosch_jax.rankings import BY_RATIO, ablations, attention, gradients, layers, loss
from bosch_jax.rankings.base import Context, Ranking
from bosch_jax.stages import Search

# Name as in `rankings.METHODS` -> what the report says, and the function.
RANKINGS: dict[str, tuple[str, Callable[[Context], np.ndarray]]] = {
  "rand": ("layers in random order", layers.rand),
  "intr": ("local and full layers interleaved", layers.intr),
  "bme": ("full layers at the beginning, middle and end", layers.bme),
  "dcam": ("attention mass beyond the window", attention.dcam),
  "dcam-nosinks": ("attention mass beyond the window, sinks excluded", attention.dcam_nosinks),
  "apl": ("distance of the attention peak at answers", attention.apl),
  "proxy": ("key blocks needed for 90% of the attention", attention.proxy),
  "qada": ("local share of attention, distant keys as a Gaussian", attention.qada),
  "razor": ("echo and induction on repeated random tokens", attention.razor),
  "fisher": ("squared gradient of each group's gate", gradients.fisher),
  "nll": ("rise of the NLL with each group alone local", loss.nll),
  "duo": ("gates trained by distillation", gradients.duo),
  "b-single": ("stage 1 alone", ablations.b_single),
  "b-multi": ("stage 3 alone, one ratio for all layers", ablations.b_multi),
  "b-layer": ("the search over whole layers", ablations.b_layer),
}


def rank(
  method: str, search: Search, recipe: ModuleType, known: dict[str, Ranking] | None = None
) -> Ranking:
  """Ranks all head groups.

  The same seed gives the same ranking, so a resumed run computes it again; what went through the
  evaluator is answered by its journal.

  Args:
    method: a key of `RANKINGS`.
    search: holds the model behind its evaluator, the settings, and K.
    recipe: module of the three stages, for the ablations.
    known: rankings of this run by method, which serve further ratios as they are; filled here.
  """
  if known and method in known:
    return known[method]
  before = search.evaluator.cost
  score_LxG = RANKINGS[method][1](Context(search, recipe))
  ranking = Ranking(np.asarray(score_LxG, np.float64), search.evaluator.cost - before)
  if known is not None and method not in BY_RATIO:
    known[method] = ranking
  return ranking
