import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import Head, chunked_loss, token_losses

B, T, D, V = 2, 11, 6, 29


def arrays(seed=0, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 6)
  x = jax.random.normal(keys[0], (B, T, D), dtype)
  tied, untied = (
    jax.random.normal(keys[1], (V, D), dtype),
    jax.random.normal(keys[2], (D, V), dtype),
  )
  targets = jax.random.randint(keys[3], (B, T), 0, V)
  weights = jnp.round(jax.random.uniform(keys[4], (B, T)) * 2)
  return x, tied, untied, targets, weights, jax.random.normal(keys[5], (B, T, D), dtype)


def full_loss(x, kernel, tied, targets, weights, teacher, distill):
  """The plain way: all logits, and jax's own gradient."""

  def logits(x, kernel):
    return jnp.einsum("btd,vd->btv" if tied else "btd,dv->btv", x, kernel)

  logp = jax.nn.log_softmax(logits(x, kernel))
  losses = -(1 - distill) * jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
  if teacher is not None:
    logt = jax.nn.log_softmax(logits(teacher[0], teacher[1].kernel))
    losses += distill * (jnp.exp(logt) * (logt - logp)).sum(-1)
  return (weights * losses).sum()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 6, 100])
def test_value_and_gradients_equal_the_full_loss(tied, distill, chunk):
  x, embedding, kernel, targets, weights, teacher_x = arrays()
  kernel = embedding if tied else kernel
  teacher = (teacher_x, Head(2 * kernel, tied)) if distill else None

  def ours(x, kernel):
    sums = chunked_loss(x, Head(kernel, tied), targets, weights, teacher, distill, chunk)
    return 3.0 * sums.loss  # a factor: the gradient must scale with what comes in

  def plain(x, kernel):
    return 3.0 * full_loss(x, kernel, tied, targets, weights, teacher, distill)

  wanted = jax.value_and_grad(plain, (0, 1))(x, kernel)
  got = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, kernel)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)
  # Without gradients, and with respect to one of the two.
  np.testing.assert_allclose(ours(x, kernel), wanted[0], rtol=2e-5)
  for argument in (0, 1):
    one = jax.grad(ours, argument)(x, kernel)
    np.testing.assert_allclose(one, wanted[1][argument], rtol=2e-5, atol=2e-5)


def test_the_parts_of_the_loss_are_reported():
  x, embedding, _, targets, weights, teacher_x = arrays()
  head, teacher = Head(embedding, True), (teacher_x, Head(embedding, True))
  sums = chunked_loss(x, head, targets, weights, teacher, 0.25, 4)
  np.testing.assert_allclose(sums.loss, 0.75 * sums.nll + 0.25 * sums.kl, rtol=1e-5)
  assert sums.kl > 0
  same = chunked_loss(x, head, targets, weights, (x, head), 1.0, 4)
  np.testing.assert_allclose(same.kl, 0, atol=1e-4)


def test_a_frozen_head_costs_no_gradient():
  x, embedding, _, targets, weights, _ = arrays()

  def loss(x):
    return chunked_loss(x, Head(embedding, True), targets, weights, chunk=4).loss

  text = str(jax.make_jaxpr(jax.grad(loss))(x))
  assert f"f32[{V},{D}] = dot_general" not in text and f"f32[{V},{D}] = add" not in text


def test_logits_never_exist_at_once():
  """At 32k tokens of Qwen3's vocabulary: nothing of `[T, V]` anywhere in the program."""
  tokens, vocabulary, width = 32768, 151936, 64
  x = jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16)
  kernel = jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16)
  targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
  weights = jax.ShapeDtypeStruct((1, tokens), jnp.float32)

  def loss(x, kernel, targets, weights):
    return chunked_loss(x, Head(kernel, True), targets, weights, chunk=512).loss

  text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel, targets, weights))
  assert "512,151936" in text and "32768,151936" not in text


def test_bfloat16_is_summed_in_float32():
  x, embedding, _, targets, weights, _ = arrays(dtype=jnp.bfloat16)
  x32, e32 = x.astype(jnp.float32), embedding.astype(jnp.float32)

  def loss(x, kernel):
    return chunked_loss(x, Head(kernel, True), targets, weights, chunk=4).loss

  value, grads = jax.value_and_grad(loss, (0, 1))(x, embedding)
  wanted, wanted_grads = jax.value_and_grad(loss, (0, 1))(x32, e32)
  assert value.dtype == jnp.float32 and grads[1].dtype == jnp.bfloat16
  np.testing.assert_allclose(value, wanted, rtol=1e-3)
  for a, b in zip(grads, wanted_grads, strict=True):
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.05, atol=0.05)


def test_token_losses_of_a_known_distribution():
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
  teacher = jnp.log(jnp.array([[0.25, 0.5, 0.25]]))
  nll, kl, p, t = token_losses(logits, jnp.array([1]), teacher)
  np.testing.assert_allclose(nll, [np.log(4)], rtol=1e-6)
  np.testing.assert_allclose(kl, [0.25 * np.log(0.5) + 0.5 * np.log(2.0)], rtol=1e-5)
  np.testing.assert_allclose(p, [[0.5, 0.25, 0.25]], rtol=1e-6)
  np.testing.assert_allclose(t, [[0.25, 0.5, 0.25]], rtol=1e-6)
