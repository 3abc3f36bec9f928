"""Experts against a loop over tokens, and what routing must not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.moe import MoE, blocks, grouped, ragged, route

E, D, F = 5, 8, 12
CONFIG = ModelConfig(
  vocab_size=11, num_layers=1, model_dim=D, num_heads=2, num_groups=1, head_dim=4, ffn_dim=9, context=16,
  num_experts=E, experts_per_token=2, moe_ffn_dim=F,
)  # fmt: skip


def kernels(seed=0):
  rng = np.random.default_rng(seed)
  return [
    jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in ((E, D, F), (E, D, F), (E, F, D))
  ]


def loop(x_NxD, weights_Nxk, experts_Nxk, gate, up, down):
  out = np.zeros(x_NxD.shape, np.float64)
  for n, x in enumerate(np.asarray(x_NxD, np.float64)):
    for weight, e in zip(weights_Nxk[n], experts_Nxk[n], strict=True):
      g = x @ np.asarray(gate[e], np.float64)
      out[n] += weight * (
        g / (1 + np.exp(-g)) * (x @ np.asarray(up[e], np.float64)) @ np.asarray(down[e], np.float64)
      )
  return out


@pytest.mark.parametrize("top", [1, 2, 5])
@pytest.mark.parametrize("crowd", [False, True])
def test_grouped_equals_a_loop(top, crowd):
  """Also when all tokens crowd into the same experts and others get none: nothing is dropped."""
  rng = np.random.default_rng(top)
  N = 30
  x = jnp.asarray(rng.normal(size=(N, D)).astype(np.float32))
  experts = np.stack(
    [np.arange(top) if crowd else rng.permutation(E)[:top] for _ in range(N)]
  ).astype(np.int32)
  weights = rng.random((N, top)).astype(np.float32)
  out = jax.jit(grouped)(x, jnp.asarray(weights), jnp.asarray(experts), *kernels())
  np.testing.assert_allclose(out, loop(x, weights, experts, *kernels()), rtol=1e-4, atol=1e-4)


@functools.cache
def _loss_and_gradients(run):
  def loss(rows, kernels, sizes):
    out = run(rows, sizes, *kernels)
    return (out**2).sum(), out

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize(
  "sizes", [(7, 0, 300, 1, 92), (0, 0, 0, 0, 400), (80,) * 5, (399, 0, 1, 0, 0)]
)
def test_both_grouped_products_agree(sizes):
  """Also their gradients, for any split of rows among experts."""
  rows = jax.random.normal(jax.random.key(0), (400, D))
  arguments = rows, kernels(), jnp.array(sizes, jnp.int32)
  ((_, first), gradients), ((_, second), others) = (
    _loss_and_gradients(run)(*arguments) for run in (ragged, blocks)
  )
  np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-3)
  scale = max(np.abs(g).max() for g in jax.tree.leaves(gradients))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-5 * scale), gradients, others)


def test_route_written_out():
  logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]], jnp.float32))
  weights, experts = route(logits, 2, normalise=False)
  np.testing.assert_array_equal(experts[0], [1, 3])
  np.testing.assert_allclose(weights, [[0.4, 0.3], [0.7, 0.1]], rtol=1e-6)
  weights, _ = route(logits, 2, normalise=True)
  np.testing.assert_allclose(weights, [[4 / 7, 3 / 7], [7 / 8, 1 / 8]], rtol=1e-6)


def test_the_router_is_in_float32_in_a_bfloat16_model():
  """Logits that bfloat16 cannot tell apart send tokens to the right expert."""
  x = jnp.ones((1, 3, D), jnp.bfloat16)
  params = jax.jit(MoE(CONFIG).init)(jax.random.key(0), x)["params"]
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  router = np.full((D, E), 1.0, np.float32)
  router[0, 3], router[0, 1] = 1 + 2**-7, 1 - 2**-7  # sums 8.0078 and 7.9922; bf16 steps by 0.0625
  params["router"]["kernel"] = jnp.asarray(router, jnp.bfloat16)
  apply = jax.jit(functools.partial(MoE(CONFIG).apply, capture_intermediates=True))
  _, state = apply({"params": params}, x)
  logits = state["intermediates"]["router"]["__call__"][0]
  assert logits.dtype == jnp.float32
  _, experts = route(logits, 1, False)
  assert (experts == 3).all()
  assert state["intermediates"]["__call__"][0].dtype == jnp.bfloat16


def test_gradients_reach_every_expert_and_the_router():
  x = jax.random.normal(jax.random.key(1), (2, 40, D))
  params = jax.jit(MoE(CONFIG).init)(jax.random.key(0), x)["params"]
  gradients = jax.jit(jax.grad(lambda p: (MoE(CONFIG).apply({"params": p}, x) ** 2).sum()))(params)
  for leaf in jax.tree.leaves(gradients["experts"]):
    assert np.isfinite(leaf).all() and (np.abs(leaf).max((1, 2)) > 0).all()
  assert (np.abs(gradients["router"]["kernel"]).max(0) > 0).all()


def test_a_tokens_output_does_not_depend_on_its_neighbours():
  x = jax.random.normal(jax.random.key(1), (1, 16, D))
  params = jax.jit(MoE(CONFIG).init)(jax.random.key(0), x)
  apply = jax.jit(MoE(CONFIG).apply)
  alone = jnp.stack([apply(params, x[:, i : i + 1])[0, 0] for i in range(16)])
  np.testing.assert_allclose(MoE(CONFIG).apply(params, x)[0], alone, atol=1e-6)
