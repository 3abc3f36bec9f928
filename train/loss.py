"""Next-token loss, a few tokens at a time: the logits `[tokens, V]` never exist at once.

Value and gradient are computed in one pass. With p the model's distribution at a token, y its target
and t the teacher's distribution, the loss of a token of weight w is

    w ((1 - a) (-log p_y) + a KL(t || p))   with gradient   w (p - (1 - a) onehot(y) - a t)

in the logits; so the products that form the head's gradient follow at once, chunk by chunk, and
nothing is computed a second time in the backward pass, which only scales by the incoming number.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Head(NamedTuple):
  """An output head.

  Attributes:
    kernel: `[V, D]` if tied (the embedding), else `[D, V]`.
    tied: which of the two.
  """

  kernel: jax.Array
  tied: bool

  def logits(self, x_NxD):
    """float32 `[N, V]`."""
    equation = "nd,vd->nv" if self.tied else "nd,dv->nv"
    return jnp.einsum(equation, x_NxD, self.kernel, preferred_element_type=jnp.float32)


class Sums(NamedTuple):
  """Weighted sums over tokens, float32: the loss, and the two that it is made of."""

  loss: jax.Array
  nll: jax.Array
  kl: jax.Array


def token_losses(logits, targets, teacher_logits=None):
  """NLL and KL of every token, and what their gradients need.

  Args:
    logits: float32 `[..., V]`.
    targets: int32 `[...]`.
    teacher_logits: float32 `[..., V]`, or None.

  Returns:
    NLL and KL `[...]` (KL 0 without a teacher), p and t `[..., V]` (t None without a teacher).
  """
  p, norm = _softmax(logits)
  nll = norm - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  if teacher_logits is None:
    return nll, jnp.zeros_like(nll), p, None
  t, teacher_norm = _softmax(teacher_logits)
  gap = (teacher_logits - teacher_norm[..., None]) - (logits - norm[..., None])
  return nll, (t * gap).sum(-1), p, t


def _softmax(logits):
  """Probabilities and the logarithm of their norm: one exponential for every logit."""
  top = logits.max(-1, keepdims=True)
  e = jnp.exp(logits - top)
  total = e.sum(-1, keepdims=True)
  return e * (1.0 / total), (top + jnp.log(total))[..., 0]


def chunked_loss(
  x_BxTxD,
  head: Head,
  targets_BxT,
  weights_BxT,
  teacher: tuple[jax.Array, Head] | None = None,
  distill: float = 0.0,
  chunk: int = 1024,
) -> Sums:
  """The loss of a batch, summed with weights.

  Args:
    x_BxTxD: normed hidden states.
    head: the output head.
    targets_BxT: int32.
    weights_BxT: float32; 0 for what does not count.
    teacher: normed hidden states `[B, T, D]` and head of the model to stay close to, or None. No
      gradient flows to it.
    distill: a, from 0 to 1.
    chunk: tokens whose logits exist at once, about.

  Returns:
    The sums. Gradients flow from `loss` only.
  """
  B, T, _ = x_BxTxD.shape
  size = max(1, min(T, chunk // B))
  count = -(-T // size)

  def split(x):
    """`[count, B * size, ...]`: matrices, as every product here is one of two matrices."""
    x = jnp.pad(x, ((0, 0), (0, count * size - T)) + ((0, 0),) * (x.ndim - 2))
    x = jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)
    return x.reshape(count, B * size, *x.shape[3:])

  places = (split(targets_BxT), split(weights_BxT))
  taught = None if teacher is None else (split(teacher[0]), teacher[1].kernel)
  tied = (head.tied, teacher is not None and teacher[1].tied)
  return Sums(*_chunked(tied, distill, split(x_BxTxD), head.kernel, places, taught))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(tied, distill, x_CxNxD, kernel, places, taught):
  return _run(tied, distill, x_CxNxD, kernel, places, taught, False, False)[0]


def _run(tied, distill, x_CxNxD, kernel, places, taught, x_gradient, kernel_gradient):
  """Sums, and the gradients that are wanted: of x, and of the kernel."""
  head = Head(kernel, tied[0])

  def step(carry, inputs):
    sums, d_kernel = carry
    x, (targets, weights), teacher_x = inputs
    teacher = None if teacher_x is None else Head(taught[1], tied[1]).logits(teacher_x)
    nll, kl, p, t = token_losses(head.logits(x), targets, teacher)
    loss = (1 - distill) * nll + distill * kl
    sums = tuple(s + (weights * l).sum() for s, l in zip(sums, (loss, nll, kl), strict=True))
    if not (x_gradient or kernel_gradient):
      return (sums, d_kernel), None
    onehot = jax.nn.one_hot(targets, p.shape[-1], dtype=p.dtype)
    d_logits = p - (1 - distill) * onehot - (0 if t is None else distill * t)
    d_logits = (weights[..., None] * d_logits).astype(x.dtype)
    if kernel_gradient:
      equation = "nv,nd->vd" if head.tied else "nd,nv->dv"
      pair = (d_logits, x) if head.tied else (x, d_logits)
      d_kernel += jnp.einsum(equation, *pair, preferred_element_type=jnp.float32)
    equation = "nv,vd->nd" if head.tied else "nv,dv->nd"
    return (sums, d_kernel), jnp.einsum(equation, d_logits, kernel) if x_gradient else None

  zero = jnp.zeros((), jnp.float32)
  d_kernel = jnp.zeros(kernel.shape, jnp.float32) if kernel_gradient else zero
  teacher_x = None if taught is None else taught[0]
  carry = ((zero,) * 3, d_kernel)
  (sums, d_kernel), d_x = jax.lax.scan(step, carry, (x_CxNxD, places, teacher_x))
  return sums, d_x, d_kernel if kernel_gradient else None


def _forward(tied, distill, x, kernel, places, taught):
  # A kernel that is not trained costs no gradient.
  value = functools.partial(jax.tree.map, lambda leaf: leaf.value, is_leaf=_is_primal)
  arguments = value((x, kernel, places, taught))
  sums, d_x, d_kernel = _run(tied, distill, *arguments, x.perturbed, kernel.perturbed)
  return sums, (d_x, d_kernel, arguments[1])


def _is_primal(leaf) -> bool:
  return hasattr(leaf, "perturbed")


def _backward(tied, distill, saved, cotangents):
  d_x, d_kernel, kernel = saved
  g = cotangents[0]
  if type(g).__name__ == "SymbolicZero":
    return None, None, None, None
  d_x = None if d_x is None else (g.astype(d_x.dtype) * d_x)
  d_kernel = None if d_kernel is None else (g * d_kernel).astype(kernel.dtype)
  return d_x, d_kernel, None, None


_chunked.defvjp(_forward, _backward, symbolic_zeros=True)
