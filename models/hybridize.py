"""Sorts the kv groups of every layer so that full ones come first: the same model, reordered.

Static attention kernels run once per window on contiguous heads, so after sorting a layer's
structure is one number, how many of its groups are full.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.windows import FULL, HeadMask


class Hybrid(NamedTuple):
  """A reordered model.

  Attributes:
    params: the parameters, groups of each layer permuted (see `models.transformer` for shapes).
    full_groups: L ints, the number of full groups at the front of each layer.
    order: int `[L, G]`; group g of layer l was group `order[l, g]` before.
  """

  params: dict
  full_groups: tuple[int, ...]
  order: np.ndarray


def hybridize(params: dict, mask: HeadMask, config: ModelConfig) -> Hybrid:
  """Permutes the kv groups of each layer, full ones first; otherwise their order is kept.

  Exact: the q, k and v columns of a group and its rows of o move together, so every head computes
  what it did before and only the order of the terms in the output projection's sum changes.

  Args:
    params: of `models.transformer.Transformer`, layers stacked.
    mask: which groups are local.
    config: the architecture.

  Raises:
    ValueError: the mask or the parameters have other shapes than the config.
  """
  if mask.local.shape != (config.num_layers, config.num_groups):
    raise ValueError(
      f"the mask is {mask.local.shape}, the model has {config.num_layers} layers of "
      f"{config.num_groups} groups"
    )
  order = np.argsort(mask.local, axis=1, kind="stable")
  full_groups = tuple(int(n) for n in (~mask.local).sum(1))
  return Hybrid(_permute(params, order, config), full_groups, order)


def dehybridize(params: dict, order: np.ndarray, config: ModelConfig) -> dict:
  """Undoes `hybridize`: parameters back in the order of the original checkpoint, bit for bit."""
  return _permute(params, np.argsort(order, axis=1), config)


def static_windows(
  full_groups: tuple[int, ...], window: int, config: ModelConfig
) -> tuple[tuple[int, ...], ...]:
  """The window rows of a hybridized model, hashable: L tuples of H ints, full heads first."""
  R, G = config.heads_per_group, config.num_groups
  return tuple((FULL,) * (n * R) + (window,) * ((G - n) * R) for n in full_groups)


def _permute(params: dict, order_LxG: np.ndarray, config: ModelConfig) -> dict:
  L, G, R = config.num_layers, config.num_groups, config.heads_per_group
  if order_LxG.shape != (L, G):
    raise ValueError(f"order is {order_LxG.shape}, the model has {L} layers of {G} groups")
  heads_LxH = (order_LxG[:, :, None] * R + np.arange(R)).reshape(L, G * R)

  def take(kernel: jax.Array, index_LxN: np.ndarray, axis: int):
    if kernel.shape[0] != L or kernel.shape[axis] != index_LxN.shape[1]:
      raise ValueError(
        f"a kernel is {kernel.shape}, expected {index_LxN.shape} on axes 0 and {axis}"
      )
    shape = [1] * kernel.ndim
    shape[0], shape[axis] = index_LxN.shape
    return jnp.take_along_axis(kernel, jnp.asarray(index_LxN.reshape(shape)), axis=axis)

  # Parameter -> the order of its heads or groups and the axis they stand on; None: shared by all.
  moves = {
    "q/kernel": (heads_LxH, 2), "k/kernel": (order_LxG, 2), "v/kernel": (order_LxG, 2),
    "q/bias": (heads_LxH, 1), "k/bias": (order_LxG, 1), "v/bias": (order_LxG, 1),
    "o/kernel": (heads_LxH, 1), "q_norm/scale": None, "k_norm/scale": None,
  }  # fmt: skip
  old = params["layers"]["attn"]
  if extra := {f"{a}/{b}" for a in old for b in old[a]} - set(moves):
    raise ValueError(f"attention parameters that are not known how to permute: {sorted(extra)}")
  new = {
    a: {b: take(x, *move) if (move := moves[f"{a}/{b}"]) else x for b, x in old[a].items()}
    for a in old
  }
  return {**params, "layers": {**params["layers"], "attn": new}}
