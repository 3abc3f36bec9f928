"""The compiled part of the evaluator: pairs of a mask and a context in, scores out.

P pairs are computed at once. Each has windows of its own, so candidates fold into the batch axis,
and the first layer is data: one trace serves every mask and every prefix. Over a mesh the pairs are
spread over the devices; the parameters lie on all of them, and stored hidden states are split
along their tokens (an all-to-all brings those of a pair together where the pair is computed).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bosch_jax.device_options import AXIS
from bosch_jax.prompts import PromptSet
from models import compiler
from models import windows as windows_lib
from models.relaxed import relaxed_hidden
from models.transformer import Transformer, answer_logits, embed, run_layers


class Batch(NamedTuple):
  """The arrays of B packed prompts (see `PromptSet`), as they enter compiled functions."""

  tokens_BxT: jax.Array
  positions_BxT: jax.Array
  segments_BxT: jax.Array
  answer_BxQxA: jax.Array
  target_BxQxA: jax.Array
  valid_BxQxA: jax.Array

  @classmethod
  def of(cls, prompts: PromptSet, rows: Sequence[int] | None = None) -> "Batch":
    """The prompts `rows` (None = all), on the host."""
    rows = slice(None) if rows is None else np.asarray(rows)
    return cls(*(getattr(prompts, name)[rows] for name in cls._fields))


def answer_scores(model, params, x_BxTxD, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Teacher-forced scores of the answers.

  Args:
    x_BxTxD: hidden states after the last layer.
    batch: the prompts they belong to.

  Returns:
    nll: float32 `[B, Q]`, mean negative log-likelihood (nats) over the answer's tokens.
    exact: bool `[B, Q]`, every answer token is the most likely one (which is when greedy
      decoding would produce the answer).
  """
  B, Q, A = batch.target_BxQxA.shape
  logits_BxQxAxV = answer_logits(model, params, x_BxTxD, batch.answer_BxQxA.reshape(B, Q * A))
  logits_BxQxAxV = logits_BxQxAxV.reshape(B, Q, A, -1)
  target_BxQxA, valid_BxQxA = batch.target_BxQxA, batch.valid_BxQxA
  picked = jnp.take_along_axis(logits_BxQxAxV, target_BxQxA[..., None], axis=-1)[..., 0]
  nll_BxQxA = jnp.where(valid_BxQxA, jax.nn.logsumexp(logits_BxQxAxV, -1) - picked, 0.0)
  hit_BxQxA = (jnp.argmax(logits_BxQxAxV, -1) == target_BxQxA) | ~valid_BxQxA
  return nll_BxQxA.sum(-1) / valid_BxQxA.sum(-1).astype(jnp.float32), hit_BxQxA.all(-1)


def advance(model: Transformer, params, x_PxTxD, batch: Batch, masks_PxLxG, window, start, stop):
  """Hidden states `[P, T, D]` of P pairs at the input of layer `stop`.

  Args:
    model: compiled in.
    x_PxTxD: at the input of layer `start`.
    batch: the context of each pair.
    masks_PxLxG: bool, the mask of each pair, True = local.
    window, start, stop: int32 scalars.
  """
  windows_PxLxH = windows_lib.expand(masks_PxLxG, model.config.num_heads, window, jnp)
  return run_layers(
    model, params, x_PxTxD, windows_PxLxH.swapaxes(0, 1),
    batch.positions_BxT, batch.segments_BxT, start, stop,
  )  # fmt: skip


def score(model: Transformer, params, x_PxTxD, batch: Batch, masks_PxLxG, window, start):
  """`answer_scores` of P pairs from their hidden states at the input of layer `start`."""
  stop = jnp.int32(model.config.num_layers)
  x_PxTxD = advance(model, params, x_PxTxD, batch, masks_PxLxG, window, start, stop)
  return answer_scores(model, params, x_PxTxD, batch)


def relax(model: Transformer, params, batch: Batch, share_PxLxG, window):
  """Losses of P contexts under relaxed masks, and how they change with the shares.

  Args:
    share_PxLxG: float32 in [0, 1], see `models.relaxed`.
    window: int32 scalar.

  Returns:
    float32: mean answer NLL `[P]` (nats per token), its gradient `[P, L, G]`.
  """

  def loss(share_PxLxG):
    x_PxTxD = relaxed_hidden(
      model, params, embed(params, batch.tokens_BxT), share_PxLxG, window,
      batch.positions_BxT, batch.segments_BxT,
    )  # fmt: skip
    loss_P = answer_scores(model, params, x_PxTxD, batch)[0].mean(1)
    return loss_P.sum(), loss_P

  gradient_PxLxG, loss_P = jax.grad(loss, has_aux=True)(share_PxLxG)
  return loss_P, gradient_PxLxG


class Compiled(NamedTuple):
  """The functions above without `model`, compiled; hidden states go in and out as a tuple of
  `[T, D]`, one for each pair."""

  embed: object
  advance: object
  score: object
  relax: object


@functools.cache
def compiled(model: Transformer, mesh: Mesh | None) -> Compiled:
  """One set per model and mesh, whichever evaluator asks."""
  platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  jit = functools.partial(jax.jit, compiler_options=compiler.options(platform))
  if mesh is None:
    return Compiled(
      jit(embed),
      jit(lambda params, xs, *rest: tuple(advance(model, params, jnp.stack(xs), *rest))),
      jit(lambda params, xs, *rest: score(model, params, jnp.stack(xs), *rest)),
      jit(functools.partial(relax, model)),
    )
  whole, split = PartitionSpec(), PartitionSpec(AXIS)

  def gather(xs):
    return jax.lax.all_to_all(jnp.stack(xs), AXIS, split_axis=0, concat_axis=1, tiled=True)

  def advance_shard(params, xs, *rest):
    x_PxTxD = advance(model, params, gather(xs), *rest)
    return tuple(jax.lax.all_to_all(x_PxTxD, AXIS, split_axis=1, concat_axis=0, tiled=True))

  def score_shard(params, xs, *rest):
    scores = score(model, params, gather(xs), *rest)
    return jax.lax.all_gather(scores, AXIS, axis=0, tiled=True)

  def relax_shard(params, *rest):
    return jax.lax.all_gather(relax(model, params, *rest), AXIS, axis=0, tiled=True)

  def over_mesh(function, pairwise, scalars, out):
    # Kernels run per shard, which no compiler does by itself; scores come back on every device.
    specs = (whole, *[split] * pairwise, *[whole] * scalars)
    return jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))

  return Compiled(
    jit(embed, out_shardings=NamedSharding(mesh, split)),
    over_mesh(advance_shard, 3, 3, split),
    over_mesh(score_shard, 3, 2, whole),
    over_mesh(relax_shard, 2, 1, whole),
  )
