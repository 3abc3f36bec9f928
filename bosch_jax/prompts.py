"""Packed prompts: one haystack, several questions with their answers behind it.

Every question sees the haystack and itself, and continues from the haystack's own length, so its
scores are those of a prompt that holds this question alone, at a fraction of the cost:

    token      h h h h  q q a  q q a  .
    position   0 1 2 3  4 5 6  4 5 6  0
    segment    0 0 0 0  1 1 1  2 2 2 -1
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

PADDING = -1


@dataclasses.dataclass(frozen=True, eq=False)
class PromptSet:
  """B contexts of Q questions each, as read-only arrays.

  Attributes:
    tokens_BxT: int32, 0 in padding.
    positions_BxT: int32, position within the unpacked prompt, 0 in padding.
    segments_BxT: int32; 0 = haystack, 1 .. Q = a question with its answer, -1 = padding.
    answer_BxQxA: int32, index on the token axis of the token whose logits predict answer token
      a, that is of the token before it; 0 where not valid.
    target_BxQxA: int32, the answer's tokens; 0 where not valid.
    valid_BxQxA: bool, False past the end of an answer shorter than A.
    depth_BxQ: float32, where the needle of a question starts, as a share of the haystack's tokens.
  """

  tokens_BxT: np.ndarray
  positions_BxT: np.ndarray
  segments_BxT: np.ndarray
  answer_BxQxA: np.ndarray
  target_BxQxA: np.ndarray
  valid_BxQxA: np.ndarray
  depth_BxQ: np.ndarray

  def __post_init__(self):
    B, T = np.shape(self.tokens_BxT)
    _, Q, A = np.shape(self.answer_BxQxA)
    sizes = {"B": B, "T": T, "Q": Q, "A": A}
    for field in dataclasses.fields(self):
      array = np.array(getattr(self, field.name), _DTYPES.get(field.name, np.int32))
      shape = tuple(sizes[letter] for letter in field.name.split("_")[1].split("x"))
      if array.shape != shape:
        raise ValueError(f"{field.name} must be {shape}, got {array.shape}")
      array.setflags(write=False)
      object.__setattr__(self, field.name, array)

  def __len__(self) -> int:
    return len(self.tokens_BxT)

  @property
  def num_questions(self) -> int:
    """Q, the questions on every context."""
    return self.answer_BxQxA.shape[1]

  @property
  def haystack_B(self) -> np.ndarray:
    """int32 `[B]`: tokens of each haystack, which is also the position of a question's first."""
    return (self.segments_BxT == 0).sum(1, dtype=np.int32)

  @property
  def context(self) -> int:
    """Tokens of the longest unpacked prompt, its answer included."""
    return int(self.positions_BxT.max()) + 1

  @property
  def digest(self) -> str:
    """sha256, 64 hex digits, of all arrays with their names, types and shapes."""
    digest = hashlib.sha256()
    for field in dataclasses.fields(self):
      array = getattr(self, field.name)
      array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
      digest.update(f"{field.name} {array.dtype.name} {array.shape};".encode())
      digest.update(array.tobytes())
    return digest.hexdigest()

  def take(self, rows: Iterable[int]) -> "PromptSet":
    """The contexts `rows`, in that order and with the same T, so that nothing is recompiled."""
    rows = np.array(list(rows), np.int64)
    return PromptSet(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

  def unpack(self, multiple: int = 8) -> "PromptSet":
    """The same questions as plain prompts: B * Q contexts of one question, all in segment 0.

    The oracle of packing: no segment rule is involved, and scores must be the same. Row b * Q + q
    is question q of context b, and keeps its depth. T is rounded up to `multiple`.
    """
    haystacks, questions, depths = [], [], []
    for b in range(len(self)):
      for q in range(self.num_questions):
        own = np.flatnonzero((self.segments_BxT[b] == 0) | (self.segments_BxT[b] == q + 1))
        answer = self.target_BxQxA[b, q][self.valid_BxQxA[b, q]].tolist()
        prompt = self.tokens_BxT[b, own].tolist()[: -len(answer)]
        haystacks.append(prompt[:-1])
        questions.append([(prompt[-1:], answer)])
        depths.append([self.depth_BxQ[b, q]])
    prompts = pack(haystacks, questions, depths, multiple=multiple)
    return dataclasses.replace(prompts, segments_BxT=np.minimum(prompts.segments_BxT, 0))


_DTYPES = {"valid_BxQxA": bool, "depth_BxQ": np.float32}


def pack(
  haystacks: Sequence[Sequence[int]],
  questions: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]],
  depths: Sequence[Sequence[float]] | None = None,
  *,
  multiple: int = 8,
) -> PromptSet:
  """Lays out one context per haystack, all padded to a common T.

  Args:
    haystacks: B lists of token ids.
    questions: for each haystack, Q pairs (question ids, answer ids).
    depths: for each haystack, Q needle depths in [0, 1]; None = 0.
    multiple: T is rounded up to a multiple of this.

  Returns:
    The `PromptSet`.

  Raises:
    ValueError: no haystacks, contexts with different numbers of questions, or an empty question
      or answer.
  """
  if not haystacks or len(haystacks) != len(questions):
    raise ValueError(f"{len(haystacks)} haystacks, {len(questions)} question lists: need one each")
  B, Q = len(haystacks), len(questions[0])
  if Q < 1 or any(len(pairs) != Q for pairs in questions):
    raise ValueError("every context needs the same number of questions, at least one")
  if not all(len(question) and len(answer) for pairs in questions for question, answer in pairs):
    raise ValueError("questions and answers need at least one token each")
  lengths = [
    len(haystack) + sum(len(question) + len(answer) for question, answer in pairs)
    for haystack, pairs in zip(haystacks, questions, strict=True)
  ]
  T = -(-max(lengths) // multiple) * multiple
  A = max(len(answer) for pairs in questions for _, answer in pairs)
  tokens_BxT = np.zeros((B, T), np.int32)
  positions_BxT = np.zeros((B, T), np.int32)
  segments_BxT = np.full((B, T), PADDING, np.int32)
  answer_BxQxA = np.zeros((B, Q, A), np.int32)
  target_BxQxA = np.zeros((B, Q, A), np.int32)
  valid_BxQxA = np.zeros((B, Q, A), bool)
  for b, (haystack, pairs) in enumerate(zip(haystacks, questions, strict=True)):
    shared = end = len(haystack)
    tokens_BxT[b, :end] = haystack
    positions_BxT[b, :end] = np.arange(end)
    segments_BxT[b, :end] = 0
    for q, (question, answer) in enumerate(pairs):
      size, asked = len(answer), end + len(question)
      start, end = end, asked + size
      tokens_BxT[b, start:end] = [*question, *answer]
      positions_BxT[b, start:end] = shared + np.arange(end - start)
      segments_BxT[b, start:end] = q + 1
      answer_BxQxA[b, q, :size] = np.arange(asked - 1, end - 1)
      target_BxQxA[b, q, :size] = answer
      valid_BxQxA[b, q, :size] = True
  depth_BxQ = np.zeros((B, Q), np.float32) if depths is None else np.array(depths, np.float32)
  return PromptSet(
    tokens_BxT, positions_BxT, segments_BxT, answer_BxQxA, target_BxQxA, valid_BxQxA, depth_BxQ
  )
