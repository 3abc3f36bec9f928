"""Every setting of `python run.py select`, and what is checked before any work begins."""

import dataclasses
import hashlib
import math
import pathlib
from typing import Annotated, Literal

import tyro

from bosch_jax import rankings, runs, solvers
from bosch_jax.device_options import DeviceOptions
from models.config import ModelConfig
from models.errors import InputError, flag
from models.windows import num_local_for

MOST_CONTEXTS = 10_000
LEAST_STEPS = 10  # with fewer, gates say little


@dataclasses.dataclass(frozen=True)
class SearchOptions:
  """Figures of the search that the paper leaves open."""

  recipe: Literal["default", "probes", "paper"] = "default"
  """The three stages with gates trained by gradient, with scores of masks alone, or literally as the
  paper states them."""
  gate_share: float = 0.9
  """Share of the budget that trains the gates (recipe default)."""
  gate_contexts: int = 1
  """Contexts of one gradient step; more where the budget pays for more than 160 such steps."""
  gate_rate: float = 0.2
  """Learning rate of the gates' logits."""
  gate_warm: float = 1.0
  """Temperature of the gates at the beginning."""
  gate_cold: float = 0.2
  """And at the end, when they are nearly binary."""
  gate_first: float = 0.5
  """Share of the local groups that the gates begin with."""
  gate_decay: float = 0.1
  """Share of the learning rate that is left at the end."""
  gate_pool: int = 64
  """Contexts that gates are trained on besides the calibration contexts."""
  confidence: float = 1.5
  """Paired standard errors that an exchange must win by (recipe default)."""
  solver: Literal["swap", "random", "nomad", "nevergrad"] = "swap"
  """What proposes masks in stage 3; the last two are optional packages."""
  alpha: float = 1.0
  """Weight of the penalty for missing the ratio."""
  layer_budget: int = 16
  """Masks per layer in the paper's stage 1: all choices where they are fewer, else a swap search."""
  screen: float = 0.25
  """Share of the calibration contexts that candidates are screened on (stages 1 and 3)."""
  tolerance: float = 0.02
  """Stage 1 leaves a group full that alone costs more than this share of the full-to-local gap."""
  assign_share: float = 0.5
  """Share of the contexts that stage 2 measures its moves on."""
  assign_batch: int = 16
  """Most groups stage 2 moves at once."""
  assign_budget: float = 0.5
  """Most of the budget left after stage 1 that stage 2 may spend, as a share."""
  cap: float = 0.01
  """Drop that the groups of one such move may be predicted to cost together."""
  slack: float = 0.001
  """Drop per moved group that stage 2 always accepts, as a share of the full-to-local gap."""
  group_size: int = 48
  """Most bits that stage 3 optimises jointly."""
  swap_batch: int = 4
  """Swaps a solver proposes at once."""
  patience: int = 4
  """Swaps in a row without improvement after which stage 3 leaves a group of layers."""
  exchange_patience: int = 48
  """The same for its closing exchanges between layers."""

  def __post_init__(self):
    for field in (
      "gate_share",
      "gate_first",
      "gate_decay",
      "screen",
      "assign_share",
      "assign_budget",
    ):
      if not 0 < getattr(self, field) <= 1:
        raise InputError(
          flag(field),
          getattr(self, field),
          "must be a share above 0, up to 1; use for example 0.25",
        )
    if not 0 <= self.gate_pool <= MOST_CONTEXTS:
      raise InputError(
        "--gate-pool", self.gate_pool, f"must be from 0 to {MOST_CONTEXTS}; use for example 64"
      )
    for field in (
      "gate_contexts",
      "layer_budget",
      "assign_batch",
      "group_size",
      "swap_batch",
      "patience",
      "exchange_patience",
    ):
      if getattr(self, field) < 1:
        raise InputError(
          flag(field),
          getattr(self, field),
          "must be a positive integer; use 1 or more",
        )
    for field in ("gate_rate", "gate_warm", "gate_cold"):
      if not 0 < getattr(self, field) < math.inf:
        raise InputError(flag(field), getattr(self, field), "must be above 0; use for example 0.2")
    for field in ("alpha", "confidence", "tolerance", "slack", "cap"):
      if getattr(self, field) < 0:
        raise InputError(flag(field), getattr(self, field), "must not be negative; use 0 or more")


@dataclasses.dataclass(frozen=True)
class SelectSettings:
  """Find which attention heads can become local: a head mask for a model, by BOSCH.

  Without any flag this runs on a real 135M model on a CPU, in minutes.
  """

  model: str = "smollm2-135m"
  """Model: smollm2-135m (fetched once, 93 MB), a .gguf file, a Hugging Face folder, or an id such as
  Qwen/Qwen3-1.7B."""
  ratio: tuple[float, ...] = (0.5,)
  """Share of key/value head groups that become local, from 0 to 1; several give a mask each."""
  window: int = 32
  """Tokens a local head sees, itself included."""
  context: int = 256
  """Tokens of one calibration prompt with its answer."""
  also: tuple[str, ...] = ()
  """Further calibration lengths as context:window, for example 512:64; the contexts are shared out evenly."""
  samples: int = 8
  """Calibration contexts, each with several questions."""
  budget: int = 30
  """About what the search may spend for each ratio, in full forward passes over the calibration set."""
  method: Literal[("bosch", *rankings.METHODS)] = "bosch"
  """How the mask is chosen: by the search, by a rival's ranking, or by a part of the search (b-...)."""
  score: Literal["nll", "accuracy"] = "nll"
  """What candidates are compared by: answer log-likelihood (smooth) or exact match (the paper's)."""
  seed: int = 1
  """Seed of the prompts and of the search; the same seed gives the same mask."""
  out: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
  """Folder of the run. Default: runs/ and a name made of the settings."""
  resume: bool = False
  """Go on with the stopped run in --out."""
  force: bool = False
  """Start over in --out, discarding what is there."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Number format of the parameters and activations; scores are float32 either way."""
  sinks: int = 0
  """First tokens that local heads see as well."""
  task: Literal["multikey", "single"] = "multikey"
  """Needles: four keys and four questions per context, or one."""
  haystack: Literal["noise", "essay"] = "noise"
  """Text around the needles: RULER's repeated sentences, or documentation text."""
  held_out: int = 16
  """Contexts of the held-out set that the final table is measured on."""
  search: tyro.conf.OmitArgPrefixes[SearchOptions] = dataclasses.field(
    default_factory=SearchOptions
  )
  devices: tyro.conf.OmitArgPrefixes[DeviceOptions] = dataclasses.field(
    default_factory=DeviceOptions
  )

  def __post_init__(self):
    if isinstance(self.ratio, int | float):  # a single one, from Python
      object.__setattr__(self, "ratio", (self.ratio,))
    for field in ("window", "context", "samples", "budget", "seed", "held_out"):
      if getattr(self, field) < 1:
        raise InputError(
          flag(field), getattr(self, field), "must be a positive integer; use 1 or more"
        )
    for field in ("samples", "held_out"):
      if getattr(self, field) > MOST_CONTEXTS:
        raise InputError(
          flag(field), getattr(self, field), f"is more than fits; use at most {MOST_CONTEXTS}"
        )
    for ratio in self.ratio:
      if not 0 <= ratio <= 1:
        raise InputError("--ratio", ratio, "must be a share from 0 to 1; use for example 0.5")
    if not self.ratio or len(set(self.ratio)) < len(self.ratio):
      raise InputError(
        "--ratio",
        " ".join(f"{ratio:g}" for ratio in self.ratio),
        "must be one share or several different ones; use for example 0.5 0.75",
      )
    if self.window >= self.context:
      raise InputError(
        "--window",
        self.window,
        f"must be smaller than --context {self.context}, or every head is full; use for example {max(1, self.context // 8)}",
      )
    if self.sinks < 0 or self.sinks + self.window >= self.context:
      raise InputError(
        "--sinks",
        self.sinks,
        f"must be 0 or more, and less than --context minus --window ({self.context - self.window})",
      )
    self._check_lengths()
    if self.resume and self.force:
      raise InputError("--force and --resume", "", "contradict each other; give one of them")

  def _check_lengths(self) -> None:
    for text in self.also:
      context, _, window = text.partition(":")
      if not (context.isdecimal() and window.isdecimal() and 0 < int(window) < int(context)):
        raise InputError(
          "--also", text, "must be context:window, the window smaller; use for example 512:64"
        )
    if len(set(self.lengths)) <= len(self.also):
      raise InputError(
        "--also", " ".join(self.also), "must be lengths other than --context, each once"
      )
    if self.samples < len(self.lengths):
      raise InputError(
        "--samples", self.samples, f"must be {len(self.lengths)} or more: one for each length"
      )
    if self.also and self.method not in rankings.BY_SCORE:
      raise InputError(
        "--also",
        " ".join(self.also),
        f"cannot be used by --method {self.method}, which reads attention of one length; use bosch or nll",
      )

  def check_model(self, config: ModelConfig) -> None:
    """What can only be checked once the model is known.

    Raises:
      InputError: a solver that is not installed, a context beyond the model's, a ratio that no number
        of groups reaches, or a budget below what the anchors and stage 1 cost.
    """
    solvers.require(self.search.solver)
    for given, (context, _) in zip(
      ("--context", *["--also"] * len(self.also)), self.lengths, strict=True
    ):
      if context > config.context:
        raise InputError(
          given, context, f"is beyond this model's {config.context} tokens; use at most that"
        )
    for ratio in self.ratio:
      local = num_local_for(ratio, config.total_groups)
      if (ratio > 0 and local == 0) or (ratio < 1 and local == config.total_groups):
        raise InputError(
          "--ratio",
          ratio,
          f"cannot be reached: this model has {config.total_groups} head groups, so the nearest is {local / config.total_groups:g}; "
          f"use a multiple of 1/{config.total_groups}",
        )
      if 0 < local < config.total_groups and self.budget < (
        least := self.least_budget(config, ratio)
      ):
        raise InputError(
          "--budget",
          self.budget,
          f"is less than {self.method} takes on this model; use {least} or more",
        )

  def least_budget(self, config: ModelConfig, ratio: float) -> int:
    """Budget for a ratio that pays for two anchors and for what the method cannot do without."""
    L, G = config.num_layers, config.num_groups
    if self.method == "bosch":
      return 2 + math.ceil(self._stage_one(L, G, ratio))
    stage_one = self._stage_one(L, 1 if self.method == "b-layer" else G, ratio)
    least = 2 + rankings.least_passes(self.method, L, G, self.samples, stage_one)
    # One ranking serves them all, with the budgets of all.
    served = 1 if self.method in rankings.BY_RATIO else sum(0 < r < 1 for r in self.ratio)
    return math.ceil(least / served)

  def _stage_one(self, L: int, G: int, ratio: float) -> float:
    """Passes for a stage 1: some steps of the gates, or a cascade, in which layer l from the top
    costs l / L."""
    if self.search.recipe == "default":
      return LEAST_STEPS * self._step_cost / self.search.gate_share
    if self.search.recipe == "paper":
      masks = min(math.comb(G, math.ceil(ratio * G)), self.search.layer_budget)
    else:
      masks = (G + 1) * self.search.screen
    return masks * (L + 1) / 2

  @property
  def _step_cost(self) -> float:
    """Passes for one step of the gates: forward 1, backward 2."""
    return 3 * self.search.gate_contexts / self.samples

  @property
  def pool(self) -> int:
    """Contexts that only gates are trained on: as many as asked for, and no more than steps use."""
    if self.search.recipe != "default":
      return 0
    steps = self.search.gate_share * self.budget / self._step_cost
    return min(self.search.gate_pool, math.ceil(steps) * self.search.gate_contexts)

  @property
  def lengths(self) -> list[tuple[int, int]]:
    """Context and window of every calibration length, the main one first."""
    further = (tuple(map(int, text.split(":"))) for text in self.also)
    return [(self.context, self.window), *further]

  @property
  def folder(self) -> pathlib.Path:
    """Where the run is written."""
    if self.out is not None:
      return pathlib.Path(self.out)
    model = (
      pathlib.Path(self.model.removesuffix(".gguf")).absolute().name if self.model else "model"
    )
    ratios = "+".join(f"{ratio:g}" for ratio in self.ratio)
    name = f"{model}-{self.method}-r{ratios}-w{self.window}-c{self.context}-s{self.seed}"
    shown = ("model", "method", "ratio", "window", "context", "seed", *runs.NOT_RECORDED)
    rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in shown}
    if rest != {
      f.name: getattr(SelectSettings(), f.name)
      for f in dataclasses.fields(self)
      if f.name not in shown
    }:
      name += (
        "-" + hashlib.sha256(repr(rest).encode()).hexdigest()[:6]
      )  # other settings, another folder
    return pathlib.Path("runs") / name

  @property
  def num_questions(self) -> int:
    return 4 if self.task == "multikey" else 1
