"""Runs `python run.py` as a user does: in a process of its own."""

import pathlib
import re
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
  "--window",
  "24",
  "--context",
  "400",
  "--samples",
  "4",
  "--held-out",
  "3",
  "--budget",
  "25",
]
# What a CUDA plugin without a GPU writes to stderr before Python can say anything.
_RUNTIME_LOG = re.compile(r"^(WARNING: All log messages before absl.*|[IWE]\d{4} .*)\n", re.M)

# A shell's background job ignores Ctrl-C, and so would what it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


def start(*args, **kwargs) -> subprocess.Popen:
  command = [sys.executable, ROOT / "run.py", *map(str, args)]
  return subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
  )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
  """Exit code, stdout, and stderr without the runtime's own log lines."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out, _RUNTIME_LOG.sub("", err)


def run(*args, **kwargs) -> tuple[int, str, str]:
  return finish(start(*args, **kwargs))
