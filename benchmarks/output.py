"""Where benchmarks leave their figures."""

import dataclasses
import pathlib

import jax

from models.windows import write_json


def write(folder: str, name: str, facts: object) -> pathlib.Path:
  """Writes `facts`, JSON-able, to `name`.json in the folder, made if need be; returns the folder."""
  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  write_json(path / f"{name}.json", facts)
  return path


def with_platform(options: object, records: list[dict]) -> dict:
  """What was measured, on what: `options` is a dataclass."""
  return {
    "options": dataclasses.asdict(options),
    "platform": jax.default_backend(),
    "jax": jax.__version__,
    "records": records,
  }
