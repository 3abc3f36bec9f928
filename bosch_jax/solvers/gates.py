"""Gates trained by gradient: the white-box solver."""

from collections.abc import Sequence

import numpy as np

from bosch_jax.solvers.base import Best
from bosch_jax.solvers.space import Space


class GatesSolver(Best):
  """Adam on logits whose soft top-k are the gates, more ones and less doubt from step to step.

  For `steps` turns `ask()` gives one vector of gates, float64 `[n]` in [0, 1]; `tell(candidates,
  losses, gradients)` wants the loss there and its gradient. Then `ask()` gives one bool candidate of
  exact cardinality, which needs no gradient; then nothing.

  In every class gates are sigmoid((logits - t) / temperature), with the threshold t that makes
  their sum what the step wants. The temperature falls geometrically from `warm` to `cold`. The sum
  grows from `first` of the wanted ones to all of them over the first `growth` of the steps: where
  nearly all bits are wanted, gates that begin there begin where the loss is lost and flat, while
  growing meets each bit at the mask it has to stand in. DuoAttention (arXiv 2410.10819) trains such
  gates with an L1 penalty instead of a fixed sum.

  Args:
    space: of the bits.
    steps: gradients asked for.
    rate: Adam's learning rate.
    warm, cold: first and last temperature.
    first: share of the ones wanted at the first step.
    growth: share of the steps over which all of them come to be wanted.
    decay: share of the rate that is left at the last step, by a cosine: late steps of single
      contexts would otherwise undo each other's work.
    logits: float32 `[n]` to begin with; None = zeros.
  """

  needs_gradient = True

  def __init__(
    self,
    space: Space,
    *,
    steps: int,
    rate: float = 0.2,
    warm: float = 1.0,
    cold: float = 0.2,
    first: float = 0.5,
    growth: float = 0.5,
    decay: float = 1.0,
    logits: np.ndarray | None = None,
  ):
    import jax  # here, as no other solver needs it
    import optax

    super().__init__()
    self._space, self._steps, self._step, self._rounded = space, steps, 0, False
    self._temperatures = np.geomspace(warm, cold, max(1, steps))
    self._wanted = np.minimum(
      1.0, first + (1.0 - first) * np.arange(max(1, steps)) / max(1.0, growth * steps)
    )
    self._wanted[-1] = 1.0
    self.logits = np.zeros(space.size, np.float32) if logits is None else np.float32(logits)
    rates = optax.cosine_decay_schedule(rate, max(1, steps), decay)
    self._optimizer = optax.adam(rates, b1=0.9, b2=0.95, eps=1e-4)
    # Optax mixes integer step counts with floats, whatever the promotion around it.
    self._promotion = lambda: jax.numpy_dtype_promotion("standard")
    with self._promotion():
      self._state = self._optimizer.init(self.logits)

  def ask(self) -> list[np.ndarray]:
    if self._step < self._steps:
      return [self._gates()]
    if self._rounded:
      return []
    self._rounded = True
    return [self._space.top(self.logits)]

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
        self._train(candidate, np.asarray(gradient, np.float64))

  def _gates(self) -> np.ndarray:
    wanted, temperature = self._wanted[self._step], self._temperatures[self._step]
    logits = [self.logits[members] for members in self._space.members]
    rows = soft_top_k(logits, wanted * self._space.ones, temperature)
    gates = np.empty(self._space.size)
    for members, row in zip(self._space.members, rows, strict=True):
      gates[members] = row
    return gates

  def _train(self, gates: np.ndarray, gradient: np.ndarray) -> None:
    slopes = gates * (1.0 - gates) / self._temperatures[self._step]
    for members in self._space.members:  # the threshold moves along, to keep the sum
      weight = slopes[members]
      gradient[members] -= (weight @ gradient[members]) / max(weight.sum(), 1e-12)
    with self._promotion():
      update, self._state = self._optimizer.update(
        (slopes * gradient).astype(np.float32), self._state
      )
    self.logits = self.logits + np.asarray(update)
    self._step += 1


def soft_top_k(
  logits: Sequence[np.ndarray], sums: np.ndarray, temperature: float
) -> list[np.ndarray]:
  """sigmoid((logits - t) / temperature), class by class, with the t that makes its sum what is wanted.

  All thresholds are bisected at once.

  Args:
    logits: float `[n_c]` of each class.
    sums: float `[classes]`; a class wanted whole, or not at all, is all ones or zeros.
    temperature: > 0.

  Returns:
    float64 `[n_c]` of each class.
  """
  sizes = np.array([len(row) for row in logits])
  padded = np.full((len(sizes), max(sizes)), -np.inf)  # gates of 1e-26, which no sum notices
  for row, values in zip(padded, logits, strict=True):
    row[: len(values)] = values
  reach = 40.0 * temperature
  low = np.array([row.min() for row in logits], np.float64) - reach
  high = padded.max(1) + reach
  for _ in range(80):
    threshold = (low + high) / 2
    scaled = np.minimum(np.maximum((threshold[:, None] - padded) / temperature, -60.0), 60.0)
    gates = 1.0 / (1.0 + np.exp(scaled))
    above = gates.sum(1) > sums
    low, high = np.where(above, threshold, low), np.where(above, high, threshold)
  return [
    row[:size] if 0 < wanted < size else np.full(size, float(wanted > 0))
    for row, size, wanted in zip(gates, sizes, sums, strict=True)
  ]
