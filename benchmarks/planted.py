"""Planted objectives over head groups: what solvers are compared on without a model.

Each is `linear . x + x' pairs x` for bits x (1 = local), in some kinds rounded down to coarse steps.
The real objective's difficulties in isolation: many weak interactions (quadratic), pairs that back
each other up (redundant), and losses that often tie (plateaus).
"""

import dataclasses

import numpy as np

from bosch_jax.solvers import Space

KINDS = ("quadratic", "redundant", "plateaus")


@dataclasses.dataclass(frozen=True)
class Planted:
  """One objective.

  Attributes:
    linear: float `[n]`, what each bit costs alone.
    pairs: float `[n, n]`, upper triangular: what two bits cost beyond that.
    step: losses are rounded down to multiples of this; 0: not at all.
  """

  linear: np.ndarray
  pairs: np.ndarray
  step: float = 0.0

  def __call__(self, x: np.ndarray) -> float:
    """The loss of bits (or gates) `[n]`."""
    loss = float(self.linear @ x + x @ self.pairs @ x)
    return float(np.floor(loss / self.step) * self.step) if self.step else loss

  def gradient(self, gates: np.ndarray) -> np.ndarray:
    """Gradient at gates, float `[n]`: of the smooth loss, as rounding has none."""
    return self.linear + (self.pairs + self.pairs.T) @ gates


def planted(kind: str, n: int, seed: int) -> Planted:
  """An objective of n bits.

  - quadratic: exponential costs, and the off-diagonal part of a random low-rank positive
    semi-definite matrix.
  - redundant: two thirds of the bits form pairs, nearly free one by one and dear together; the
    others have exponential costs.
  - plateaus: a quadratic one in steps of half a mean linear cost, so most swaps tie.
  """
  rng = np.random.default_rng([KINDS.index(kind), n, seed])
  if kind == "redundant":
    linear, pairs = rng.exponential(size=n), np.zeros((n, n))
    members = rng.permutation(n)[: 2 * (n // 3)].reshape(-1, 2)
    linear[members] *= 0.05
    for i, j in members:
      pairs[min(i, j), max(i, j)] = 1.0 + rng.exponential()
    return Planted(linear, pairs)
  factors = rng.normal(size=(n, 8)) * (rng.random((n, 8)) < 0.3)
  pairs = np.triu(0.2 * factors @ factors.T, 1)
  linear = rng.exponential(size=n)
  return Planted(linear, pairs, 0.5 * float(linear.mean()) if kind == "plateaus" else 0.0)


def best_known(objective: Planted, space: Space, restarts: int = 20, seed: int = 0) -> float:
  """The least loss that restarted tabu search on the formula itself finds.

  It sees the change of every swap at once, which no solver of the benchmark does. On objectives
  small enough to enumerate it finds the optimum (tested).
  """
  rng = np.random.default_rng(seed)
  both = objective.pairs + objective.pairs.T
  smooth = dataclasses.replace(objective, step=0.0)
  same = np.zeros((space.size, space.size), bool)
  for members in space.members:
    same[np.ix_(members, members)] = True
  best, best_loss = None, np.inf
  for _ in range(restarts):
    x = space.top(rng.random(space.size))
    tabu_until = np.zeros(space.size, int)
    loss, fields = smooth(x), objective.linear + both @ x
    for step in range(3 * space.size):
      ones, zeros = np.flatnonzero(x), np.flatnonzero(~x)
      grid = np.ix_(ones, zeros)
      change = fields[zeros] - fields[ones][:, None] - both[grid]
      free = (tabu_until[ones][:, None] <= step) & (tabu_until[zeros] <= step)
      change = np.where(same[grid] & (free | (loss + change < best_loss - 1e-9)), change, np.inf)
      if change.size == 0 or not np.isfinite(change.min()):
        break
      i, j = np.unravel_index(np.argmin(change), change.shape)
      clear, put = ones[i], zeros[j]
      loss += change[i, j]
      x[clear], x[put] = False, True
      fields += both[:, put] - both[:, clear]
      tabu_until[[clear, put]] = step + 1 + rng.integers(4, 12)
      if loss < best_loss - 1e-12:
        best, best_loss = x.copy(), loss
    if best is None or smooth(x) < best_loss:
      best, best_loss = x.copy(), smooth(x)
  return objective(best)
