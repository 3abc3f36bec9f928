"""Every setting of `python run.py compare`: those of `select`, with lists in place of three of them."""

import dataclasses
import pathlib
import typing

import tyro

from bosch_jax.settings import SelectSettings
from models.config import ModelConfig
from models.errors import InputError, flag

MOST_SEEDS = 100
USUAL_RATIO = 0.75  # of the recovery runs, where it is among the ratios


def known_methods() -> tuple[str, ...]:
  """The names that `select --method` takes."""
  return typing.get_args(typing.get_type_hints(SelectSettings)["method"])


@dataclasses.dataclass(frozen=True)
class RecoveryOptions:
  """Training behind the comparison; no part of what the comparison is."""

  cpt: bool = False
  """Afterwards train the hybrid of every method by the recipe of `cpt`, from the first seed's masks, and
  draw the recovery curves."""
  cpt_ratio: float = 0.0
  """Which of the ratios; 0 = 0.75 where it is among them, else the largest."""
  cpt_updates: int = 120
  """Updates of every such run."""
  cpt_train: str = "all"
  """Parameters to train: all, attention, layers, or a regular expression on their names."""
  cpt_data: str = "python"
  """Text to train on (see `cpt --data`)."""

  def __post_init__(self):
    for field in dataclasses.fields(self)[1:]:
      if not self.cpt and (value := getattr(self, field.name)) != field.default:
        raise InputError(flag(field.name), value, "is for training; give --cpt as well")
    if self.cpt_updates < 1:
      raise InputError("--cpt-updates", self.cpt_updates, "must be positive; use 1 or more")


@dataclasses.dataclass(frozen=True)
class CompareSettings(SelectSettings):
  """Compare methods at several ratios, over several seeds: tables, plots and one report.

  Every method and seed is a run of `select` of its own, for all ratios, in a folder below `cells`;
  finished ones are not repeated. With --resume, --methods and --seeds may be others than before.
  """

  ratio: tyro.conf.Suppress[tyro.conf.Fixed[tuple[float, ...]]] = (0.5,)
  method: tyro.conf.Suppress[tyro.conf.Fixed[str]] = "bosch"
  seed: tyro.conf.Suppress[tyro.conf.Fixed[int]] = 1
  ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875)
  """Shares of key/value head groups that become local."""
  methods: tuple[str, ...] = ("all",)
  """all, or the methods to compare (see `select --method`)."""
  seeds: int = 3
  """Number of seeds; each has calibration and held-out prompts of its own, the same for all methods."""
  recovery: tyro.conf.OmitArgPrefixes[RecoveryOptions] = dataclasses.field(
    default_factory=RecoveryOptions
  )

  def __post_init__(self):
    known = known_methods()
    names = [name.lower() for text in self.methods for name in text.split(",") if name]
    for name in names:
      if name not in ("all", *known):
        raise InputError("--methods", name, f"is not known; use all, or some of {', '.join(known)}")
    if not names:
      raise InputError("--methods", "", "is empty; use all")
    chosen = tuple(name for name in known if name in names or "all" in names)
    object.__setattr__(self, "methods", chosen)
    object.__setattr__(self, "ratios", tuple(sorted(set(self.ratios))))
    if not self.ratios:
      raise InputError("--ratios", "", "is empty; give for example 0.5 0.75")
    for ratio in self.ratios:
      if not 0 < ratio < 1:
        raise InputError("--ratios", ratio, "must be between 0 and 1; use for example 0.5")
    if not 1 <= self.seeds <= MOST_SEEDS:
      raise InputError("--seeds", self.seeds, f"must be from 1 to {MOST_SEEDS}; use for example 3")
    if (ratio := self.recovery.cpt_ratio) and ratio not in self.ratios:
      known = " ".join(f"{ratio:g}" for ratio in self.ratios)
      raise InputError("--cpt-ratio", ratio, f"is not compared; use one of {known}")
    super().__post_init__()

  def check_model(self, config: ModelConfig) -> None:
    """What can only be checked once the model is known, for every cell.

    Raises:
      InputError: see `SelectSettings.check_model`.
    """
    for method in self.methods:
      self.cell(method, 1).check_model(config)

  @property
  def folder(self) -> pathlib.Path:
    """Where the comparison is written; the same for any methods and seeds, which may grow."""
    if self.out is not None:
      return pathlib.Path(self.out)
    cell = self.cell("bosch", 1, out=None)
    model, _, rest = cell.folder.name.rpartition("-bosch-")
    return pathlib.Path("runs") / f"compare-{model}-{rest.replace('-s1', '', 1)}"

  def cell(self, method: str, seed: int, **changes) -> SelectSettings:
    """The settings of one run of `select`; `changes` as in `dataclasses.replace`."""
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(SelectSettings)}
    values |= {"ratio": self.ratios, "method": method, "seed": seed}
    if "out" not in changes:
      changes["out"] = self.folder / "cells" / f"{method}-s{seed}"
    return SelectSettings(**(values | {"resume": False, "force": False} | changes))

  @property
  def recovery_ratio(self) -> float:
    """Share of local groups of the masks that are trained."""
    return self.recovery.cpt_ratio or (
      USUAL_RATIO if USUAL_RATIO in self.ratios else max(self.ratios)
    )

  @property
  def cells(self) -> list[tuple[str, int]]:
    """Method and seed of every run, seed by seed."""
    return [(method, seed) for seed in range(1, self.seeds + 1) for method in self.methods]
