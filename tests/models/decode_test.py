"""Reading through the hybrid cache gives the logits of one pass over the whole text."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cache as kv
from models import decode
from models.config import ModelConfig, RopeScaling
from models.transformer import Transformer
from models.windows import FULL, HeadMask
from tests.models.cached import QUICK, Cached, forward

W = 6
LENGTHS = (W - 1, W, W + 1, 2 * W, 3 * W + 5)
LONGEST = LENGTHS[-1]
CAPACITY = 40  # one for all, so that tests share what is compiled
CONFIG = ModelConfig(
  vocab_size=53,
  num_layers=2,
  model_dim=24,
  num_heads=6,
  num_groups=3,
  head_dim=8,
  ffn_dim=20,
  context=64,
  qk_norm=True,
  qkv_bias=True,
  nope_layers=(1,),
  rope_scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.14),
)
MASK = HeadMask([[1, 0, 1], [1, 1, 1]])  # a full group among local ones, and a layer without
NO_LOCAL_LAYER = HeadMask([[0, 0, 0], [1, 1, 0]])


def random_params(config: ModelConfig, seed: int = 0):
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  init = jax.jit(Transformer(config).init, compiler_options=QUICK)
  params = init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32), windows)["params"]
  rng = np.random.default_rng(seed)  # biases and norms differ too; attention is sharp
  return jax.tree.map(
    lambda p: 2 * p + rng.normal(0, 0.2, p.shape).astype(p.dtype) if p.ndim > 1 else p, params
  )


@pytest.fixture(scope="module")
def params():
  return random_params(CONFIG)


def random_ids(rows: int, length: int, seed: int = 1) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length))


def close(got, want):
  assert np.abs(want).max() > 1
  np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())


@pytest.mark.parametrize("sinks", [0, 4])
def test_prompt_and_decoding_equal_the_full_pass(params, sinks):
  """At every length around the window, read in chunks of every kind, then five tokens more."""
  ids = random_ids(1, LONGEST + 5)
  want = forward(CONFIG, params, MASK, W, sinks, ids)[0]
  model = Cached(CONFIG, params, MASK, W, sinks, 1, CAPACITY)
  for chunk in (1, 3, W, W + 3, LONGEST):
    for length in LENGTHS:
      model.clear()
      close(model.prompt([ids[0, :length]], chunk)[0], want[length - 1])
      for t in range(length, length + 5):
        close(model.read(ids[:, t : t + 1], [1])[0], want[t])


def test_the_comparison_can_fail(params):
  ids = random_ids(1, 2 * W)
  want = forward(CONFIG, params, MASK, W, 0, ids)[0, -1]
  for wrong in ((W - 1, 0), (W + 1, 0)):
    assert (
      np.abs(Cached(CONFIG, params, MASK, *wrong, 1, CAPACITY).prompt([ids[0]], 3)[0] - want).max()
      > 1e-2
    )


@pytest.mark.parametrize("mask", [NO_LOCAL_LAYER, HeadMask(np.zeros((2, 3)))])
def test_layers_without_full_or_local_groups(params, mask):
  ids = random_ids(1, 20)
  want = forward(CONFIG, params, mask, W, 4, ids)[0]
  model = Cached(CONFIG, params, mask, W, 4, 1, CAPACITY)
  close(model.prompt([ids[0, :15]], 3)[0], want[14])
  for t in range(15, 20):
    close(model.read(ids[:, t : t + 1], [1])[0], want[t])


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("chunk", [1, 5, LONGEST])
def test_rows_of_different_lengths(params, sinks, chunk):
  lengths = (LONGEST, W, 1, 2 * W + 1)
  ids = random_ids(len(lengths), LONGEST + 4)
  want = forward(CONFIG, params, MASK, W, sinks, ids)
  model = Cached(CONFIG, params, MASK, W, sinks, len(lengths), CAPACITY)
  got = model.prompt([row[:n] for row, n in zip(ids, lengths, strict=True)], chunk)
  for t in range(5):
    for b, n in enumerate(lengths):
      close(got[b], want[b, n - 1 + t])
    if t < 4:
      got = model.read(
        np.array([[row[n + t]] for row, n in zip(ids, lengths, strict=True)]), [1] * 4
      )


def test_a_finished_row_stays_as_it_is(params):
  ids = random_ids(2, 20)
  model = Cached(CONFIG, params, MASK, W, 0, 2, CAPACITY)
  before = model.prompt([ids[0, :9], ids[1, :9]], 3)[1]
  after = model.read(np.array([[3], [7]]), [1, 0])
  np.testing.assert_array_equal(after[1], before)
  close(
    model.read(ids[:, 9:10], [0, 1])[1], forward(CONFIG, params, MASK, W, 0, ids[1:, :10])[0, -1]
  )


def test_a_row_is_what_it_is_alone(params):
  ids = random_ids(2, 18)
  both = Cached(CONFIG, params, MASK, W, 0, 2, CAPACITY).prompt([ids[0], ids[1, :5]], 3)
  for b, row in enumerate((ids[0], ids[1, :5])):
    close(both[b], Cached(CONFIG, params, MASK, W, 0, 1, CAPACITY).prompt([row], 3)[0])


def test_text_continues_after_an_answer(params):
  """A second prompt is read behind the first: its chunks begin anywhere."""
  ids = random_ids(1, 30)
  want = forward(CONFIG, params, MASK, W, 4, ids)[0]
  model = Cached(CONFIG, params, MASK, W, 4, 1, CAPACITY)
  for first, stop in ((0, 7), (7, 8), (8, 21), (21, 30)):
    close(model.prompt([ids[0, first:stop]], 9 if stop - first > 1 else 1)[0], want[stop - 1])


def test_capacity_below_the_window(params):
  ids = random_ids(1, 10)
  want = forward(CONFIG, params, MASK, 50, 4, ids)[0]
  for sinks in (0, 4):
    model = Cached(CONFIG, params, MASK, 50, sinks, 1, 10)
    assert model.spec.slots == 10
    close(model.prompt([ids[0, :8]], 5)[0], want[7])
    close(model.read(ids[:, 8:9], [1])[0], want[8])


# ---- what a layer reads


def test_local_layers_forget_what_is_older_than_the_window(params):
  """One token older than W changes nothing behind a layer whose groups are all local; the oldest
  within W does."""
  config = dataclasses.replace(CONFIG, num_layers=1, nope_layers=())
  one = {**params, "layers": jax.tree.map(lambda p: p[:1], params["layers"])}
  ids, last = random_ids(1, 20), 19
  model = Cached(config, one, HeadMask([[1, 1, 1]]), W, 0, 1, CAPACITY)
  want = model.prompt([ids[0]], 5)[0]
  for position, seen in ((last - W, False), (last - W + 1, True), (0, False)):
    other = ids.copy()
    other[0, position] = (other[0, position] + 1) % CONFIG.vocab_size
    model.clear()
    assert (model.prompt([other[0]], 5)[0] != want).any() == seen


def test_mixed_groups_never_exchange_windows(params):
  """In a layer with both kinds, an old token is seen through full groups alone, wherever they
  stood in the checkpoint: only the heads of full groups change."""
  position, ids = 3, random_ids(1, 20)
  other = ids.copy()
  other[0, position] = (other[0, position] + 1) % CONFIG.vocab_size
  config = dataclasses.replace(CONFIG, num_layers=1, nope_layers=())
  R, D = CONFIG.heads_per_group, CONFIG.head_dim
  for row in ([1, 0, 1], [0, 1, 1], [1, 1, 0]):
    for group in range(3):
      # Only the heads of one group reach the output.
      one = jax.tree.map(lambda p: p[:1], params["layers"])
      kernel = np.zeros_like(one["attn"]["o"]["kernel"])
      heads = slice(group * R, (group + 1) * R)
      kernel[:, heads] = one["attn"]["o"]["kernel"][:, heads]
      assert kernel.shape[2] == D
      attn = {**one["attn"], "o": {"kernel": jnp.asarray(kernel)}}
      alone = {**params, "layers": {**one, "attn": attn}}
      model = Cached(config, alone, HeadMask([row]), W, 0, 1, CAPACITY)
      a = model.prompt([ids[0]], 5)[0]
      model.clear()
      b = model.prompt([other[0]], 5)[0]
      assert (a != b).any() == (row[group] == 0), (row, group)


# ---- traces and buffers


def test_one_trace_for_chunks_and_one_for_decoding(params):
  model = Cached(CONFIG, params, MASK, W, 0, 2, 60)
  traced = chex.assert_max_traces(decode.extend.__wrapped__, n=2)
  step = jax.jit(traced, static_argnums=0, compiler_options=QUICK)
  cache, logits = model.cache, model.logits
  for chunk in (8, 8, 8, 1, 1, 1, 1, 8):
    for counts in ([chunk, chunk], [chunk, 0]):
      tokens = jnp.zeros((2, chunk), jnp.int32)
      cache, logits = step(
        model.spec, model.params, cache, logits, tokens, jnp.asarray(counts, jnp.int32)
      )
  with pytest.raises(AssertionError):
    step(
      model.spec, model.params, cache, logits, jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    )


def test_buffers_are_reused(params):
  """The step's own promise to the runtime: every cache buffer is the output's, and little is
  allocated beside them."""
  model = Cached(CONFIG, params, MASK, W, 0, 1, 16384)
  tokens, one = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
  compiled = decode.extend.lower(
    model.spec, model.params, model.cache, model.logits, tokens, one
  ).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= kv.num_bytes(model.cache)
  assert memory.temp_size_in_bytes < kv.num_bytes(model.cache) / 4
  old = model.cache.layers[0].full_k
  decode.extend(model.spec, model.params, model.cache, model.logits, tokens, one)
  assert old.is_deleted()


def test_memory_is_linear_in_the_chunk(params):
  """Twice the chunk takes about twice the temporaries, whatever the capacity."""

  def temporaries(chunk, capacity):
    spec = dataclasses.replace(Cached(CONFIG, params, MASK, 64, 0, 1, 8).spec, capacity=capacity)
    shapes = jax.eval_shape(lambda: kv.empty(spec))
    logits = jax.ShapeDtypeStruct((1, CONFIG.vocab_size), jnp.float32)
    tokens = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    small = decode.unstack(params)
    lowered = decode.extend.lower(spec, small, shapes, logits, tokens, count)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  base = temporaries(1024, 8192)
  assert temporaries(2048, 8192) < 2.3 * base
  assert temporaries(1024, 32768) < 1.1 * base


@pytest.mark.parametrize("tokens", [1, 4])
def test_runtime_windows_over_several_blocks_of_keys(tokens):
  """Blocks in which a local head sees nothing come before those in which it does."""
  B, S, G, R, K, sinks = 2, 1500, 3, 2, 8, 1
  rng = np.random.default_rng(0)
  q = rng.normal(size=(B, tokens, G * R, K)).astype(np.float32)
  k, v = rng.normal(size=(2, B, G, S, K)).astype(np.float32)
  end = np.array([1500, 700], np.int32)
  position = end[:, None] - tokens + np.arange(tokens, dtype=np.int32)
  window = np.array([5, FULL, 600], np.int32)
  for s in (0, sinks):
    got = decode._attend_full(*map(jnp.asarray, (q, k, v, position, end)), (jnp.asarray(window), s))
    distance = position[:, None, :, None] - np.arange(S)
    seen = (distance >= 0) & ((distance < window[:, None, None]) | (np.arange(S) < s))
    score = np.einsum("btgrk,bgsk->bgrts", q.reshape(B, tokens, G, R, K), k) / K**0.5
    score = np.where(seen[:, :, None], score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    want = np.einsum("bgrts,bgsk->btgrk", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got, want.reshape(got.shape), atol=2e-6)
