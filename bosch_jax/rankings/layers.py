"""Layer heuristics: whole layers become local, whatever their heads do.

K local groups are K // G whole layers and, where G does not divide K, the first K mod G groups of
the next layer in the same order (that remainder is ours: published hybrids have whole layers only).
They cost nothing.
"""

import numpy as np

from bosch_jax.rankings.base import Context, spread


def rand(context: Context) -> np.ndarray:
  """RAND: layers in random order (`--seed`; report the mean of several).

  Source: the random baseline of hybrid-attention studies.
  """
  rng = np.random.default_rng(context.search.settings.seed)
  return by_layer(rng.permutation(context.shape[0]), context.shape[1])


def intr(context: Context) -> np.ndarray:
  """INTR: interleaved; layer l is local iff floor((l + 1) n / L) > floor(l n / L), n = K // G.

  Source: hybrids that alternate local and full layers. The formula for any ratio is ours, as is the
  layer that takes the remainder: the middle of the longest run of full layers.
  """
  L, G = context.shape
  local = spread(context.search.num_local // G, L) > 0
  edges = np.flatnonzero(np.concatenate([[True], local, [True]]))
  longest = int(np.argmax(np.diff(edges)))
  next_layer = (edges[longest] + edges[longest + 1]) // 2 - 1
  chosen = np.flatnonzero(local)
  rest = [l for l in np.flatnonzero(~local) if l != next_layer]
  return by_layer([*chosen, *([] if local.all() else [next_layer]), *rest], G)


def bme(context: Context) -> np.ndarray:
  """BME: blocks of layers at the beginning, the middle and the end stay full.

  Source: hybrids that keep full attention at both ends and in the middle. Ours: the blocks are equal,
  but for one layer more in the middle, or one at each end, where three does not divide; the layer
  that takes the remainder is the last one of the middle block.
  """
  L, G = context.shape
  full = L - context.search.num_local // G
  ends = full // 3 + (full % 3 == 2)
  middle = full - 2 * ends
  start = ends + (L - full) // 2
  blocks = [*range(ends), *range(L - ends, L), *range(start, start + middle)]
  local = [l for l in range(L) if l not in blocks]
  return by_layer([*local, *reversed(blocks)], G)


def by_layer(order, groups: int) -> np.ndarray:
  """float64 `[L, G]`: layers in this order, first = most local, groups of a layer by number."""
  place = np.empty(len(order))
  place[np.asarray(order, int)] = np.arange(len(order))
  return place[:, None] * groups + np.arange(groups)[None]
