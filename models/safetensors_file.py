"""The safetensors format: a JSON header, then raw little-endian tensors.

Read with plain reads and not through the `safetensors` package's memory map, whose pages would
stay resident beside the weights, and whose numpy reader has no bfloat16. Format:
https://huggingface.co/docs/safetensors
"""

import dataclasses
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

from models.errors import InputError

DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where a tensor lies.

  Attributes:
    path: its file.
    kind: storage type, e.g. "BF16".
    shape: as stored.
    offset: of its first byte, from the start of the file.
  """

  path: pathlib.Path
  kind: str
  shape: tuple[int, ...]
  offset: int

  def read(self) -> np.ndarray:
    """The tensor, in its stored type and shape."""
    dtype = DTYPES[self.kind]
    flat = np.fromfile(self.path, dtype, math.prod(self.shape), offset=self.offset)
    return flat.reshape(self.shape)


def read_header(path: str | os.PathLike) -> dict[str, Entry]:
  """The tensors of a file by name; checks that the file is all there.

  Raises:
    InputError: no such file, not safetensors, damaged, or cut short.
  """
  path = pathlib.Path(path)
  try:
    size = path.stat().st_size
    with open(path, "rb") as file:
      start = file.read(8)
      (length,) = struct.unpack("<Q", start)
      if length > min(_LARGEST_HEADER, size - 8):
        raise ValueError
      header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries, end = {}, 0
    for name, tensor in header.items():
      first, last = tensor["data_offsets"]
      shape = tuple(int(n) for n in tensor["shape"])
      if (
        tensor["dtype"] in DTYPES
        and last - first != math.prod(shape) * DTYPES[tensor["dtype"]].itemsize
      ):
        raise ValueError
      entries[name] = Entry(path, tensor["dtype"], shape, 8 + length + first)
      end = max(end, last)
  except OSError as error:
    raise InputError(
      "--model", path, f"cannot be read ({error.strerror}); fetch the model again"
    ) from None
  except (ValueError, KeyError, TypeError, AttributeError, struct.error):
    raise InputError(
      "--model", path, "is damaged or not safetensors; fetch the file again"
    ) from None
  if 8 + length + end > size:
    raise InputError(
      "--model",
      path,
      f"is cut short: it has {size} bytes, and its header asks for {8 + length + end}; fetch the file again",
    )
  return entries


def write(
  path: str | os.PathLike,
  tensors: Iterable[tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]],
) -> None:
  """Writes a file, one tensor in memory at a time; a crash leaves no half file of that name.

  Args:
    tensors: name, shape, dtype and a function that makes the tensor when its turn comes.
  """
  tensors = list(tensors)
  header, at = {"__metadata__": {"format": "pt"}}, 0
  for name, shape, dtype, _ in tensors:
    size = math.prod(shape) * dtype.itemsize
    header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
    at += size
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # tensors begin on a multiple of 8
  path = pathlib.Path(path)
  partial = path.with_name(path.name + ".partial")
  with open(partial, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for _, shape, dtype, make in tensors:
      value = np.ascontiguousarray(make())
      if value.shape != shape or value.dtype != dtype:
        raise ValueError(f"{value.shape} {value.dtype} instead of {shape} {dtype}")
      file.write(value.reshape(-1).view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)
