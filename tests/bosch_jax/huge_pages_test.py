import json
import os
import pathlib
import subprocess
import sys

import pytest

from bosch_jax import huge_pages

ROOT = pathlib.Path(__file__).parents[2]
# Says how it was started. A kernel that gives pages on request is put in place of this machine's.
SCRIPT = """
import json, os, sys
from bosch_jax import huge_pages
print(os.getpid(), flush=True)
huge_pages.on_request = lambda: {on_request}
huge_pages.restart()
print(json.dumps([os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:]]))
"""


@pytest.mark.parametrize(
  ("before", "after"),
  [
    (None, "glibc.malloc.hugetlb=1"),
    ("", "glibc.malloc.hugetlb=1"),
    ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
  ],
)
def test_the_tunable_joins_what_is_set(before, after):
  env = {"HOME": "x"} | ({} if before is None else {"GLIBC_TUNABLES": before})
  assert huge_pages.asking(env) == {"HOME": "x", "GLIBC_TUNABLES": after}


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_choice_made_already_stands(value):
  assert huge_pages.asking({"GLIBC_TUNABLES": f"glibc.malloc.hugetlb={value}"}) is None


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("always [madvise] never\n", True),
    ("[always] madvise never\n", False),
    ("always madvise [never]\n", False),
  ],
)
def test_only_kernels_that_give_on_request(tmp_path, text, expected):
  kernel = tmp_path / "enabled"
  kernel.write_text(text)
  assert huge_pages.on_request(kernel) is expected


def test_no_such_kernel(tmp_path):
  assert not huge_pages.on_request(tmp_path / "missing")


def run(tmp_path, on_request: bool, **env: str):
  script = tmp_path / "script.py"
  script.write_text(SCRIPT.format(on_request=on_request))
  kept = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
  done = subprocess.run(
    [sys.executable, "-B", str(script), "one", "two words", "--flag=ä"],
    env=kept | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | env,
    capture_output=True,
    text=True,
    encoding="utf-8",
    check=True,
  )
  *starts, last = done.stdout.splitlines()
  return starts, json.loads(last)


def test_restarts_once_as_the_same_process_with_the_same_arguments(tmp_path):
  starts, (pid, tunables, args) = run(tmp_path, True)
  assert starts == [str(pid)] * 2
  assert tunables == "glibc.malloc.hugetlb=1"
  assert args == ["one", "two words", "--flag=ä"]


@pytest.mark.parametrize(
  ("on_request", "env"),
  [(False, {}), (True, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})],
)
def test_does_not_restart_without_need(tmp_path, on_request, env):
  starts, (pid, tunables, _) = run(tmp_path, on_request, **env)
  assert starts == [str(pid)]
  assert tunables == env.get("GLIBC_TUNABLES")
