"""Peak memory of a process by its own account."""

import pathlib


def peak_kib() -> int:
  """Highest resident memory so far, KiB. Not getrusage's: a process inherits that one's peak from
  the process that started it, so a small child of a large test run would look large."""
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.split("VmHWM:")[1].split()[0])
