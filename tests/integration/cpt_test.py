"""`python run.py cpt`, as a user runs it: in processes of its own, on files on disk."""

import json
import os
import pathlib
import random
import signal
import socket
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bosch_jax import cli
from models import registry
from models.windows import HeadMask
from tests.integration.command import finish, run, start
from tests.integration.tiny_gguf import write_tiny_gguf
from tests.train.corpus import write_corpus

STEPS, PATIENCE = 12, 240
FLAGS = (
  "--steps", STEPS, "--batch", 4, "--sequence", 400, "--context", 256, "--window", 24, "--lr", 3e-3,
  "--eval-every", 4, "--save-every", 3, "--eval-rows", 3, "--eval-contexts", 2, "--warmup", 2,
  "--train", "layers", "--distill", 0.25,
)  # fmt: skip
TIMES = {"seconds", "tokens_per_s", "mfu"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  """A model, a mask of it, text, and flags and environment that all runs share."""
  folder = tmp_path_factory.mktemp("cpt")
  model = write_tiny_gguf(folder / "tiny.gguf", layers=2)
  config = registry.load_config(str(model))
  mask = HeadMask(np.array([[1, 0, 1], [1, 1, 1]], bool))
  mask.save(folder / "mask.json", config, model="tiny", window=24, sinks=0)
  corpus = write_corpus(folder / "corpus")
  flags = (
    "cpt", "--model", model, "--mask", folder / "mask.json", "--data", corpus,
    "--cache", folder / "cache", *FLAGS,
  )  # fmt: skip
  # One compilation for all runs, as on a machine where this is switched on.
  env = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "",
  }
  return flags, env, folder


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
  """An uninterrupted run: its folder and what it printed."""
  flags, env, _ = world
  folder = tmp_path_factory.mktemp("runs") / "a"
  code, out, err = run(*flags, "--out", folder, "--export", folder.parent / "hf", env=env)
  assert code == 0, err
  return folder, out, err


def metrics(folder: pathlib.Path) -> list[dict]:
  records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def parameters(folder: pathlib.Path, step: int = STEPS) -> dict:
  """All arrays of a checkpoint, and the position in the data."""
  where = folder / "checkpoints" / str(step)
  restored = ocp.StandardCheckpointer().restore(where / "state")
  position = json.loads((where / "run" / "metadata").read_text())["position"]
  return jax.tree.map(np.asarray, restored) | {"position": position}


def assert_bit_equal(folder, other):
  assert metrics(folder) == metrics(other)
  jax.tree.map(np.testing.assert_array_equal, parameters(folder), parameters(other))


def wait_for_step(folder: pathlib.Path, process, step: int) -> None:
  deadline = time.monotonic() + PATIENCE
  path = folder / "metrics.jsonl"
  while time.monotonic() < deadline and process.poll() is None:
    if path.exists() and f'"step": {step},' in path.read_text():
      return
    time.sleep(0.01)
  raise AssertionError(f"update {step} was not reached")


def test_a_run_leaves_what_scripts_rely_on(finished, world):
  folder, out, err = finished
  assert {"config.json", "metrics.jsonl", "result.json", "curve.png", "mask.json"} <= {
    p.name for p in folder.iterdir()
  }
  records = metrics(folder)
  assert [r["step"] for r in records if "loss" in r] == list(range(1, STEPS + 1))
  evaluated = [r["step"] for r in records if "text_nll" in r and r.get("model") != "full"]
  assert evaluated == [0, 4, 8, 12]
  losses = [r["loss"] for r in records if "loss" in r]
  assert losses[-1] < losses[0]
  result = json.loads((folder / "result.json").read_text())
  assert result["after"]["text_nll"] < result["before"]["text_nll"]
  assert result["full"] and result["updates"] == STEPS
  assert "hybrid, after" in out and "Traceback" not in err and "tokens/s" in err
  # The two latest checkpoints, and the best one if it is another.
  steps = {int(p.name) for p in (folder / "checkpoints").iterdir()}
  assert {9, 12} <= steps and len(steps) <= 3


def test_the_exported_folder_is_the_trained_model(finished, world):
  folder = finished[0].parent / "hf"
  loaded = registry.load(str(folder))
  _, record = HeadMask.load(folder / "mask.json", loaded.config)
  assert record["window"] == 24
  before = registry.load(str(world[0][2])).params
  trained = parameters(finished[0])["trained"]
  moved = loaded.params["layers"]["mlp"]["up"]["kernel"]
  np.testing.assert_array_equal(moved, trained["layers/mlp/up/kernel"])
  assert np.abs(moved - before["layers"]["mlp"]["up"]["kernel"]).max() > 1e-4
  np.testing.assert_array_equal(loaded.params["embed"]["embedding"], before["embed"]["embedding"])
  # Groups stand in the order of the original again, not in that of training.
  q = loaded.params["layers"]["attn"]["q"]["kernel"] - before["layers"]["attn"]["q"]["kernel"]
  assert np.abs(q).max() < 0.1 and np.abs(q).max() > 1e-4


@pytest.mark.parametrize(
  "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_stopped_run_goes_on_bit_for_bit(finished, world, tmp_path, how):
  flags, env, _ = world
  folder = tmp_path / "b"
  process = start(*flags, "--out", folder, env=env)
  wait_for_step(folder, process, random.SystemRandom().randrange(1, STEPS - 1))
  process.send_signal(how)
  _, _, err = finish(process)
  assert "Traceback" not in err
  if how == signal.SIGTERM:
    assert process.returncode == 0 and "--resume" in err
  if how == signal.SIGKILL:  # what a save cut short may leave
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "11").mkdir(exist_ok=True)
  code, _, err = run(*flags, "--out", folder, "--resume", env=env)
  assert code == 0, err
  assert_bit_equal(folder, finished[0])


@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one(finished, world, tmp_path):
  flags, env, _ = world
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  together = ("--hosts.coordinator", f"localhost:{port}", "--hosts.processes", 2)
  folder = tmp_path / "c"
  processes = [
    start(*flags, "--out", folder, *together, "--hosts.process", i, env=env) for i in (0, 1)
  ]
  for process in processes:
    code, _, err = finish(process)
    assert code == 0, err
  for got, want in zip(metrics(folder), metrics(finished[0]), strict=True):
    assert got.keys() == want.keys()
    for name, value in want.items():
      assert got[name] == value or np.isclose(got[name], value, rtol=2e-3), (name, got, want)
  first, wanted = metrics(folder)[2], metrics(finished[0])[2]
  for name in ("loss", "grad_norm"):  # before rounding has been through an update
    assert np.isclose(first[name], wanted[name], rtol=1e-5)
  # And one process goes on with what two have saved.
  code, _, err = run(*flags, "--out", folder, "--resume", env=env)
  assert code == 0, err


def test_another_runs_checkpoints_are_refused(finished, world, tmp_path, capsys):
  flags, _, shared = world
  flags = [str(flag) for flag in flags]
  assert cli.main([*flags, "--out", str(finished[0])]) == 2
  assert "--resume" in capsys.readouterr().err
  assert cli.main([*flags, "--out", str(finished[0]), "--resume", "--lr", "0.1"]) == 2
  assert "--lr" in capsys.readouterr().err
  # The same settings, but the mask file has changed under them.
  config = registry.load_config(flags[2])
  path, kept = shared / "mask.json", (shared / "mask.json").read_text()
  HeadMask(np.array([[0, 1, 1], [1, 1, 1]], bool)).save(path, config, window=24, sinks=0)
  try:
    assert cli.main([*flags, "--out", str(finished[0]), "--resume"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and "its mask is not this run's" in last
  finally:
    path.write_text(kept)


def test_a_loss_that_is_no_number_stops_the_run(world, tmp_path):
  flags, env, _ = world
  code, _, err = run(*flags, "--out", tmp_path / "d", "--lr", 9e15, "--clip", 9e15, env=env)
  last = err.strip().splitlines()[-1]
  assert code == 2 and "is not finite" in last and "checkpoint" in last, err
  assert "Traceback" not in err


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    (("--lr", "0"), "--lr 0"),
    (("--lr", "-1"), "--lr -1"),
    (("--sequence", "4000"), "--sequence 4000"),
    (("--mesh.data", "3", "--mesh.fsdp", "1"), "--mesh"),
    (("--data", "nowhere/at all"), "--data"),
    (("--mask", "none.json"), "none.json"),
    (("--train", "nothing"), "--train nothing"),
    (("--context", "500"), "--context 500"),
    (("--batch", "3"), "does not divide --batch 3"),
  ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(world, tmp_path, capsys, flags, named):
  arguments = [*map(str, world[0]), "--out", str(tmp_path / "e"), *flags]
  assert cli.main(arguments) == 2
  last = capsys.readouterr().err.strip().splitlines()[-1]
  assert last.startswith("error: ") and named in last
  assert not (tmp_path / "e").exists()
