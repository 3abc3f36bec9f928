"""A GGUF file: its metadata, where its tensors lie, and one tensor at a time, dequantised.

The header is parsed here and not by `gguf.GGUFReader`, which makes numpy views of every one of the
vocabulary's strings (seconds) and runs on past the end of a damaged file; the quantisation formats
are the `gguf` package's.
"""

import dataclasses
import math
import mmap
import os
import pathlib
import struct

import gguf
import numpy as np

from models.errors import InputError

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a tensor lies in a file.

  Attributes:
    kind: storage format.
    shape: outermost axis first (GGUF writes it last).
    offset: of the first byte, from the start of the file.
  """

  kind: gguf.GGMLQuantizationType
  shape: tuple[int, ...]
  offset: int

  @property
  def bytes_shape(self) -> tuple[int, ...]:
    """Shape as stored, in bytes along the innermost axis."""
    return gguf.quants.quant_shape_to_byte_shape(self.shape, self.kind)


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
  """The header of a GGUF file.

  Attributes:
    path: the file.
    fields: metadata by key; arrays are lists.
    tensors: by name.
  """

  path: pathlib.Path
  fields: dict[str, object]
  tensors: dict[str, Tensor]

  def read(self, name: str) -> np.ndarray:
    """Reads and dequantises one tensor: float32, outermost axis first.

    Raises:
      InputError: numbers that are not finite.
    """
    tensor = self.tensors[name]
    shape = tensor.bytes_shape
    # A plain read: pages of a memory map would stay resident beside the dequantised weights.
    raw = np.fromfile(self.path, np.uint8, math.prod(shape), offset=tensor.offset).reshape(shape)
    with np.errstate(all="ignore"):
      value = gguf.quants.dequantize(raw, tensor.kind).reshape(tensor.shape)
    if not np.isfinite(value).all():
      raise InputError(
        "--model", self.path, f"has infinite or undefined numbers in {name}; fetch the file again"
      )
    return value


class _Cursor:
  """Reads little-endian values one after the other; anything past the end raises."""

  def __init__(self, buffer):
    self._buffer, self.at, self.end = buffer, 0, len(buffer)

  def scalar(self, code: str):
    (value,) = struct.unpack_from("<" + code, self._buffer, self.at)
    self.at += struct.calcsize("<" + code)
    return value

  def string(self) -> str:
    start = self.at + 8
    self.at = start + self.scalar("Q")
    if self.at > self.end:
      raise EOFError
    return self._buffer[start : self.at].decode()

  def value(self, kind: int):
    if kind == _STRING:
      return self.string()
    if kind != _ARRAY:
      return self.scalar(_SCALARS[kind])
    kind, count = self.scalar("I"), self.scalar("Q")
    if kind == _STRING:
      return [self.string() for _ in range(count)]
    # Arrays of arrays, legal but unknown in practice, fail here like any unknown kind.
    size = struct.calcsize(_SCALARS[kind])
    if self.at + count * size > self.end:
      raise EOFError
    start, self.at = self.at, self.at + count * size
    return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._buffer, start))


def open_gguf(path: str | os.PathLike) -> GGUFFile:
  """Reads the header of a GGUF file and checks that the file is all there.

  Raises:
    InputError: no such file, not GGUF, damaged, or cut short.
  """
  path = pathlib.Path(path)

  def refuse(reason):
    return InputError("--model", path, f"{reason}; fetch the file again or give another model")

  try:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
      if buffer[:4] != _MAGIC:
        raise refuse("is not a GGUF file (it does not start with the letters GGUF)")
      cursor = _Cursor(buffer)
      cursor.at = 4
      version = cursor.scalar("I")
      if version not in _VERSIONS:
        raise refuse(f"is of GGUF version {version}, and only little-endian 2 and 3 are supported")
      fields, tensors = _read_header(cursor)
  except OSError as error:
    raise InputError(
      "--model", path, f"cannot be read ({error.strerror}); give the path of a .gguf file"
    ) from None
  except (EOFError, struct.error):
    raise refuse("is cut short or damaged: its header runs past its end") from None
  except (ValueError, KeyError, OverflowError, MemoryError) as error:
    raise refuse(f"is damaged or not a GGUF file ({type(error).__name__} in its header)") from None
  needed = max((t.offset + math.prod(t.bytes_shape) for t in tensors.values()), default=0)
  if needed > (size := path.stat().st_size):
    raise refuse(f"is cut short or damaged: it has {size} bytes, and its header asks for {needed}")
  return GGUFFile(path, fields, tensors)


def _read_header(cursor: _Cursor) -> tuple[dict[str, object], dict[str, Tensor]]:
  num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
  fields = {}
  for _ in range(num_fields):
    key = cursor.string()
    fields[key] = cursor.value(cursor.scalar("I"))
  found = []
  for _ in range(num_tensors):
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
    kind = gguf.GGMLQuantizationType(cursor.scalar("I"))
    found.append((name, Tensor(kind, shape, cursor.scalar("Q"))))
  alignment = fields.get("general.alignment", _ALIGNMENT)
  if not isinstance(alignment, int) or alignment < 1 or len(dict(found)) < len(found):
    raise ValueError
  start = cursor.at + -cursor.at % alignment  # offsets count from here
  tensors = {name: dataclasses.replace(t, offset=start + t.offset) for name, t in found}
  for tensor in tensors.values():
    if not tensor.shape or 0 in tensor.bytes_shape:  # raises on rows of broken blocks
      raise ValueError
  return fields, tensors
