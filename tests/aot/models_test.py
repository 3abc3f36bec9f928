"""Scoring steps of the true Qwen3-1.7B shape at 32k tokens, compiled for accelerators without one."""

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from bosch_jax import memory
from bosch_jax.device_options import AXIS
from bosch_jax.prompts import PromptSet
from bosch_jax.scoring import Batch, compiled
from models.families import config_from_hf
from models.hf_table import num_params, table
from models.transformer import Transformer
from tests.aot.cuda_test import topology as cuda_topology

pytestmark = pytest.mark.slow
needs_tpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed (pip install -r requirements-aot.txt)",
)
needs_cuda = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda12_plugin") is None,
  reason="the CUDA plugin is not installed (pip install -r requirements-aot.txt)",
)

QWEN3 = {
  "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
  "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_size": 2048, "intermediate_size": 6144,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
  "model_type": "qwen3_moe", "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
  "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
  "num_hidden_layers": 2,  # of 48: four chips do not hold 61 GB, and every layer is the same
}  # fmt: skip
HBM = {"v6e:2x2": 32e9, "H100": 80e9}


def abstract_params(config, sharding):
  params = {}
  for row in table(config):
    *parents, leaf = row.target.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = jax.ShapeDtypeStruct(row.full_shape, jnp.bfloat16, sharding=sharding)
  return params


def prompt_set(samples, tokens, questions=4, answer=8):
  """Prompts of the shape alone."""
  answers = np.zeros((samples, questions, answer), np.int32)
  row = np.zeros((samples, tokens), np.int32)
  return PromptSet(row, row, row, answers, answers, answers, np.zeros((samples, questions)))


def compiled_score(config, prompts, pairs, *, backend, mesh=None, device=None):
  """The evaluator's own scoring step for so many pairs at once, on a mesh or one device."""
  place = SingleDeviceSharding(device) if mesh is None else None
  everywhere = place or NamedSharding(mesh, PartitionSpec())
  split = place or NamedSharding(mesh, PartitionSpec(AXIS))

  def shape(*dims, kind=jnp.int32, sharding=split):
    return jax.ShapeDtypeStruct(dims, kind, sharding=sharding)

  batch = Batch(*(
    shape(pairs, *x.shape[1:], kind=x.dtype) for x in Batch.of(prompts, [0])
  ))  # fmt: skip
  tokens = prompts.tokens_BxT.shape[1]
  states = tuple(shape(tokens, config.model_dim, kind=jnp.bfloat16) for _ in range(pairs))
  masks = shape(pairs, config.num_layers, config.num_groups, kind=jnp.bool)
  scalars = [shape(sharding=everywhere)] * 2
  score = compiled(Transformer(config, backend=backend), mesh).score
  return score.lower(abstract_params(config, everywhere), states, batch, masks, *scalars).compile()


@functools.cache
def figures(topology, moe, tokens):
  """A candidate on each chip of a mesh."""
  config = config_from_hf(QWEN3_MOE if moe else QWEN3)
  mesh = Mesh(np.array(tpus(topology)), (AXIS,))
  step = compiled_score(
    config, prompt_set(1, tokens), mesh.size, backend="flash_tpu", mesh=mesh
  )  # fmt: skip
  memory = step.memory_analysis()
  weights, rest = (
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes + memory.output_size_in_bytes,
  )
  print(
    f"\n{topology}, {tokens} tokens, {num_params(config) / 1e9:.2f} billion parameters: a chip holds "
    f"{weights / 1e9:.2f} GB of arguments and {rest / 1e9:.2f} GB of temporaries and results"
  )
  return config, step, weights, rest


def tpus(topology):
  return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


@needs_tpu
def test_qwen3_1_7b_at_32k_fits_a_v6e_chip():
  config, step, weights, rest = figures("v6e:2x2", False, 32768)
  assert num_params(config) == 1_720_574_976
  assert weights >= 2 * num_params(config)
  assert weights + rest < HBM["v6e:2x2"] / 2
  assert "tpu_custom_call" in step.as_text()
  # Never logits of all positions: [T, V] in bf16 alone would be 10 GB.
  assert rest < 32768 * config.vocab_size * 2 / 2


@needs_tpu
def test_two_layers_of_qwen3_30b_a3b_at_32k():
  """Dropless experts are a grouped product there: no [T, E, F] in memory."""
  config, _, weights, rest = figures("v6e:2x2", True, 32768)
  assert weights + rest < HBM["v6e:2x2"]
  assert rest < 32768 * config.num_experts * config.moe_ffn_dim * 2


@pytest.mark.parametrize(
  "card", [pytest.param("v6e:2x2", marks=needs_tpu), pytest.param("H100", marks=needs_cuda)]
)
def test_64_samples_of_32k_fit_one_card_in_the_chosen_split(card):
  """Parameters, the stored states and one call of the chosen number of pairs."""
  config, prompts = config_from_hf(QWEN3), prompt_set(64, 32768)
  weights = 2 * num_params(config)
  plan = memory.plan(config, prompts, 2, weights, device_bytes=int(HBM[card]))
  device = cuda_topology().devices[0] if card == "H100" else tpus(card)[0]
  backend = "triton" if card == "H100" else "flash_tpu"
  step = compiled_score(config, prompts, plan.batch, backend=backend, device=device)
  sizes = step.memory_analysis()
  assert sizes.argument_size_in_bytes >= weights
  call = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
  slots = -(-config.num_layers // plan.stride) - 1
  stored = slots * 64 * 32768 * config.model_dim * 2
  print(
    f"\n{card}: {plan.batch} pairs at once, {(call - weights) / 1e9:.2f} GB beside {weights / 1e9:.2f} GB of "
    f"parameters; every {plan.stride}th layer's states, {stored / 1e9:.2f} GB; {(call + stored) / 1e9:.2f} of "
    f"{HBM[card] / 1e9:.0f} GB; estimated {plan.batch * memory.pair_bytes(config, prompts, 2) / 1e9:.2f} GB"
  )
  assert call + stored < HBM[card]
  # The estimate that the split rests on is an upper bound, and not a wild one.
  assert 0.3 < (call - weights) / (plan.batch * memory.pair_bytes(config, prompts, 2)) <= 1.0
