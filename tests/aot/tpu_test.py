"""Ahead-of-time compilation for TPUs, on a machine without one: what a kernel cannot hold or
express fails here, as it would on the chip. Needs libtpu (requirements-aot.txt)."""

import importlib.util
import os

# libtpu looks for a chip and a metadata server unless told where it is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_ID", "0")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from models.attention import attention, sharded_attention
from models.attention.splash import splash
from models.windows import FULL

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed (pip install -r requirements-aot.txt)",
)

CROSSED = (
  (64, 8192), (128, 32768),
  *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((128, 8192), (64, 32768))),
)  # fmt: skip
TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
H, G, WINDOW = 8, 4, 1024
ROW = (FULL,) * 4 + (WINDOW,) * 4


def devices(topology):
  return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def shapes(T, K, sharding, batch=1):
  """q, k, v as bfloat16 shapes."""
  return [
    jax.ShapeDtypeStruct((batch, T, heads, K), jnp.bfloat16, sharding=sharding)
    for heads in (H, G, G)
  ]


def integers(shape, sharding):
  return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


def gradients(run):
  return jax.grad(lambda q, k, v: run(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))


def calls(function, *arguments) -> int:
  """Compiles, and counts the kernels in the executable."""
  return jax.jit(function).lower(*arguments).compile().as_text().count("tpu_custom_call")


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("K", "T"), CROSSED)
def test_runtime_windows(topology, K, T):
  one = SingleDeviceSharding(devices(topology)[0])

  def run(q, k, v, windows, positions, segments):
    return attention(
      q,
      k,
      v,
      windows,
      positions_BxT=positions,
      segments_BxT=segments,
      sinks=4,
      softcap=30.0,
      backend="flash_tpu",
    )

  places = [integers((1, T), one)] * 2
  assert calls(run, *shapes(T, K, one), integers((1, H), one), *places) == 1


def test_runtime_windows_of_many_candidates():
  """Eight candidates folded into the batch by vmap are one kernel, not a loop of eight."""
  one = SingleDeviceSharding(devices("v5e:2x2")[0])

  def run(q, k, v, windows):
    return jax.vmap(lambda w: attention(q, k, v, w, backend="flash_tpu"))(windows)

  text = jax.jit(run).lower(*shapes(8192, 64, one), integers((8, H), one)).compile().as_text()
  assert text.count("tpu_custom_call") == 1 and " while(" not in text


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("K", "T"), CROSSED)
def test_static_windows_forward_and_backward(topology, K, T):
  one = SingleDeviceSharding(devices(topology)[0])

  def run(q, k, v):
    return attention(q, k, v, ROW, backend="splash")

  # Two windows, and for each the forward pass, dq, and dk with dv.
  assert calls(gradients(run), *shapes(T, K, one)) == 6


def test_static_windows_with_packing():
  one = SingleDeviceSharding(devices("v5e:2x2")[0])

  def loss(q, k, v, positions, segments):
    out = attention(
      q, k, v, ROW, positions_BxT=positions, segments_BxT=segments, packed=True, backend="splash"
    )
    return out.astype(jnp.float32).sum()

  places = [integers((1, 8192), one)] * 2
  assert calls(jax.grad(loss, (0, 1, 2)), *shapes(8192, 128, one), *places) == 6


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_two_by_two_mesh(topology):
  """Rows over one axis, heads over the other: static with gradients, and runtime windows."""
  mesh = Mesh(np.array(devices(topology)).reshape(2, 2), ("data", "model"))
  spread = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
  run = sharded_attention(mesh, batch="data", heads="model")
  arrays = shapes(8192, 128, spread, batch=2)
  assert calls(gradients(lambda q, k, v: run(q, k, v, ROW, backend="splash")), *arrays) == 6
  windows = integers((2, H), NamedSharding(mesh, PartitionSpec("data", "model")))
  assert calls(lambda *x: run(*x, backend="flash_tpu"), *arrays, windows) == 1


@pytest.mark.slow
def test_a_block_too_large_is_caught_here():
  """The reason for compiling: v5e cannot hold the backward pass of a block of 2048."""
  one = SingleDeviceSharding(devices("v5e:2x2")[0])

  def run(q, k, v):
    zeros = jnp.zeros((1, 8192), jnp.int32)
    return splash(
      q, k, v, ROW, positions=zeros, segments=zeros, scale=1.0, layout="plain", block=2048
    )

  with pytest.raises(Exception, match=r"(?i)vmem|memory"):
    calls(gradients(run), *shapes(8192, 128, one))
