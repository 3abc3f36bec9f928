"""Pages of 2 MiB instead of 4 KiB for what XLA maps anew in every call.

A training step of 1024 tokens has 2 GB of temporaries; as small pages they are half a million faults.
Linux gives large pages to whoever asks, and glibc (2.35 and later) asks if told so before a process starts.
Other systems and C libraries take no notice.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Mapping

TUNABLE = "glibc.malloc.hugetlb"
KERNEL = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def asking(env: Mapping[str, str]) -> dict[str, str] | None:
  """The environment that has glibc ask for large pages; None if `env` has already decided that."""
  tunables = env.get("GLIBC_TUNABLES", "")
  if TUNABLE in tunables:
    return None
  return {**env, "GLIBC_TUNABLES": f"{tunables}:{TUNABLE}=1".lstrip(":")}


def on_request(kernel: pathlib.Path = KERNEL) -> bool:
  """Whether this kernel gives large pages to those who ask, and to no others."""
  try:
    return "[madvise]" in kernel.read_text()
  except OSError:
    return False


def restart() -> None:
  """Starts this very command again with large pages, in the same process; once, and only if it helps.

  For scripts, before anything heavy is imported: the process forgets all that it has done.
  `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` prevents it.
  """
  env = asking(os.environ)
  if env is None or not sys.executable or not on_request():
    return
  with contextlib.suppress(OSError):  # then things are as right, only slower
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
