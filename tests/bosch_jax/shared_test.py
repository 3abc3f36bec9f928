"""Runs of `select` that share the model and the held-out evaluator."""

import collections
import dataclasses
import json

import pytest

from bosch_jax import cli
from bosch_jax.evaluator import Evaluator
from bosch_jax.settings import SelectSettings
from bosch_jax.shared import Shared
from models import registry
from tests.bosch_jax.tiny import tiny_prompts
from tests.integration.command import SMALL
from tests.integration.tiny_gguf import write_tiny_gguf

METHODS, SEEDS, HELD_OUT = ("rand", "intr"), (1, 2), 3


@dataclasses.dataclass
class Counted:
  loads: int = 0
  # How often each mask was run on each held-out set, by the set's digest and the mask.
  runs: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def compared(model, tmp_path_factory):
  """The folder of a comparison, and what it took."""
  folder, counted = tmp_path_factory.mktemp("runs") / "a", Counted()
  load, forward = registry.load, Evaluator._forward

  def counting_load(*args):
    counted.loads += 1
    return load(*args)

  def counting_forward(self, masks, slot, contexts):
    if len(self.contexts) == HELD_OUT:  # SMALL has four contexts for calibration
      counted.runs.update((self.prompts.digest, mask.tobytes()) for mask in masks)
    return forward(self, masks, slot, contexts)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(registry, "load", counting_load)
    patch.setattr(Evaluator, "_forward", counting_forward)
    flags = ("--methods", *METHODS, "--seeds", str(len(SEEDS)), "--ratios", "0.5")
    assert cli.main(["compare", "--model", model, *SMALL, *flags, "--out", str(folder)]) == 0
  return folder, counted


def result(folder) -> dict:
  return json.loads((folder / "result.json").read_text())


def test_a_comparison_loads_the_model_once(compared):
  assert compared[1].loads == 1


def test_full_attention_and_all_local_are_scored_once_for_all_methods_of_a_seed(compared):
  folder, counted = compared
  assert len({digest for digest, _ in counted.runs}) == len(SEEDS)
  # Two anchors and a mask of each method.
  assert len(counted.runs) == len(SEEDS) * (2 + len(METHODS)) and set(counted.runs.values()) == {1}
  for seed in SEEDS:
    costs = [
      result(folder / "cells" / f"{method}-s{seed}")["cost"]["held_out_forward_equivalents"]
      for method in METHODS
    ]
    assert 2 < costs[0] <= 3 and 0 < costs[1] <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cell_says_what_select_alone_says(compared, model, tmp_path, seed):
  flags = ("--method", METHODS[1], "--ratio", "0.5", "--seed", str(seed))
  assert cli.main(["select", "--model", model, *SMALL, *flags, "--out", str(tmp_path / "a")]) == 0
  cell = compared[0] / "cells" / f"{METHODS[1]}-s{seed}"
  assert (tmp_path / "a" / "mask.json").read_bytes() == (cell / "mask.json").read_bytes()
  alone, shared = result(tmp_path / "a"), result(cell)
  spent = {
    "held_out_forward_equivalents", "cpu_seconds", "wall_seconds", "peak_memory_bytes",
  }  # fmt: skip
  for facts in (alone, shared):
    facts["cost"] = {k: v for k, v in facts["cost"].items() if k not in spent}
  assert json.dumps(alone) == json.dumps(shared)


def test_only_the_newest_prompts_are_kept_and_only_for_the_same_question(model):
  shared = Shared()
  settings = SelectSettings(model=model, window=24, context=400)
  shared.load(settings)
  first = shared.evaluator(tiny_prompts(seed=0), settings, None)
  assert shared.evaluator(tiny_prompts(seed=0), settings, None) is first
  wider = dataclasses.replace(settings, window=32)
  other = shared.evaluator(tiny_prompts(seed=0), wider, None)
  assert other is not first and other.window == 32
  assert shared.evaluator(tiny_prompts(seed=1), wider, None) is not other is not shared.held_out
  assert shared.evaluator(tiny_prompts(seed=0), wider, None) is not other


def test_another_model_or_dtype_is_loaded_anew(model):
  shared = Shared()
  settings = SelectSettings(model=model, window=24, context=400)
  loaded = shared.load(settings)
  held_out = shared.evaluator(tiny_prompts(), settings, None)
  assert shared.load(settings) is loaded and shared.held_out is held_out
  half = dataclasses.replace(settings, dtype="bfloat16")
  again = shared.load(half)
  assert again.params["embed"]["embedding"].dtype == "bfloat16"
  assert shared.evaluator(tiny_prompts(), half, None).params is again.params
