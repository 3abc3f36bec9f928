"""The training state with an array for every layer, instead of one for all layers.

An unrolled step reads the weights of a layer and makes their gradient by themselves. From a stack it
would copy the weights out, and the gradients into another: 4% of a step on a CPU, and a sixth of its
memory. Checkpoints hold the stacked form, whatever trained them.
"""

import jax
import jax.numpy as jnp

from train.step import State


def layout(state: State) -> State:
  """Shapes, dtypes and shardings of a state, without its arrays."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def split(state: State) -> State:
  """Arrays `[L, ...]` of parameters "layers/..." and of their moments become tuples of L arrays."""

  def one(path, x):
    inside = any(str(getattr(key, "key", "")).startswith("layers/") for key in path)
    return tuple(x) if inside else x

  return jax.tree.map_with_path(one, state)


def stacked(state: State, like: State) -> State:
  """The inverse.

  Args:
    like: a state of the stacked form, or its `layout`.
  """
  return jax.tree.map(lambda _, x: jnp.stack(x) if isinstance(x, tuple) else x, like, state)
