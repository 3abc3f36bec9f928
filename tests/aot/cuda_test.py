"""Ahead-of-time compilation for an NVIDIA H100, on a machine without one: Triton code becomes a
binary, so too much shared memory or an unsupported shape fails here. Needs the CUDA plugin of JAX
(requirements-aot.txt)."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from models.attention import attention

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda12_plugin") is None,
  reason="the CUDA plugin is not installed (pip install -r requirements-aot.txt)",
)

H, G = 8, 4
# Published figures of the H100 SXM card.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 7 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def topology():
  return topologies.get_topology_desc(
    platform="cuda", topology_name="", target_config=H100, topology="1x1x1"
  )


@pytest.fixture(scope="module")
def card():
  return SingleDeviceSharding(topology().devices[0])


def arguments(T, K, card, dtype):
  def shape(*dims, dtype=dtype):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=card)

  places = [shape(1, T, dtype=jnp.int32)] * 2
  return [shape(1, T, H, K), *[shape(1, T, G, K)] * 2, shape(1, H, dtype=jnp.int32), *places]


def run(q, k, v, windows, positions, segments, **kw):
  return attention(
    q, k, v, windows, positions_BxT=positions, segments_BxT=segments, backend="triton", **kw
  )


@pytest.mark.parametrize(("K", "T"), [(64, 8192), (80, 8192), (128, 32768)])
def test_forward(card, K, T):
  jax.jit(lambda *x: run(*x, sinks=4, softcap=30.0)).lower(
    *arguments(T, K, card, jnp.bfloat16)
  ).compile()


@pytest.mark.parametrize(("K", "T"), [(64, 8192), (64, 32768), (128, 8192), (128, 32768)])
def test_forward_and_backward(card, K, T):
  def loss(q, k, v, *rest):
    return run(q, k, v, *rest).astype(jnp.float32).sum()

  jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments(T, K, card, jnp.bfloat16)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("K", [64, 128])
def test_float32(card, K):
  """Exact float32 products take the compiler longer."""
  jax.jit(run).lower(*arguments(8192, K, card, jnp.float32)).compile()
