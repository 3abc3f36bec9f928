"""What every ranking gets, and what it gives."""

import dataclasses
from types import ModuleType

import jax
import numpy as np

from bosch_jax.evaluator import Evaluator
from bosch_jax.prompts import PromptSet
from bosch_jax.solvers import bits
from bosch_jax.stages import Search
from models.config import ModelConfig
from models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Context:
  """What a ranking works with.

  Attributes:
    search: the model behind its evaluator, the settings of the run, and K, the local groups wanted.
    recipe: the module that holds the three stages; ablations take it apart.
  """

  search: Search
  recipe: ModuleType

  @property
  def evaluator(self) -> Evaluator:
    return self.search.evaluator

  @property
  def config(self) -> ModelConfig:
    return self.evaluator.config

  @property
  def shape(self) -> tuple[int, int]:
    """(L, G)."""
    return self.search.shape

  @property
  def window(self) -> int:
    return self.evaluator.window

  @property
  def calibration(self) -> PromptSet:
    """The contexts masks are scored on; the evaluator may hold more, for gradients."""
    return self.evaluator.prompts.take(range(self.evaluator.calibration))

  @property
  def left(self) -> float:
    """Passes that a ranking which serves every ratio may spend: what this ratio has left, and the
    budgets of the harder ones."""
    settings = self.search.settings
    return self.search.left + settings.budget * sum(
      self.search.ratio < r < 1 for r in settings.ratio
    )

  def model(self) -> tuple[Transformer, dict]:
    """The model and its parameters on one device of this process: statistics and gates are not
    spread over a mesh (every process computes the same)."""
    params = jax.tree.map(lambda p: p.addressable_data(0), self.evaluator.params)
    return Transformer(self.config, self.search.settings.sinks), params

  def spend(self, passes: float) -> None:
    """Counts work done outside the evaluator, in full-forward equivalents; interrupts are seen here."""
    self.evaluator.cost += passes
    self.evaluator.on_scored(self.evaluator.stage, self.evaluator.cost)


@dataclasses.dataclass(frozen=True, eq=False)
class Ranking:
  """An order of all head groups.

  Attributes:
    score_LxG: float64, how much a group needs the full context; the lowest become local first,
      equal ones by layer, then by group.
    cost: full-forward equivalents it took.
  """

  score_LxG: np.ndarray
  cost: float

  def __post_init__(self):
    if not np.isfinite(self.score_LxG).all():
      raise FloatingPointError("a ranking holds scores that are not finite: the model overflows")

  def mask(self, num_local: int) -> np.ndarray:
    """bool `[L, G]`, True = local, with exactly `num_local` local groups."""
    order = np.argsort(self.score_LxG, axis=None, kind="stable")
    return bits(self.score_LxG.size, order[:num_local]).reshape(self.score_LxG.shape)


def spread(total: int, parts: int) -> np.ndarray:
  """int `[parts]`: `total` dealt out as evenly as it goes, the larger parts evenly apart."""
  return np.diff(np.arange(parts + 1) * total // parts)


def group_scores(values_LxH: np.ndarray, groups: int, how) -> np.ndarray:
  """Head scores `[L, H]` to group scores `[L, G]` by `how`, a reduction like `np.mean`."""
  layers, heads = values_LxH.shape
  return how(values_LxH.reshape(layers, groups, heads // groups), axis=2)


def middle_ranks(values: np.ndarray) -> np.ndarray:
  """Ranks 1 .. n from the lowest up; equal values share the mean of theirs."""
  ordered = np.sort(values, axis=None)
  below = np.searchsorted(ordered, values, side="left")
  return (below + np.searchsorted(ordered, values, side="right") + 1) / 2
