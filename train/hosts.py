"""Several processes that train together."""

import jax
from jax.experimental import multihost_utils

from models.errors import InputError
from train.settings import HostOptions


def connect(hosts: HostOptions) -> None:
  """Joins the other processes; must come before anything else asks jax for devices.

  Raises:
    InputError: they cannot be reached.
  """
  if not hosts.coordinator:
    return
  where = {} if hosts.coordinator == "auto" else {
    "coordinator_address": hosts.coordinator,
    "num_processes": hosts.processes,
    "process_id": hosts.process,
  }  # fmt: skip
  try:
    jax.distributed.initialize(**where)
  except (RuntimeError, ValueError) as error:
    raise InputError(
      "--hosts.coordinator", hosts.coordinator, f"cannot be joined ({error!s:.120})"
    ) from None


def barrier(name: str) -> None:
  """Waits for all processes."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def first() -> bool:
  """Whether this process is the one that writes files and speaks."""
  return jax.process_index() == 0
