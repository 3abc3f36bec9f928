"""Streamed statistics equal the formulas on the whole attention matrix, and never hold one."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from bosch_jax.rankings import attention, gradients
from bosch_jax.rankings.folds import BlocksNeeded, LocalShare, Mass, Peak
from bosch_jax.rankings.streaming import Places, stream
from bosch_jax.scoring import Batch
from models.attention import as_array
from models.config import ModelConfig
from models.transformer import Transformer
from models.windows import FULL
from tests.bosch_jax.rankings import handmade
from tests.bosch_jax.tiny import tiny_prompts

H, G, K = 6, 3, 4
PROMPTS = tiny_prompts(contexts=2)
BLOCK = 8  # several tiles, and padding inside of some
WINDOW, SINKS = 5, 2


@pytest.fixture(scope="module")
def case():
  """q, k, places, and for every context: scores [H, T, T], visibility [T, T], A and distances."""
  B, T = PROMPTS.tokens_BxT.shape
  rng = np.random.default_rng(0)
  q = rng.normal(size=(B, T, H, K)).astype(np.float32) * 3
  k = rng.normal(size=(B, T, G, K)).astype(np.float32)
  oracle = []
  for b in range(B):
    pos, seg = PROMPTS.positions_BxT[b], PROMPTS.segments_BxT[b]
    scores = np.einsum("thk,shk->hts", q[b], np.repeat(k[b], H // G, axis=1)) / np.sqrt(K)
    seen = as_array([FULL], pos, seg)[0].astype(bool)
    weights = np.where(seen, np.exp(scores - scores.max()), 0.0)
    total = weights.sum(-1, keepdims=True)
    a = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    oracle.append((scores, seen, a, pos[:, None] - pos[None], pos))
  where = Places(jnp.asarray(PROMPTS.positions_BxT), jnp.asarray(PROMPTS.segments_BxT))
  return jnp.asarray(q), jnp.asarray(k), where, oracle


def real(b):
  return np.flatnonzero(PROMPTS.segments_BxT[b] >= 0)


def run(fold, q, k, queries, keys, block=BLOCK):
  return jax.tree.map(np.asarray, jax.jit(lambda *a: stream(fold, *a, block))(q, k, queries, keys))


@pytest.mark.parametrize("block", [BLOCK, 128])
def test_mass(case, block):
  q, k, where, oracle = case

  def features(tile):
    far = tile.distance_BxTxS >= WINDOW
    return jnp.stack([far, far & (tile.key_BxS >= SINKS)[:, None]])

  found_FxBxHxT = run(Mass(features, 2), q, k, where, where, block)
  for b, (_, _, a, distance, pos) in enumerate(oracle):
    far = distance >= WINDOW
    for f, chosen in enumerate((far, far & (pos >= SINKS)[None])):
      expected = (a * chosen).sum(-1)[:, real(b)]
      np.testing.assert_allclose(found_FxBxHxT[f, b][:, real(b)], expected, atol=1e-5)


def test_peak_at_chosen_queries(case):
  q, k, where, oracle = case
  asked = np.array([[3, 17, 30, 35, 12], [39, 2, 28, 31, 8]])
  rows = np.arange(2)[:, None]
  queries = Places(*(x[rows, asked] for x in where))
  found_BxHxA = run(Peak(SINKS), q[rows, asked], k, queries, where)
  for b, (scores, seen, _, distance, pos) in enumerate(oracle):
    masked = np.where(seen & (pos >= SINKS)[None], scores, -np.inf)
    for n, t in enumerate(asked[b]):
      if np.isfinite(masked[:, t]).any():
        expected = distance[t, masked[:, t].argmax(-1)]
        np.testing.assert_array_equal(found_BxHxA[b, :, n], expected)


def test_peak_without_a_visible_key_is_no_distance(case):
  q, k, where, _ = case
  found_BxHxT = run(Peak(SINKS), q, k, where, where)
  assert (found_BxHxT[:, :, :SINKS] == 0).all()


def test_local_share_by_moments_of_the_keys(case):
  """The formula as written, with the mean and covariance of the distant keys."""
  q, k, where, oracle = case
  share_BxHxT, count_BxHxT = run(LocalShare(WINDOW, SINKS), q, k, where, where)
  for b, (scores, seen, _, distance, pos) in enumerate(oracle):
    keys = np.repeat(np.asarray(k[b]), H // G, axis=1).astype(np.float64)
    for t in real(b):
      far = seen[t] & (distance[t] >= WINDOW) & (pos >= SINKS)
      assert (count_BxHxT[b, :, t] == far.sum()).all()
      if not far.any():
        continue
      for h in range(H):
        query, distant = np.asarray(q[b, t, h], np.float64), keys[far, h]
        covariance = np.cov(distant.T, bias=True)
        m, s2 = query @ distant.mean(0) / np.sqrt(K), query @ covariance @ query / K
        local = np.exp(scores[h, t, seen[t] & ~far]).sum()
        expected = local / (local + far.sum() * np.exp(m + s2 / 2))
        assert share_BxHxT[b, h, t] == pytest.approx(expected, abs=2e-5)


def test_blocks_needed(case):
  q, k, where, oracle = case
  B, T = PROMPTS.tokens_BxT.shape
  R = H // G
  heads = q.reshape(B, T, G, R, K)
  with_proxy = jnp.concatenate([heads, heads.mean(3, keepdims=True)], 3).reshape(B, T, -1, K)
  found_BxHxT = run(BlocksNeeded(G, 0.9), with_proxy, k, where, where)
  for b, (_, seen, a, _, _) in enumerate(oracle):
    proxy_q, keys = np.asarray(heads[b].mean(2)), np.asarray(k[b])
    scores = np.einsum("tgk,sgk->gts", proxy_q, keys) / np.sqrt(K)
    weights = np.where(seen, np.exp(scores), 0.0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    for start in range(0, T, BLOCK):
      rows = [t for t in range(start, min(start + BLOCK, T)) if t in real(b)]
      if not rows:
        continue
      edges = np.arange(0, T, BLOCK)
      peaks = np.maximum.reduceat(weights[:, rows].max(1), edges, axis=-1)
      mass = np.add.reduceat(a[:, rows].sum(1), edges, axis=-1)
      for h in range(H):
        order = np.argsort(-peaks[h // R], kind="stable")
        held = np.cumsum(mass[h, order])
        expected = 1 + (held < 0.9 * held[-1]).sum()
        np.testing.assert_array_equal(found_BxHxT[b, h, rows], expected)


LONG = 32768
MODEL = ModelConfig(50, 2, 16, 4, 2, 4, 16, LONG, qk_norm=True)


def avals(jaxpr):
  """Shapes of every intermediate, those inside loops and branches too."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from avals(inner)


def specs():
  tokens = jax.ShapeDtypeStruct((1, LONG), jnp.int32)
  answers = jax.ShapeDtypeStruct((1, 4, 8), jnp.int32)
  valid = jax.ShapeDtypeStruct((1, 4, 8), jnp.bool_)
  windows = jnp.zeros((MODEL.num_layers, MODEL.num_heads), jnp.int32)
  init = Transformer(MODEL).init
  params = jax.eval_shape(init, jax.random.key(0), windows[:, :4], windows)["params"]
  return params, Batch(tokens, tokens, tokens, answers, answers, valid)


STATISTICS = {
  "dcam": attention.DistantMass(1024, 0),
  "apl": attention.PeakLag(4),
  "proxy": attention.ProxyBlocks(2, 0.9, 128),
  "qada": attention.QueryLocalShare(1024, 4),
  "razor": attention.Repeats(2500),
}


@pytest.mark.parametrize("name", [*STATISTICS, "duo"])
def test_nothing_quadratic_at_32k(name):
  params, batch = specs()
  model = Transformer(MODEL)
  if name == "duo":
    gates = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    wanted = jax.ShapeDtypeStruct((1, 32, 16), jnp.float32)
    window = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(gradients._distill, static_argnums=0)(
      model, params, gates, wanted, batch, window
    )
  else:
    jaxpr = jax.make_jaxpr(attention._observe, static_argnums=(0, 1))(
      model, STATISTICS[name], params, batch
    )
  shapes = list(avals(jaxpr.jaxpr))
  assert any(LONG in shape for shape in shapes)
  assert not any(sum(d >= LONG // 8 for d in shape) > 1 for shape in shapes)
  assert max(np.prod(shape) for shape in shapes) <= 64 * LONG  # linear: q has 16 numbers a token


def test_the_search_of_shapes_sees_a_dense_matrix():
  jaxpr = jax.make_jaxpr(lambda x: jax.lax.map(lambda r: (r[:, None] * r[None]).sum(0), x))(
    jax.ShapeDtypeStruct((2, LONG), jnp.float32)
  )
  assert (LONG, LONG) in list(avals(jaxpr.jaxpr))


def test_padding_changes_no_statistic_of_a_model():
  model, params = Transformer(handmade.CONFIG), handmade.params()
  batch = Batch.of(handmade.prompts(), [0])
  padding = {"tokens_BxT": 0, "positions_BxT": 0, "segments_BxT": -1}
  wide = batch._replace(
    **{
      name: np.pad(getattr(batch, name), ((0, 0), (0, 24)), constant_values=value)
      for name, value in padding.items()
    }
  )
  statistic = attention.QueryLocalShare(handmade.WINDOW, attention.SINKS)
  results = [attention._observe(model, statistic, params, text) for text in (batch, wide)]
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
