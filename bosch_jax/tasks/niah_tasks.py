"""The eight needle tasks of RULER, as prompts to continue and as answers to score.

    task             haystack  key -> value      keys / values / queries
    niah_single_1    noise     words -> numbers  1 / 1 / 1
    niah_single_2    essay     words -> numbers  1 / 1 / 1
    niah_single_3    essay     words -> uuids    1 / 1 / 1
    niah_multikey_1  essay     words -> numbers  4 / 1 / 1
    niah_multikey_2  needles   words -> numbers  1 / 1 / 1
    niah_multikey_3  needles   uuids -> uuids    1 / 1 / 1
    niah_multivalue  essay     words -> numbers  1 / 4 / 1
    niah_multiquery  essay     words -> numbers  4 / 1 / 4

What is RULER's (arXiv 2404.06654, synthetic.yaml): the table, the needle's and the question's words, and
the score, `string_match`. What is ours: words, essays and draws are this project's (`bosch_jax.niah`),
so nothing is fetched; prompts use the model's own chat template; no needle that is asked for or that
shares its key stands within the window of a question; and the first needle's depth runs through the
fifths of the haystack from context to context, so that every depth is measured.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bosch_jax import prompts
from bosch_jax.niah import (
  FIRST_VALUE,
  LAST_VALUE,
  Context,
  Filler,
  Question,
  split_of,
  stream,
)
from bosch_jax.words import ADJECTIVES, NOUNS
from models.errors import InputError

if TYPE_CHECKING:
  from models.tokenizer import Tokenizer

DEPTHS = 5  # fifths of the haystack: the first needle's depth goes round them, reports bin by them
_HEX = "0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class NiahTask:
  """One row of the table above.

  Attributes:
    haystack: "noise", "essay" or "needles" (sentences like the needle itself, with other keys).
    key, value: "words", "numbers" or "uuids".
    keys: keys in the context; the first `queries` of them are asked for, in one question.
    values: needles that share a key; all are asked for.
  """

  haystack: str
  key: str = "words"
  value: str = "numbers"
  keys: int = 1
  values: int = 1
  queries: int = 1

  @property
  def num_answers(self) -> int:
    """Strings that an answer should contain."""
    return self.queries * self.values


NIAH = {
  "niah_single_1": NiahTask("noise"),
  "niah_single_2": NiahTask("essay"),
  "niah_single_3": NiahTask("essay", value="uuids"),
  "niah_multikey_1": NiahTask("essay", keys=4),
  "niah_multikey_2": NiahTask("needles"),
  "niah_multikey_3": NiahTask("needles", key="uuids", value="uuids"),
  "niah_multivalue": NiahTask("essay", values=4),
  "niah_multiquery": NiahTask("essay", keys=4, queries=4),
}
# The paper averages six sub-tasks without naming them.
SIX = (
  "niah_single_1",
  "niah_single_2",
  "niah_single_3",
  "niah_multikey_1",
  "niah_multivalue",
  "niah_multiquery",
)


@dataclasses.dataclass(frozen=True, eq=False)
class TaskSet:
  """B contexts of one task.

  Attributes:
    prompts: the contexts with one question each, the answer written out, for teacher forcing.
    answers: for each context, the strings that its answer should contain.
    depths: for each of these strings, where its needle starts, as a share of the haystack.
  """

  prompts: prompts.PromptSet
  answers: list[tuple[str, ...]]
  depths: list[tuple[float, ...]]

  def __len__(self) -> int:
    return len(self.answers)

  def ids(self, row: int) -> list[int]:
    """The tokens of a prompt, up to where its answer begins."""
    last = int(self.prompts.answer_BxQxA[row, 0, 0])
    return self.prompts.tokens_BxT[row, : last + 1].tolist()


def string_match(text: str, answers: Sequence[str]) -> list[bool]:
  """Which of the expected strings a text contains, whatever the case; RULER's `string_match_all` is
  the share of them."""
  return [answer.lower() in text.lower() for answer in answers]


def make_task(
  tokenizer: "Tokenizer",
  name: str,
  *,
  context: int,
  window: int,
  samples: int,
  sinks: int = 0,
  essay: str = "essay",
  seed: int = 1,
  split: str = "held_out",
) -> TaskSet:
  """Makes the contexts of a task; the same arguments give the same arrays in every process.

  Args:
    tokenizer: the model's, with its chat template.
    name: of the task, a key of `NIAH`.
    context: most tokens of a prompt with its answer.
    window: tokens a local head sees, itself included; no needle lies within it.
    samples: B.
    sinks: first tokens that local heads see as well; no needle lies among them.
    essay: "essay" or a folder of text (see `haystacks.sentences`), for tasks with an essay.
    seed: together with task, split and row it decides everything random.
    split: "calibration" or "held_out"; they share no key and no value, and none with the
      calibration prompts of a search.

  Raises:
    InputError: a context too short for the needles, too long for the number of keys there are, or
      a needle among the sinks.
  """
  task = NIAH[name]
  rows, answers, depths = [], [], []
  for row in range(samples):
    rng = stream(seed, f"{split} {name}", row)
    built, expected, wanted = _context(tokenizer, task, rng, row, split, window, essay)
    if built.least_length > context:
      raise InputError(
        "--lengths",
        context,
        f"is too short for the needles of {name} outside a window of {window} tokens; "
        f"use at least {built.least_length}",
      )
    rows.append(filled := built.fill(context))
    answers.append(expected)
    depths.append(tuple(filled.depths[i] for i in wanted))
    first = round(min(filled.depths) * len(filled.haystack))
    if first < sinks:
      raise InputError(
        "--mask",
        f"with {sinks} sinks",
        f"sees a needle of {name} (it begins at token {first}); use a mask with at most {first}",
      )
  made = prompts.pack(
    [row.haystack for row in rows],
    [row.pairs for row in rows],
    [[float(np.mean(d))] for d in depths],
    multiple=64,  # tasks of similar length share what is compiled
  )
  return TaskSet(made, answers, depths)


def _context(tokenizer, task, rng, row, split, window, essay):
  """One context, the strings expected, and the indices of their needles."""
  keys, values = _distinct(rng, task.key, split), _distinct(rng, task.value, split)
  pairs = [(key, next(values)) for key in _first(keys, task.keys) for _ in range(task.values)]
  depths = [rng.random() for _ in pairs]
  depths[0] = (row % DEPTHS + depths[0]) / DEPTHS
  if task.values > 1:
    depths.sort()  # several values of one key are expected in the order of the text
  needles = [_needle(task, *pair) for pair in pairs]
  if task.haystack == "needles":
    filler: Filler = NeedleFiller(tokenizer, task, rng.random(), row, split, set(pairs[0]))
  else:
    filler = Filler(tokenizer, "noise" if task.haystack == "noise" else essay, rng.random())
  wanted = list(range(task.num_answers))
  expected = tuple(pairs[i][1] for i in wanted)
  asked = list(dict.fromkeys(pairs[i][0] for i in wanted))
  kind, plural = task.value, len(expected) > 1
  what = (
    f"magic {kind if plural else kind[:-1]} for {_listed(asked)} mentioned in the provided text"
  )
  question = Question(
    f"What {'are all' if plural else 'is'} the special {what}?",
    f"The special {what} {'are' if plural else 'is'}",
    _listed(expected),
  )
  intro = (
    f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    f"I will quiz you about the {kind} afterwards."
  )
  return Context(tokenizer, filler, intro, needles, depths, [question], window), expected, wanted


class NeedleFiller(Filler):
  """A haystack of sentences that are needles themselves, with keys of their own.

  Args:
    tokenizer: measures the text.
    task: what keys and values look like.
    start, row, split: decide the draws.
    taken: keys and values that are not to appear.
  """

  def __init__(self, tokenizer, task: NiahTask, start: float, row: int, split: str, taken: set):
    super().__init__(tokenizer, "noise", 0.0)
    rng = stream(1, f"{split} needles {start!r}", row)
    self._task = task
    self._keys = _distinct(rng, task.key, split, taken)
    self._values = _distinct(rng, task.value, split, taken)
    self._made: list[str] = []
    self._sentence = self._draw

  def _draw(self, i: int) -> str:
    while len(self._made) <= i:
      self._made.append(_needle(self._task, next(self._keys), next(self._values)))
    return self._made[i]


def _needle(task: NiahTask, key: str, value: str) -> str:
  return f"One of the special magic {task.value} for {key} is: {value}."


def _listed(items: Sequence[str]) -> str:
  """ "a", "a and b", "a, b, and c"."""
  if len(items) < 3:
    return " and ".join(items)
  return ", ".join(items[:-1]) + f", and {items[-1]}"


def _first(items: Iterator[str], count: int) -> list[str]:
  return [next(items) for _ in range(count)]


def _distinct(rng, kind: str, split: str, taken: set[str] = frozenset()) -> Iterator[str]:
  """Random texts of a kind, all different, all of this split, none of `taken`.

  Raises:
    InputError: nearly all two-word keys are used up, which takes a context of some 200,000 tokens.
  """
  draw, seen = _DRAWS[kind], set(taken)
  most = 0.4 * len(ADJECTIVES) * len(NOUNS) if kind == "words" else float("inf")
  while True:
    if len(seen) > most:
      raise InputError(
        "--lengths", "", "need more keys than there are pairs of words; use shorter contexts"
      )
    text = draw(rng.random)
    if text not in seen and split_of(text) == split:
      seen.add(text)
      yield text


def _pick(random: Callable[[], float], options: Sequence[str]) -> str:
  return options[int(random() * len(options))]


def _uuid(random: Callable[[], float]) -> str:
  """Random hexadecimal digits in the form of a uuid of version 4."""
  digits = [_pick(random, _HEX) for _ in range(32)]
  digits[12], digits[16] = "4", _pick(random, "89ab")
  text = "".join(digits)
  return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


_DRAWS: dict[str, Callable[[Callable[[], float]], str]] = {
  "words": lambda random: f"{_pick(random, ADJECTIVES)} {_pick(random, NOUNS)}",
  "numbers": lambda random: str(FIRST_VALUE + int(random() * (LAST_VALUE - FIRST_VALUE + 1))),
  "uuids": _uuid,
}
