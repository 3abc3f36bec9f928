"""Solvers over bits with exact cardinality, behind one ask/tell interface.

A solver never sees the model. `ask()` gives a batch of candidate bit vectors (an empty batch: it
has nothing left to try); `tell()` gives their losses back, lower is better. Cardinality is exact by
construction: the number of ones in every class of variables (a layer, or all of them) is fixed.
"""

from bosch_jax.solvers.base import Solver, bits
from bosch_jax.solvers.enumeration import EnumerateSolver
from bosch_jax.solvers.factory import SOLVERS, make_solver, require
from bosch_jax.solvers.gates import GatesSolver
from bosch_jax.solvers.lazy import LazySolver
from bosch_jax.solvers.nevergrad import NevergradSolver
from bosch_jax.solvers.nomad import NomadSolver
from bosch_jax.solvers.space import Space
from bosch_jax.solvers.swap import SwapSolver
from bosch_jax.solvers.uniform import RandomSolver

__all__ = [
  "SOLVERS",
  "EnumerateSolver",
  "GatesSolver",
  "LazySolver",
  "NevergradSolver",
  "NomadSolver",
  "RandomSolver",
  "Solver",
  "Space",
  "SwapSolver",
  "bits",
  "make_solver",
  "require",
]
