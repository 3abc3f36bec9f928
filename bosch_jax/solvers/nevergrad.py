"""Optimisers of nevergrad, an optional extra."""

import functools

import numpy as np

from bosch_jax.solvers.keys import KeySolver, first_keys
from models.errors import InputError


class NevergradSolver(KeySolver):
  """An optimiser of nevergrad over one real key per bit (see `bosch_jax.solvers.keys`).

  Args:
    start, start_loss, classes, batch, patience: see `KeySolver`.
    cost: float `[n]`, first guess of the loss each bit adds when set.
    seed: of the optimiser; the same seed proposes the same candidates.
    budget: candidates the optimiser plans for.
    optimizer: name in nevergrad's registry.

  Raises:
    InputError: nevergrad has no such optimiser.
  """

  def __init__(
    self,
    start: np.ndarray,
    start_loss: float,
    cost: np.ndarray | None = None,
    *,
    classes: np.ndarray | None = None,
    batch: int = 4,
    patience: int | None = None,
    seed: int = 1,
    budget: int = 200,
    optimizer: str = "DiscreteLenglerOnePlusOne",
  ):
    import nevergrad

    if optimizer not in nevergrad.optimizers.registry:
      raise InputError(
        "nevergrad optimizer", optimizer, "is not in its registry; use DiscreteLenglerOnePlusOne"
      )
    super().__init__(start, start_loss, classes=classes, batch=batch, patience=patience)
    keys = nevergrad.p.Array(init=2.0 * first_keys(start, cost) - 1.0)
    keys.random_state = np.random.RandomState(seed)
    self._optimizer = nevergrad.optimizers.registry[optimizer](
      parametrization=keys, budget=max(1, budget), num_workers=batch
    )

  def _propose(self):
    proposal = self._optimizer.ask()
    return proposal.value, functools.partial(self._optimizer.tell, proposal)
