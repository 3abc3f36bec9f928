"""What the solver tests share: a planted objective and a loop that counts."""

import numpy as np


def planted(n, seed, interaction=1.0):
  """A quadratic objective over bits: linear costs and random pair interactions."""
  rng = np.random.default_rng(seed)
  linear = rng.exponential(size=n)
  pairs = interaction * np.triu(rng.normal(size=(n, n)) * (rng.random((n, n)) < 0.1), 1)
  return linear, lambda x: float(linear @ x + x @ pairs @ x)


def relaxed(n, seed, interaction=1.0):
  """The same objective on gates: loss and gradient."""
  rng = np.random.default_rng(seed)
  linear = rng.exponential(size=n)
  pairs = interaction * np.triu(rng.normal(size=(n, n)) * (rng.random((n, n)) < 0.1), 1)
  return lambda g: (float(linear @ g + g @ pairs @ g), linear + (pairs + pairs.T) @ g)


def run(solver, loss, budget):
  """Asks and tells until nothing is left or the budget is spent; returns the candidates tried."""
  tried = []
  while len(tried) < budget and (candidates := solver.ask()):
    tried += candidates
    before = solver.best_loss
    solver.tell(candidates, np.array([loss(c) for c in candidates]))
    assert solver.best_loss <= before
  return tried


def train(solver, loss_and_gradient, budget=10**6):
  """The same for a solver that needs gradients of the relaxed objective."""
  tried = []
  while len(tried) < budget and (candidates := solver.ask()):
    tried += candidates
    told = [loss_and_gradient(c) for c in candidates]
    gradients = [None if c.dtype == bool else g for c, (_, g) in zip(candidates, told, strict=True)]
    solver.tell(candidates, np.array([loss for loss, _ in told]), gradients)
  return tried
