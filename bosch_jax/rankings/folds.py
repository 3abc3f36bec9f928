"""What attention statistics keep of the tiles that go by (see `streaming`)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bosch_jax.rankings.streaming import FLOOR, Places, Tile


def _online(top, total, scores, seen):
  """One step of a running softmax denominator.

  Returns:
    The new top and total, exp(scores - top) where seen and 0 elsewhere, and the factor by which
    sums kept so far shrink.
  """
  scores = jnp.where(seen, scores, FLOOR)
  new = jnp.maximum(top, scores.max(-1))
  p = jnp.where(seen, jnp.exp(scores - new[..., None]), 0.0)
  shrink = jnp.exp(top - new)
  return new, total * shrink + p.sum(-1), p, shrink


@dataclasses.dataclass(frozen=True)
class Mass:
  """Attention mass on chosen keys: sum_j A[t, j] f(t, j), float32 `[F, B, H, T]`.

  Attributes:
    features: `tile -> bool [F, B, T, S]`, hashable.
    count: F.
  """

  features: Callable[[Tile], jax.Array]
  count: int

  def start(self, shape, key_blocks):
    zero = jnp.zeros(shape)
    return jnp.full(shape, FLOOR), zero, jnp.zeros((self.count, *shape))

  def step(self, state, tile: Tile):
    top, total, mass = state
    seen = tile.visible_BxTxS[:, None]
    top, total, p, shrink = _online(top, total, tile.scores_BxHxTxS, seen)
    chosen = self.features(tile).astype(jnp.float32)
    return top, total, mass * shrink[None] + jnp.einsum("bhts,fbts->fbht", p, chosen)

  def finish(self, state, query: Places):
    _, total, mass = state
    return mass / jnp.maximum(total, 1e-30)[None]


@dataclasses.dataclass(frozen=True)
class Peak:
  """Distance to the key with the highest score, float32 `[B, H, T]`; the first `skipped` positions
  do not count. Of equal keys the earliest wins; a query that sees none has distance 0."""

  skipped: int

  def start(self, shape, key_blocks):
    return jnp.full(shape, FLOOR), jnp.zeros(shape, jnp.int32)

  def step(self, state, tile: Tile):
    best, place = state
    B, H, T, _ = tile.scores_BxHxTxS.shape
    counts = tile.visible_BxTxS & (tile.key_BxS >= self.skipped)[:, None]
    scores = jnp.where(counts[:, None], tile.scores_BxHxTxS, FLOOR)
    arg = jnp.argmax(scores, -1)
    key = jnp.take_along_axis(tile.key_BxS, arg.reshape(B, H * T), axis=1).reshape(B, H, T)
    higher = scores.max(-1) > best
    return jnp.maximum(best, scores.max(-1)), jnp.where(higher, key, place)

  def finish(self, state, query: Places):
    best, place = state
    lag = (query.positions[:, None] - place).astype(jnp.float32)
    return jnp.where(best > FLOOR / 2, lag, 0.0)


@dataclasses.dataclass(frozen=True)
class LocalShare:
  """Share of local keys when the distant ones are replaced by a Gaussian (see `attention.qada`).

  Returns the share, float32 `[B, H, T]`, and the number of distant keys, `[B, H, T]`.
  """

  window: int
  sinks: int

  def start(self, shape, key_blocks):
    zero = jnp.zeros(shape)
    return jnp.full(shape, FLOOR), zero, zero, zero, zero

  def step(self, state, tile: Tile):
    top, total, count, mean, spread = state
    far = (tile.distance_BxTxS >= self.window) & (tile.key_BxS >= self.sinks)[:, None]
    near = (tile.visible_BxTxS & ~far)[:, None]
    far = (tile.visible_BxTxS & far)[:, None].astype(jnp.float32)
    top, total, _, _ = _online(top, total, tile.scores_BxHxTxS, near)
    # Moments of two parts combined: nothing is lost where the mean is large beside the variance.
    added = jnp.broadcast_to(far.sum(-1), count.shape)
    both = jnp.maximum(count + added, 1.0)
    tile_mean = (far * tile.scores_BxHxTxS).sum(-1) / jnp.maximum(added, 1.0)
    off = tile.scores_BxHxTxS - tile_mean[..., None]
    gap = jnp.where(added > 0, tile_mean - mean, 0.0)
    spread = spread + (far * off * off).sum(-1) + gap * gap * count * added / both
    return top, total, count + added, mean + gap * added / both, spread

  def finish(self, state, query: Places):
    top, total, count, mean, spread = state
    some = jnp.maximum(count, 1.0)
    local = top + jnp.log(jnp.maximum(total, 1e-30))
    bulk = jnp.log(some) + mean + spread / some / 2
    return jnp.where(count > 0, jax.nn.sigmoid(local - bulk), 1.0), count


@dataclasses.dataclass(frozen=True)
class BlocksNeeded:
  """Key blocks that hold a share of a head's attention, best first by its group's proxy (see
  `attention.proxy`): float32 `[B, G * R, T]`, the same for all queries of a block.

  Of every group's R + 1 heads in the tiles, the last one is the proxy.
  """

  groups: int
  covered: float

  def start(self, shape, key_blocks):
    empty = jnp.full((key_blocks, *shape), FLOOR)
    return empty, empty

  def step(self, state, tile: Tile):
    peak, lse = state
    scores = jnp.where(tile.visible_BxTxS[:, None], tile.scores_BxHxTxS, FLOOR)
    peak = jax.lax.dynamic_update_index_in_dim(peak, scores.max(-1), tile.index, 0)
    summed = jnp.maximum(jax.nn.logsumexp(scores, -1), FLOOR)
    return peak, jax.lax.dynamic_update_index_in_dim(lse, summed, tile.index, 0)

  def finish(self, state, query: Places):
    peak_NxBxHxT, lse_NxBxHxT = state
    real_BxT = (query.segments >= 0)[:, None, None]
    total = jax.nn.logsumexp(lse_NxBxHxT, 0)[None]
    N, B, _, T = lse_NxBxHxT.shape

    def of_blocks(x_NxBxHxT, reduce):
      """exp(x - total) over the block's queries: `[B, G, R + 1, N]`."""
      x = jnp.exp(jnp.minimum(x_NxBxHxT - total, 0.0)).reshape(N, B, self.groups, -1, T)
      return jnp.moveaxis(reduce(jnp.where(real_BxT[None], x, 0.0), axis=-1), 0, -1)

    proxy_BxGx1xN = of_blocks(peak_NxBxHxT, jnp.max)[:, :, -1:]
    mass_BxGxRxN = of_blocks(lse_NxBxHxT, jnp.sum)[:, :, :-1]
    order = jnp.broadcast_to(jnp.argsort(-proxy_BxGx1xN, axis=-1), mass_BxGxRxN.shape)
    held = jnp.cumsum(jnp.take_along_axis(mass_BxGxRxN, order, axis=-1), -1)
    needed_BxGxR = 1.0 + (held < self.covered * held[..., -1:]).sum(-1, dtype=jnp.float32)
    needed_BxGxR = jnp.minimum(needed_BxGxR, float(N))
    return jnp.broadcast_to(needed_BxGxR.reshape(B, -1, 1), (B, needed_BxGxR[0].size, T))
