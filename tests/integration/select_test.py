"""`python run.py select`, as a user runs it: in a process of its own, on files on disk."""

import json
import os
import random
import signal
import time

import numpy as np
import pytest

from bosch_jax import cli
from models import registry
from models.windows import HeadMask
from tests.integration.command import SMALL, finish, run, start
from tests.integration.tiny_gguf import write_tiny_gguf

FILES = {"config.json", "mask.json", "result.json", "journal.jsonl", "mask.png", "report.md"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
  """A whole run: its folder and what it printed."""
  folder = tmp_path_factory.mktemp("runs") / "a"
  code, out, err = run("select", "--model", model, *SMALL, "--out", folder)
  assert code == 0, err
  return folder, out, err


def test_a_run_leaves_every_file_with_the_names_scripts_rely_on(finished, model):
  folder, out, err = finished
  assert {p.name for p in folder.iterdir()} == FILES
  result = json.loads((folder / "result.json").read_text())
  for field in ("model", "ratio", "num_local", "num_groups", "window", "context", "method", "seed"):
    assert field in result
  for column in ("full", "all_local", "mask"):
    assert set(result["held_out"][column]) == {
      "nll",
      "nll_se",
      "exact_match",
      "exact_match_se",
      "by_context",
      "n",
    }
    assert result["held_out"][column]["n"] == 12
  assert {"full_forward_equivalents", "cpu_seconds", "wall_seconds", "masks_scored"} <= set(
    result["cost"]
  )
  assert result["kv"]["bytes_hybrid"] < result["kv"]["bytes_full"]
  record = json.loads((folder / "mask.json").read_text())
  for field in (
    "format",
    "model",
    "fingerprint",
    "layers",
    "groups",
    "heads",
    "window",
    "sinks",
    "ratio",
    "method",
    "seed",
    "swa",
  ):
    assert field in record
  mask, _ = HeadMask.load(folder / "mask.json", registry.load_config(str(model)))
  assert mask.num_local == result["num_local"] == 6
  for name in ("full attention", "all local", "BOSCH mask"):
    assert name in out
  assert "Traceback" not in err


def test_every_scored_mask_is_one_line_of_the_journal(finished):
  folder, _, _ = finished
  header, *lines = [
    json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()
  ]
  result = json.loads((folder / "result.json").read_text())
  assert header["format"] == "bosch-journal/1"
  scored = [line for line in lines if "relaxed" not in line]
  assert len({line["mask"] for line in scored}) == result["cost"]["masks_scored"]
  assert sum(line["cost"] for line in lines) == pytest.approx(
    result["cost"]["full_forward_equivalents"]
  )


def test_the_same_seed_gives_the_same_mask_file_byte_for_byte(finished, model, tmp_path):
  code, _, err = run("select", "--model", model, *SMALL, "--out", tmp_path / "b")
  assert code == 0, err
  assert (tmp_path / "b" / "mask.json").read_bytes() == (finished[0] / "mask.json").read_bytes()


SLOW = pytest.mark.slow  # the default suite has one kill, .ci/run all


@pytest.mark.parametrize(
  "how",
  [
    signal.SIGKILL,
    pytest.param(signal.SIGINT, marks=SLOW),
    pytest.param(signal.SIGTERM, marks=SLOW),
  ],
)
def test_a_killed_run_resumes_to_the_identical_mask_and_scores_nothing_twice(
  finished, model, tmp_path, how
):
  folder = tmp_path / "c"
  flags = ("select", "--model", model, *SMALL, "--out", folder)
  process = start(*flags)
  wanted = random.Random(int(how)).randrange(5, 40)
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline and process.poll() is None:
    journal = folder / "journal.jsonl"
    if journal.exists() and journal.read_bytes().count(b"\n") > wanted:
      break
    time.sleep(0.02)
  process.send_signal(how)
  _, _, err = finish(process)
  assert "Traceback" not in err
  if how != signal.SIGKILL:
    assert process.returncode == 130 and "--resume" in err
  before = (folder / "journal.jsonl").read_text().splitlines()
  code, _, err = run(*flags, "--resume")
  assert code == 0, err
  after = (folder / "journal.jsonl").read_text().splitlines()
  whole = [line for line in before if line.endswith("}")]
  assert after[: len(whole)] == whole
  entries = [e for e in map(json.loads, after[1:]) if "mask" in e]
  scored = [(e["mask"], c) for e in entries for c in e["contexts"]]
  assert len(scored) == len(set(scored))
  assert (folder / "mask.json").read_bytes() == (finished[0] / "mask.json").read_bytes()


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    (("--ratio", "0.01"), "--ratio 0.01"),
    (("--context", "4000"), "--context 4000"),
    (("--context", "100"), "--context 100"),
  ],
)
def test_what_only_the_model_can_tell_is_refused_and_leaves_nothing(model, tmp_path, flags, named):
  code, _out, err = run("select", "--model", model, *SMALL, "--out", tmp_path / "d", *flags)
  assert code == 2 and named in err and len(err.strip().splitlines()) == 1, err
  assert not (tmp_path / "d").exists()


def test_ctrl_c_before_anything_is_scored_is_no_traceback(model, tmp_path):
  for delay in (0.1, 0.4, 1.0):
    process = start("select", "--model", model, *SMALL, "--out", tmp_path / f"h{delay}")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, _, err = finish(process)
    # Python itself has not installed its handler in the first tenths of a second.
    assert process.returncode in (130, -signal.SIGINT), err
    assert "run.py" not in err


def test_a_terminal_without_unicode_is_enough(finished, model, tmp_path):
  env = os.environ | {
    "PYTHONIOENCODING": "ascii",
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
  }
  process = start("select", "--model", model, *SMALL, "--out", finished[0], "--resume", env=env)
  _, _, err = finish(process)
  assert process.returncode == 0, err


def test_force_with_bad_input_keeps_the_earlier_run(finished, model):
  before = (finished[0] / "result.json").read_bytes()
  code, _, err = run(
    "select", "--model", model, *SMALL, "--out", finished[0], "--force", "--context", "100"
  )
  assert code == 2 and "--context" in err
  assert (finished[0] / "result.json").read_bytes() == before


def test_sinks_never_reach_a_needle(model, tmp_path):
  code, _, err = run("select", "--model", model, *SMALL, "--out", tmp_path / "i", "--sinks", "150")
  assert code == 2 and "--sinks 150" in err and not (tmp_path / "i").exists()


def test_a_used_folder_is_refused(finished, model):
  before = (finished[0] / "result.json").read_bytes()
  code, _, err = run("select", "--model", model, *SMALL, "--out", finished[0])
  assert code == 2 and "already used" in err
  code, _, err = run(
    "select", "--model", model, *SMALL, "--out", finished[0], "--resume", "--seed", "2"
  )
  assert code == 2 and "--seed 2" in err
  assert (finished[0] / "result.json").read_bytes() == before


@pytest.mark.parametrize("ratio", [0, 1])
def test_all_full_and_all_local_need_no_search(model, tmp_path, ratio):
  code, _, err = run("select", "--model", model, *SMALL, "--out", tmp_path / "e", "--ratio", ratio)
  assert code == 0, err
  result = json.loads((tmp_path / "e" / "result.json").read_text())
  assert result["ratio"] == ratio
  column = "all_local" if ratio else "full"
  assert np.isclose(result["held_out"]["mask"]["nll"], result["held_out"][column]["nll"])


@pytest.mark.parametrize(
  "flags",
  [
    pytest.param("--dtype bfloat16", marks=SLOW),
    "--recipe paper --score accuracy --budget 40",
    "--recipe probes --solver nevergrad",
    "--task single --haystack essay --sinks 2 --seed 7",
    "--also 300:20",
  ],
)
def test_other_choices_run_to_the_end(model, tmp_path, flags, capsys):
  arguments = [
    "select",
    "--model",
    str(model),
    *SMALL,
    "--out",
    str(tmp_path / "f"),
    *flags.split(),
  ]
  assert cli.main(arguments) == 0, capsys.readouterr().err
  result = json.loads((tmp_path / "f" / "result.json").read_text())
  assert result["num_local"] == 6
  assert all(np.isfinite(result["held_out"]["mask"][f]) for f in ("nll", "nll_se", "exact_match"))


@pytest.mark.slow
def test_several_ratios_share_one_run_and_give_a_mask_each(model, tmp_path):
  folder = tmp_path / "g"
  arguments = ["select", "--model", model, *SMALL, "--out", folder, "--ratio", "0.25", "0.75"]
  code, out, err = run(*arguments)
  assert code == 0, err
  assert out.count("BOSCH mask") == 2
  rows = json.loads((folder / "result.json").read_text())["ratios"]
  assert [row["num_local"] for row in rows] == [3, 9]
  for row in rows:
    assert {p.name for p in (folder / row["folder"]).iterdir()} == FILES - {
      "config.json",
      "journal.jsonl",
    }
    mask, _ = HeadMask.load(folder / row["folder"] / "mask.json", registry.load_config(str(model)))
    assert mask.num_local == row["num_local"]
    assert row["held_out"]["mask"]["nll"] >= 0
  lines = (folder / "journal.jsonl").read_text().splitlines()[1:]
  masks = [e["mask"] + str(e["contexts"]) for e in map(json.loads, lines) if "mask" in e]
  assert len(masks) == len(set(masks))  # nothing is scored twice, the anchors included
  before = {f: (folder / f).read_bytes() for f in ("ratio-0.25/mask.json", "ratio-0.75/mask.json")}
  journal = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
  (folder / "journal.jsonl").write_text("".join(journal[: len(journal) // 2]))
  code, _, err = run(*arguments, "--resume")
  assert code == 0, err
  assert {f: (folder / f).read_bytes() for f in before} == before
  assert (folder / "journal.jsonl").read_text() == "".join(journal)
