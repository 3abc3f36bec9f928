"""Statistics of attention scores without ever holding them: `[block, block]` tiles, one at a time.

Queries are taken block by block; for each block the key blocks that some query sees go by, and a
`Fold` keeps what it needs of them. Memory is linear in the number of tokens, at 32k as at 256.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from models.attention import plan, visible
from models.windows import FULL

FLOOR = -1e30  # a finite "nothing seen yet": exp(FLOOR - FLOOR) is 1, never NaN
BLOCK = 128


class Places(NamedTuple):
  """Where tokens stand: int32 positions and segments `[B, T]` (see `models.attention`)."""

  positions: jax.Array
  segments: jax.Array


class Tile(NamedTuple):
  """Scores of a block of queries (T) on a block of keys (S).

  Attributes:
    scores_BxHxTxS: float32, scaled by K ** -0.5.
    visible_BxTxS: bool, full attention.
    query_BxT, key_BxS: int32 positions.
    index: int32 scalar, number of the key block.
  """

  scores_BxHxTxS: jax.Array
  visible_BxTxS: jax.Array
  query_BxT: jax.Array
  key_BxS: jax.Array
  index: jax.Array

  @property
  def distance_BxTxS(self) -> jax.Array:
    return self.query_BxT[:, :, None] - self.key_BxS[:, None, :]


class Fold(Protocol):
  """What is kept of the tiles of one block of queries."""

  def start(self, shape: tuple[int, int, int], key_blocks: int) -> Any:
    """The state before any tile; `shape` is (B, H, queries of a block)."""

  def step(self, state: Any, tile: Tile) -> Any:
    """The state after one more tile."""

  def finish(self, state: Any, query: Places) -> Any:
    """Arrays `[..., queries of the block]`, from the state after the last tile."""


def stream(
  fold: Fold, q_BxTxHxK, k_BxSxGxK, queries: Places, keys: Places, block: int = BLOCK
) -> Any:
  """Runs a fold over all queries.

  Args:
    fold: what to keep.
    q_BxTxHxK, k_BxSxGxK: as they enter attention; query head h uses key head h // (H // G).
    queries, keys: `[B, T]` and `[B, S]`; queries need not be among the keys.
    block: queries, and keys, of a tile.

  Returns:
    What `fold.finish` returns, for all T queries on the last axis. Values at padded queries mean
    nothing.
  """
  T = q_BxTxHxK.shape[1]
  *queries, q_BxTxHxK = plan.pad_tokens(block, *queries, q_BxTxHxK)
  *keys, k_BxSxGxK = plan.pad_tokens(block, *keys, k_BxSxGxK)
  queries, keys = Places(*queries), Places(*keys)
  B, padded, H, _ = q_BxTxHxK.shape
  full_1x1 = jnp.full((1, 1), FULL, jnp.int32)
  needed_QxN = plan.needed(
    full_1x1, plan.summarise(*queries, block), plan.summarise(*keys, block)
  ).any((0, 1))
  order_QxN = jnp.argsort(~needed_QxN, axis=-1, stable=True).astype(jnp.int32)
  count_Q = needed_QxN.sum(-1)

  def query_block(i):
    q_BxTxHxK_i, query = _rows(q_BxTxHxK, i, block), Places(*(_rows(x, i, block) for x in queries))

    def key_block(step, state):
      j = order_QxN[i, step]
      key = Places(*(_rows(x, j, block) for x in keys))
      tile = Tile(
        _scores(q_BxTxHxK_i, _rows(k_BxSxGxK, j, block)),
        visible(full_1x1[0], *query, *key)[:, 0],
        query.positions,
        key.positions,
        j,
      )
      return fold.step(state, tile)

    start = fold.start((B, H, block), needed_QxN.shape[1])
    return fold.finish(jax.lax.fori_loop(0, count_Q[i], key_block, start), query)

  blocks = jax.lax.map(query_block, jnp.arange(padded // block))
  return jax.tree.map(lambda x: _join(x)[..., :T], blocks)


def _rows(x, block, size):
  return jax.lax.dynamic_slice_in_dim(x, block * size, size, 1)


def _scores(q_BxTxHxK, k_BxSxGxK):
  B, T, H, K = q_BxTxHxK.shape
  S, G = k_BxSxGxK.shape[1:3]
  scores_BxGxRxTxS = jnp.einsum(
    "btgrk,bsgk->bgrts",
    q_BxTxHxK.reshape(B, T, G, H // G, K),
    k_BxSxGxK,
    preferred_element_type=jnp.float32,
  )
  return K**-0.5 * scores_BxGxRxTxS.reshape(B, H, T, S)


def _join(x_Qx_xT):
  """`[blocks, ..., block]` to `[..., blocks * block]`."""
  x = jnp.moveaxis(x_Qx_xT, 0, -2)
  return x.reshape(*x.shape[:-2], -1)
