"""Llama 3's rotary scaling from GGUF files, which store its outcome instead of its parameters.

The tensor holds what each frequency is divided by. Of the four parameters behind it, three are the
same in every Llama 3.1, 3.2 and 3.3; the factor (8 or 32) follows from the slowest frequency.
Reference: Llama 3 (arXiv 2407.21783); formula as in `models.rope`.
"""

import dataclasses
import math

import gguf
import numpy as np

from models.config import ModelConfig, RopeScaling
from models.errors import InputError
from models.gguf_file import GGUFFile
from models.rope import frequencies

TENSOR = "rope_freqs.weight"
_CONTEXT, _LOW, _HIGH = 8192, 1.0, 4.0
_TOLERANCE = 1e-4  # relative; the divisors are float32, some of them small differences


def llama3_scaling(file: GGUFFile, config: ModelConfig) -> RopeScaling | None:
  """The scaling that made the divisors `rope_freqs.weight`, float32 `[K/2]`.

  Args:
    file: has that tensor.
    config: the architecture, still without scaling.

  Returns:
    The parameters, verified by computing every divisor again; None where all of them are 1.

  Raises:
    InputError: a tensor of another form.
  """
  tensor = file.tensors[TENSOR]
  if tensor.kind == gguf.GGMLQuantizationType.F32 and tensor.shape == (config.head_dim // 2,):
    divisors = file.read(TENSOR)
    plain = frequencies(dataclasses.replace(config, rope_scaling=None))
    scaling = _solve(float(divisors[-1]), float(plain[-1]))
    if scaling is not None:
      scaled = frequencies(dataclasses.replace(config, rope_scaling=scaling))
      if np.allclose(divisors, plain / scaled, rtol=_TOLERANCE, atol=0):
        return scaling if scaling.factor != 1 else None
  raise InputError(
    "--model",
    file.path,
    f"has a tensor {TENSOR} that does not hold the {config.head_dim // 2} divisors of Llama 3's rotary "
    f"scaling (original context {_CONTEXT}), the only ones read; give another model, or a Hugging Face folder",
  )


def _solve(divisor: float, frequency: float) -> RopeScaling | None:
  """The scaling under which a frequency has this divisor; None if no factor does that."""
  turns = _CONTEXT * frequency / (2 * math.pi)
  kept = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
  if kept == 1:
    factor = 1.0  # even the slowest frequency is kept, whatever the factor
  elif divisor <= 0 or (rest := 1 / divisor - kept) <= 0:
    return None
  else:
    factor = float(f"{(1 - kept) / rest:.6g}")  # 8.0, where float32 gave 8.0000004
  return RopeScaling("llama3", factor, _CONTEXT, _LOW, _HIGH) if factor >= 1 else None
