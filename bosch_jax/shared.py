"""What runs of `select` in one process have in common, made once."""

import dataclasses

from jax.sharding import Mesh

from bosch_jax.evaluator import Evaluator
from bosch_jax.prompts import PromptSet
from bosch_jax.settings import SelectSettings
from models import registry
from models.registry import Loaded


@dataclasses.dataclass
class Shared:
  """Handed to `select` by a caller with several runs. Holds one model and one evaluator: what the
  newest run used, for the next one if it asks for the same.

  Attributes:
    loaded: the model, its parameters where they were last used; None = none yet.
    held_out: scores held-out prompts, and knows what it has scored: full attention and all local
      are the same for every method.
  """

  loaded: Loaded | None = None
  held_out: Evaluator | None = None
  _loaded_for: tuple = ()
  _held_out_for: tuple = ()

  def load(self, settings: SelectSettings) -> Loaded:
    """The settings' model.

    Raises:
      InputError: see `registry.load`.
    """
    if (wanted := (settings.model, settings.dtype)) != self._loaded_for:
      self.loaded = self.held_out = None  # before another model takes memory
      self._held_out_for = ()
      self.loaded = registry.load(settings.model, settings.dtype)
      self._loaded_for = wanted
    return self.loaded

  def evaluator(self, prompts: PromptSet, settings: SelectSettings, mesh: Mesh | None) -> Evaluator:
    """Of held-out prompts, on `loaded`; only the newest is kept, however many seeds there are."""
    if (wanted := (prompts.digest, settings.window, settings.sinks, mesh)) != self._held_out_for:
      self.held_out = Evaluator(
        self.loaded.config,
        self.loaded.params,
        prompts,
        settings.window,
        sinks=settings.sinks,
        mesh=mesh,
      )
      self._held_out_for = wanted
    return self.held_out
