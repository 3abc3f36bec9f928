"""The rankings benchmark on a tiny model: figures that agree with one another."""

import json

import numpy as np
import pytest

from benchmarks import rankings
from models.errors import InputError
from tests.integration.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
  folder = tmp_path_factory.mktemp("bench")
  options = rankings.Options(
    methods=("intr", "dcam", "nll"), model=str(write_tiny_gguf(folder / "tiny.gguf")), ratio=0.5,
    context=400, window=24, samples=4, held_out=2, budget=25, out=str(folder / "out"),
  )  # fmt: skip
  return options, rankings.main(options)


def test_what_is_written_is_what_was_measured(measured):
  options, facts = measured
  with open(f"{options.out}/rankings.json") as file:
    assert json.load(file) == json.loads(json.dumps(facts))
  assert list(facts["methods"]) == list(options.methods)


def test_every_method_has_its_own_cost_and_an_exact_mask(measured):
  rows = measured[1]["methods"]
  assert rows["intr"]["passes"] == 0
  assert 1 < rows["dcam"]["passes"] < 2  # the layers once, and the scores again
  # 4 layers of 3 groups: layer l from the top costs l / 4 of a pass, and the full model's states one.
  assert 7 < rows["nll"]["passes"] <= 3 * 2.5 + 1
  for row in rows.values():
    assert np.sum(row["mask"]) == 6 and np.shape(row["mask"]) == (4, 3)
    assert row["held_out"]["nll"] > 0 and row["held_out"]["n"] == 8


def test_the_table_shows_every_method(measured):
  table = rankings.table(measured[1])
  assert list(table.columns[0].cells) == ["intr", "dcam", "nll"]
  assert all(float(shown) >= 0 for shown in table.columns[1].cells)


def test_an_unknown_method_is_named():
  with pytest.raises(InputError, match="--methods best"):
    rankings.Options(methods=("nll", "best"))
