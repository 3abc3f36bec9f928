"""Needles and questions as training text, for continual pretraining, and held-out ones beside it."""

import hashlib

from bosch_jax.niah import make_niah, stream
from bosch_jax.prompts import PromptSet

HAYSTACKS = ("noise", "essay")


class Retrieval:
  """Retrieval text for `train.data.retrieval`.

  Keys and values of examples are those of calibration prompts, which no held-out question uses.

  Args:
    tokenizer: the model's, with its chat template.
    context: most tokens of a question with its haystack and answer.
    window: tokens a local head sees; no needle lies within it for the first token of a question.
    seed: decides everything random.
  """

  def __init__(self, tokenizer, context: int, window: int, seed: int):
    self._tokenizer, self._context, self._window, self._seed = tokenizer, context, window, seed

  def _make(self, seed: int, **choices) -> PromptSet:
    return make_niah(
      self._tokenizer, context=self._context, window=self._window, seed=seed, **choices
    )

  def example(self, index: int, length: int) -> tuple[list[int], list[bool]]:
    """A haystack and, one after the other, as many questions with answers as fit.

    Args:
      index: of the example; the same one is the same text.
      length: most tokens.

    Returns:
      Ids, and for each whether it belongs to an answer.
    """
    digest = hashlib.sha256(f"retrieval text {self._seed} {index}".encode()).digest()
    seed = 1 + int.from_bytes(digest[:6], "big")
    kind = HAYSTACKS[int(stream(seed, "calibration", 0).random() * len(HAYSTACKS))]
    prompt = self._make(seed, samples=1, haystack=kind)
    segments, tokens = prompt.segments_BxT[0], prompt.tokens_BxT[0]
    ids = tokens[segments == 0].tolist()
    answers = [False] * len(ids)
    for q in range(prompt.num_questions):
      own = tokens[segments == q + 1].tolist()
      size = int(prompt.valid_BxQxA[0, q].sum())
      if len(ids) + len(own) > length + 1:
        break
      ids += own
      answers += [False] * (len(own) - size) + [True] * size
    return ids, answers

  def questions(self, samples: int) -> PromptSet:
    """Held-out prompts, as the closing table of `select` asks them."""
    return self._make(self._seed, samples=samples, split="held_out")
