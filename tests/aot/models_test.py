"""One scoring step of the true Qwen3-1.7B shape at 32k tokens, compiled for TPUs without one."""

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bosch_jax.evaluator import Batch, score_from
from models.families import config_from_hf
from models.hf_table import num_params, table
from models.transformer import Transformer

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install -r requirements-aot.txt)",
  ),
]

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
HBM = {"v6e:2x2": 32e9}


def abstract_params(config, sharding):
  params = {}
  for row in table(config):
    *parents, leaf = row.target.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = jax.ShapeDtypeStruct(row.full_shape, jnp.bfloat16, sharding=sharding)
  return params


def compiled_step(topology, values, tokens, questions=4, answer=8, stride=4):
  """The evaluator's own step: a candidate mask a chip, weights and states on every chip."""
  config = config_from_hf(values)
  model = Transformer(config, backend="flash_tpu")
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  mesh = Mesh(np.array(devices), ("candidates",))
  everywhere, spread = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("candidates",)))

  def on_all(*shape, kind=jnp.int32):
    return jax.ShapeDtypeStruct(shape, kind, sharding=everywhere)

  answers = (1, questions, answer)
  batch = Batch(
    *(on_all(1, tokens) for _ in range(3)),
    on_all(*answers),
    on_all(*answers),
    on_all(*answers, kind=jnp.bool),
  )
  states = on_all(-(-config.num_layers // stride), 1, tokens, config.model_dim, kind=jnp.bfloat16)
  shape = (mesh.size, config.num_layers, config.num_groups)
  masks = jax.ShapeDtypeStruct(shape, jnp.bool, sharding=spread)
  whole, split = PartitionSpec(), PartitionSpec("candidates")
  step = jax.shard_map(
    functools.partial(score_from, model, stride), mesh=mesh,
    in_specs=(whole, whole, whole, split, whole, whole), out_specs=split, check_vma=False,
  )  # fmt: skip
  arguments = abstract_params(config, everywhere), states, batch, masks, on_all(), on_all()
  return config, jax.jit(step).lower(*arguments).compile()


@functools.cache
def figures(topology, moe, tokens):
  config, step = compiled_step(topology, QWEN3_MOE if moe else QWEN3, tokens)
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


def test_qwen3_1_7b_at_32k_fits_a_v6e_chip():
  config, step, weights, rest = figures("v6e:2x2", False, 32768)
  assert num_params(config) == 1_720_574_976
  assert weights >= 2 * num_params(config)
  assert weights + rest < HBM["v6e:2x2"] / 2
  assert "tpu_custom_call" in step.as_text()
  # Never logits of all positions: [T, V] in bf16 alone would be 10 GB.
  assert rest < 32768 * config.vocab_size * 2 / 2


def test_two_layers_of_qwen3_30b_a3b_at_32k():
  """Dropless experts are a grouped product there: no [T, E, F] in memory."""
  config, _, weights, rest = figures("v6e:2x2", True, 32768)
  assert weights + rest < HBM["v6e:2x2"]
  assert rest < 32768 * config.num_experts * config.moe_ffn_dim * 2
