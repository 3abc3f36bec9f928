"""Where parameters, optimizer state and batches lie on a mesh of devices (data, fsdp, tensor).

Rows of a batch are split over data and fsdp; parameters over fsdp (gathered when used) and, by
heads, ffn width and vocabulary, over tensor. Everything else follows from these shardings.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.attention import plan
from models.config import ModelConfig
from models.errors import InputError

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
_LAYERS = {  # behind the axis of layers
  "q/kernel": ("fsdp", "tensor", None), "k/kernel": ("fsdp", "tensor", None),
  "v/kernel": ("fsdp", "tensor", None), "o/kernel": ("tensor", None, "fsdp"),
  "q/bias": ("tensor", None), "k/bias": ("tensor", None), "v/bias": ("tensor", None),
  "mlp/gate/kernel": ("fsdp", "tensor"), "mlp/up/kernel": ("fsdp", "tensor"),
  "mlp/down/kernel": ("tensor", "fsdp"),
  "experts/gate/kernel": (None, "fsdp", "tensor"), "experts/up/kernel": (None, "fsdp", "tensor"),
  "experts/down/kernel": (None, "tensor", "fsdp"),
}  # fmt: skip
_OTHERS = {"embed/embedding": ("tensor", "fsdp"), "head/kernel": ("fsdp", "tensor")}


def make_mesh(data: int, fsdp: int, tensor: int, devices: list | None = None) -> Mesh:
  """A mesh over all devices.

  Args:
    data, fsdp, tensor: sizes of the axes; an fsdp of 0 takes the devices the others leave.
    devices: default all, of all processes.

  Raises:
    InputError: sizes that do not use every device, or a tensor axis across processes.
  """
  devices = jax.devices() if devices is None else devices
  fsdp = fsdp or len(devices) // (data * tensor)
  if data * fsdp * tensor != len(devices):
    raise InputError(
      "--mesh",
      f"data {data}, fsdp {fsdp}, tensor {tensor}",
      f"makes {data * fsdp * tensor} devices of {len(devices)}; the product must be {len(devices)}",
    )
  local = len(devices) // len({device.process_index for device in devices})
  if local % tensor:
    raise InputError(
      "--mesh.tensor", tensor, f"does not divide the {local} devices of a process; use fsdp instead"
    )
  return Mesh(np.array(devices).reshape(data, fsdp, tensor), AXES)


def spec(path: str) -> PartitionSpec:
  """How a parameter is split."""
  if path in _OTHERS:
    return PartitionSpec(*_OTHERS[path])
  for end, axes in _LAYERS.items():
    if path.startswith("layers/") and path.endswith("/" + end):
      return PartitionSpec(None, *axes)
  return PartitionSpec()


def sharding(mesh: Mesh):
  """A function of (path, shape) for `models.registry.load`."""
  return lambda path, shape: NamedSharding(mesh, spec(path))


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Of arrays `[accumulate, rows, ...]`."""
  return NamedSharding(mesh, PartitionSpec(None, ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def check(mesh: Mesh, shapes: dict, rows: int, config: ModelConfig, windows) -> None:
  """Refuses a mesh that does not divide the batch, the parameters or the attention heads.

  Args:
    shapes: `{path: shape}` of all parameters.
    rows: of a micro-batch.
    windows: the model's static windows.

  Raises:
    InputError: which axis does not divide what.
  """
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  if rows % ways:
    raise InputError(
      "--mesh",
      f"data {mesh.shape['data']}, fsdp {mesh.shape['fsdp']}",
      f"does not divide --batch {rows}; use a multiple of {ways}",
    )
  for path, shape in shapes.items():
    for size, axis in zip(shape, spec(path), strict=False):
      if axis is not None and size % mesh.shape[axis]:
        raise InputError(
          f"--mesh.{axis}",
          mesh.shape[axis],
          f"does not divide {path}, which has {size} there; use a divisor of {size}",
        )
  tensor = mesh.shape["tensor"]
  for row in windows:
    for first, stop, window in plan.runs(row, config.num_groups):
      if (stop - first) % tensor:
        raise InputError(
          "--mesh.tensor",
          tensor,
          f"does not divide the {stop - first} head groups with window {window} of a layer; "
          "use --mesh.tensor 1 and --mesh.fsdp instead",
        )
