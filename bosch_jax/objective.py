"""The objective of the search: normalised score plus a penalty for missing the ratio."""

import dataclasses

import numpy as np

from models.windows import HeadMask


@dataclasses.dataclass(frozen=True)
class Objective:
  """L(z) = -S_hat(z) + alpha (rho(z) - rho)^2, minimised (paper, problem statement), with
  S_hat = (S(z) - S_all_local) / (S_full - S_all_local).

  Attributes:
    full, all_local: scores S of the two anchor masks, on the contexts the candidates are scored on.
    ratio: rho, the target share of local groups.
    alpha: penalty weight. The paper gives no value. Our final stage keeps the number of local
      groups exact, so the penalty only ranks masks of different size against each other.
  """

  full: float
  all_local: float
  ratio: float
  alpha: float = 1.0

  def normalised(self, score: np.ndarray) -> np.ndarray:
    """S_hat, 1 = as good as full attention, 0 = as bad as all local."""
    return (np.asarray(score) - self.all_local) / (self.span if self.measures else 1.0)

  @property
  def span(self) -> float:
    """What full attention is worth on these prompts."""
    return self.full - self.all_local

  @property
  def measures(self) -> bool:
    """Whether full attention is worth anything here; if not, there is nothing to normalise by and
    S_hat is the plain score above all local."""
    return self.span > 1e-9

  def __call__(self, score: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    """L(z) of masks with the given scores S(z): float64 `[C]`."""
    ratios = np.array([HeadMask(mask).ratio for mask in masks])
    return -self.normalised(score) + self.alpha * (ratios - self.ratio) ** 2
