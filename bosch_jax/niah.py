"""Needle-in-a-haystack prompts after RULER: numbers hidden in text, and questions about them.

A needle reads "One of the special magic numbers for {key} is: {value}.", with a key of two words
and a 7-digit value. Needles stand between the sentences of the haystack at random depths, but never
so late that a question's first token could still see one inside the local window: what a question
asks for can only be reached by full attention. All texts and draws follow from the seed alone.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from bosch_jax import haystacks, prompts, words
from models.errors import InputError

if TYPE_CHECKING:
  from models.tokenizer import Tokenizer

INTRO = (
  "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
  "I will quiz you about the numbers afterwards."
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
LEADS = {
  "chat": "The special magic number for {key} mentioned in the provided text is",
  "chatcopy": "One of the special magic numbers for {key} is:",
}
TASKS = ("multikey", "single")
SPLITS = ("calibration", "held_out")
FIRST_VALUE, LAST_VALUE = 1_000_000, 9_999_999


def make_niah(
  tokenizer: "Tokenizer",
  *,
  context: int,
  window: int,
  samples: int,
  questions: int = 4,
  needles: int = 4,
  task: Literal["multikey", "single"] = "multikey",
  haystack: str = "noise",
  style: Literal["chat", "chatcopy"] = "chat",
  seed: int = 1,
  split: Literal["calibration", "held_out"] = "calibration",
) -> prompts.PromptSet:
  """Makes needle-in-a-haystack prompts, several questions packed on each haystack.

  The same arguments give the same arrays in every process. Needles of the two splits are disjoint
  whatever the seeds: each key and each value belongs to one split only (see `split_of`).

  Args:
    tokenizer: the model's, with its chat template.
    context: most tokens of one unpacked prompt with its answer; haystacks grow up to it.
    window: tokens a local head sees, itself included. No token of a needle lies within it for any
      token of any question.
    samples: B, number of contexts.
    questions: Q, each about another needle of the context; at most `needles`.
    needles: needles per context.
    task: "multikey" as above; "single" is one needle and one question, whatever the two say.
    haystack: "noise", "essay", or a folder of text (see `haystacks.sentences`).
    style: how the assistant's turn leads up to the answer: "chat" repeats the question's words,
      "chatcopy" the needle's.
    seed: together with `split` and the row decides everything random.
    split: "calibration" or "held_out".

  Returns:
    The `PromptSet`, with T rounded up to a multiple of 8.

  Raises:
    InputError: a count that is not positive, a window not smaller than the context, more questions
      than needles, an unknown choice, or a context too short for the needles.
  """
  if task == "single":
    questions = needles = 1
  _check(
    dict(
      context=context,
      window=window,
      samples=samples,
      seed=seed,
      questions=questions,
      needles=needles,
    ),
    dict(task=(task, TASKS), style=(style, tuple(LEADS)), split=(split, SPLITS)),
  )
  rows = []
  for row in range(samples):
    rng = stream(seed, split, row)
    pairs = draw_needles(rng, split, needles)
    depths = [rng.random() for _ in pairs]
    filler = Filler(tokenizer, haystack, rng.random())
    texts = [NEEDLE.format(key=key, value=value) for key, value in pairs]
    asked = [
      Question(QUESTION.format(key=key), LEADS[style].format(key=key), value)
      for key, value in pairs[:questions]
    ]
    rows.append(Context(tokenizer, filler, INTRO, texts, depths, asked, window))
  least = max(row.least_length for row in rows)
  if least > context:
    raise InputError(
      "--context",
      context,
      f"is too short for {needles} needle{'s' * (needles > 1)} outside a window of {window} "
      f"tokens; use at least {least}, or a smaller --window",
    )
  filled = [row.fill(context) for row in rows]
  return prompts.pack(
    [row.haystack for row in filled],
    [row.pairs for row in filled],
    [row.depths[:questions] for row in filled],
  )


def _check(counts: dict[str, int], choices: dict[str, tuple[str, Sequence[str]]]) -> None:
  for name, value in counts.items():
    if value < 1:
      raise InputError(f"--{name}", value, "must be a positive integer; use 1 or more")
  for name, (value, known) in choices.items():
    if value not in known:
      raise InputError(f"--{name}", value, f"is unknown; use one of {', '.join(known)}")
  context, window = counts["context"], counts["window"]
  if window >= context:
    raise InputError(
      "--window",
      window,
      f"must be smaller than --context {context}; use for example {max(1, context // 8)}",
    )
  if counts["questions"] > counts["needles"]:
    raise InputError(
      "--questions",
      counts["questions"],
      f"cannot all be about different needles; use at most --needles {counts['needles']}",
    )


# --- random draws --------------------------------------------------------------------------------


def stream(seed: int, split: str, row: int) -> random.Random:
  """The random stream of one context. Only its `random()` may be used: that is the one method whose
  sequence Python promises to keep."""
  digest = hashlib.sha256(f"bosch niah 1 {split} {seed} {row}".encode()).digest()
  return random.Random(int.from_bytes(digest, "big"))


def split_of(text: str) -> str:
  """The split that a key or value belongs to, by a hash of its text; about half go to each."""
  return SPLITS[hashlib.sha256(f"bosch split {text}".encode()).digest()[0] & 1]


def draw_needles(rng: random.Random, split: str, needles: int) -> list[tuple[str, str]]:
  """Draws pairs (key, value), all keys and all values different, all of this split."""

  def distinct(draw: Callable[[], str]) -> Iterator[str]:
    seen = set()
    while True:
      text = draw()
      if text not in seen and split_of(text) == split:
        seen.add(text)
        yield text

  def pick(options: Sequence[str]) -> str:
    return options[int(rng.random() * len(options))]

  keys = distinct(lambda: f"{pick(words.ADJECTIVES)} {pick(words.NOUNS)}")
  span = LAST_VALUE - FIRST_VALUE + 1
  values = distinct(lambda: str(FIRST_VALUE + int(rng.random() * span)))
  return [(next(keys), next(values)) for _ in range(needles)]


# --- text ----------------------------------------------------------------------------------------


class Filler:
  """The haystack without needles, which can be cut off after any number of units.

  Units are whole sentences in noise. In essays, whose sentences are long, they are words, so only
  the last sentence may be cut.

  Args:
    tokenizer: measures the text.
    haystack, start: see `haystacks.sentences`.
  """

  def __init__(self, tokenizer: "Tokenizer", haystack: str, start: float):
    self._tokenizer, self._sentence = tokenizer, haystacks.sentences(haystack, start)
    self._whole = haystack == "noise"
    self._sizes: dict[str, int] = {}

  def pieces(self, units: int) -> list[str]:
    """The first `units` units as sentences, the last one possibly cut."""
    if self._whole:
      return [self._sentence(i) for i in range(units)]
    pieces = []
    while units > 0:
      sentence = self._sentence(len(pieces)).split(" ")[:units]
      pieces.append(" ".join(sentence))
      units -= len(sentence)
    return pieces

  def sizes(self, pieces: Sequence[str]) -> list[int]:
    """Tokens of each piece with the space before it."""
    for piece in pieces:
      if piece not in self._sizes:
        # Behind a word: SentencePiece puts a space of its own before whatever begins a text.
        word, whole = (self._tokenizer.encode(text) for text in ("x", f"x {piece}"))
        self._sizes[piece] = len(whole) - len(word)
    return [self._sizes[piece] for piece in pieces]

  def most_units(self, tokens: int) -> int:
    """The greatest number of units that is not longer than `tokens`."""

    def fits(units: int) -> bool:
      return sum(self.sizes(self.pieces(units))) <= tokens

    high = 1
    while fits(high):
      high *= 2
    low = high // 2  # fits (or is 0), and high does not
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class Row:
  """The ids of one context.

  Attributes:
    haystack: ids of everything that the questions share.
    pairs: for each question, its ids and its answer's.
    depths: where each needle starts, as a share of the haystack's tokens.
    last_needle: index of the last token of any needle.
  """

  haystack: list[int]
  pairs: list[tuple[list[int], list[int]]]
  depths: list[float]
  last_needle: int

  @property
  def length(self) -> int:
    """Tokens of the longest unpacked prompt."""
    return len(self.haystack) + max(len(question) + len(answer) for question, answer in self.pairs)


@dataclasses.dataclass(frozen=True)
class Question:
  """What is asked about a context.

  Attributes:
    text: the question, which ends the user's turn.
    lead: how the assistant's turn begins.
    answer: what follows it, behind a space.
  """

  text: str
  lead: str
  answer: str


class Context:
  """One context with its needles drawn, whose haystack can still be of any length.

  Args:
    tokenizer, window: see `make_niah`.
    filler: the text around the needles.
    intro: begins the user's turn.
    needles: the sentences to hide.
    depths: for each needle in [0, 1), where among the places allowed it stands.
    questions: what is asked, each of the same context.

  Attributes:
    least_length: tokens of the shortest prompt that keeps all needles out of the window.
  """

  def __init__(
    self,
    tokenizer: "Tokenizer",
    filler: Filler,
    intro: str,
    needles: Sequence[str],
    depths: Sequence[float],
    questions: Sequence[Question],
    window: int,
  ):
    self._tokenizer, self._filler, self._window = tokenizer, filler, window
    self._order = sorted(range(len(needles)), key=depths.__getitem__)
    self._intro, self._needles, self._depths = intro, needles, depths
    self._questions = questions
    self._least_units = filler.most_units(max(0, window - 2))
    while not self._outside(row := self._row(self._least_units, 0)):
      self._least_units += 1
    self.least_length = row.length

  def fill(self, context: int) -> Row:
    """The ids with as much haystack as fits `context`, which must be `least_length` or more."""
    least = self._row(self._least_units, 0)
    room = context - least.length + sum(self._filler.sizes(self._filler.pieces(self._least_units)))
    # Sizes of single pieces add up to the size of the text unless the tokenizer merges across
    # them, so the estimate is checked on the ids themselves.
    for units in range(self._filler.most_units(room), self._least_units, -1):
      for slots in self._slots(units):
        row = self._row(units, slots)
        if row.length > context:
          break
        if self._outside(row):
          return row
    return least

  def _outside(self, row: Row) -> bool:
    """Whether the first token behind the haystack, at position len(haystack), sees no needle."""
    return len(row.haystack) - row.last_needle >= self._window

  def _slots(self, units: int) -> Iterator[int]:
    """Numbers of sentences that needles may stand behind, by estimate: most first."""
    sizes = self._filler.sizes(self._filler.pieces(units))
    after = 0
    for slots in range(len(sizes) - 1, -1, -1):
      after += sizes[slots]
      if after >= self._window - 2:
        yield slots

  def _row(self, units: int, slots: int) -> Row:
    """Renders and tokenises; needles stand behind 0 .. `slots` sentences, by their depth."""
    pieces = self._filler.pieces(units)
    items, starts, done = [], [], 0
    for i in self._order:
      behind = int(self._depths[i] * (slots + 1))
      items += pieces[done:behind]
      done = behind
      starts.append(len(" ".join(items)) + bool(items))
      items.append(self._needles[i])
    end = len(" ".join(items))
    body = " ".join([*items, *pieces[done:]])

    encode, prompt = self._tokenizer.encode, self._prompt
    texts = [(prompt(body, q), f"{prompt(body, q)} {q.answer}") for q in self._questions]
    wholes = [encode(whole) for _, whole in texts]
    # Where the ids of a part depart from those of the whole is the one cut that is right for every
    # tokenizer: a token that spans the cut falls to the later part.
    first = texts[0][0]
    prefix = encode(first[: first.rindex(self._questions[0].text)])
    shared = min(common(prefix, whole) for whole in wholes)
    asked = [common(encode(text), whole) for (text, _), whole in zip(texts, wholes, strict=True)]
    offset = first.index(body)
    reached = encode(first[: offset + end])
    depths = [len(encode(first[: offset + start])) / shared for start in starts]
    return Row(
      haystack=wholes[0][:shared],
      pairs=[(ids[shared:cut], ids[cut:]) for ids, cut in zip(wholes, asked, strict=True)],
      depths=[depths[self._order.index(i)] for i in range(len(self._needles))],
      last_needle=min(common(reached, wholes[0]), len(reached) - 1),
    )

  def _prompt(self, body: str, question: Question) -> str:
    """The text up to, and without, the answer's space."""
    content = f"{self._intro}\n{body}\n{question.text}"
    return self._tokenizer.chat([{"role": "user", "content": content}], lead=question.lead)


def common(part: Sequence[int], whole: Sequence[int]) -> int:
  """How many ids two sequences share from the start."""
  for i, (a, b) in enumerate(zip(part, whole, strict=False)):
    if a != b:
      return i
  return min(len(part), len(whole))
