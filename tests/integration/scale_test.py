"""`python run.py select` on several devices and in several processes; killed again and again."""

import json
import os
import random
import signal
import socket
import time

import pytest

from tests.integration.command import SMALL as SMALL_RUN
from tests.integration.command import finish, run, start
from tests.integration.tiny_gguf import write_tiny_gguf

# Forward passes alone: a gradient summed in another order moves gates in their last digits.
SMALL = [*SMALL_RUN, "--recipe", "probes"]

DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
ONE = {"XLA_FLAGS": ""}  # what conftest.py sets for the tests themselves is not meant here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
  """The folder of a run on one device."""
  folder = tmp_path_factory.mktemp("runs") / "one"
  code, _, err = run("select", "--model", model, *SMALL, "--out", folder, env=os.environ | ONE)
  assert code == 0, err
  return folder


def scores(folder):
  lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
  return [(line["mask"], line["contexts"]) for line in lines], [
    n for line in lines for row in line["nll"] for n in row
  ]


def assert_same(folder, other):
  """The same mask file, by the same path, with scores equal to 1e-5."""
  assert (folder / "mask.json").read_bytes() == (other / "mask.json").read_bytes()
  (path, nll), (wanted_path, wanted_nll) = scores(folder), scores(other)
  assert path == wanted_path and nll == pytest.approx(wanted_nll, abs=1e-5)


@pytest.mark.slow
def test_four_devices_give_the_same_mask_and_go_on_with_what_one_began(model, finished, tmp_path):
  flags = ("select", "--model", model, *SMALL, "--mesh", "data=4")
  code, _, err = run(*flags, "--out", tmp_path / "four", env=os.environ | DEVICES)
  assert code == 0, err
  assert_same(tmp_path / "four", finished)
  kept = (finished / "journal.jsonl").read_text().splitlines(keepends=True)
  (tmp_path / "four" / "journal.jsonl").write_text("".join(kept[: len(kept) // 2]))
  code, _, err = run(*flags, "--out", tmp_path / "four", "--resume", env=os.environ | DEVICES)
  assert code == 0, err
  assert_same(tmp_path / "four", finished)


@pytest.mark.slow
def test_two_processes_give_the_same_mask_and_only_the_first_writes(model, finished, tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"

  def both(*more):
    processes = [
      start(
        "select", "--model", model, *SMALL, "--coordinator", address, "--num-processes", 2,
        "--process-id", i, "--out", tmp_path / ("two" if i == 0 else "none"), *more,
        env=os.environ | ONE,
      )
      for i in (0, 1)
    ]  # fmt: skip
    return [finish(process) for process in processes]

  for code, _, err in both():
    assert code == 0, err
  assert_same(tmp_path / "two", finished)
  assert not (tmp_path / "none").exists()
  # What the first process refuses stops all of them, in one sentence each.
  for code, _, err in both():
    assert code == 2 and "already used" in err and "Traceback" not in err


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    (("--mesh", "data=3000"), "--mesh data=3000: is more than the"),
    (("--mesh", "model=2"), "--mesh model=2: is not known"),
    (("--mesh", "data=0"), "--mesh data=0"),
    (("--mesh", "4"), "--mesh 4"),
    (("--process-id", "0"), "--coordinator"),
    (("--coordinator", "here"), "--coordinator here"),
    (
      ("--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"),
      "--process-id 2",
    ),
  ],
)
def test_devices_that_cannot_be_had_are_one_sentence(model, tmp_path, flags, named, capsys):
  from bosch_jax import cli

  out = tmp_path / "no"
  code = cli.main(["select", "--model", str(model), *SMALL, *flags, "--out", str(out)])
  err = capsys.readouterr().err
  assert code == 2 and named in err and len(err.strip().splitlines()) == 1, err
  assert not out.exists()


@pytest.mark.slow
def test_killed_at_20_random_moments_every_resume_ends_in_the_identical_mask(
  model, finished, tmp_path
):
  """Chains of runs: each is killed after some more scores, or at a random time, and resumed."""
  cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
  cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  env, rng, kills, chain = os.environ | ONE | cache, random.Random(0), 0, 0
  total = (finished / "journal.jsonl").read_bytes().count(b"\n")
  while kills < 20:
    folder, chain = tmp_path / f"chain{chain}", chain + 1
    flags = ("select", "--model", model, *SMALL, "--out", folder)
    journal, resume, killed = folder / "journal.jsonl", (), kills
    while kills < 20 and kills < killed + 7:
      had = journal.read_bytes().count(b"\n") if journal.exists() else 0
      # A number of further lines at which the kill comes, and a moment after it.
      wanted, moment = had + rng.randrange(0, max(1, total // 6)), rng.random() * 0.05
      process = start(*flags, *resume, env=env)
      while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > wanted:
          break
        time.sleep(0.002)
      time.sleep(moment)
      process.send_signal(signal.SIGKILL)
      finish(process)
      if process.returncode != -signal.SIGKILL:
        break  # it was done before
      kills += 1
      resume = ("--resume",)
    before = journal.read_bytes()
    code, _, err = run(*flags, "--resume", env=env)
    assert code == 0, err
    whole = before[: before.rfind(b"\n") + 1]
    assert journal.read_bytes().startswith(whole)
    assert_same(folder, finished)
    assert len(scores(folder)[0]) == len({(m, tuple(c)) for m, c in scores(folder)[0]})
