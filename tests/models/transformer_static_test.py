"""Static windows at construction give what runtime windows give: logits, gradients, parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.hybridize import hybridize, static_windows
from models.transformer import Transformer
from models.windows import HeadMask

CONFIG = ModelConfig(
  vocab_size=50,
  num_layers=4,
  model_dim=24,
  num_heads=4,
  num_groups=2,
  head_dim=8,
  ffn_dim=16,
  context=256,
)
MASK = HeadMask([[1, 0], [0, 1], [0, 0], [1, 1]])
T = 140  # more than the dense backend's limit, so that the static loops run


@pytest.fixture(scope="module")
def setup():
  tokens = jax.random.randint(jax.random.key(1), (2, T), 0, 50)
  params = Transformer(CONFIG).init(
    jax.random.key(0), tokens, jnp.asarray(MASK.windows(5, CONFIG.num_heads))
  )["params"]
  hybrid = hybridize(params, MASK, CONFIG)
  return tokens, params, hybrid, static_windows(hybrid.full_groups, 5, CONFIG)


def places():
  positions = jnp.tile(jnp.concatenate([jnp.arange(60), jnp.arange(T - 60)])[None], (2, 1))
  segments = jnp.tile(jnp.where(jnp.arange(T) < 60, 1, 2)[None], (2, 1))
  return positions.astype(jnp.int32), segments.astype(jnp.int32)


@pytest.mark.parametrize("packed", [False, True])
def test_static_equals_runtime(setup, packed):
  tokens, params, hybrid, rows = setup
  where = places() if packed else (None, None)
  runtime = jnp.asarray(MASK.windows(5, CONFIG.num_heads))
  before = Transformer(CONFIG).apply({"params": params}, tokens, runtime, *where)
  static = Transformer(CONFIG, static_windows=rows, packed=packed)

  def loss(params):
    logits = static.apply({"params": params}, tokens, None, *where)
    return jax.nn.logsumexp(logits, -1).mean(), logits

  (_, after), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(hybrid.params)
  np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)
  array = Transformer(CONFIG, backend="reference")

  def dense(params):
    logits = array.apply({"params": params}, tokens, jnp.asarray(rows, jnp.int32), *where)
    return jax.nn.logsumexp(logits, -1).mean()

  want = jax.jit(jax.grad(dense))(hybrid.params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, want)


def test_equal_rows_share_a_scan(setup):
  tokens, _, hybrid, rows = setup
  assert [row == rows[0] for row in rows] == [True, True, False, False]
  model = Transformer(CONFIG, static_windows=rows)
  jaxpr = jax.make_jaxpr(lambda p: model.apply({"params": p}, tokens))(hybrid.params)
  scans = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  assert [e.params["length"] for e in scans] == [2]  # a layer alone needs none


def test_init_makes_the_same_parameters(setup):
  tokens, params, _, rows = setup
  static = Transformer(CONFIG, static_windows=rows).init(jax.random.key(0), tokens)["params"]
  jax.tree.map(np.testing.assert_array_equal, static, params)


def test_windows_must_be_given_once(setup):
  tokens, params, _, rows = setup
  with pytest.raises(ValueError, match="either in the call"):
    Transformer(CONFIG).apply({"params": params}, tokens)
  with pytest.raises(ValueError, match="either in the call"):
    model = Transformer(CONFIG, static_windows=rows)
    model.apply({"params": params}, tokens, jnp.asarray(rows, jnp.int32))
