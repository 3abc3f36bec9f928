"""Means with standard errors, where contexts are the independent unit."""

from collections.abc import Sequence

import numpy as np


def mean_and_error(values_B: Sequence[float]) -> tuple[float, float | None]:
  """Mean and its standard error over contexts; None for a single one."""
  values = np.asarray(values_B, np.float64)
  if len(values) < 2:
    return float(values.mean()), None
  return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def average(means: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
  """The mean of means over different contexts, and its standard error."""
  values, errors = zip(*means, strict=True)
  if None in errors:
    return float(np.mean(values)), None
  return float(np.mean(values)), float(np.sqrt(np.sum(np.square(errors))) / len(errors))


def paired(a_B: Sequence[float], b_B: Sequence[float]) -> tuple[float, float | None]:
  """Mean of a - b over the same contexts, and its standard error: what the contexts have in common
  cancels out."""
  return mean_and_error(np.asarray(a_B, np.float64) - np.asarray(b_B, np.float64))
