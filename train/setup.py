"""From settings to everything a run needs: mesh, model, state, data, step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import Mesh

from models import registry
from models.config import ModelConfig
from models.digest import weights_digest
from models.errors import InputError
from models.hybridize import hybridize, static_windows
from models.transformer import Transformer
from models.windows import HeadMask
from train import layers, partition, subset
from train.data.packing import PackedRows
from train.data.pipeline import batches
from train.data.retrieval import RetrievalRows
from train.data.tokens import prepare
from train.evaluate import HeldOut
from train.optimizer import optimizer, schedule
from train.settings import CptSettings
from train.step import Plan, State, cast, compiled_step, make_model


class Choice(NamedTuple):
  """Which heads are local, and how far they see."""

  mask: HeadMask
  window: int
  sinks: int


def choose_mask(settings: CptSettings, config: ModelConfig) -> Choice:
  """The mask a run trains.

  Raises:
    InputError: a file that is no mask of this model, or local heads without a window.
  """
  if settings.mask == "full":
    return Choice(HeadMask.full(config), settings.window or config.context, 0)
  if settings.mask == "local":
    if not settings.window:
      raise InputError(
        "--window", settings.window, "is needed with --mask local; use for example 32"
      )
    return Choice(HeadMask.all_local(config), settings.window, 0)
  mask, record = HeadMask.load(settings.mask, config)
  window = settings.window or record.get("window")
  if not isinstance(window, int) or window < 1:
    raise InputError("--window", window, "is not in the mask file; give the window it was made for")
  return Choice(mask, window, int(record.get("sinks") or 0))


@dataclasses.dataclass
class Run:
  """Everything a run needs.

  Attributes:
    settings, config, choice: what is trained.
    loaded: the model as it came; its parameters are on the host, groups in their own order.
    order: int `[L, G]`, how groups are sorted for training (see `models.hybridize`).
    mesh: the devices.
    plan: what is compiled in.
    state: master weights, moments, step; with an array for every layer where `train.layers` says.
    layout: `layers.layout` of the state as checkpoints hold it.
    frozen: `{path: array}` that is not trained.
    reference: the teacher's parameters, or None.
    step: (state, batch) -> (state, metrics), compiled.
    held_out: evaluates.
    identity: ties checkpoints to this run.
    windows, full_windows: static windows as trained, and of full attention.
  """

  settings: CptSettings
  config: ModelConfig
  choice: Choice
  loaded: registry.Loaded
  order: np.ndarray
  mesh: Mesh
  plan: Plan
  state: State
  layout: State
  frozen: dict
  reference: dict | None
  step: Callable
  held_out: HeldOut
  identity: dict
  windows: tuple
  full_windows: tuple
  _text: PackedRows
  _retrieval: RetrievalRows

  @property
  def saved(self) -> State:
    """The state as checkpoints hold it."""
    return layers.stacked(self.state, self.layout)

  @saved.setter
  def saved(self, state: State) -> None:
    apart = self.plan.model.unroll and self.mesh.size == 1
    self.state = layers.split(state) if apart else state

  @property
  def dtype(self):
    return jnp.dtype(self.settings.dtype)

  def batches(self, start: int):
    """This process's share of the data from batch `start` on."""
    s, index, count = self.settings, jax.process_index(), jax.process_count()
    return batches(
      self._text, self._retrieval, share=s.retrieval, rows=s.rows, seed=s.seed, start=start,
      process=index, processes=count,
    )  # fmt: skip

  def place(self, rows):
    """This process's rows of a batch on the devices, as arrays `[accumulate, batch, T]`."""
    s, target = self.settings, partition.batch_sharding(self.mesh)

    def one(x):
      x = np.asarray(x).reshape(s.accumulate, -1, *x.shape[1:])
      shape = (s.accumulate, s.batch, *x.shape[2:])
      return jax.make_array_from_process_local_data(target, x, shape)

    return jax.tree.map(one, rows)

  def evaluation_model(self, full: bool = False) -> Transformer:
    """The hybrid, or the model with full attention, for rows of any layout."""
    windows = self.full_windows if full else self.windows
    return make_model(
      self.config, windows, mesh=self.mesh, packed=False, sinks=self.choice.sinks, unroll=False
    )

  def evaluate(self, full: bool = False) -> dict:
    """Held-out losses of the current weights."""
    s = self.settings
    return self.held_out(
      self.evaluation_model(full), self.state.trained, self.frozen, s.chunk, self.dtype
    )


def set_up(settings: CptSettings, make_retrieval: Callable, notice: Callable[[str], None]) -> Run:
  """Loads, tokenises, places and compiles nothing yet.

  Args:
    settings: of the run.
    make_retrieval: (tokenizer, context, window, seed) -> `train.data.retrieval.Retrieval`.
    notice: told what takes a while.

  Raises:
    InputError: whatever a user can put right.
  """
  config = registry.load_config(settings.model)
  settings.check_model(config)
  choice = choose_mask(settings, config)
  mesh = partition.make_mesh(**dataclasses.asdict(settings.mesh))
  full_windows = static_windows((config.num_groups,) * config.num_layers, 1, config)
  groups = tuple(int(n) for n in (~choice.mask.local).sum(1))
  windows = static_windows(groups, choice.window, config)
  if settings.batch % jax.process_count():
    raise InputError(
      "--batch", settings.batch, f"must be a multiple of the {jax.process_count()} processes"
    )
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    loaded = registry.load(settings.model, jnp.float32)
    hybrid = hybridize(loaded.params, choice.mask, config)
  shapes = {
    path: leaf.shape for path, leaf in traverse_util.flatten_dict(loaded.params, sep="/").items()
  }
  partition.check(mesh, shapes, settings.batch, config, windows)
  trained, frozen = subset.split(hybrid.params, settings.train)

  # A retrieval prompt needs room outside the window, whatever the mask.
  window = min(choice.window, max(1, settings.context // 8)) if settings.mask == "full" else (
    choice.window
  )  # fmt: skip
  retrieval = make_retrieval(loaded.tokenizer, settings.context, window, settings.seed)
  corpus = prepare(settings.data, loaded.tokenizer, settings.cache, notice)
  text, held_text = (PackedRows(corpus, settings.sequence, side) for side in (False, True))
  if not len(text) or not len(held_text):
    raise InputError("--data", settings.data, "holds too little text; give more")
  held_out = HeldOut(
    held_text, retrieval, settings.eval_rows, settings.eval_contexts, settings.batch,
    functools.partial(jax.tree.map, functools.partial(put, mesh)),
  )  # fmt: skip

  dtype = jnp.dtype(settings.dtype)
  transform = optimizer(settings)
  teacher = None
  if settings.distill:
    teacher = make_model(config, full_windows, mesh=mesh, sinks=choice.sinks)
  plan = Plan(
    make_model(
      config, windows, mesh=mesh, remat=settings.remat, sinks=choice.sinks
    ),
    teacher, transform, schedule(settings), settings.distill, settings.chunk, dtype,
  )  # fmt: skip
  reference = place_params(mesh, cast(hybrid.params, dtype)) if settings.distill else None
  state = fresh_state(mesh, transform, trained)
  frozen = place_params(mesh, cast(frozen, dtype), flat=True)

  compiled = compiled_step(plan, mesh.devices.flat[0].platform)
  run = Run(
    settings=settings, config=config, choice=choice, loaded=loaded, order=hybrid.order, mesh=mesh,
    plan=plan, state=state, layout=layers.layout(state), frozen=frozen, reference=reference,
    step=lambda state, batch: compiled(state, frozen, reference, batch),
    held_out=held_out,
    identity={
      "model": dataclasses.asdict(config), "weights": weights_digest(loaded.params),
      "mask": choice.mask.local.astype(int).tolist(), "window": choice.window,
      "sinks": choice.sinks, "data": corpus.digest, "settings": settings.identity(),
    },
    windows=windows, full_windows=full_windows,
    _text=text, _retrieval=RetrievalRows(retrieval, settings.sequence, settings.retrieval_weight),
  )  # fmt: skip
  run.saved = state
  return run


def put(mesh: Mesh, x):
  """A host array `[1, rows, ...]` that every process has, on the devices."""
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, partition.batch_sharding(mesh), lambda i: x[i])


def place_params(mesh: Mesh, params: dict, flat: bool = False) -> dict:
  """Parameters on the mesh, as copies: a step may give away the buffers of its state."""
  paths = params if flat else traverse_util.flatten_dict(params, sep="/")
  target = partition.sharding(mesh)
  placed = {}
  for path, leaf in paths.items():
    host = np.asarray(leaf)
    placed[path] = jax.make_array_from_callback(
      host.shape, target(path, host.shape), lambda i, host=host: np.array(host[i])
    )
  return placed if flat else traverse_util.unflatten_dict(placed, sep="/")


def fresh_state(mesh: Mesh, transform, trained: dict) -> State:
  """Before the first update."""
  trained = place_params(mesh, trained, flat=True)
  shardings = state_shardings(mesh, transform, trained)
  moments = jax.jit(transform.init, out_shardings=shardings.moments)(trained)
  zero = jax.make_array_from_callback((), shardings.step, lambda i: np.zeros((), np.int32))
  return State(trained, moments, zero)


def state_shardings(mesh: Mesh, transform, trained: dict) -> State:
  """Moments lie where their parameters lie; `trained` may be shapes."""
  target, everywhere = partition.sharding(mesh), partition.replicated(mesh)
  own = {path: target(path, leaf.shape) for path, leaf in trained.items()}
  moments = optax.tree.map_params(
    transform,
    lambda _, sharding: sharding,
    jax.eval_shape(transform.init, trained),
    own,
    transform_non_params=lambda _: everywhere,
  )
  return State(own, moments, everywhere)
