"""Which token stands in which slot, and what the buffers weigh."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import cache as kv
from models.cache import CacheSpec
from models.config import ModelConfig
from models.windows import HeadMask

CONFIG = ModelConfig(
  vocab_size=11,
  num_layers=3,
  model_dim=8,
  num_heads=6,
  num_groups=3,
  head_dim=4,
  ffn_dim=8,
  context=64,
)
MASK = HeadMask([[1, 0, 1], [1, 1, 1], [0, 0, 0]])


def spec(window=3, sinks=1, capacity=12, batch=1, dtype=jnp.float32):
  full = tuple((~MASK.local).sum(1).tolist())
  return CacheSpec(CONFIG, full, window, sinks, batch, capacity, dtype)


def test_slots_written_out():
  """W = 3 and one sink: token 0 stays, the others go round."""
  positions = jnp.arange(8, dtype=jnp.int32)
  assert kv.slot_of(positions, spec()).tolist() == [0, 1, 2, 3, 1, 2, 3, 1]
  lengths = jnp.array([0, 1, 2, 4, 6, 8], jnp.int32)
  assert kv.held(lengths, spec()).tolist() == [
    [-1, -1, -1, -1], [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, 3], [0, 4, 5, 3], [0, 7, 5, 6],
  ]  # fmt: skip


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (3, 0), (3, 2), (5, 4), (20, 3)])
def test_what_is_held_is_what_was_put_there(window, sinks):
  """`held` against a simulation that writes token by token: the newest W and the sinks, no more."""
  s, slots = spec(window, sinks), [-1] * spec(window, sinks).slots
  for length in range(1, s.capacity + 1):
    slots[int(kv.slot_of(jnp.int32(length - 1), s))] = length - 1
    assert kv.held(jnp.array([length], jnp.int32), s)[0].tolist() == slots
    seen = {p for p in range(length) if p >= length - window or p < sinks}
    assert {p for p in slots if p >= 0} == seen


@pytest.mark.parametrize("chunk", [1, 2, 5, 12])
@pytest.mark.parametrize("sinks", [0, 2])
def test_chunks_leave_what_single_tokens_leave(chunk, sinks):
  s, tokens = spec(3, sinks, batch=2), np.random.default_rng(0).normal(size=(2, 12, 3, 4))
  ends = np.array([12, 7])

  def fill(size):
    buffer = kv.empty(s).layers[1].local_k
    for first in range(0, 12, size):
      position = jnp.tile(jnp.arange(first, min(first + size, 12), dtype=jnp.int32)[None], (2, 1))
      real = position < jnp.asarray(ends)[:, None]
      end = jnp.minimum(jnp.asarray(ends), first + size).astype(jnp.int32)
      slots = kv.local_slots(position, real, end, s)
      buffer = kv.write(buffer, jnp.asarray(tokens[:, first : first + size], jnp.float32), slots)
    return np.asarray(buffer)

  np.testing.assert_array_equal(fill(chunk), fill(1))
  held = np.asarray(kv.held(jnp.asarray(ends, jnp.int32), s))
  for b in range(2):
    want = tokens[b, held[b]].swapaxes(0, 1).astype(np.float32)
    np.testing.assert_array_equal(fill(chunk)[b], want)


@pytest.mark.parametrize("capacity", [4, 9, 10, 50])
@pytest.mark.parametrize(("window", "sinks"), [(6, 0), (6, 4), (1, 0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_of_the_buffers_equal_the_formula(capacity, window, sinks, dtype):
  s = spec(window, sinks, capacity, batch=3, dtype=dtype)
  size = kv.num_bytes(kv.empty(s))
  bf16 = MASK.kv_bytes(CONFIG, capacity, window, sinks)
  assert size == s.num_bytes == 3 * bf16 * jnp.dtype(dtype).itemsize // 2
  assert kv.num_bytes(kv.empty(s.full())) == 3 * CONFIG.kv_bytes(
    capacity, jnp.dtype(dtype).itemsize
  )


@pytest.mark.parametrize("wrong", [{"window": 0}, {"sinks": -1}, {"capacity": 0}, {"batch": 0}])
def test_impossible_caches_are_refused(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    spec(**wrong)


def test_counts_of_another_model_are_refused():
  with pytest.raises(ValueError, match="full_groups"):
    CacheSpec(CONFIG, (1, 4, 0), 3, 0, 1, 8, jnp.float32)
