"""The bit vectors a solver may try: those with an exact number of ones in every class."""

import itertools
import math
from collections.abc import Iterator

import numpy as np


class Space:
  """Bit vectors of one size whose ones are counted class by class.

  Args:
    classes: int `[n]`, the class of each variable (any labels); or n, for one class of n variables.
    ones: how many are set in each class, in the order of the sorted labels; an int for one class.

  Attributes:
    size: n.
    members: the variables of each class, int arrays, in the order of the sorted labels.
    ones: int `[number of classes]`.

  Raises:
    ValueError: more ones than variables in a class, or not one count per class.
  """

  def __init__(self, classes: np.ndarray | int, ones: np.ndarray | int):
    classes = np.zeros(classes, int) if np.ndim(classes) == 0 else np.asarray(classes)
    self.size = len(classes)
    self.members = [np.flatnonzero(classes == label) for label in np.unique(classes)]
    self.ones = np.atleast_1d(np.asarray(ones, int))
    if self.ones.shape != (len(self.members),):
      raise ValueError(f"{len(self.members)} classes, but counts of shape {self.ones.shape}")
    for members, count in zip(self.members, self.ones, strict=True):
      if not 0 <= count <= len(members):
        raise ValueError(f"{count} ones do not fit a class of {len(members)} variables")
    self._labels = np.empty(self.size, int)
    for label, members in enumerate(self.members):
      self._labels[members] = label
    # Sorted by class and key, the variables to set are those at these places.
    starts = np.cumsum([0] + [len(members) for members in self.members])
    self._set = np.concatenate(
      [start + np.arange(ones) for start, ones in zip(starts, self.ones, strict=False)]
      or [np.arange(0)]
    )

  @classmethod
  def like(cls, mask: np.ndarray, classes: np.ndarray | None = None) -> "Space":
    """The space of all bit vectors with as many ones in every class as `mask` has."""
    mask = np.asarray(mask, bool)
    labels = np.zeros(len(mask), int) if classes is None else np.asarray(classes)
    return cls(labels, [int(mask[labels == label].sum()) for label in np.unique(labels)])

  @property
  def count(self) -> int:
    """How many bit vectors there are."""
    return math.prod(
      math.comb(len(members), int(ones))
      for members, ones in zip(self.members, self.ones, strict=True)
    )

  def __contains__(self, mask: np.ndarray) -> bool:
    return len(mask) == self.size and all(
      int(np.asarray(mask, bool)[members].sum()) == ones
      for members, ones in zip(self.members, self.ones, strict=True)
    )

  def __iter__(self) -> Iterator[np.ndarray]:
    """All of them, in lexicographic order of the positions of the ones, class by class."""
    choices = [
      itertools.combinations(members, int(ones))
      for members, ones in zip(self.members, self.ones, strict=True)
    ]
    for chosen in itertools.product(*choices):
      out = np.zeros(self.size, bool)
      out[[int(i) for i in itertools.chain.from_iterable(chosen)]] = True
      yield out

  def top(self, keys: np.ndarray) -> np.ndarray:
    """Sets the variables with the highest keys in every class; the earlier one of equal keys.

    Args:
      keys: float `[n]`.

    Returns:
      bool `[n]`, in this space.
    """
    out = np.zeros(self.size, bool)
    out[np.lexsort((-np.asarray(keys), self._labels))[self._set]] = True
    return out

  def project(self, gates: np.ndarray) -> np.ndarray:
    """The nearest point of [0, 1]^n whose sum in every class is the number of ones.

    That point is clip(gates + t, 0, 1), one shift t per class. The sum is piecewise linear in t
    with kinks where a gate reaches 0 or 1, so t is found exactly.

    Args:
      gates: float `[n]`.

    Returns:
      float64 `[n]`.
    """
    out = np.empty(self.size)
    for members, ones in zip(self.members, self.ones, strict=True):
      values = np.asarray(gates, np.float64)[members]
      kinks = np.sort(np.concatenate([-values, 1.0 - values]))
      sums = np.clip(values + kinks[:, None], 0.0, 1.0).sum(1)
      out[members] = np.clip(values + np.interp(ones, sums, kinks), 0.0, 1.0)
    return out
