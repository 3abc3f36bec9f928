"""NOMAD, the solver of the paper, an optional extra (PyNomadBBO)."""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import weakref

import numpy as np

from bosch_jax.solvers.keys import KeySolver, first_keys

WORKER = pathlib.Path(__file__).with_name("nomad_worker.py")


class NomadSolver(KeySolver):
  """Mesh adaptive direct search over one real key per bit (see `bosch_jax.solvers.keys`).

  The paper gives NOMAD the bits themselves and a penalty for missing the ratio; keys keep the
  cardinality exact. `PyNomad.optimize` calls back and returns when it is done, and keeps its state
  in global variables; so each solver runs one in a process of its own, which waits in the callback
  until losses are told, and ends with the solver. A run that has converged is started again from its
  best keys with the next seed.

  Args:
    start, start_loss, classes, batch, patience: see `KeySolver`.
    cost: float `[n]`, first guess of the loss each bit adds when set.
    seed: of NOMAD; the same seed and batch propose the same candidates.

  Raises:
    RuntimeError: NOMAD crashed (from `ask` or `tell`).
  """

  def __init__(
    self,
    start: np.ndarray,
    start_loss: float,
    cost: np.ndarray | None = None,
    *,
    classes: np.ndarray | None = None,
    batch: int = 4,
    patience: int | None = None,
    seed: int = 1,
  ):
    super().__init__(start, start_loss, classes=classes, batch=batch, patience=patience)
    self._block: list[list[float]] = []  # keys NOMAD waits for
    self._handed = 0
    self._answers: list[float | None] = []
    self._process: subprocess.Popen | None = None
    self._task = {"keys": first_keys(start, cost).tolist(), "seed": seed, "block": batch}

  def _propose(self):
    if self._process is None:
      self._begin()
    if self._handed == len(self._block):
      if None in self._answers:
        return None  # NOMAD goes on when the whole block is answered
      self._send(self._answers)
      self._receive()
    keys = np.array(self._block[self._handed])
    answer = functools.partial(self._answers.__setitem__, self._handed)
    self._handed += 1
    return keys, answer

  def _begin(self) -> None:
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by _end
    self._process = subprocess.Popen(
      [sys.executable, "-P", str(WORKER)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env={**os.environ, "OMP_NUM_THREADS": "1"},  # its threads would only wait for the callback
    )
    weakref.finalize(self, _end, self._process, self._errors)
    self._send(self._task)
    self._receive()

  def _send(self, message) -> None:
    try:
      self._process.stdin.write(json.dumps(message) + "\n")
      self._process.stdin.flush()
    except OSError:
      self._crashed()

  def _receive(self) -> None:
    line = self._process.stdout.readline()
    if not line:
      self._crashed()
    self._block = json.loads(line)
    self._answers, self._handed = [None] * len(self._block), 0

  def _crashed(self) -> None:
    self._errors.seek(0)
    said = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
    raise RuntimeError(f"NOMAD ended with exit code {self._process.wait()}: {' '.join(said)}")


def _end(process: subprocess.Popen, errors) -> None:
  process.kill()
  process.wait()
  for stream in (process.stdin, process.stdout, errors):
    with contextlib.suppress(OSError):  # what was not yet sent, to a process that is gone
      stream.close()
