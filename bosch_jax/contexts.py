"""The contexts of an evaluator: of one length, or of several in turns, each with its window."""

import dataclasses

import numpy as np

from bosch_jax.prompts import PADDING, PromptSet


@dataclasses.dataclass(frozen=True)
class Contexts:
  """Contexts numbered in turns over the lengths, so that any first few hold all of them: context b
  is row b // n of length b % n.

  Attributes:
    sets: the prompts of n lengths; each holds as many contexts as the first, or one less.
    windows: W of local heads for each length, in tokens.

  Raises:
    ValueError: sets that cannot be numbered in turns, or hold different numbers of questions.
  """

  sets: tuple[PromptSet, ...]
  windows: tuple[int, ...]

  def __post_init__(self):
    sizes = [len(prompts) for prompts in self.sets]
    if sizes != shares(sum(sizes), len(sizes)) or len(self.windows) != len(sizes):
      raise ValueError(f"{sizes} contexts and {len(self.windows)} windows cannot take turns")
    if len({prompts.num_questions for prompts in self.sets}) > 1:
      raise ValueError("all lengths need the same number of questions")

  def __len__(self) -> int:
    return sum(len(prompts) for prompts in self.sets)

  def length(self, context: int) -> int:
    """Index of the length that a context belongs to."""
    return context % len(self.sets)

  def row(self, context: int) -> int:
    """Row of a context among those of its length."""
    return context // len(self.sets)

  def tokens(self, context: int) -> np.ndarray:
    """int32 `[T]`."""
    return self.sets[self.length(context)].tokens_BxT[self.row(context)]

  def longest(self, count: int) -> PromptSet:
    """Those of the first `count` contexts that belong to the longest padded length: what one call
    needs at most."""
    sizes = shares(count, len(self.sets))
    widest = max(
      (i for i, size in enumerate(sizes) if size),
      key=lambda i: self.sets[i].tokens_BxT.shape[1],
    )
    return self.sets[widest].take(range(sizes[widest]))

  def padded(self, multiple: int) -> "Contexts":
    """With T of each length rounded up to a multiple."""
    return dataclasses.replace(self, sets=tuple(pad(prompts, multiple) for prompts in self.sets))


def shares(total: int, parts: int) -> list[int]:
  """How many of `total` contexts each of `parts` lengths holds when they take turns."""
  return [(total - i + parts - 1) // parts for i in range(parts)]


def pad(prompts: PromptSet, multiple: int) -> PromptSet:
  """The prompts with T rounded up to a multiple, by padding."""
  extra = ((0, 0), (0, -prompts.tokens_BxT.shape[1] % multiple))
  return dataclasses.replace(
    prompts,
    tokens_BxT=np.pad(prompts.tokens_BxT, extra),
    positions_BxT=np.pad(prompts.positions_BxT, extra),
    segments_BxT=np.pad(prompts.segments_BxT, extra, constant_values=PADDING),
  )
