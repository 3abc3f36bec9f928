"""`python run.py compare`, as a user runs it: cells of `select`, stopped and gone on with."""

import json
import shutil
import signal
import time

import pytest

from bosch_jax import cli
from tests.integration.command import SMALL, finish, run, start
from tests.integration.tiny_gguf import write_tiny_gguf

FLAGS = [
  *SMALL,
  "--recipe",
  "probes",
  "--ratios",
  "0.75",
  "0.5",
  "--methods",
  "bosch",
  "--seeds",
  "2",
]
FILES = {"config.json", "journal.jsonl", "cells", "compare.json", "compare.md", "report.html"}
FILES |= {"cost.png", "masks.png", "jaccard.png"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def stopped_and_resumed(model, tmp_path_factory):
  """A comparison killed in its second cell and gone on with: its folder, and the first cell's files
  as they were when it was killed."""
  folder = tmp_path_factory.mktemp("runs") / "a"
  flags = ("compare", "--model", model, *FLAGS, "--out", folder)
  process = start(*flags)
  second = folder / "cells" / "bosch-s2" / "journal.jsonl"
  deadline = time.monotonic() + 280
  while time.monotonic() < deadline and process.poll() is None:
    if second.exists() and second.read_bytes().count(b"\n") > 4:
      break
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  _, _, err = finish(process)
  assert second.exists() and not (folder / "compare.json").exists(), err
  first = folder / "cells" / "bosch-s1"
  before = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}
  journal = [line for line in second.read_text().splitlines() if line.endswith("}")]
  code, out, err = run(*flags, "--resume")
  assert code == 0, err
  return folder, before, journal, out, err


def test_finished_cells_are_skipped_and_the_stopped_one_goes_on(stopped_and_resumed):
  folder, before, journal, _, err = stopped_and_resumed
  assert len(before) > 5
  assert all(path.stat().st_mtime_ns == written for path, written in before.items())
  assert "seed 1" not in err and "cell 2 of 2: bosch, seed 2" in err
  after = (folder / "cells" / "bosch-s2" / "journal.jsonl").read_text().splitlines()
  assert after[: len(journal)] == journal and len(after) > len(journal)


def test_a_comparison_leaves_its_files_and_figures(stopped_and_resumed):
  folder, *_, out, _ = stopped_and_resumed
  assert {path.name for path in folder.iterdir()} == FILES
  result = json.loads((folder / "compare.json").read_text())
  assert result["ratios"] == [0.5, 0.75] and result["seeds"] == 2
  assert [cell["num_local"] for cell in result["cells"]] == [6, 9, 6, 9]
  assert result["table"]["bosch"]["0.5"]["contexts"] == 2 * 3
  for cell in result["cells"]:
    own = json.loads((folder / cell["folder"] / "result.json").read_text())
    assert own["held_out"]["mask"]["nll"] == cell["nll"]
    assert own["target_ratio"] == cell["ratio"] and own["seed"] == cell["seed"]
  assert "BOSCH" in out and "0.75 local" in out


def test_methods_and_seeds_may_be_others_on_resume(stopped_and_resumed, model, tmp_path, capsys):
  folder = shutil.copytree(stopped_and_resumed[0], tmp_path / "a")
  before = {p: p.read_bytes() for p in (folder / "cells").rglob("*") if p.is_file()}
  arguments = ["compare", "--model", str(model), *FLAGS, "--out", str(folder), "--resume"]
  assert cli.main([*arguments, "--methods", "rand", "bosch", "--seeds", "1"]) == 0
  err = capsys.readouterr().err
  assert "cell 2 of 2: rand, seed 1" in err and "cell 1 of 2" not in err
  assert before == {path: path.read_bytes() for path in before}
  result = json.loads((folder / "compare.json").read_text())
  assert (result["methods"], result["seeds"]) == (["bosch", "rand"], 1)
  assert "RAND" in (folder / "compare.md").read_text()

  # What was asked for at first is made of the finished cells, in moments.
  assert cli.main(arguments) == 0
  again = json.loads((folder / "compare.json").read_text())
  assert again == json.loads((stopped_and_resumed[0] / "compare.json").read_text())


@pytest.mark.slow
def test_a_cell_is_what_select_finds_alone(stopped_and_resumed, model, tmp_path):
  flags = ("--ratio", "0.5", "0.75", "--seed", "2", "--out", tmp_path / "alone")
  code, _, err = run("select", "--model", model, *SMALL, "--recipe", "probes", *flags)
  assert code == 0, err
  cell = stopped_and_resumed[0] / "cells" / "bosch-s2"
  for name in ("ratio-0.5/mask.json", "ratio-0.75/mask.json"):
    assert (tmp_path / "alone" / name).read_bytes() == (cell / name).read_bytes()


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    ("--ratios 2", "--ratios 2"),
    ("--ratios 0.01", "0.01"),
    ("--methods nobody", "--methods nobody"),
    ("--seeds 0", "--seeds 0"),
    ("--context 9999", "--context 9999"),
    ("--context 150", "--context 150: is too short"),
    ("--sinks 100", "--sinks 100"),
    ("--ratio 0.5", "--ratio"),
    ("--resume --force", "--force"),
  ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(model, tmp_path, flags, named, capsys):
  arguments = ["compare", "--model", str(model), *FLAGS, "--out", str(tmp_path / "d")]
  assert cli.main([*arguments, *flags.split()]) == 2
  err = capsys.readouterr().err
  assert named in err and len(err.strip().splitlines()) == 1, err
  assert not (tmp_path / "d").exists()


def test_other_settings_are_refused_on_resume(stopped_and_resumed, model, capsys):
  arguments = ["compare", "--model", str(model), *FLAGS, "--out", str(stopped_and_resumed[0])]
  assert cli.main([*arguments, "--resume", "--budget", "26"]) == 2
  assert "--budget" in capsys.readouterr().err
  assert cli.main([*arguments, "--resume", "--ratios", "0.25", "0.5", "0.75"]) == 2
  assert "--ratios" in (err := capsys.readouterr().err) and "another --out" in err
  assert cli.main(arguments) == 2
  assert "already used" in capsys.readouterr().err
