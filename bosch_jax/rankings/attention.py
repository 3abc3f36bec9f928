"""Rankings by what heads look at, on the full model: one pass over a text each.

Score direction throughout: low = local. A[t, j] is the attention probability of query t on key j,
W the window, sinks the first 4 keys. Distances are positions, so packed questions count as if each
stood alone behind its haystack. All are streamed (see `streaming`).

Cost: the layers of a full pass over the text, and its scores computed once more.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bosch_jax.evaluator import forward_flops
from bosch_jax.prompts import PromptSet, pack
from bosch_jax.rankings.base import Context, group_scores, middle_ranks
from bosch_jax.rankings.folds import BlocksNeeded, LocalShare, Mass, Peak
from bosch_jax.rankings.streaming import BLOCK, Places, Tile, stream
from bosch_jax.scoring import Batch
from models.internals import observe_attention

SINKS = 4
RAZOR_PERIOD = 2500
RAZOR_REPEATS = 4


def dcam(context: Context) -> np.ndarray:
  """DCAM, distant-context attention mass: mean over queries of sum_{j <= t - W} A[t, j], over all
  tokens of the calibration prompts; a group's score is the mean of its heads. Sinks count.

  Source: `dcam` of the BOSCH paper's comparison; the averaging is ours.
  """
  return _dcam(context, skipped=0)


def dcam_nosinks(context: Context) -> np.ndarray:
  """DCAM with the sums starting behind the first 4 keys, on which idle heads rest (ours)."""
  return _dcam(context, skipped=SINKS)


def _dcam(context: Context, skipped: int) -> np.ndarray:
  (mass_LxH,) = _means(context, DistantMass(context.window, skipped), context.calibration)
  return group_scores(mass_LxH, context.shape[1], np.mean)


def apl(context: Context) -> np.ndarray:
  """APL, answer peak lag: mean of t - argmax_j A[t, j] over the positions t that predict an answer
  token, sinks excluded; a group's score is the mean of its heads.

  Source: `apl` of the BOSCH paper's comparison; the formula is ours.
  """
  (lag_LxH,) = _means(context, PeakLag(SINKS), context.calibration)
  return group_scores(lag_LxH, context.shape[1], np.mean)


def proxy(context: Context) -> np.ndarray:
  """PROXY: mean number of key blocks that hold 90% of a head's attention mass; a group's score is
  the mean of its heads.

  A proxy head per group (the mean of the group's queries, on its keys) orders the key blocks of
  each query block by its highest probability in them; a head then takes blocks in that order until
  it has .9 of its own mass of that query block. Blocks are W / 2 tokens, 1 to 128.

  Source: after ProxyAttn (arXiv 2509.24745), which pools heads to find the blocks a sparse kernel
  should visit and gives each head its own number of them. A ranking of heads by that number, and
  the block size, are ours.
  """
  block = max(1, min(BLOCK, context.window // 2))
  statistic = ProxyBlocks(context.shape[1], 0.9, block)
  (blocks_LxH,) = _means(context, statistic, context.calibration)
  return group_scores(blocks_LxH, context.shape[1], np.mean)


def qada(context: Context) -> np.ndarray:
  """QADA: minus the mean local share L / (L + bulk) over the queries that have distant keys; a
  group's score is the mean of its heads.

  L is the sum of exp(score) over sinks and the recent W keys. For query q at t, with mean mu and
  covariance S of the T distant keys, bulk = T exp(m + s2 / 2), m = q.mu / sqrt(K), s2 = q'Sq / K. m
  and s2 are the mean and variance of the distant scores themselves, and computed as such: exactly,
  for every query's own distant keys.

  Source: after QAdA (arXiv 2502.09647), whose online estimate of bulk is approximate.
  """
  statistic = QueryLocalShare(context.window, SINKS)
  (share_LxH,) = _means(context, statistic, context.calibration)
  return -group_scores(share_LxH, context.shape[1], np.mean)


def razor(context: Context) -> np.ndarray:
  """RAZOR: retrieval by repetition. P random tokens are repeated 4 times; for token i of repeats
  2 to 4 and j over the earlier occurrences of the same token, echo = mean_i sum_j A[i, j] and
  induction = mean_i sum_j A[i, j + 1]. A group has the largest of its heads; its score is the larger
  of its two percentile ranks among all groups.

  Source: RazorAttention (arXiv 2407.15891), with P = 2500. Ours: P is a quarter of `--context` where
  that is less, and the two ranks make one order for any ratio (there, fixed shares are taken of
  each).
  """
  period = min(RAZOR_PERIOD, context.search.settings.context // RAZOR_REPEATS)
  rng = np.random.default_rng(context.search.settings.seed)
  tokens = np.tile(rng.integers(0, context.config.vocab_size, period), RAZOR_REPEATS).tolist()
  # As a prompt whose last two tokens are its question and answer; neither is looked at.
  text = pack([tokens[:-2]], [[(tokens[-2:-1], tokens[-1:])]], multiple=1)
  text = dataclasses.replace(text, segments_BxT=np.zeros_like(text.segments_BxT))
  heads = _means(context, Repeats(period), text)
  ranks = [
    middle_ranks(group_scores(x_LxH, context.shape[1], np.max)) / context.config.total_groups
    for x_LxH in heads
  ]
  return np.maximum(*ranks)


class Observed(NamedTuple):
  """Float32 values `[F, B, H, T]` at the queries that a statistic looks at, and their weights
  `[B, T]`."""

  values_FxBxHxT: jax.Array
  weight_BxT: jax.Array


@dataclasses.dataclass(frozen=True)
class DistantMass:
  window: int
  skipped: int

  def __call__(self, batch: Batch, q_BxTxHxK, k_BxTxGxK) -> Observed:
    where = Places(batch.positions_BxT, batch.segments_BxT)
    mass = stream(Mass(self._distant, 1), q_BxTxHxK, k_BxTxGxK, where, where)
    return Observed(mass, _real(batch))

  def _distant(self, tile: Tile):
    kept = (tile.key_BxS >= self.skipped)[:, None]
    return ((tile.distance_BxTxS >= self.window) & kept)[None]


@dataclasses.dataclass(frozen=True)
class PeakLag:
  skipped: int

  def __call__(self, batch: Batch, q_BxTxHxK, k_BxTxGxK) -> Observed:
    B = len(batch.answer_BxQxA)
    asked_BxA = batch.answer_BxQxA.reshape(B, -1)
    keys = Places(batch.positions_BxT, batch.segments_BxT)
    queries = Places(*(jnp.take_along_axis(x, asked_BxA, axis=1) for x in keys))
    q_BxAxHxK = jnp.take_along_axis(q_BxTxHxK, asked_BxA[:, :, None, None], axis=1)
    lag = stream(Peak(self.skipped), q_BxAxHxK, k_BxTxGxK, queries, keys)
    return Observed(lag[None], batch.valid_BxQxA.reshape(B, -1).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class ProxyBlocks:
  groups: int
  covered: float
  block: int

  def __call__(self, batch: Batch, q_BxTxHxK, k_BxTxGxK) -> Observed:
    B, T, H, K = q_BxTxHxK.shape
    q_BxTxGxRxK = q_BxTxHxK.reshape(B, T, self.groups, H // self.groups, K)
    proxies = q_BxTxGxRxK.mean(3, keepdims=True)
    q_BxTxNxK = jnp.concatenate([q_BxTxGxRxK, proxies], 3).reshape(B, T, -1, K)
    where = Places(batch.positions_BxT, batch.segments_BxT)
    fold = BlocksNeeded(self.groups, self.covered)
    needed = stream(fold, q_BxTxNxK, k_BxTxGxK, where, where, self.block)
    return Observed(needed[None], _real(batch))


@dataclasses.dataclass(frozen=True)
class QueryLocalShare:
  window: int
  sinks: int

  def __call__(self, batch: Batch, q_BxTxHxK, k_BxTxGxK) -> Observed:
    where = Places(batch.positions_BxT, batch.segments_BxT)
    fold = LocalShare(self.window, self.sinks)
    share, count = stream(fold, q_BxTxHxK, k_BxTxGxK, where, where)
    return Observed(share[None], _real(batch) * (count[:, 0] > 0).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Repeats:
  """Echo and induction mass; a text of one document."""

  period: int

  def __call__(self, batch: Batch, q_BxTxHxK, k_BxTxGxK) -> Observed:
    where = Places(batch.positions_BxT, batch.segments_BxT)
    mass = stream(Mass(self._occurrences, 2), q_BxTxHxK, k_BxTxGxK, where, where)
    return Observed(mass, (batch.positions_BxT >= self.period).astype(jnp.float32))

  def _occurrences(self, tile: Tile):
    def earlier(distance):  # of an occurrence of the same token
      return (distance > 0) & (distance % self.period == 0)

    behind = earlier(tile.distance_BxTxS + 1) & (tile.key_BxS > 0)[:, None]
    return jnp.stack([earlier(tile.distance_BxTxS), behind])


def _real(batch: Batch) -> jax.Array:
  return (batch.segments_BxT >= 0).astype(jnp.float32)


def _means(context: Context, statistic, text: PromptSet) -> np.ndarray:
  """Weighted means of a statistic over a text's queries: float64 `[F, L, H]`.

  Contexts are run one by one, which bounds the memory.
  """
  model, params = context.model()
  sums, weights = 0.0, 0.0
  context.evaluator.stage = "ranking"
  for b in range(len(text)):
    total_LxFxH, weight_L = _observe(model, statistic, params, Batch.of(text, [b]))
    sums, weights = sums + np.asarray(total_LxFxH, np.float64), weights + np.asarray(weight_L)[0]
    context.spend(_passes(context, text) / len(text))
  return np.moveaxis(sums / weights, 1, 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _observe(model, statistic, params, batch: Batch):
  def observe(q_BxTxHxK, k_BxTxGxK):
    values_FxBxHxT, weight_BxT = statistic(batch, q_BxTxHxK, k_BxTxGxK)
    return jnp.einsum("fbht,bt->fh", values_FxBxHxT, weight_BxT), weight_BxT.sum()

  return observe_attention(
    model, params, batch.tokens_BxT, batch.positions_BxT, batch.segments_BxT, observe
  )


def _passes(context: Context, text: PromptSet) -> float:
  """Cost of a text: its layers, and the causal half of its scores a second time."""
  c = context.config
  B, T = text.tokens_BxT.shape
  layer, _ = forward_flops(c, text)
  again = 2 * c.num_heads * c.head_dim * B * T * T / 2
  full_layer, head = forward_flops(c, context.calibration)
  return c.num_layers * (layer + again) / (c.num_layers * full_layer + head)
