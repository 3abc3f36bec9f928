"""One training step as a pure function: loss, gradient, update."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from models import compiler
from models.attention import attention, sharded_attention
from models.config import ModelConfig
from models.transformer import RMSNorm, Transformer
from train.data.packing import Row
from train.loss import Head, Sums, chunked_loss
from train.partition import ROWS
from train.subset import join


class State(NamedTuple):
  """What a step changes.

  Attributes:
    trained: `{path: float32 array}`, the master weights.
    moments: the optimizer's state.
    step: int32, updates so far.
  """

  trained: dict
  moments: optax.OptState
  step: jax.Array


class Plan(NamedTuple):
  """What is compiled into a step.

  Attributes:
    model: with static windows, as it is trained.
    teacher: the full-attention model, or None without distillation.
    optimizer: see `train.optimizer`.
    schedule: learning rate by step, for the record.
    distill: weight of the KL to the teacher.
    chunk: tokens whose logits exist at once.
    dtype: of the computation.
  """

  model: Transformer
  teacher: Transformer | None
  optimizer: optax.GradientTransformation
  schedule: Callable
  distill: float = 0.0
  chunk: int = 1024
  dtype: jnp.dtype = jnp.float32


def make_model(
  config: ModelConfig,
  windows,
  *,
  mesh: Mesh | None = None,
  remat="none",
  packed=True,
  sinks=0,
  backend: str | None = None,
  unroll: bool | None = None,
) -> Transformer:
  """The decoder with static windows, its attention split over a mesh of more than one device.

  Args:
    windows: L tuples of H ints (`models.hybridize.static_windows`).
    mesh: of `partition.make_mesh`.
    remat: a key of `models.transformer.REMAT`.
    packed: rows are laid out as `Row` says (training), or any way (evaluation).
    sinks: first keys that every head sees.
    backend: of attention; None = the best for the platform.
    unroll: see `Transformer`; None = on a CPU.
  """
  unroll = jax.default_backend() == "cpu" if unroll is None else unroll
  op = attention
  if mesh is not None and mesh.size > 1:
    heads = "tensor" if mesh.shape["tensor"] > 1 else None
    op = sharded_attention(mesh, batch=ROWS, heads=heads)
  return Transformer(config, sinks, backend, windows, packed, op, remat, unroll)


def normed_hidden(model: Transformer, params: dict, batch: Row) -> jax.Array:
  """Hidden states that the output head reads: `[B, T, D]`."""
  hidden = model.apply(
    {"params": params}, batch.tokens, None, batch.positions, batch.segments, method=model.hidden
  )
  return RMSNorm(model.config.norm_eps).apply({"params": params["final_norm"]}, hidden)


def head(config: ModelConfig, params: dict) -> Head:
  """The output head in a tree of parameters."""
  if config.tied_head:
    return Head(params["embed"]["embedding"], True)
  return Head(params["head"]["kernel"], False)


def cast(params: dict, dtype) -> dict:
  return jax.tree.map(lambda p: p.astype(dtype), params)


def batch_loss(plan: Plan, trained: dict, frozen: dict, reference: dict | None, batch: Row) -> Sums:
  """Weighted sums over one micro-batch (see `train.loss`).

  Args:
    trained, frozen: `{path: array}`, together the model.
    reference: tree of the teacher's parameters, in the dtype of the computation.
  """
  config = plan.model.config
  params = join(cast(trained, plan.dtype), cast(frozen, plan.dtype))
  taught = None
  if plan.teacher is not None:
    taught = jax.lax.stop_gradient(normed_hidden(plan.teacher, reference, batch))
    taught = (taught, head(config, reference))
  x_BxTxD = normed_hidden(plan.model, params, batch)
  return chunked_loss(
    x_BxTxD,
    head(config, params),
    batch.targets,
    batch.weights,
    taught,
    plan.distill,
    plan.chunk,
  )


def loss_and_gradient(plan: Plan, trained: dict, frozen: dict, reference: dict | None, batch: Row):
  """Means over all weighted tokens of a batch `[accumulate, rows, T]`, and the gradient of the loss.

  Micro-batches are added up with their weights, so accumulating changes nothing but the memory.
  """
  # Scaled here, and not what comes out, the gradient of the output head is not gone over again.
  batch = batch._replace(weights=batch.weights / jnp.maximum(batch.weights.sum(), 1.0))

  def loss(trained, micro):
    means = batch_loss(plan, trained, frozen, reference, micro)
    return means.loss, means

  def one(trained, micro):
    (_, means), gradient = jax.value_and_grad(loss, has_aux=True)(trained, micro)
    return means, gradient

  if batch.tokens.shape[0] == 1:
    return one(trained, jax.tree.map(lambda x: x[0], batch))

  def add(carry, micro):
    return jax.tree.map(jnp.add, carry, one(trained, micro)), None

  zero = jnp.zeros((), jnp.float32)
  start = (Sums(zero, zero, zero), jax.tree.map(jnp.zeros_like, trained))
  return jax.lax.scan(add, start, batch)[0]


def train_step(plan: Plan, state: State, frozen: dict, reference: dict | None, batch: Row):
  """One update.

  Returns:
    The new state, and metrics: loss, nll, kl (nats per weighted token), grad_norm (before
    clipping), lr.
  """
  means, gradient = loss_and_gradient(plan, state.trained, frozen, reference, batch)
  updates, moments = plan.optimizer.update(gradient, state.moments, state.trained)
  metrics = {
    **means._asdict(),
    "grad_norm": optax.tree.norm(gradient),
    "lr": plan.schedule(state.step),
  }
  return State(optax.apply_updates(state.trained, updates), moments, state.step + 1), metrics


def compiled_step(plan: Plan, platform: str) -> Callable:
  """`train_step` of a plan, jitted for 'cpu', 'gpu' or 'tpu'; the state's buffers are given away."""
  step = functools.partial(train_step, plan)
  return jax.jit(step, donate_argnums=0, compiler_options=compiler.options(platform))
