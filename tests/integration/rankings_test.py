"""`python run.py select --method ...`: rivals and ablations through the same run folder."""

import json

import numpy as np
import pytest

from bosch_jax import cli, rankings
from models import registry
from models.windows import HeadMask
from tests.integration.command import SMALL
from tests.integration.tiny_gguf import write_tiny_gguf

QUICK = ("intr", "razor", "nll")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def select(model, folder, *flags) -> int:
  return cli.main(["select", "--model", str(model), *SMALL, "--out", str(folder), *flags])


@pytest.mark.parametrize(
  "method",
  [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in rankings.METHODS],
)
def test_every_method_runs_to_the_end_and_resumes_to_the_same_mask(model, tmp_path, method, capsys):
  folder = tmp_path / "run"
  flags = ("--method", method, "--ratio", "0.4")
  assert select(model, folder, *flags) == 0, capsys.readouterr().err
  config = registry.load_config(str(model))
  mask, record = HeadMask.load(folder / "mask.json", config)
  result = json.loads((folder / "result.json").read_text())
  assert mask.num_local == 5 and record["method"] == result["method"] == method
  assert method.upper() in capsys.readouterr().out
  ranking = result["stages"][-1]
  cost = result["cost"]["full_forward_equivalents"]
  assert ranking["name"] == method and np.isfinite(ranking["nll"])
  # Two anchors, the ranking, and the score of its mask, unless that was scored on the way.
  assert ranking["ranking_cost"] + 2 <= cost <= ranking["ranking_cost"] + 3 + 1e-9
  assert result["cost"]["alone"] == cost <= 25 + 5  # the budget, but for what was under way
  if rankings.least_passes(method, 4, 3, 4, 0.0) == 0 and not method.startswith("b-"):
    assert ranking["ranking_cost"] == 0
  else:
    assert ranking["ranking_cost"] > 0

  before = (folder / "mask.json").read_bytes()
  journal = folder / "journal.jsonl"
  whole = journal.read_text().splitlines(keepends=True)
  journal.write_text("".join(whole[: len(whole) // 2]) + whole[len(whole) // 2][:20])
  assert select(model, folder, *flags, "--resume") == 0, capsys.readouterr().err
  assert (folder / "mask.json").read_bytes() == before
  again = json.loads((folder / "result.json").read_text())
  assert again["stages"] == result["stages"]


def test_a_budget_below_what_a_ranking_needs_is_refused(model, tmp_path, capsys):
  flags = ("--method", "nll", "--samples", "1", "--budget", "5")
  assert select(model, tmp_path / "run", *flags) == 2
  # Three groups a layer, a probe of layer l costs (4 - l) / 4: 7.5 passes, states 1, anchors 2.
  assert "--budget 5" in (error := capsys.readouterr().err) and "use 11 or more" in error
  # One ranking serves several ratios and may spend what they have together.
  assert select(model, tmp_path / "run", *flags, "--ratio", "0.4", "0.8") == 2
  assert "use 6 or more" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_an_unknown_method_is_refused_by_name(model, tmp_path, capsys):
  assert select(model, tmp_path / "run", "--method", "best") == 2
  error = capsys.readouterr().err
  assert "'best'" in error and all(f"'{method}'" in error for method in rankings.METHODS)
