"""Gates trained by gradient: the white-box reference that black-box solvers are measured against."""

import numpy as np

from bosch_jax.solvers.base import Best
from bosch_jax.solvers.space import Space


class GatesSolver(Best):
  """Projected Adam on relaxed bits, then rounding.

  For `steps` turns `ask()` gives one vector of gates, float64 `[n]` in [0, 1], whose sums in every
  class are exactly the wanted ones; `tell(candidates, losses, gradients)` wants the loss there and
  its gradient. After that `ask()` gives bool candidates of exact cardinality, rounded from the
  last gates and from their average over the second half, which need no gradient; then nothing.
  `best` is the best bool candidate told.

  A step is Adam with a cosine schedule. The gradient's mean within each class is removed first:
  the sum cannot change, and Adam's scaling by coordinate would drown in it what tells bits apart.
  A regulariser g (1 - g) that grows from nothing pushes gates towards 0 and 1. DuoAttention (arXiv
  2410.10819) trains such gates with an L1 penalty instead of a fixed sum.

  Args:
    space: of the bits.
    steps: gradients asked for.
    rate: first learning rate.
    sharpness: last weight of the regulariser, relative to the size of the gradient.
    start: float `[n]`, the first gates, projected; None: all gates of a class equal.
  """

  needs_gradient = True

  def __init__(
    self,
    space: Space,
    *,
    steps: int,
    rate: float = 0.1,
    sharpness: float = 0.5,
    start: np.ndarray | None = None,
  ):
    import jax  # here, as no other solver needs it
    import optax

    super().__init__()
    self._space, self._steps, self._sharpness = space, steps, sharpness
    self.gates = space.project(np.zeros(space.size) if start is None else start)
    self._optimizer = optax.adam(optax.cosine_decay_schedule(rate, max(1, steps)))
    # Optax mixes integer step counts with floats, whatever the promotion around it.
    self._promotion = lambda: jax.numpy_dtype_promotion("standard")
    with self._promotion():
      self._state = self._optimizer.init(self.gates.astype(np.float32))
    self._step, self._sum, self._summed, self._rounded = 0, np.zeros(space.size), 0, False

  def ask(self) -> list[np.ndarray]:
    if self._step < self._steps:
      return [self.gates.copy()]
    if self._rounded:
      return []
    self._rounded = True
    rounded = [self._space.top(self.gates)]
    if self._summed:
      average = self._space.top(self._sum)
      if not np.array_equal(average, rounded[0]):
        rounded.append(average)
    return rounded

  def tell(
    self,
    candidates: list[np.ndarray],
    losses: np.ndarray,
    gradients: list[np.ndarray | None] | None = None,
  ) -> None:
    """Losses of candidates, in order, and for gates the gradients.

    Raises:
      ValueError: gates without a gradient.
    """
    gradients = [None] * len(candidates) if gradients is None else gradients
    for candidate, loss, gradient in zip(candidates, losses, gradients, strict=True):
      if candidate.dtype == bool:
        super().tell([candidate], [loss])
      elif gradient is None:
        raise ValueError(
          "gates need the gradient of their loss: tell(candidates, losses, gradients)"
        )
      else:
        self._train(np.array(gradient, np.float64))

  def _train(self, gradient: np.ndarray) -> None:
    for members in self._space.members:
      gradient[members] -= gradient[members].mean()
    size = np.sqrt(np.mean(gradient**2))
    weight = self._sharpness * self._step / self._steps * size
    gradient += weight * (1.0 - 2.0 * self.gates)
    with self._promotion():
      update, self._state = self._optimizer.update(gradient.astype(np.float32), self._state)
    self.gates = self._space.project(self.gates + np.asarray(update, np.float64))
    self._step += 1
    if 2 * self._step > self._steps:
      self._sum += self.gates
      self._summed += 1
