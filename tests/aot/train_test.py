"""The training step of the true Qwen3-1.7B at 32k tokens, half of its groups local, compiled for
accelerators that this machine does not have: it fits, and says what it needs."""

import functools
import importlib.util
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_ID", "0")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from models.families import config_from_hf
from models.hf_table import num_params, table
from models.hybridize import static_windows
from tests.aot.cuda_test import H100
from tests.aot.models_test import QWEN3
from train import partition
from train.data.packing import Row
from train.flops import step_flops
from train.optimizer import optimizer, schedule
from train.settings import CptSettings
from train.setup import state_shardings
from train.step import Plan, State, make_model, train_step

TOKENS = 32768
needs_tpu, needs_cuda = (
  pytest.mark.skipif(
    importlib.util.find_spec(package) is None,
    reason=f"{package} is not installed (pip install -r requirements-aot.txt)",
  )
  for package in ("libtpu", "jax_cuda12_plugin")
)
pytestmark = pytest.mark.slow


def compiled(devices, backend, capacity):
  """A step of one row per device in bfloat16, parameters and moments split over all devices."""
  config = config_from_hf(QWEN3)
  windows = static_windows((config.num_groups // 2,) * config.num_layers, 1024, config)
  mesh = partition.make_mesh(1, 0, 1, list(devices))
  transform = optimizer(CptSettings(mask="full"))
  # Logits of 1024 tokens of a row at a time.
  plan = Plan(
    make_model(config, windows, mesh=mesh, remat="full", backend=backend, unroll=False), None, transform,
    schedule(CptSettings(mask="full")), chunk=1024 * mesh.size, dtype=jnp.bfloat16,
  )  # fmt: skip
  trained = {row.target: jax.ShapeDtypeStruct(row.full_shape, jnp.float32) for row in table(config)}
  partition.check(mesh, {p: s.shape for p, s in trained.items()}, mesh.size, config, windows)
  shardings = state_shardings(mesh, transform, trained)
  shapes = State(
    trained, jax.eval_shape(transform.init, trained), jax.ShapeDtypeStruct((), jnp.int32)
  )
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )
  rows = partition.batch_sharding(mesh)
  batch = Row(
    *(
      jax.ShapeDtypeStruct((1, mesh.size, TOKENS), kind, sharding=rows)
      for kind in (jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)
    )
  )
  step = jax.jit(
    functools.partial(train_step, plan), donate_argnums=0,
    out_shardings=(shardings, partition.replicated(mesh)),
  )  # fmt: skip
  done = step.lower(state, {}, None, batch).compile()
  memory = done.memory_analysis()
  arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  full = static_windows((config.num_groups,) * config.num_layers, 1, config)
  flops, of_full = (step_flops(config, w, mesh.size, TOKENS) for w in (windows, full))
  print(
    f"\n{mesh.size} x {devices[0].device_kind}, {mesh.size} rows of {TOKENS} tokens: a device holds "
    f"{arguments / 1e9:.2f} GB of state and batch and {temporaries / 1e9:.2f} GB of temporaries, of "
    f"{capacity / 1e9:.0f} GB; {flops / mesh.size / 1e12:.0f} TFLOP per device and step "
    f"({of_full / mesh.size / 1e12:.0f} with full attention)"
  )
  assert arguments >= 12 * num_params(config) / mesh.size
  # The state is given away and written in place: what the step returns needs no room of its own.
  assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes
  assert arguments + temporaries < capacity
  # Never the logits of a row, which in bfloat16 alone would be 10 GB.
  assert f"{TOKENS},{config.vocab_size}]" not in done.as_text()
  return done


@needs_tpu
@pytest.mark.parametrize("topology", ["v6e:2x4", "v6e:4x4"])
def test_on_a_tpu_slice(topology):
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  done = compiled(devices, "splash", 32e9)
  assert done.as_text().count("tpu_custom_call") >= 6  # two windows, forward and two backward


@needs_cuda
def test_on_an_h100():
  topology = topologies.get_topology_desc(
    platform="cuda", topology_name="", target_config=H100, topology="1x1x1"
  )
  compiled(np.array(topology.devices)[:1].tolist(), "triton", 80e9)
