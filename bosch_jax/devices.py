"""Several devices and several processes: which of them a run uses, and what only the first one does."""

import json
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from bosch_jax.device_options import AUTO, AXIS, DeviceOptions
from models.errors import InputError

T = TypeVar("T")


def start(options: DeviceOptions) -> Mesh | None:
  """Joins the other processes and chooses the devices; None = the default device alone.

  Raises:
    InputError: processes that do not meet, or a mesh these devices cannot form.
  """
  if options.coordinator is not None:
    known = (options.coordinator, options.num_processes, options.process_id)
    # SIGTERM stops a run here as everywhere else (see `interrupts`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
      jax.distributed.initialize(*(known if options.coordinator != AUTO else ()))
    except (RuntimeError, ValueError) as error:
      raise InputError(
        "--coordinator",
        options.coordinator,
        f"does not work ({str(error).splitlines()[0]}); start all processes with the same address and count",
      ) from None
  processes, there = jax.process_count(), jax.device_count()
  if options.mesh is None:
    return Mesh(np.array(jax.devices()), (AXIS,)) if processes > 1 else None
  wanted = int(options.mesh.split("=")[1])
  if wanted > there:
    more = (
      f", or set XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
      if jax.default_backend() == "cpu"
      else ""
    )
    raise InputError(
      "--mesh", options.mesh, f"is more than the {there} there are; use {AXIS}={there}{more}"
    )
  if wanted % processes:
    raise InputError(
      "--mesh",
      options.mesh,
      f"does not divide over {processes} processes; use a multiple of {processes}",
    )
  each: dict[int, list] = {}
  for device in jax.devices():
    each.setdefault(device.process_index, []).append(device)
  return Mesh(np.array([d for some in each.values() for d in some[: wanted // processes]]), (AXIS,))


def is_first() -> bool:
  """Whether this process writes files and prints."""
  return jax.process_index() == 0


def on_first(make: Callable[[], T]) -> T:
  """What `make` gives in the first process (something JSON can say), in all processes.

  Raises:
    InputError: in all processes, when `make` raised it.
  """
  if jax.process_count() == 1:
    return make()
  said = b""
  if is_first():
    try:
      said = json.dumps({"value": make()}).encode()
    except InputError as error:
      said = json.dumps({"refused": [error.field, str(error.value), error.remedy]}).encode()
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(said))))
  sent = np.frombuffer(said.ljust(size), np.uint8)
  heard = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes())
  if "refused" in heard:
    raise InputError(*heard["refused"])
  return heard["value"]
