"""Solvers by name."""

import importlib.util

import numpy as np

from bosch_jax.solvers.base import Solver
from bosch_jax.solvers.enumeration import EnumerateSolver
from bosch_jax.solvers.gates import GatesSolver
from bosch_jax.solvers.lazy import LazySolver
from bosch_jax.solvers.nevergrad import NevergradSolver
from bosch_jax.solvers.nomad import NomadSolver
from bosch_jax.solvers.space import Space
from bosch_jax.solvers.swap import SwapSolver
from bosch_jax.solvers.uniform import RandomSolver
from models.errors import InputError

SOLVERS = ("enumerate", "swap", "lazy", "gates", "random", "nomad", "nevergrad")
PACKAGES = {"nomad": "PyNomad", "nevergrad": "nevergrad"}


def require(name: str) -> None:
  """Checks that the package of a solver is there.

  Raises:
    InputError: it is not; says how to install it.
  """
  if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
    raise InputError(
      "--solver", name, "is an optional package; pip install -r requirements-solvers.txt"
    )


def make_solver(
  name: str,
  start: np.ndarray,
  start_loss: float,
  cost: np.ndarray | None = None,
  *,
  classes: np.ndarray | None = None,
  batch: int = 4,
  patience: int | None = None,
  seed: int = 1,
  budget: int = 200,
) -> Solver:
  """A solver that keeps the cardinality of `start` and knows its loss.

  Args:
    name: one of `SOLVERS`.
    start: bool `[n]`, the incumbent.
    start_loss: its loss.
    cost: float `[n]`, first guess of the loss each bit adds when set; None: nothing is known.
    classes: int `[n]`; the number of ones is kept in each class. None: one class.
    batch: candidates asked for at once.
    patience: give up after this many candidates in a row that did not improve; None: never.
      Enumeration, lazy elimination and gates end by themselves and take no notice.
    seed: of what is drawn.
    budget: candidates that can be paid; gates are trained for as many steps less the roundings,
      nevergrad plans for it. The caller stops.

  Returns:
    The solver. `lazy` begins with no bit set and asks for that first; `gates` has
    `needs_gradient`.

  Raises:
    InputError: no such solver, or its package is missing.
  """
  require(name)
  start = np.asarray(start, bool)
  space = Space.like(start, classes)
  labels = np.zeros(len(start), int) if classes is None else np.asarray(classes)
  shared = {"classes": classes, "batch": batch, "patience": patience}
  if name == "swap":
    guess = np.zeros(len(start)) if cost is None else cost
    return SwapSolver(start, start_loss, guess, **shared)
  if name == "nomad":
    return NomadSolver(start, start_loss, cost, seed=seed, **shared)
  if name == "nevergrad":
    return NevergradSolver(start, start_loss, cost, seed=seed, budget=budget, **shared)
  if name == "enumerate":
    solver: Solver = EnumerateSolver(labels, space.ones, batch=batch)
  elif name == "random":
    solver = RandomSolver(labels, space.ones, seed=seed, batch=batch, patience=patience)
  elif name == "lazy":
    solver = LazySolver(np.zeros(len(start), bool), None, space, cost=cost, batch=batch)
  elif name == "gates":
    solver = GatesSolver(space, steps=max(1, budget - 2))
  else:
    raise InputError("--solver", name, f"is not known; use one of: {', '.join(SOLVERS)}")
  solver.tell([start], [start_loss])
  return solver
