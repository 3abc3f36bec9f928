"""One set of tests for every attention backend; each backend's test file subclasses it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import BACKENDS
from models.attention.reference import reference
from models.windows import FULL

# Every length that once broke a kernel, each with a head_dim, so that both are covered.
SHAPES = (
  (8, 96), (200, 128),
  *(
    pytest.param(*shape, marks=pytest.mark.slow)
    for shape in ((16, 64), (32, 80), (64, 96), (128, 64))
  ),
)  # fmt: skip


def compiled(function):
  """`jax.jit` for tests: compiles in half the time, into slower code."""
  return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def make(B, T, H, G, K, dtype=jnp.float32, seed=0):
  """Random q, k, v and a cotangent for the output."""
  keys = jax.random.split(jax.random.key(seed), 4)
  shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), (B, T, H, K)]
  return [
    jax.random.normal(key, shape, jnp.float32).astype(dtype)
    for key, shape in zip(keys, shapes, strict=True)
  ]


def plain(B, T):
  """One document per row."""
  positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  return positions, jnp.zeros((B, T), jnp.int32)


def rows(*documents):
  """Positions and segments of one row from `(segment, first position, tokens)`, as `[1, T]`."""
  positions = [np.arange(first, first + n) for _, first, n in documents]
  segments = [np.full(n, segment) for segment, _, n in documents]
  return tuple(jnp.asarray(np.concatenate(x)[None], jnp.int32) for x in (positions, segments))


class AttentionTestBase:
  """Subclasses set the attributes below.

  Attributes:
    backend: a key of `BACKENDS`.
    options: its extra arguments in tests, such as small blocks.
    block: a block size it really uses, to put windows around.
    static: it takes windows as tuples only.
    gradients: it can be differentiated.
    shared: it can show segment 0 to the other segments.
    packed_sinks: it can have sinks with several documents in a row.
  """

  backend: str
  options: dict = {}  # noqa: RUF012  (read only)
  block = 32
  static = False
  gradients = True
  shared = True
  packed_sinks = True

  def run(self, q, k, v, windows, positions, segments, layout="plain", **kw):
    kw = {"scale": q.shape[-1] ** -0.5, "layout": layout, **self.options, **kw}
    if not self.static and isinstance(windows, tuple):
      windows = jnp.asarray(windows, jnp.int32)
    return BACKENDS[self.backend](q, k, v, windows, positions=positions, segments=segments, **kw)

  def spec(self, q, k, v, windows, positions, segments, **kw):
    kw = {"scale": q.shape[-1] ** -0.5, **kw}
    return reference(q, k, v, windows, positions=positions, segments=segments, **kw)

  def check(self, arrays, windows, places, layout="plain", tolerance=2e-6, **kw):
    """Forward and gradients equal the reference's; tolerance relative to the largest value."""
    q, k, v, cotangent = arrays

    def both(function, **more):
      def loss(q, k, v):
        out = function(q, k, v, windows, *places, **more, **kw)
        return (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(), out

      return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)

    if self.gradients:
      (_, out), grads = compiled(both(self.run, layout=layout))(q, k, v)
      (_, want), want_grads = compiled(both(self.spec))(q, k, v)
    else:
      run, grads, want_grads = self.run, (), ()
      out = compiled(lambda *qkv: run(*qkv, windows, *places, layout=layout, **kw))(q, k, v)
      want = compiled(lambda *qkv: self.spec(*qkv, windows, *places, **kw))(q, k, v)
    assert out.dtype == q.dtype and out.shape == q.shape
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
      got, expected = (np.asarray(x, np.float32) for x in (got, expected))
      assert np.isfinite(got).all()
      scale = max(1.0, np.abs(expected).max())
      np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=tolerance)

  def test_windows_around_a_block(self):
    b = self.block
    windows = (FULL, 1, b - 1, b, b + 1, 2 * b, 7)
    T = 2 * b + b // 2 + 5
    self.check(make(1, T, 7, 7, 32), windows, plain(1, T))

  @pytest.mark.parametrize(("T", "K"), SHAPES)
  def test_lengths_and_head_dims(self, T, K):
    self.check(make(2, T, 4, 2, K, seed=T), (FULL, FULL, 5, 5), plain(2, T))

  def test_bfloat16(self):
    arrays = make(1, 72, 4, 1, 64, jnp.bfloat16)
    self.check(arrays, (9,) * 4, plain(1, 72), tolerance=2e-2)

  def test_sinks_and_softcap(self):
    T, windows = 3 * self.block + 7, (5, 5, 5, FULL, FULL, FULL)
    arrays = make(1, T, 6, 2, 32)
    self.check(arrays, windows, plain(1, T), sinks=3, softcap=2.0, scale=0.7)

  def test_packed_documents(self):
    """Documents in one row give what they give alone; padding, here also a whole row, gives zeros
    and finite gradients."""
    lengths, b = (self.block + 3, 9, self.block), self.block
    documents = [(i + 1, 0, n) for i, n in enumerate(lengths)]
    places = rows(*documents, (-1, 0, 6))
    T = sum(lengths) + 6
    places = [jnp.concatenate([x, y]) for x, y in zip(places, rows((-1, 0, T)), strict=True)]
    windows = (FULL, FULL, b // 2, b // 2)
    q, k, v, cotangent = make(2, T, 4, 2, 32)
    self.check((q, k, v, cotangent), windows, places, layout="packed")

    def alone(q, k, v):
      starts = np.cumsum((0, *lengths))
      parts = [slice(a, a + n) for a, n in zip(starts, lengths, strict=False)]
      outs = [
        self.spec(q[:1, part], k[:1, part], v[:1, part], windows, *plain(1, n))
        for part, n in zip(parts, lengths, strict=True)
      ]
      return jnp.concatenate(outs, 1)

    out = compiled(lambda *qkv: self.run(*qkv, windows, *places, layout="packed"))(q, k, v)
    np.testing.assert_allclose(out[:1, :-6], compiled(alone)(q, k, v), atol=3e-6)
    np.testing.assert_array_equal(out[0, -6:], 0)
    np.testing.assert_array_equal(out[1], 0)

  def test_shared_haystack(self):
    """Questions see segment 0 and themselves, at positions that continue the haystack's."""
    hay = 2 * self.block + 5
    places = rows((0, 0, hay), (1, hay, 6), (2, hay, self.block), (3, hay, 4), (-1, 0, 5))
    T = places[0].shape[1]
    windows, arrays = (FULL, FULL, 12, 12), make(1, T, 4, 2, 32)
    if not self.shared:
      with pytest.raises(NotImplementedError, match="segment 0"):
        self.run(*arrays[:3], windows, *places, layout="any")
      return
    self.check(arrays, windows, places, layout="any")

  def test_sinks_of_packed_documents(self):
    places = rows((1, 0, self.block + 9), (2, 0, 30))
    arrays = make(1, places[0].shape[1], 2, 1, 32)
    if not self.packed_sinks:
      with pytest.raises(NotImplementedError, match="sinks=0"):
        self.run(*arrays[:3], (6, 6), *places, layout="packed", sinks=2)
      return
    self.check(arrays, (6, 6), places, layout="packed", sinks=2)

  def test_nothing_outside_the_window_matters(self):
    """Bit for bit: neither the future nor keys beyond the window touch a query's output."""
    T, t, w = 2 * self.block + 8, self.block + 11, 13
    q, k, v, _ = make(1, T, 2, 2, 32)
    inside = np.arange(t - w + 1, t + 1)
    outside = np.setdiff1d(np.arange(T), inside)
    windows = (w, FULL)
    run = compiled(lambda k, v: self.run(q, k, v, windows, *plain(1, T)))
    before = np.asarray(run(k, v))
    after = np.asarray(run(k.at[:, outside].add(50.0), v.at[:, outside].add(50.0)))
    np.testing.assert_array_equal(after[0, t, 0], before[0, t, 0])
    future = np.arange(t + 1, T)
    after = np.asarray(run(k.at[:, future].add(50.0), v.at[:, future].add(50.0)))
    np.testing.assert_array_equal(after[0, t], before[0, t])
    for j in (inside[0], inside[-1]):  # both ends of the window do matter
      after = np.asarray(run(k, v.at[:, j].add(50.0)))
      assert np.abs(after[0, t, 0] - before[0, t, 0]).max() > 1e-3

  def test_gradients_outside_the_window_are_zero(self):
    if not self.gradients:
      pytest.skip("this backend has no gradients")
    T, t, w = 2 * self.block + 8, self.block + 11, 13
    q, k, v, _ = make(1, T, 2, 2, 32)
    one = jnp.zeros_like(q).at[0, t].set(1.0)

    @compiled
    def gradients(k, v):
      return jax.vjp(lambda k, v: self.run(q, k, v, (w, FULL), *plain(1, T)), k, v)[1](one)

    for gradient in gradients(k, v):
      touched = np.abs(np.asarray(gradient[0])).max(-1)  # [T, G]
      np.testing.assert_array_equal(np.flatnonzero(touched[:, 0]), np.arange(t - w + 1, t + 1))
      np.testing.assert_array_equal(np.flatnonzero(touched[:, 1]), np.arange(t + 1))


class RuntimeWindowsTests:
  """Further tests of backends whose windows are arrays; mixed in beside `AttentionTestBase`."""

  def test_rows_and_heads_have_their_own_windows(self):
    """Also heads of one group; a backend that skips blocks must keep what any of them needs."""
    windows = jnp.array([[FULL, 3, 17, 40], [9, 9, FULL, FULL], [1, 1, 40, 40]], jnp.int32)
    self.check(make(3, 70, 4, 2, 32), windows, plain(3, 70))

  def test_one_trace_for_all_windows(self):
    q, k, v, _ = make(1, 40, 4, 2, 32)
    places = plain(1, 40)
    chex.clear_trace_counter()  # it counts by source line, so across subclasses too
    run = compiled(chex.assert_max_traces(lambda w: self.run(q, k, v, w, *places), n=1))
    spec = compiled(lambda w: self.spec(q, k, v, w, *places))
    for seed in range(6):
      windows = jax.random.randint(jax.random.key(seed), (4,), 1, 50)
      np.testing.assert_allclose(run(windows), spec(windows), atol=3e-6)

  def test_vmap_over_candidates_equals_the_loop(self):
    q, k, v, _ = make(2, 40, 4, 2, 32)
    windows = jnp.array([[FULL, FULL, 3, 3], [9, 9, FULL, FULL], [5, 5, 5, 5]], jnp.int32)
    places = plain(2, 40)
    alone = compiled(lambda w: self.run(q, k, v, w, *places))
    together = compiled(jax.vmap(lambda w: self.run(q, k, v, w, *places)))(windows)
    for i, row in enumerate(windows):
      np.testing.assert_allclose(together[i], alone(row), atol=2e-6)
