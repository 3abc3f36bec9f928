"""Rankings by gradients in gates: one gate a group blends its full and its local output."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bosch_jax.evaluator import GRADIENT_PASSES
from bosch_jax.rankings.base import Context, middle_ranks
from bosch_jax.scoring import Batch
from models.relaxed import relaxed_hidden
from models.transformer import RMSNorm, embed, run_layers
from models.windows import FULL

DUO_RATE = 0.02
DUO_PENALTY = 0.05


def fisher(context: Context) -> np.ndarray:
  """FISHER: sum over prompts of (d loss / d m)^2 at m = 1, where a group's output is
  m full + (1 - m) local and the loss is the answers' NLL.

  Source: after Kwon et al. 2022 (arXiv 2204.09656), whose masks remove a head; that the other end of
  the gate is the local output is ours, and that a prompt is a context with all of its questions.
  Cost: one gradient pass.
  """
  evaluator = context.evaluator
  evaluator.stage = "ranking"
  nothing_local = np.zeros(context.shape, np.float32)
  # The share of the local output is 1 - m: the same derivative but for its sign.
  gradients = [evaluator.relax(nothing_local, [b])[1] for b in context.search.all_contexts]
  return np.square(gradients).sum(0)


def duo(context: Context) -> np.ndarray:
  """DUO: gates trained by distillation, with the weights fixed.

  A group's output is a full + (1 - a) local. From a = 1, Adam minimises
  mean (h_full - h_gated)^2 + .05 sum |a|, h the model's normed last hidden states at answer tokens;
  after each step a is clipped to [0, 1]. Each step takes one prompt; the rate rises from a tenth to
  .02 within the first fifth of the steps and falls likewise in the last. A low gate is local.

  Source: DuoAttention (arXiv 2410.10819; gates per key/value head there too). Ours: the prompts,
  window and sinks are those of the run, h is taken at the tokens that predict the answer, steps are
  as many as the budget leaves (2000 there), and gates that end equal (most are clipped to 0) are
  ordered by their mean on the way there.
  Prompts are the calibration contexts and those that the search's gates are trained on. Cost: a pass
  on each context for h_full when it is first met, and a gradient pass on one context a step.
  """
  evaluator, model_and_params = context.evaluator, context.model()
  contexts, share = len(evaluator.prompts), 1 / evaluator.calibration
  evaluator.stage = "ranking"
  wanted: dict[int, tuple[Batch, jax.Array]] = {}
  affordable = max(context.left, 0) / share
  steps = int(max((affordable - contexts) / GRADIENT_PASSES, affordable / (1 + GRADIENT_PASSES)))
  adam = optax.scale_by_adam()
  gates_LxG = np.ones(context.shape, np.float32)
  state, path_LxG, turn = adam.init(gates_LxG), np.zeros(context.shape), []
  rng = np.random.default_rng(context.search.settings.seed)
  for rate in rates(steps):
    turn = turn or rng.permutation(contexts).tolist()
    if (b := turn.pop()) not in wanted:
      batch = Batch.of(evaluator.prompts, [b])
      wanted[b] = batch, _full_hidden(*model_and_params, batch)
      context.spend(share)
    batch, full_BxAxD = wanted[b]
    window = jnp.int32(context.window)
    slope_LxG = _distill(*model_and_params, gates_LxG, full_BxAxD, batch, window)
    slope_LxG = np.asarray(slope_LxG) + np.float32(DUO_PENALTY)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
      update_LxG, state = adam.update(slope_LxG, state)
    gates_LxG = np.clip(gates_LxG - np.float32(rate) * np.asarray(update_LxG), 0, 1)
    path_LxG += gates_LxG
    context.spend(GRADIENT_PASSES * share)
  return gates_LxG.astype(np.float64) + 1e-12 * middle_ranks(path_LxG)


def rates(steps: int) -> np.ndarray:
  """Learning rate of each step: a ramp up, a plateau at `DUO_RATE`, a ramp down."""
  step, ramp = np.arange(steps), max(steps // 5, 1)
  return DUO_RATE * np.clip(np.minimum(step + 1, steps - step) / ramp, 0.1, 1.0)


def _at_answers(model, params, x_BxTxD, batch: Batch):
  """Normed hidden states where answer tokens are predicted: float32 `[B, A, D]`."""
  B = batch.answer_BxQxA.shape[0]
  answer_BxAx1 = batch.answer_BxQxA.reshape(B, -1, 1)
  picked_BxAxD = jnp.take_along_axis(x_BxTxD, answer_BxAx1, axis=1)
  norm = RMSNorm(model.config.norm_eps)
  return norm.apply({"params": params["final_norm"]}, picked_BxAxD).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _full_hidden(model, params, batch: Batch):
  c = model.config
  windows_LxBxH = jnp.full((c.num_layers, len(batch.tokens_BxT), c.num_heads), FULL, jnp.int32)
  x_BxTxD = run_layers(
    model,
    params,
    embed(params, batch.tokens_BxT),
    windows_LxBxH,
    batch.positions_BxT,
    batch.segments_BxT,
    0,
  )
  return _at_answers(model, params, x_BxTxD, batch)


@functools.partial(jax.jit, static_argnums=0)
def _distill(model, params, gates_LxG, wanted_BxAxD, batch: Batch, window):
  """Gradient of the distillation loss in the gates, `[L, G]`."""
  valid_BxA = batch.valid_BxQxA.reshape(len(batch.tokens_BxT), -1).astype(jnp.float32)

  def loss(gates_LxG):
    x_BxTxD = relaxed_hidden(
      model,
      params,
      embed(params, batch.tokens_BxT),
      (1.0 - gates_LxG)[None],
      window,
      batch.positions_BxT,
      batch.segments_BxT,
    )
    gap_BxA = jnp.square(_at_answers(model, params, x_BxTxD, batch) - wanted_BxAxD).mean(-1)
    return (gap_BxA * valid_BxA).sum() / valid_BxA.sum()

  return jax.grad(loss)(gates_LxG)
