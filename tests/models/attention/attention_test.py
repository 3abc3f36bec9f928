"""The public op: which backend is chosen, what is refused and how, meshes, host memory."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.attention import BACKENDS, attention, choose, sharded_attention
from models.windows import FULL
from tests.models.attention.base import compiled, make, plain

ROW = (FULL, FULL, 5, 5)


@pytest.mark.parametrize(
  ("platform", "tokens", "head_dim", "static", "layout", "sinks", "backend"),
  [
    ("cpu", 64, 64, True, "plain", 0, "reference"),
    ("cpu", 4096, 64, True, "any", 0, "static"),
    ("cpu", 4096, 64, False, "plain", 0, "blocked"),
    ("gpu", 4096, 64, True, "plain", 0, "triton"),
    ("gpu", 4096, 64, False, "any", 4, "triton"),
    ("gpu", 4096, 256, False, "any", 0, "blocked"),
    ("tpu", 4096, 64, True, "plain", 4, "splash"),
    ("tpu", 4096, 64, True, "packed", 0, "splash"),
    ("tpu", 4096, 64, True, "packed", 4, "flash_tpu"),
    ("tpu", 4096, 64, True, "any", 0, "flash_tpu"),
    ("tpu", 64, 64, False, "plain", 0, "flash_tpu"),
  ],
)
def test_default_backend(platform, tokens, head_dim, static, layout, sinks, backend):
  assert choose(platform, tokens, head_dim, static, layout, sinks) == backend


def test_splash_is_never_chosen_on_a_gpu():
  for tokens in (64, 4096):
    for static in (False, True):
      assert choose("gpu", tokens, 64, static, "plain", 0) not in ("splash", "flash_tpu")


@pytest.mark.parametrize(
  ("platform", "backend", "remedy"),
  [
    ("gpu", "splash", "triton"),
    ("gpu", "flash_tpu", "triton"),
    ("tpu", "triton", "flash_tpu"),
    ("tpu", "cudnn", "leave backend unset"),
    ("cpu", "cudnn", "leave backend unset"),
  ],
)
def test_a_backend_asked_for_is_used_or_refused(monkeypatch, platform, backend, remedy):
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  q, k, v, _ = make(1, 16, 4, 2, 32)
  with pytest.raises(NotImplementedError, match=remedy):
    attention(q, k, v, ROW, backend=backend)


def test_cudnn_refusals(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  q, k, v, _ = make(1, 16, 4, 2, 32)
  half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
  positions, segments = plain(1, 16)
  for arrays, windows, kw in (
    ((q, k, v), ROW, {}),
    (half, jnp.array(ROW), {}),
    (half, ROW, {"segments_BxT": segments}),
    (half, ROW, {"positions_BxT": positions, "segments_BxT": segments, "packed": True}),
    (half, ROW, {"sinks": 1}),
    (half, ROW, {"softcap": 5.0}),
  ):
    with pytest.raises(NotImplementedError, match="triton"):
      attention(*arrays, windows, backend="cudnn", **kw)


def test_wrong_arguments():
  q, k, v, _ = make(1, 16, 4, 2, 32)
  with pytest.raises(ValueError, match="there are blocked, cudnn"):
    attention(q, k, v, ROW, backend="flash")
  with pytest.raises(ValueError, match="3 windows for 4 heads"):
    attention(q, k, v, ROW[:3])
  with pytest.raises(ValueError, match="cannot be interpreted"):
    attention(q, k, v, ROW, backend="blocked", interpret=True)


def test_segment_zero_is_refused_by_splash_unless_packed():
  q, k, v, _ = make(1, 16, 4, 2, 32)
  positions, segments = plain(1, 16)
  kw = {"positions_BxT": positions, "segments_BxT": segments, "backend": "splash"}
  with pytest.raises(NotImplementedError, match="packed=True"):
    attention(q, k, v, ROW, **kw)


def test_tuple_and_array_agree_by_default():
  """Mixed windows within a group are fine by default: the choice then is a runtime backend."""
  q, k, v, _ = make(1, 150, 4, 2, 32)
  for row in (ROW, (FULL, 3, 9, 9)):
    got = compiled(lambda *x, row=row: attention(*x, row))(q, k, v)
    want = compiled(lambda *x, row=row: attention(*x, jnp.array(row)))(q, k, v)
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize(
  ("backend", "windows", "interpret"),
  [
    ("splash", ROW, True),
    ("flash_tpu", jnp.array([ROW, ROW[::-1]], jnp.int32), True),
    pytest.param("static", ROW, False, marks=pytest.mark.slow),
    pytest.param("triton", jnp.array(ROW, jnp.int32), True, marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize(
  "axes", [{"batch": "x"}, pytest.param({"heads": "x"}, marks=pytest.mark.slow)]
)
def test_two_devices(backend, windows, interpret, axes):
  """Kernels under `shard_map` equal the reference, over rows and over heads."""
  if isinstance(windows, tuple) and "heads" in axes:
    H, G, windows = 8, 4, (FULL,) * 4 + (5,) * 4
  else:
    H, G = 4, 2
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  q, k, v, _ = make(2, 24, H, G, 32)
  spec = PartitionSpec(axes.get("batch"), None, axes.get("heads"), None)
  q, k, v = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v))
  run = sharded_attention(mesh, **axes)
  positions, segments = plain(2, 24)
  out = compiled(
    lambda q, k, v: run(
      q,
      k,
      v,
      windows,
      positions_BxT=positions,
      segments_BxT=segments,
      packed=True,
      backend=backend,
      interpret=interpret,
    )
  )(q, k, v)
  assert out.sharding.spec == spec
  want = attention(q, k, v, windows, backend="reference")
  np.testing.assert_allclose(out, want, atol=3e-6)


def test_runs_that_do_not_divide_are_refused_by_name():
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  q, k, v, _ = make(2, 24, 4, 2, 32)
  with pytest.raises(NotImplementedError, match="1 kv groups with window"):
    sharded_attention(mesh, heads="x")(q, k, v, ROW)


HOST_MEMORY = """
from tests.memory import peak_kib
from models.attention import plan
from models.attention.splash import _kernel
from models.windows import FULL
_kernel(4, 1024, FULL, 0, None, 512, False)
plan.visited([FULL, 16], 1024, 512).block_until_ready()
before = peak_kib()
for window, sinks in ((FULL, 0), (1024, 0), (1024, 4)):
  _kernel(4, 32768, window, sinks, None, 512, False)
plan.visited([FULL, 1024], 32768, 128).block_until_ready()
print((peak_kib() - before) // 1024)
"""


def test_host_memory_at_32k():
  """Kernels for 32k tokens are prepared without a mask of 1e9 entries (1 GB): under 100 MB."""
  done = subprocess.run(
    [sys.executable, "-c", HOST_MEMORY], capture_output=True, text=True, check=True, cwd="."
  )
  assert int(done.stdout) < 100


def test_backends_are_listed():
  assert set(BACKENDS) == {
    "reference", "blocked", "static", "flash_tpu", "splash", "triton", "cudnn",
  }  # fmt: skip
