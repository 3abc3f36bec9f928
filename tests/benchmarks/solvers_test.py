import importlib.util
import json
import math

import numpy as np
import pytest

from benchmarks.solvers import CONTENDERS, Count, Options, instances, missing, solve, summary
from bosch_jax import cli
from bosch_jax.solvers import Space, bits

SMALL = {"layers": 4, "groups": 3, "ones": (5,), "budgets": (10, 40), "seeds": 2}


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_never_pays_more_than_the_budget_and_never_gets_worse(name):
  if missing(name):
    pytest.skip("optional package")
  options = Options(**SMALL)
  for instance in instances(Options(**{**SMALL, "seeds": 1})):
    for budget in options.budgets:
      trace = solve(name, instance, options, budget)
      assert len(trace) == budget and trace[0] == instance.objective(instance.start)
      assert (np.diff(trace) <= 0).all()
      assert instance.regret(trace[-1]) > -1e-9  # nobody beats the optimum of a small objective


def test_only_candidates_of_exact_cardinality_count_and_gradients_cost_three():
  count = Count(lambda x: -float(x.sum()), Space(4, 2), 10)
  count(bits(4, [0, 1]))
  count(bits(4, [0, 1, 2]))
  count(np.full(4, 0.5), 3)
  assert count.trace == [-2.0] * 5 and count.left == 5


def test_standard_errors_are_over_objectives():
  records = [
    {"solver": "swap", "kind": "quadratic", "seed": seed, "regret": regret}
    for seed, regrets in enumerate([(0.0, 0.2), (0.3, 0.5)])
    for regret in regrets
  ]
  mean, error = summary(records, solver="swap")
  assert mean == pytest.approx(0.25) and error == pytest.approx(0.15)
  assert math.isnan(summary(records[:2], solver="swap")[1])
  assert summary(records, solver="lazy") is None


def test_the_command_writes_table_figures_and_picture(tmp_path, capsys):
  flags = "--layers 4 --groups 3 --ones 5 --budgets 10 40 --seeds 2 --solvers random swap lazy"
  assert cli.main(["bench", "solvers", *flags.split(), "--out", str(tmp_path)]) == 0
  assert "swap" in capsys.readouterr().out
  records = json.loads((tmp_path / "solvers.json").read_text())["records"]
  assert len(records) == 3 * 3 * 2 * 2 * 2  # solvers, kinds, cardinalities, seeds, budgets
  assert (tmp_path / "solvers.md").read_text().count("| swap |") == 3
  assert (tmp_path / "solvers.png").stat().st_size > 1000


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    ("--solvers anneal", "--solvers anneal"),
    ("--kinds cubic", "--kinds cubic"),
    ("--ones 90", "--ones 90"),
    ("--budgets 2", "--budgets 2"),
    ("--seeds 0", "--seeds 0"),
  ],
)
def test_bad_options_are_one_sentence(flags, named, capsys):
  assert cli.main(["bench", "solvers", *flags.split()]) == 2
  assert named in capsys.readouterr().err


def test_missing_packages_get_a_row_that_says_so(tmp_path, capsys, monkeypatch):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name, *rest: None if name == "PyNomad" else found(name, *rest),
  )
  flags = "--layers 4 --groups 3 --ones 5 --budgets 10 --seeds 1 --out"
  assert (
    cli.main(["bench", "solvers", *flags.split(), str(tmp_path), "--solvers", "random", "nomad"])
    == 0
  )
  assert "nomad (not installed)" in capsys.readouterr().out
  assert "| nomad (not installed) | - | - | - |" in (tmp_path / "solvers.md").read_text()
  assert {r["solver"] for r in json.loads((tmp_path / "solvers.json").read_text())["records"]} == {
    "random"
  }
  assert cli.main(["bench", "solvers", *flags.split(), str(tmp_path), "--solvers", "nomad"]) == 2
  assert "requirements-solvers.txt" in capsys.readouterr().err
