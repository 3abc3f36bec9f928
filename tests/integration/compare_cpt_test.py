"""`python run.py compare --cpt`, as a user runs it: on a finished comparison, stopped, gone on with."""

import json
import os
import shutil
import signal
import time

import pytest

from bosch_jax import cli
from tests.integration.command import finish, run, start
from tests.integration.tiny_gguf import write_tiny_gguf
from tests.train.corpus import write_corpus

METHODS, UPDATES, PATIENCE = ("rand", "intr"), 5, 240
SMALL = ("--window", 24, "--context", 256, "--samples", 4, "--held-out", 3, "--budget", 25)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  """Flags of a comparison, those of its training, an environment, and a folder."""
  folder = tmp_path_factory.mktemp("compare")
  model = write_tiny_gguf(folder / "tiny.gguf", layers=2)
  flags = ("compare", "--model", model, *SMALL, "--ratios", 0.5, 0.67, "--seeds", 1)
  flags = (*flags, "--methods", *METHODS)
  training = ("--cpt", "--cpt-updates", UPDATES, "--cpt-train", "layers")
  training = (*training, "--cpt-data", write_corpus(folder / "corpus"))
  env = os.environ | {
    "BOSCH_JAX_CACHE": str(folder / "cache"),
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "",
  }
  return flags, training, env, folder


@pytest.fixture(scope="module")
def compared(world):
  """A finished comparison without training."""
  flags, _, env, folder = world
  code, _, err = run(*flags, "--out", folder / "a", env=env)
  assert code == 0, err
  return folder / "a"


@pytest.fixture(scope="module")
def trained(world, compared, tmp_path_factory):
  """The finished comparison, trained without a stop: folder, what was there before, output."""
  flags, training, env, _ = world
  folder = tmp_path_factory.mktemp("trained") / "b"
  shutil.copytree(compared, folder)
  before = {path: path.read_bytes() for path in (folder / "cells").rglob("*") if path.is_file()}
  code, out, err = run(*flags, "--out", folder, "--resume", *training, env=env)
  assert code == 0, err
  return folder, before, out, err


def recovery(folder) -> dict:
  made = json.loads((folder / "recovery.json").read_text())
  for facts in made["methods"].values():
    assert facts.pop("seconds_per_update") > 0
  return made


@pytest.mark.slow
def test_a_finished_comparison_is_trained_and_drawn(trained):
  folder, before, out, err = trained
  assert before and all(path.read_bytes() == text for path, text in before.items())
  made = recovery(folder)
  # 0.75 is not compared, so the largest ratio is trained; an evaluation comes before any update.
  assert (made["ratio"], made["updates"], made["window"]) == (0.67, UPDATES, 24)
  assert list(made["methods"]) == list(METHODS)
  for method, facts in made["methods"].items():
    points = facts["points"]
    assert [p["step"] for p in points] == list(range(UPDATES + 1))
    assert points[-1]["text_nll"] < points[0]["text_nll"]
    config = json.loads((folder / "cpt" / f"{method}-s1" / "config.json").read_text())
    assert config["mask"] == str(folder / "cells" / f"{method}-s1" / "ratio-0.67" / "mask.json")
    assert (config["context"], config["sequence"], config["train"]) == (256, 384, "layers")
    assert not (folder / "cpt" / f"{method}-s1" / "checkpoints").exists()
    assert f"cpt {1 + METHODS.index(method)} of 2: {method}, 0.67 local" in err
  starts = {facts["points"][0]["retrieval_nll"] for facts in made["methods"].values()}
  assert len(starts) == 2 and made["full"]["text_nll"] not in starts  # masks of their own
  assert (folder / "recovery.png").stat().st_size > 5000
  assert "(recovery.png)" in (folder / "compare.md").read_text()
  assert 'alt="Recovery by continual pretraining"' in (folder / "report.html").read_text()
  assert json.loads((folder / "compare.json").read_text())["recovery"]["full"] == made["full"]
  assert "Recovery" in out and "RAND" in out


@pytest.mark.slow
def test_a_stopped_training_goes_on_to_the_same_curves(world, compared, trained, tmp_path):
  flags, training, env, _ = world
  folder, wanted = tmp_path / "c", recovery(trained[0])
  shutil.copytree(compared, folder)
  command = (*flags, "--out", folder, "--resume", *training)
  process = start(*command, env=env)
  second = folder / "cpt" / "intr-s1" / "metrics.jsonl"
  deadline = time.monotonic() + PATIENCE
  while time.monotonic() < deadline and process.poll() is None:
    if second.exists() and '"step": 2,' in second.read_text():
      break
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  _, _, err = finish(process)
  assert process.returncode == 130 and "--resume" in err and "Traceback" not in err, err
  first = folder / "cpt" / "rand-s1" / "metrics.jsonl"
  written, steps = first.stat().st_mtime_ns, second.read_text().count('"loss"')
  assert 2 <= steps < UPDATES and not (folder / "recovery.json").exists()
  code, _, err = run(*command, env=env)
  assert code == 0, err
  assert f"resumed at update {steps}" in err
  assert first.stat().st_mtime_ns == written
  assert recovery(folder) == wanted


@pytest.mark.slow
def test_another_recipe_is_refused_by_its_flag(world, trained, capsys):
  flags, training, _, _ = world
  command = [*map(str, (*flags, "--out", trained[0], "--resume", *training))]
  for flag, value in (("--cpt-updates", "4"), ("--cpt-train", "attention"), ("--cpt-ratio", "0.5")):
    assert cli.main([*command, flag, value]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"error: --resume: {flag} ") and "was made with" in last


@pytest.mark.slow
def test_without_training_the_curves_stay(world, trained):
  flags, _, env, _ = world
  code, out, err = run(*flags, "--out", trained[0], "--resume", env=env)
  assert code == 0, err
  assert "(recovery.png)" in (trained[0] / "compare.md").read_text() and "recovery.json" in out


@pytest.mark.parametrize(
  ("given", "named"),
  [
    ("--cpt --cpt-ratio 0.75", "--cpt-ratio 0.75"),
    ("--cpt --cpt-updates 0", "--cpt-updates 0"),
    ("--cpt-updates 7", "--cpt-updates 7: is for training; give --cpt"),
    ("--cpt --cpt-train nothing", "--cpt-train nothing"),
    ("--cpt --cpt-train (", "--cpt-train ("),
    ("--cpt --cpt-data nowhere/at/all", "--cpt-data nowhere/at/all"),
  ],
)
def test_bad_input_is_one_sentence_before_any_work(world, tmp_path, capsys, given, named):
  flags = [str(flag) for flag in world[0]]
  assert cli.main([*flags, "--out", str(tmp_path / "d"), *given.split()]) == 2
  err = capsys.readouterr().err.strip()
  assert err.startswith("error: ") and named in err and len(err.splitlines()) == 1
  assert not (tmp_path / "d").exists()
