"""Models with a window of its own for every attention head."""

from models.config import ModelConfig
from models.errors import InputError
from models.windows import HeadMask

__all__ = ["HeadMask", "InputError", "Loaded", "ModelConfig", "load"]


def __getattr__(name):
  # Late, so that reading a flag or a mask does not wait for jax to start.
  if name in ("Loaded", "load"):
    from models import registry

    return getattr(registry, name)
  raise AttributeError(f"module 'models' has no attribute {name!r}")
