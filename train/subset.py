"""Which parameters are trained: a flat tree `{path: array}` split by a regular expression."""

import re

from flax import traverse_util

from models.errors import InputError

PRESETS = {"all": ".*", "attention": "layers/attn/", "layers": "layers/"}


def split(params: dict, pattern: str) -> tuple[dict, dict]:
  """Trained and frozen parameters, each `{path: array}` with paths like "layers/attn/q/kernel".

  Args:
    params: the model's tree.
    pattern: a key of `PRESETS`, or a regular expression searched for in paths.

  Raises:
    InputError: a pattern that cannot be read or that no path has.
  """
  try:
    expression = re.compile(PRESETS.get(pattern, pattern))
  except re.error as error:
    raise InputError(
      "--train", pattern, f"is no regular expression ({error}); use all, attention or layers"
    ) from None
  flat = traverse_util.flatten_dict(params, sep="/")
  trained = {path: leaf for path, leaf in flat.items() if expression.search(path)}
  if not trained:
    raise InputError(
      "--train", pattern, f"is in no parameter's name; names are for example {', '.join(flat)}"
    )
  return trained, {path: leaf for path, leaf in flat.items() if path not in trained}


def join(trained: dict, frozen: dict) -> dict:
  """The model's tree again."""
  return traverse_util.unflatten_dict({**frozen, **trained}, sep="/")
