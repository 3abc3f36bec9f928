"""`python run.py evaluate`, as a user runs it, on a tiny model."""

import json
import signal
import time

import numpy as np
import pytest

from bosch_jax import cli
from models import registry
from models.windows import HeadMask
from tests.integration.command import finish, run, start
from tests.integration.tiny_gguf import write_tiny_gguf

TASKS = ("niah_single_1", "niah_multikey_2", "niah_multivalue")
SMALL = ["--tasks", "niah_multivalue", "niah_single_1,niah_multikey_2", "--lengths", "400"]
SMALL += ["--samples", "3", "--batch", "2", "--max-tokens", "6"]
FILES = {"config.json", "journal.jsonl", "evaluate.json", "evaluate.md", "evaluate.png"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def masks(model, tmp_path_factory):
  """Two mask files, of which the second keeps every group full."""
  folder, config = tmp_path_factory.mktemp("masks"), registry.load_config(str(model))
  local = np.arange(config.total_groups).reshape(config.num_layers, -1) % 2 == 0
  paths = []
  for name, mask in (("half", HeadMask(local)), ("none", HeadMask.full(config))):
    (folder / name).mkdir()
    paths.append(folder / name / "mask.json")
    mask.save(paths[-1], config, model=model.name, window=24, sinks=0)
  return paths


@pytest.fixture(scope="module")
def finished(model, masks, tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "a"
  code, out, err = run("evaluate", "--model", model, "--mask", *masks, *SMALL, "--out", folder)
  assert code == 0, err
  return folder, out, err


def test_a_run_leaves_its_files_and_figures(finished):
  folder, out, err = finished
  assert {path.name for path in folder.iterdir()} == FILES and "Traceback" not in err
  result = json.loads((folder / "evaluate.json").read_text())
  assert list(result["masks"]) == ["full", "all_local", "half", "none"]
  assert result["masks"]["half"]["num_local"] == 6
  assert result["tasks"] == list(TASKS)  # in the table's order
  assert result["averaged"] == ["niah_single_1", "niah_multivalue"]
  for by_length in result["scores"].values():
    scores = by_length["400"]
    assert set(scores) == {*TASKS, "average"}
    for entry in scores.values():
      assert np.isfinite([v for v in entry.values()]).all()
    means = [scores[task]["nll"] for task in result["averaged"]]
    assert scores["average"]["nll"] == pytest.approx(np.mean(means))
  lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
  assert sum(len(line["contexts"]) for line in lines) == 4 * 3 * 3
  assert all(isinstance(text, str) for line in lines for text in line["text"])
  for depths in result["depths"].values():
    assert sum(entry["n"] for entry in depths["400"]) == 3 * (1 + 1 + 4)
  report = (folder / "evaluate.md").read_text()
  assert "| half | 6 of 12 |" in report and "half - full attention" in report
  assert "all local" in out and "multivalue" in out


def test_a_mask_that_keeps_all_groups_full_scores_as_full_attention(finished):
  result = json.loads((finished[0] / "evaluate.json").read_text())
  assert result["scores"]["none"] == result["scores"]["full"]
  assert result["scores"]["half"] != result["scores"]["full"] != result["scores"]["all_local"]
  by_pair = {(p["a"], p["b"], p["task"]): p for p in result["paired"]}
  same = by_pair["none", "full", "average"]
  assert same["nll"] == same["nll_se"] == 0
  scores = {name: result["scores"][name]["400"]["average"]["nll"] for name in ("half", "full")}
  difference = by_pair["half", "full", "average"]["nll"]
  assert difference == pytest.approx(scores["half"] - scores["full"])


@pytest.mark.parametrize(
  "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_killed_run_resumes_to_the_same_figures_and_answers_nothing_twice(
  finished, model, masks, tmp_path, how
):
  folder = tmp_path / "b"
  flags = ("evaluate", "--model", model, "--mask", *masks, *SMALL, "--out", folder)
  process = start(*flags)
  deadline = time.monotonic() + 280
  while time.monotonic() < deadline and process.poll() is None:
    journal = folder / "journal.jsonl"
    if journal.exists() and journal.read_bytes().count(b"\n") > 3:
      break
    time.sleep(0.02)
  process.send_signal(how)
  _, _, err = finish(process)
  assert "Traceback" not in err and not (folder / "evaluate.json").exists()
  before = (folder / "journal.jsonl").read_text().splitlines()
  assert 3 < len(before) < 25
  code, _, err = run(*flags, "--resume")
  assert code == 0, err
  after = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
  answered = [(e["column"], e["task"], row) for e in after for row in e["contexts"]]
  assert len(answered) == len(set(answered)) == 36
  same = (finished[0] / "evaluate.json").read_bytes()
  assert (folder / "evaluate.json").read_bytes() == same


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    ("--lengths 20", "--lengths 20"),
    ("--lengths 4000", "--lengths 4000"),
    ("--lengths 100", "--lengths 100"),
    ("--tasks niah_double", "--tasks niah_double"),
    ("--average niah_double", "--average niah_double"),
    ("--samples 0", "--samples 0"),
    ("--mask nowhere.json", "mask nowhere.json"),
    ("--window 0", "--window 0"),
    ("--essay nowhere --tasks niah_single_2", "nowhere"),
    ("--resume --force", "--force"),
  ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(model, masks, tmp_path, flags, named, capsys):
  arguments = ["evaluate", "--model", str(model), "--mask", str(masks[0]), *SMALL]
  assert cli.main([*arguments, "--out", str(tmp_path / "d"), *flags.split()]) == 2
  err = capsys.readouterr().err
  assert named in err and len(err.strip().splitlines()) == 1, err
  assert not (tmp_path / "d").exists()


def test_masks_of_different_windows_are_refused(model, masks, tmp_path, capsys):
  config = registry.load_config(str(model))
  HeadMask.full(config).save(tmp_path / "other.json", config, model="tiny", window=48, sinks=0)
  arguments = ["evaluate", "--model", str(model), *SMALL, "--out", str(tmp_path / "d")]
  assert cli.main([*arguments, "--mask", str(masks[0]), str(tmp_path / "other.json")]) == 2
  assert "other.json" in capsys.readouterr().err


def test_no_mask_is_refused(capsys):
  assert cli.main(["evaluate"]) == 2
  assert "--mask" in capsys.readouterr().err
