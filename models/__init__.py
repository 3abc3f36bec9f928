"""Models with a window of its own for every attention head."""

import importlib

from models.config import ModelConfig
from models.errors import InputError
from models.windows import HeadMask

# Late, so that reading a flag or a mask does not wait for jax to start.
_LATE = {"Loaded": "registry", "load": "registry", "Generator": "generate", "Sampling": "sampling"}

__all__ = ["Generator", "HeadMask", "InputError", "Loaded", "ModelConfig", "Sampling", "load"]


def __getattr__(name):
  if name not in _LATE:
    raise AttributeError(f"module 'models' has no attribute {name!r}")
  return getattr(importlib.import_module(f"models.{_LATE[name]}"), name)
