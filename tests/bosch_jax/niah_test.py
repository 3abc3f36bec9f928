"""Needle prompts: reproducible, disjoint, exact in their tokens, and out of the window's reach."""

import hashlib
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch_jax import haystacks, niah
from bosch_jax.niah import draw_needles, make_niah, split_of, stream
from models.errors import InputError

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+ [a-z]+) is: (\d{7})\.")


class PieceTokenizer:
  """Stands in for a model's tokenizer: one token per match of a pattern, text is kept exactly."""

  SINGLE_DIGITS = r"<\|\w+\|>| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s"
  # As in some larger vocabularies: sentence ends swallow what follows, digits go in threes.
  MERGING = r"<\|\w+\|>| ?[A-Za-z]+|\d{1,3}|[.?:]+\s?| ?[^\sA-Za-z\d.?:]+|\s"

  def __init__(self, pattern: str):
    self._pattern, self._texts = re.compile(pattern), {}

  def encode(self, text: str) -> list[int]:
    ids = []
    for piece in self._pattern.findall(text):
      ids.append(int(hashlib.sha1(piece.encode()).hexdigest()[:7], 16))
      self._texts[ids[-1]] = piece
    return ids

  def decode(self, ids) -> str:
    return "".join(self._texts[int(i)] for i in ids)

  def chat(self, messages, lead="") -> str:
    turns = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
    return f"<|start|>system\nYou are helpful.<|end|>\n{turns}<|start|>assistant\n{lead}"


TOKENIZERS = {
  "single digits": PieceTokenizer(PieceTokenizer.SINGLE_DIGITS),
  "merging": PieceTokenizer(PieceTokenizer.MERGING),
}
PLAIN = TOKENIZERS["single digits"]
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
every_haystack = pytest.mark.parametrize("haystack", ["noise", "essay"])
every_style = pytest.mark.parametrize("style", ["chat", "chatcopy"])


def make(tokenizer=PLAIN, context=256, window=32, samples=2, **changes):
  return make_niah(tokenizer, context=context, window=window, samples=samples, **changes)


def prompt_ids(plain, row):
  """The ids of an unpacked prompt, and how many of them are its answer's."""
  return plain.tokens_BxT[row][plain.segments_BxT[row] == 0], plain.valid_BxQxA[row].sum()


def check_out_of_reach(tokenizer, prompts, window, needles):
  """All needles lie in front of what the first token of a question sees through the window."""
  for b, shared in enumerate(prompts.haystack_B):
    tokens = prompts.tokens_BxT[b, :shared]
    assert len(NEEDLE.findall(tokenizer.decode(tokens[: shared - window + 1]))) == needles
    assert "magic" not in tokenizer.decode(tokens[shared - window + 1 :])


# --- reproducible and disjoint -------------------------------------------------------------------


def test_the_same_in_every_process():
  program = (
    "from niah_test import make\n"
    "print(*(make(haystack=h, seed=3).digest for h in ('noise', 'essay')))"
  )
  paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE)))}
  outputs = {
    subprocess.run(
      [sys.executable, "-c", program],
      env={**os.environ, **paths, "PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in ("0", "1")
  }
  assert outputs == {f"{make(seed=3).digest} {make(seed=3, haystack='essay').digest}\n"}


def test_draws_do_not_change_between_releases():
  """Results are tied to these prompts: to change them on purpose, renumber the `stream`."""
  assert draw_needles(stream(1, "calibration", 0), "calibration", 2) == [
    ("firm brush", "4448679"),
    ("sweet bell", "1118282"),
  ]


def test_seeds_splits_and_rows_differ():
  digests = {make(seed=s, split=split).digest for s in (1, 2) for split in niah.SPLITS}
  assert len(digests) == 4
  prompts = make(samples=8)
  assert len({row.tobytes() for row in prompts.tokens_BxT}) == 8


def test_more_samples_keep_the_first_ones():
  few, many = make(samples=2), make(samples=4)
  T = min(few.tokens_BxT.shape[1], many.tokens_BxT.shape[1])
  np.testing.assert_array_equal(few.tokens_BxT[:, :T], many.tokens_BxT[:2, :T])


def test_the_splits_share_no_key_and_no_value():
  found = {}
  for split in niah.SPLITS:
    pairs = [p for row in range(300) for p in draw_needles(stream(5, split, row), split, 4)]
    assert {split_of(text) for pair in pairs for text in pair} == {split}
    found[split] = [set(texts) for texts in zip(*pairs, strict=True)]
  for one, other in zip(*found.values(), strict=True):
    assert len(one) > 900
    assert not one & other


@given(seed=st.integers(1, 10**9), needles=st.integers(1, 40))
def test_keys_and_values_are_distinct_within_a_context(seed, needles):
  keys, values = zip(*draw_needles(stream(seed, "held_out", 0), "held_out", needles), strict=True)
  assert len(set(keys)) == len(set(values)) == needles
  assert all(re.fullmatch(r"[1-9]\d{6}", value) for value in values)


# --- what the prompts say ------------------------------------------------------------------------


def test_the_text_of_one_prompt_written_out():
  plain = make(task="single", context=126, window=8, samples=1).unpack()
  ids, answer = prompt_ids(plain, 0)
  text = PLAIN.decode(ids)
  key, value = NEEDLE.search(text).groups()
  body = text.split("afterwards.\n")[1].split("\nWhat")[0]
  assert NEEDLE.sub("", body).split() == " ".join(haystacks.NOISE[:4]).split()
  assert text == (
    "<|start|>system\nYou are helpful.<|end|>\n<|start|>user\n"
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
    f"{body}\nWhat is the special magic number for {key} mentioned in the provided text?<|end|>\n"
    "<|start|>assistant\n"
    f"The special magic number for {key} mentioned in the provided text is {value}"
  )
  assert PLAIN.decode(ids[-answer:]) == f" {value}"


@every_tokenizer
@every_haystack
@every_style
def test_ids_are_those_of_the_whole_text(tokenizer, haystack, style):
  prompts = make(tokenizer, haystack=haystack, style=style)
  plain = prompts.unpack()
  for row in range(len(plain)):
    ids, answer = prompt_ids(plain, row)
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text) == ids.tolist()
    key = re.search(r"What is the special magic number for (.+) mentioned.*\?", text).group(1)
    value = dict(NEEDLE.findall(text))[key]
    assert tokenizer.decode(ids[-answer:]).strip(": ") == value
    assert text.endswith(f"{niah.LEADS[style].format(key=key)} {value}")


@every_haystack
def test_questions_ask_for_different_needles_at_their_depth(haystack):
  prompts = make(haystack=haystack, samples=4, context=400)
  for b, shared in enumerate(prompts.haystack_B):
    text = PLAIN.decode(prompts.tokens_BxT[b, :shared])
    needles = {match.group(2): match.start() for match in NEEDLE.finditer(text)}
    answers = [PLAIN.decode(target).strip() for target in prompts.target_BxQxA[b]]
    assert sorted(answers) == sorted(needles)
    for answer, depth in zip(answers, prompts.depth_BxQ[b], strict=True):
      before = len(PLAIN.encode(text[: needles[answer]].rstrip(" ")))
      assert depth == pytest.approx(before / shared, abs=1.5 / shared)


def test_fewer_questions_than_needles():
  prompts = make(questions=2, needles=5, context=400)
  assert prompts.num_questions == 2
  shared = prompts.haystack_B[0]
  assert len(NEEDLE.findall(PLAIN.decode(prompts.tokens_BxT[0, :shared]))) == 5


# --- lengths and windows -------------------------------------------------------------------------


@every_tokenizer
@every_haystack
@pytest.mark.parametrize("context", [256, 400, 1000])
def test_haystacks_fill_the_context(tokenizer, haystack, context):
  prompts = make(tokenizer, context=context, haystack=haystack, samples=4)
  lengths = prompts.positions_BxT.max(1) + 1
  assert lengths.max() <= context
  assert lengths.min() >= 0.95 * context
  assert prompts.tokens_BxT.shape[1] % 8 == 0


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(1, 10**6),
  window=st.integers(1, 120),
  room=st.integers(0, 300),
  needles=st.integers(1, 6),
  haystack=st.sampled_from(["noise", "essay"]),
  tokenizer=st.sampled_from(list(TOKENIZERS.values())),
)
def test_no_needle_is_within_the_window_of_a_question(
  seed, window, room, needles, haystack, tokenizer
):
  settings = dict(seed=seed, window=window, needles=needles, questions=1, haystack=haystack)
  with pytest.raises(InputError) as error:
    make(tokenizer, context=window + 1, **settings)
  least = int(re.search(r"use at least (\d+)", str(error.value)).group(1))
  prompts = make(tokenizer, context=least + room, **settings)
  assert prompts.context <= least + room
  check_out_of_reach(tokenizer, prompts, window, needles)


def test_needles_spread_over_the_whole_depth():
  depths = make(context=1000, samples=16).depth_BxQ
  assert depths.min() < 0.2
  assert depths.max() > 0.8
  assert 0.4 < depths.mean() < 0.6


def test_the_least_context_named_is_the_least_that_does():
  with pytest.raises(InputError) as error:
    make(context=100, samples=8)
  start = "--context 100: is too short for 4 needles outside a window of 32 tokens; use at least "
  assert str(error.value).startswith(start)
  least = int(re.search(r"use at least (\d+)", str(error.value)).group(1))
  assert make(context=least, samples=8).context == least
  with pytest.raises(InputError, match=f"use at least {least},"):
    make(context=least - 1, samples=8)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(window=256), "--window 256: must be smaller than --context 256; use for example 32"),
    (dict(window=0), "--window 0: must be a positive integer; use 1 or more"),
    (dict(samples=0), "--samples 0: must be a positive integer; use 1 or more"),
    (dict(seed=0), "--seed 0: must be a positive integer; use 1 or more"),
    (dict(questions=5),
     "--questions 5: cannot all be about different needles; use at most --needles 4"),
    (dict(task="multivalue"), "--task multivalue: is unknown; use one of multikey, single"),
    (dict(style="plain"), "--style plain: is unknown; use one of chat, chatcopy"),
    (dict(split="test"), "--split test: is unknown; use one of calibration, held_out"),
    (dict(haystack="nowhere"),
     "--haystack nowhere: is not noise, essay or a folder; give one of them"),
  ],
)  # fmt: skip
def test_bad_input_is_named_with_its_remedy(changes, message):
  with pytest.raises(InputError) as error:
    make(**changes)
  assert str(error.value) == message


# --- haystacks -----------------------------------------------------------------------------------


def test_prose_is_told_from_listings_and_needles():
  text = """
  This sentence is short, plain prose. So is
  the one broken over two lines! Too short. this one begins in lower case.

  x = f(3)  # Not a sentence at all.

  The number 1234567 could be a needle. <|im_end|> is no prose either.
  """
  assert haystacks.split(text) == (
    "This sentence is short, plain prose.", "So is the one broken over two lines!",
  )  # fmt: skip


def test_a_folder_of_text_is_a_haystack(tmp_path):
  (tmp_path / "a.txt").write_text("Rivers run slowly to the sea. Boats follow them with the tide.")
  (tmp_path / "b.py").write_text("This is not a text file at all.")
  prompts = make(haystack=str(tmp_path))
  text = PLAIN.decode(prompts.tokens_BxT[0, : prompts.haystack_B[0]])
  assert "Rivers run slowly to the sea." in text
  assert "not a text file" not in text
  (empty := tmp_path / "empty").mkdir()
  with pytest.raises(InputError, match=r"holds no prose; put \.txt or \.md files"):
    make(haystack=str(empty))


def test_essays_begin_at_random_and_start_again():
  text = haystacks.documentation()
  sentence = haystacks.sentences("essay", 0.5)
  assert sentence(0) == text[len(text) // 2]
  assert sentence(len(text)) == sentence(0)
