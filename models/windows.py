"""Per-head attention windows and the mask that chooses them.

One convention everywhere: key j is visible to query i iff `0 <= i - j < w`, so a window of `w`
counts the query itself, or if `j < sinks` and `j <= i`. `FULL` is larger than any position, so a
head with that window sees its whole past.

    w = 3, six tokens          w = 3, sinks = 1
    1 . . . . .                1 . . . . .
    1 1 . . . .                1 1 . . . .
    1 1 1 . . .                1 1 1 . . .
    . 1 1 1 . .                1 1 1 1 . .
    . . 1 1 1 .                1 . 1 1 1 .
    . . . 1 1 1                1 . . 1 1 1
"""

import dataclasses
import json
import math
import os
import pathlib
from fractions import Fraction

import numpy as np

from models.config import ModelConfig
from models.errors import InputError

FULL = int(np.iinfo(np.int32).max)
FORMAT = "bosch-mask/1"


def num_local_for(ratio: float, total: int) -> int:
  """round-half-up(ratio * total): the exact number of local groups a ratio asks for."""
  # As a fraction of the digits the user wrote: 0.35 * 90 is 31.499.. in binary.
  return math.floor(Fraction(repr(float(ratio))) * total + Fraction(1, 2))


def expand(mask_xLxG, num_heads: int, window: int, xp=np):
  """Boolean group masks `[..., L, G]` to int32 windows `[..., L, H]` (head h is of group h // R)."""
  groups = mask_xLxG.shape[-1]
  full, local = xp.int32(FULL), xp.int32(window)
  return xp.repeat(xp.where(mask_xLxG, local, full), num_heads // groups, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMask:
  """Which key/value groups of a model are local.

  Attributes:
    local: bool `[L, G]`, read-only; True = sliding window, False = full attention.
  """

  local: np.ndarray

  def __post_init__(self):
    local = np.array(self.local, dtype=bool)
    if local.ndim != 2:
      raise ValueError(f"a head mask is [layers, groups], got shape {local.shape}")
    local.setflags(write=False)
    object.__setattr__(self, "local", local)

  @classmethod
  def full(cls, config: ModelConfig) -> "HeadMask":
    return cls(np.zeros((config.num_layers, config.num_groups), bool))

  @classmethod
  def all_local(cls, config: ModelConfig) -> "HeadMask":
    return cls(np.ones((config.num_layers, config.num_groups), bool))

  def __eq__(self, other) -> bool:
    return isinstance(other, HeadMask) and np.array_equal(self.local, other.local)

  def __hash__(self) -> int:
    return hash((self.local.shape, self.local.tobytes()))

  @property
  def ratio(self) -> float:
    """Share of groups that are local."""
    return self.num_local / self.local.size

  @property
  def num_local(self) -> int:
    return int(self.local.sum())

  def windows(self, window: int, num_heads: int) -> np.ndarray:
    """int32 `[L, H]`: `window` for the heads of local groups, `FULL` for the others."""
    return expand(self.local, num_heads, window)

  def jaccard(self, other: "HeadMask") -> float:
    """Jaccard distance of the two sets of local groups, in [0, 1]; 0 = the same set."""
    union = np.sum(self.local | other.local)
    return float(1 - np.sum(self.local & other.local) / union) if union else 0.0

  def turnover(self, other: "HeadMask") -> float:
    """Share of local groups exchanged between two ratios, normalised by the geometric mean of
    the two sizes: 1 - |A & B| / sqrt(|A| |B|) (paper, head turnover between ratios)."""
    size = math.sqrt(self.num_local * other.num_local)
    return float(1 - np.sum(self.local & other.local) / size) if size else 0.0

  def kv_bytes(self, config: ModelConfig, tokens: int, window: int, sinks: int = 0) -> int:
    """Bytes of the hybrid key/value cache (bf16): local groups keep `window + sinks` tokens."""
    per_token = config.kv_bytes(1) // config.total_groups
    kept = min(tokens, window + sinks)
    return per_token * (self.num_local * kept + (self.local.size - self.num_local) * tokens)

  def save(self, path: str | os.PathLike, config: ModelConfig, **facts) -> None:
    """Writes `bosch-mask/1` JSON, in one step (a reader never sees half a file).

    Args:
      path: the file to write.
      config: the model the mask belongs to.
      **facts: what else the file records; `model`, `window`, `sinks`, `target_ratio`, `method`,
        `seed` and `scores` by convention.
    """
    layers, groups = self.local.shape
    record = {
      "format": FORMAT,
      "fingerprint": config.fingerprint,
      "layers": layers,
      "groups": groups,
      "heads": config.num_heads,
      "ratio": self.ratio,
      **facts,
      "swa": self.local.astype(int).tolist(),
    }
    write_json(path, record)

  @classmethod
  def load(cls, path: str | os.PathLike, config: ModelConfig) -> tuple["HeadMask", dict]:
    """Reads a mask and checks that it belongs to `config`.

    Returns:
      The mask, and the whole record (`window`, `sinks`, `method` ...).

    Raises:
      InputError: no such file, not a mask, or a mask of another model.
    """
    path = pathlib.Path(path)
    try:
      record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
      raise InputError(
        "mask", path, f"cannot be read ({error.strerror}); give the mask.json of a run"
      ) from None
    except ValueError:
      raise InputError("mask", path, "is not JSON; give the mask.json of a run") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
      raise InputError("mask", path, f"is not a {FORMAT} file; give the mask.json of a run")
    if record.get("fingerprint") != config.fingerprint:
      raise InputError(
        "mask",
        path,
        f"was made for {record.get('model')} ({record.get('layers')} layers x {record.get('groups')} groups, "
        f"fingerprint {record.get('fingerprint')}), not for this model (fingerprint {config.fingerprint}); "
        "pass that model with --model",
      )
    try:
      local = np.array(record["swa"], dtype=int)
    except (KeyError, ValueError, TypeError):
      local = np.zeros(0, int)
    if local.shape != (config.num_layers, config.num_groups) or not np.isin(local, (0, 1)).all():
      raise InputError(
        "mask",
        path,
        f"'swa' must be {config.num_layers} rows of {config.num_groups} zeros and ones; use an unedited mask.json",
      )
    return cls(local.astype(bool)), record


def write_json(path: str | os.PathLike, record: object) -> None:
  """Writes JSON through a temporary file and a rename, so a crash leaves the old file or the new."""
  path = pathlib.Path(path)
  partial = path.with_name(path.name + ".partial")
  with open(partial, "w", encoding="utf-8") as file:
    file.write(json.dumps(record, indent=1) + "\n")
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)
