"""The eight needle tasks: what they ask, what they hide, what is out of reach."""

import re

import numpy as np
import pytest

from bosch_jax import niah
from bosch_jax.niah import split_of
from bosch_jax.tasks.niah_tasks import NIAH, SIX, make_task, string_match
from models.errors import InputError
from tests.bosch_jax.niah_test import TOKENIZERS

PLAIN = TOKENIZERS["single digits"]
NEEDLE = re.compile(
  r"One of the special magic (numbers|uuids) for ([a-z]+ [a-z]+|[0-9a-f-]{36}) is: ([0-9a-f-]+)\."
)
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
every_task = pytest.mark.parametrize("name", NIAH)
_MADE = {}


def made(name, **changes):
  """Contexts of a task; made once."""
  arguments = {"context": 700, "window": 24, "samples": 5, **changes}
  key = (name, *sorted(arguments.items()))
  if key not in _MADE:
    _MADE[key] = make_task(PLAIN, name, **arguments)
  return _MADE[key]


def text_of(tasks, row):
  """The prompt of a context without its answer."""
  return PLAIN.decode(tasks.ids(row))


@every_task
def test_needles_and_answers_are_what_the_table_says(name):
  task, tasks = NIAH[name], made(name)
  for row in range(len(tasks)):
    text, answers = text_of(tasks, row), tasks.answers[row]
    needles = NEEDLE.findall(text)
    assert len(answers) == len(set(answers)) == task.queries * task.values
    asked = re.search(r"for (.+) mentioned in the provided text\?", text).group(1)
    asked = re.split(r", and |, | and ", asked)
    assert len(asked) == task.queries
    held = [value for kind, key, value in needles if key in asked]
    assert sorted(held) == sorted(answers)
    assert {kind for kind, _, _ in needles} == {task.value}
    assert all(bool(UUID.fullmatch(v)) == (task.value == "uuids") for _, _, v in needles)
    assert all(bool(UUID.fullmatch(k)) == (task.key == "uuids") for _, k, _ in needles)
    if task.haystack == "needles":
      assert len({key for _, key, _ in needles}) == len(needles) > 5
      assert not NEEDLE.sub("", text.split("afterwards.\n")[1].split("\nWhat")[0]).strip()
    else:
      assert len(needles) == task.keys * task.values
      assert ("The grass is green." in text) == (task.haystack == "noise")


def test_the_prompt_of_two_tasks_written_out():
  text = text_of(made("niah_multiquery"), 0)
  keys = dict((value, key) for _, key, value in NEEDLE.findall(text))
  a, b, c, d = (keys[value] for value in made("niah_multiquery").answers[0])
  what = f"magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text"
  assert text.endswith(
    f"\nWhat are all the special {what}?<|end|>\n<|start|>assistant\nThe special {what} are"
  )
  text = text_of(made("niah_single_3"), 0)
  key = NEEDLE.search(text).group(2)
  assert text.startswith(
    "<|start|>system\nYou are helpful.<|end|>\n<|start|>user\nSome special magic uuids are hidden "
    "within the following text. Make sure to memorize it. I will quiz you about the uuids afterwards.\n"
  )
  what = f"magic uuid for {key} mentioned in the provided text"
  assert text.endswith(
    f"\nWhat is the special {what}?<|end|>\n<|start|>assistant\nThe special {what} is"
  )


@every_task
def test_the_teacher_is_forced_on_the_prompt_and_its_answer(name):
  tasks = made(name)
  for row in range(len(tasks)):
    valid = tasks.prompts.valid_BxQxA[row, 0]
    answer = PLAIN.decode(tasks.prompts.target_BxQxA[row, 0][valid])
    expected = tasks.answers[row]
    assert answer == " " + (
      expected[0] if len(expected) == 1 else ", ".join(expected[:-1]) + f", and {expected[-1]}"
    )
    whole = tasks.ids(row) + tasks.prompts.target_BxQxA[row, 0][valid].tolist()
    assert PLAIN.encode(PLAIN.decode(whole)) == whole and len(whole) <= 700
    assert string_match(answer, expected) == [True] * len(expected)


@every_task
def test_no_needle_that_is_asked_for_is_within_the_window(name):
  tasks, window = made(name, window=40), 40
  for row in range(len(tasks)):
    shared = int(tasks.prompts.haystack_B[row])
    near = PLAIN.decode(tasks.ids(row)[shared - window + 1 : shared])
    assert not any(answer in near for answer in tasks.answers[row])
    assert all(answer in PLAIN.decode(tasks.ids(row)[:shared]) for answer in tasks.answers[row])


@every_task
def test_depths_are_where_the_needles_are_and_reach_every_fifth_over_the_contexts(name):
  tasks = made(name)
  for row in range(len(tasks)):
    shared = int(tasks.prompts.haystack_B[row])
    text = PLAIN.decode(tasks.ids(row)[:shared])
    for answer, depth in zip(tasks.answers[row], tasks.depths[row], strict=True):
      start = text.rindex("One of", 0, text.index(answer))
      before = len(PLAIN.encode(text[:start].rstrip(" ")))
      assert depth == pytest.approx(before / shared, abs=1.5 / shared)
  if NIAH[name].values > 1:
    assert all(list(d) == sorted(d) for d in tasks.depths)
  else:  # the first and the last fifth of the places allowed
    assert tasks.depths[4][0] - tasks.depths[0][0] > 0.3


@every_task
def test_the_same_seed_gives_the_same_contexts_and_another_does_not(name):
  again = make_task(PLAIN, name, context=700, window=24, samples=2)
  assert again.answers == made(name).answers[:2]
  assert [again.ids(row) for row in (0, 1)] == [made(name).ids(row) for row in (0, 1)]
  assert make_task(PLAIN, name, context=700, window=24, samples=2, seed=2).answers != again.answers


@every_task
def test_the_splits_share_no_key_and_no_value(name):
  for split in niah.SPLITS:
    tasks = made(name, samples=2, split=split)
    found = [t for row in range(2) for n in NEEDLE.findall(text_of(tasks, row)) for t in n[1:]]
    assert found and {split_of(text) for text in found} == {split}


def test_tasks_draw_needles_of_their_own():
  assert made("niah_single_1").answers[0] != made("niah_single_2").answers[0]


def test_six_are_averaged_as_documented():
  assert set(NIAH) - set(SIX) == {"niah_multikey_2", "niah_multikey_3"}


def test_string_match_is_the_share_of_strings_found_whatever_the_case():
  assert string_match("The answer: ABC-1 and 22.", ["abc-1", "33", "22"]) == [True, False, True]


def test_an_essay_folder_is_used(tmp_path):
  (tmp_path / "a.txt").write_text("Rivers run slowly to the sea. Boats follow them with the tide.")
  arguments = {"context": 300, "window": 24, "samples": 1, "essay": str(tmp_path)}
  for name, there in (("niah_single_2", True), ("niah_single_1", False)):
    text = PLAIN.decode(make_task(PLAIN, name, **arguments).ids(0))
    assert ("Rivers run slowly to the sea." in text) == there


def test_what_does_not_fit_is_refused():
  with pytest.raises(InputError, match=r"--lengths 150: is too short .* use at least \d+"):
    make_task(PLAIN, "niah_multivalue", context=150, window=24, samples=1)
  least = float(np.min(made("niah_single_1").depths))
  shared = made("niah_single_1").prompts.haystack_B.max()
  with pytest.raises(InputError, match="--mask with 690 sinks"):
    make_task(PLAIN, "niah_single_1", context=700, window=4, samples=5, sinks=690)
  assert least * shared < 690
