"""The flags that say where a run computes; read without starting jax."""

import dataclasses
import re

from models.errors import InputError

AXIS = "data"  # the mesh axis that pairs of a mask and a context are spread over
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
  """Where a run computes. The result does not depend on it."""

  mesh: str | None = None
  """Devices that share the candidates and prompts, such as data=4. Default: one, or all of all
  processes."""
  coordinator: str | None = None
  """host:port of process 0, where several processes (hosts) work together; or auto, where the cluster
  tells (TPU pods, Slurm)."""
  num_processes: int | None = None
  """How many processes there are."""
  process_id: int | None = None
  """Which of them this is, from 0."""

  def __post_init__(self):
    if self.mesh is not None and not re.fullmatch(rf"{AXIS}=[1-9]\d{{0,5}}", self.mesh):
      raise InputError(
        "--mesh", self.mesh, f"is not known; the only axis is {AXIS}, use for example {AXIS}=4"
      )
    given = self.num_processes is not None, self.process_id is not None
    if self.coordinator in (None, AUTO):
      if any(given):
        raise InputError(
          "--coordinator",
          self.coordinator or "",
          "does not go with --num-processes and --process-id; give the host:port of process 0",
        )
      return
    if not re.fullmatch(r".+:\d+", self.coordinator):
      raise InputError(
        "--coordinator", self.coordinator, "must be host:port; use for example 10.0.0.1:1234"
      )
    if not all(given) or not 0 <= self.process_id < self.num_processes:
      raise InputError(
        "--process-id",
        self.process_id,
        f"must be from 0 to below --num-processes ({self.num_processes}); give both",
      )
