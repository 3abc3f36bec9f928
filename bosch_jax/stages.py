"""The three stages of BOSCH (paper, section "Three stages"), as functions of a `Search`.

Bits are `[L, G]`, True = local. A *drop* is what a mask loses of the normalised score S_hat
against another: 0 nothing, 1 the whole way from full attention to all local.
"""

import dataclasses
import math

import numpy as np

from bosch_jax.evaluator import Evaluator
from bosch_jax.objective import Objective
from bosch_jax.settings import SelectSettings
from bosch_jax.solvers import bits, make_solver
from models.windows import num_local_for

STAGES = (
  "layer importance: a cascade from the top layer down",
  "adaptive ratios: layers to buckets to the exact budget",
  "grouped head selection: layers of equal ratio together",
)
ANCHORS = 2.0  # full-forward equivalents of scoring full attention and all local


class Search:
  """What every stage works with.

  Args:
    evaluator: scores masks.
    settings: of the run.
    ratio: rho, the share of groups that become local.
    known: what easier ratios of the run have learned, by a name the learner chose; filled on.

  Attributes:
    num_local: K, the number of local groups the mask must have.
    objective: L(z), with its anchors, on all contexts.
    shape: (L, G).
    best_nll: calibration NLL of the best mask with K local groups so far, or None.
  """

  def __init__(
    self,
    evaluator: Evaluator,
    settings: SelectSettings,
    ratio: float,
    known: dict | None = None,
  ):
    config, self.known = evaluator.config, {} if known is None else known
    self.evaluator, self.settings, self.ratio = evaluator, settings, ratio
    self.num_local = num_local_for(ratio, config.total_groups)
    self.shape = (config.num_layers, config.num_groups)
    self.all_contexts = tuple(range(evaluator.calibration))
    self.best_nll: float | None = None
    self._objectives: dict[tuple[int, ...], Objective] = {}
    evaluator.stage = "anchors"
    self.objective = self._objective(self.all_contexts)
    # Counted to every ratio, though only the first one of a run has to score them.
    self._began = evaluator.cost - ANCHORS

  def some(self, share: float, turn: int = 0) -> tuple[int, ...]:
    """About this share of the contexts, to screen candidates on. Turns go round all contexts, so
    that a long search does not come to fit the first few."""
    count = max(1, math.ceil(share * len(self.all_contexts)))
    start = turn * count % len(self.all_contexts)
    return tuple(sorted((self.all_contexts * 2)[start : start + count]))

  @property
  def left(self) -> float:
    """Budget of this ratio not yet spent, in full-forward equivalents."""
    return self.settings.budget - (self.evaluator.cost - self._began)

  def _objective(self, contexts: tuple[int, ...]) -> Objective:
    if contexts not in self._objectives:
      anchors = [np.zeros(self.shape, bool), np.ones(self.shape, bool)]
      scores = self.evaluator.score(anchors, contexts).score(self.settings.score)
      self._objectives[contexts] = Objective(*scores, self.ratio, self.settings.search.alpha)
    return self._objectives[contexts]

  def loss(self, masks: list[np.ndarray], contexts: tuple[int, ...] | None = None) -> np.ndarray:
    """L(z) on the given contexts (None: all), float64 `[C]`."""
    contexts = self.all_contexts if contexts is None else contexts
    scores = self.evaluator.score(masks, contexts).score(self.settings.score)
    return self._objective(contexts)(scores, masks)

  def drop(self, masks: list[np.ndarray], contexts: tuple[int, ...]) -> np.ndarray:
    """1 - S_hat on the given contexts, float64 `[C]`: what masks lose against full attention."""
    scores = self.evaluator.score(masks, contexts).score(self.settings.score)
    return 1.0 - self._objective(contexts).normalised(scores)

  def race(
    self,
    masks: list[np.ndarray],
    incumbent: np.ndarray,
    screen: tuple[int, ...],
    confidence: float = 0.0,
  ) -> np.ndarray:
    """L(z) of masks that beat the incumbent on the screening contexts; the others keep the
    incumbent's loss plus what they were worse by there, and cost no more than the screening.

    Args:
      confidence: standard errors, paired over contexts, that a mask must win by; one that wins by
        less is given the incumbent's loss. The more masks are tried, the luckier the best of them.
    """
    before = self.loss([incumbent])[0]
    worse = self.loss(masks, screen) - self.loss([incumbent], screen)[0]
    losses = before + np.maximum(worse, 1e-9)
    for i in np.argsort(worse, kind="stable"):
      if worse[i] < 0 and self.left > 0:
        losses[i] = self.loss([masks[i]])[0]
        if losses[i] < before and confidence and not self._wins(masks[i], incumbent, confidence):
          losses[i] = before
    return losses

  def _wins(self, mask: np.ndarray, incumbent: np.ndarray, confidence: float) -> bool:
    nll_2xB = self.evaluator.score([mask, incumbent]).nll.mean(2)
    gain_B = nll_2xB[1] - nll_2xB[0]
    if len(gain_B) < 2:
      return True  # one context has no standard error
    return gain_B.mean() > confidence * gain_B.std(ddof=1) / math.sqrt(len(gain_B))

  def note_best(self, mask: np.ndarray) -> None:
    """Remembers the NLL of the incumbent, for people to watch."""
    if int(mask.sum()) == self.num_local:
      self.best_nll = float(self.evaluator.score([mask]).nll.mean())


@dataclasses.dataclass(frozen=True)
class Importance:
  """What stage 1 learned.

  Attributes:
    cost_LxG: drop each group adds when it becomes local, the layers above being localised.
    best_L: drop of the cascade after each layer was visited (s_best of the paper, as a loss).
    cascade: bool `[L, G]`, what the cascade localised on the way.
  """

  cost_LxG: np.ndarray
  best_L: np.ndarray
  cascade: np.ndarray


@dataclasses.dataclass(frozen=True)
class Assignment:
  """What stage 2 decided.

  Attributes:
    weight_L: in [0, 1], low = easy to localise.
    cost_LxG: stage 1's costs, where stage 2 measured a group again its newer one.
    mask: bool `[L, G]` with exactly K local groups; its row sums are the layers' counts.
  """

  weight_L: np.ndarray
  cost_LxG: np.ndarray
  mask: np.ndarray


def layer_importance(search: Search) -> Importance:
  """Stage 1, ours: from the top layer down, probe every group of the layer alone.

  Going down, a probe at layer l costs (L - l) / L of a pass. Of each layer the best ceil(rho G)
  groups are committed, but none that costs more than `settings.tolerance`: a cascade that has lost
  the answers measures nothing any more (the paper commits ceil(rho G) regardless).
  """
  L, G = search.shape
  options = search.settings.search
  screen = search.some(options.screen)
  z = np.zeros(search.shape, bool)
  cost_LxG, best_L = np.zeros(search.shape), np.zeros(L)
  current = search.drop([z], screen)[0]
  search.evaluator.rebase(z)
  for l in reversed(range(L)):
    search.evaluator.stage = f"1 layer {l}"
    cost_LxG[l] = search.drop([with_local(z, l, [g]) for g in range(G)], screen) - current
    order = np.argsort(cost_LxG[l], kind="stable")[: math.ceil(search.ratio * G)]
    chosen = [int(g) for g in order if cost_LxG[l, g] <= options.tolerance]
    if chosen:
      candidate = with_local(z, l, chosen)
      reached = search.drop([candidate], screen)[0]
      if reached - current <= options.tolerance * len(chosen):
        z, current = candidate, reached
    best_L[l] = current
  return Importance(cost_LxG, best_L, z)


def assign_ratios(search: Search, importance: Importance) -> Assignment:
  """Stage 2, ours: layers move up through the buckets 0, 1/G .. 1 until exactly K groups are local.

  A move localises the group of a layer that is next by stage 1's cost. Moves are made in order of
  that cost and measured truly, several at once while they are predicted to cost less than
  `cap` together (group testing): a batch that loses more than predicted is halved, and a single
  group that turns out dearer than the next one goes back into the queue with its true cost (lazy
  greedy elimination). Batches grow when `assign_budget` would not last otherwise.
  """
  options = search.settings.search
  contexts = search.some(options.assign_share)
  until = search.evaluator.cost + options.assign_budget * search.left
  cost = importance.cost_LxG.ravel().copy()
  z = np.zeros(search.shape, bool)
  current = search.drop([z], contexts)[0]
  search.evaluator.stage = "2 ratios"
  size = options.assign_batch
  while (missing := search.num_local - int(z.sum())) > 0:
    waiting = np.flatnonzero(~z.ravel())
    queue = waiting[np.argsort(cost[waiting], kind="stable")]
    moves_left = max(0.0, until - search.evaluator.cost) / (0.5 * options.assign_share)
    if moves_left < 1:  # trust the costs for the rest
      z = (z.ravel() | bits(z.size, queue[:missing])).reshape(z.shape)
      break
    least = math.ceil(missing / moves_left)
    cheap = np.searchsorted(np.cumsum(np.maximum(cost[queue], 0.0)), options.cap, side="right")
    size = max(1, min(size, missing, max(int(cheap), least)))
    moved = queue[:size]
    candidate = (z.ravel() | bits(z.size, moved)).reshape(z.shape)
    lost = search.drop([candidate], contexts)[0] - current
    if size == 1:
      cost[moved] = lost
      accepted = lost <= max(cost[queue[1]] if len(queue) > 1 else math.inf, options.slack)
    else:
      accepted = (
        size <= least or lost <= options.slack * size + np.maximum(cost[moved], 0.0).sum() / 2
      )
    if accepted:
      z, current = candidate, current + lost
      search.evaluator.rebase(z)
      size = min(2 * size, options.assign_batch)
    else:
      size = max(1, size // 2)
  cost_LxG = cost.reshape(z.shape)
  return Assignment(weights(cost_LxG), cost_LxG, z)


def weights(cost_LxG: np.ndarray) -> np.ndarray:
  """Layer weights in [0, 1], low = easy to localise: w = d / (d + mean d), where d is the drop the
  layer's groups cost together (negative costs are noise and count as none)."""
  delta_L = np.maximum(cost_LxG, 0.0).sum(1)
  return delta_L / np.maximum(delta_L + delta_L.mean(), 1e-12)


def select_heads(search: Search, assigned: Assignment) -> np.ndarray:
  """Stage 3: layers of equal ratio are optimised jointly, easiest ratio first, each layer keeping
  its count; what is left of the budget goes into exchanges between layers, the total kept (ours).

  Returns:
    The mask, bool `[L, G]` with exactly K local groups.
  """
  z, options = assigned.mask, search.settings.search
  L, G = search.shape
  groups = layer_groups(z.sum(1), G, options.group_size)
  for i, layers in enumerate(groups):
    search.evaluator.stage = f"3 group {i + 1} of {len(groups)}"
    z = optimise(search, z, layers, assigned.cost_LxG, np.repeat(layers, G), options.patience)
  search.evaluator.stage = "3 exchanges"
  z = optimise(search, z, np.arange(L), assigned.cost_LxG, None, options.exchange_patience)
  return z


def layer_groups(counts_L: np.ndarray, G: int, most_bits: int) -> list[np.ndarray]:
  """Layers of equal local count, most local first, in parts of at most `most_bits` bits. Layers
  that are all local or all full have nothing to choose and are left out."""
  out = []
  for k in range(G - 1, 0, -1):
    layers = np.flatnonzero(counts_L == k)
    if layers.size:
      out += np.array_split(layers, math.ceil(layers.size * G / most_bits))
  return out


def optimise(
  search: Search, z, layers, cost_LxG, classes, patience, confidence: float = 0.0
) -> np.ndarray:
  """Runs `--solver` on some layers of z until it is done or the budget is spent.

  Args:
    z: bool `[L, G]`, the incumbent.
    layers: int, the layers whose bits may change.
    cost_LxG: first guess of what each group costs.
    classes, patience: see `make_solver`.
    confidence: see `Search.race`.

  Returns:
    The best mask found.
  """
  options = search.settings.search
  solver = make_solver(
    options.solver,
    z[layers].ravel(),
    search.loss([z])[0],
    cost_LxG[layers].ravel(),
    classes=classes,
    batch=options.swap_batch,
    patience=patience,
    seed=search.settings.seed,
  )
  search.evaluator.rebase(z)
  search.note_best(z)
  turn = 0
  while search.left > 0 and (candidates := solver.ask()):
    masks = [with_rows(z, layers, candidate) for candidate in candidates]
    screen = search.some(options.screen, turn)
    solver.tell(candidates, search.race(masks, z, screen, confidence))
    turn += 1
    best = with_rows(z, layers, solver.best)
    if not np.array_equal(best, z):
      z = best
      search.evaluator.rebase(z)
      search.note_best(z)
  return z


def with_local(z: np.ndarray, layer: int, groups) -> np.ndarray:
  """A copy of z with these groups of a layer local."""
  z = z.copy()
  z[layer, list(groups)] = True
  return z


def with_rows(z: np.ndarray, layers: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """A copy of z with these layers replaced by the concatenated rows."""
  z = z.copy()
  z[layers] = rows.reshape(len(layers), z.shape[1])
  return z
