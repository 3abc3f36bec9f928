"""Folders of safetensors: what is read, where it lies, and every way they can be wrong."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import export, hf_table, safetensors_file, safetensors_loader
from models.config import ModelConfig
from models.errors import InputError
from models.transformer import Transformer

CONFIG = ModelConfig(
  vocab_size=61, num_layers=2, model_dim=24, num_heads=4, num_groups=2, head_dim=8, ffn_dim=40, context=64,
  tied_head=False, qk_norm=True, num_experts=4, experts_per_token=2, moe_ffn_dim=16,
)  # fmt: skip
DENSE = ModelConfig(61, 2, 24, 4, 2, 8, 40, 64, qkv_bias=True)


def random_params(config, seed=0):
  rng, params = np.random.default_rng(seed), {}
  for row in hf_table.table(config):
    *parents, leaf = row.target.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = jnp.asarray(rng.normal(size=row.full_shape).astype(np.float32))
  return params


def edit(folder, change):
  """Rewrites a folder's only file after `change(tensors)`."""
  path = folder / "model.safetensors"
  tensors = {name: entry.read() for name, entry in safetensors_file.read_header(path).items()}
  change(tensors)
  safetensors_file.write(path, [(n, t.shape, t.dtype, lambda t=t: t) for n, t in tensors.items()])


def refused(folder, *words, config=DENSE):
  with pytest.raises(InputError) as info:
    safetensors_loader.load_params(folder, config)
  message = str(info.value)
  assert "--model" in message and str(folder) in message and "\n" not in message
  for word in words:
    assert word in message, message


@pytest.fixture
def folder(tmp_path):
  return export.save_folder(tmp_path / "m", DENSE, random_params(DENSE))


@pytest.mark.parametrize("shard_bytes", [10**9, 5000, 1])
@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_reads_what_was_written(tmp_path, config, shard_bytes):
  params = random_params(config)
  export.save_folder(tmp_path, config, params, shard_bytes=shard_bytes)
  read = safetensors_loader.load_params(tmp_path, config)
  jax.tree.map(np.testing.assert_array_equal, read, params)
  files = sorted(tmp_path.glob("*.safetensors"))
  assert (len(files) == 1) == (shard_bytes == 10**9)
  if shard_bytes == 5000:
    sizes = [
      sum(np.prod(e.shape) * 4 for e in safetensors_file.read_header(f).values()) for f in files
    ]
    largest = max(e.read().nbytes for f in files for e in safetensors_file.read_header(f).values())
    assert max(sizes) <= max(5000, largest)


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_tree_is_the_one_the_model_makes(tmp_path, config):
  export.save_folder(tmp_path, config, random_params(config))
  read = safetensors_loader.load_params(tmp_path, config, jnp.bfloat16)
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  made = jax.eval_shape(
    lambda: Transformer(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), windows)
  )["params"]
  assert jax.tree.structure(read) == jax.tree.structure(made)
  assert jax.tree.map(jnp.shape, read) == jax.tree.map(jnp.shape, made)
  assert {p.dtype for p in jax.tree.leaves(read)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64, np.float32])
def test_stored_types(tmp_path, dtype):
  values = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
  safetensors_file.write(tmp_path / "x", [("a", (3, 5), np.dtype(dtype), lambda: values)])
  read = safetensors_file.read_header(tmp_path / "x")["a"].read()
  assert read.dtype == values.dtype and read.tobytes() == values.tobytes()


def test_the_safetensors_package_agrees(folder):
  numpy = pytest.importorskip("safetensors.numpy")
  theirs = numpy.load_file(folder / "model.safetensors")
  ours = safetensors_file.read_header(folder / "model.safetensors")
  assert theirs.keys() == ours.keys()
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name].read(), value)


def test_straight_to_a_mesh(tmp_path):
  params = random_params(CONFIG)
  export.save_folder(tmp_path, CONFIG, params, shard_bytes=5000)
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
  asked = {}

  def sharding(path, shape):
    asked[path] = shape
    experts = "experts" in path
    return NamedSharding(mesh, PartitionSpec(None, "model", "data") if experts else PartitionSpec())

  read = safetensors_loader.load_params(tmp_path, CONFIG, sharding=sharding)
  jax.tree.map(np.testing.assert_array_equal, read, params)
  gate = read["layers"]["mlp"]["experts"]["gate"]["kernel"]
  assert {s.data.shape for s in gate.addressable_shards} == {(2, 2, 12, 16)}
  assert asked == {row.target: row.full_shape for row in hf_table.table(CONFIG)}


def test_all_faults_in_one_sentence(folder):
  def change(tensors):
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_proj.bias"]
    tensors["model.layers.1.mlp.up_proj.bias"] = np.zeros(40, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((40, 24), np.float32)

  edit(folder, change)
  refused(
    folder,
    "model.norm.weight is missing",
    "model.layers.0.self_attn.q_proj.bias is missing",
    "model.layers.1.mlp.up_proj.bias is unexpected",
    "model.layers.2.mlp.up_proj.weight is of a layer or expert beyond the last",
    "model.layers.1.mlp.down_proj.weight has shape (40, 24) instead of (24, 40)",
  )


def test_untied_head_that_is_not_there(folder):
  import dataclasses

  refused(folder, "lm_head.weight is missing", config=dataclasses.replace(DENSE, tied_head=False))


def test_a_tied_head_may_be_stored_again_if_it_is_the_same(folder):
  edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
  safetensors_loader.load_params(folder, DENSE)
  edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
  refused(folder, "lm_head.weight differs from the embedding")


def test_frequencies_of_old_checkpoints_are_not_weights(folder):
  edit(
    folder,
    lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}),
  )
  safetensors_loader.load_params(folder, DENSE)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_cut_short(folder, keep):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:keep])
  refused(folder, "fetch the file again")


@pytest.mark.parametrize(
  "start", [b"", b"\xff" * 8, b"\x04" + bytes(7) + b'{"a"', b"\x02" + bytes(7) + b"[]"]
)
def test_not_safetensors(folder, start):
  (folder / "model.safetensors").write_bytes(start)
  refused(folder, "damaged or not safetensors")


def test_other_types_are_named(folder):
  path = folder / "model.safetensors"
  raw = path.read_bytes()
  path.write_bytes(raw.replace(b'"F32"', b'"I32"', 1))
  refused(folder, "of type I32, which is not read")


def test_no_weights(tmp_path):
  refused(tmp_path, "has no model.safetensors")
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  refused(tmp_path, "pytorch_model.bin is a pickle")


def test_shards_missing_or_other_than_the_index_says(tmp_path):
  export.save_folder(tmp_path, DENSE, random_params(DENSE), shard_bytes=5000)
  first = sorted(tmp_path.glob("*.safetensors"))[0]
  index = tmp_path / "model.safetensors.index.json"
  text = index.read_text()
  values = json.loads(text)
  values["weight_map"]["model.norm.weight"] = first.name
  index.write_text(json.dumps(values))
  refused(tmp_path, "does not hold model.norm.weight where")
  for bad in ("[]", "{}", '{"weight_map": {"a": "../x"}}', "no"):
    index.write_text(bad)
    refused(tmp_path, "is damaged")
  index.write_text(text)
  first.unlink()
  refused(tmp_path, f"lacks {first.name}")


def test_export_refuses(tmp_path, folder):
  params = random_params(DENSE)
  with pytest.raises(InputError, match="holds a model already"):
    export.save_folder(folder, DENSE, params)
  with pytest.raises(InputError, match="shard size 0"):
    export.save_folder(tmp_path / "b", DENSE, params, shard_bytes=0)
  with pytest.raises(InputError, match="int32"):
    export.save_folder(tmp_path / "b", DENSE, jax.tree.map(lambda p: p.astype(jnp.int32), params))
  with pytest.raises(ValueError, match="layers/attn/q/bias"):
    export.save_folder(tmp_path / "b", ModelConfig(61, 2, 24, 4, 2, 8, 40, 64), params)
  with pytest.raises(ValueError, match="embed/embedding"):
    export.save_folder(
      tmp_path / "b", ModelConfig(62, 2, 24, 4, 2, 8, 40, 64, qkv_bias=True), params
    )
  (tmp_path / "file").write_text("")
  with pytest.raises(InputError, match="cannot be written"):
    export.save_folder(tmp_path / "file" / "x", DENSE, params)
  assert not (tmp_path / "b").exists()


MEASURE = """
import re, sys
import jax, jax.numpy as jnp
from models import safetensors_loader
from models.config import ModelConfig
def status(key):  # not getrusage, whose peak a process inherits from the one that started it
  with open("/proc/self/status") as file:
    return 1024 * int(re.search(key + r":\\s+(\\d+) kB", file.read())[1])
config = eval(sys.argv[2])
jnp.zeros(8).block_until_ready()
before = status("VmRSS")
params = safetensors_loader.load_params(sys.argv[1], config, jnp.dtype(sys.argv[3]))
leaves = jax.tree.leaves(params)
print(status("VmHWM") - before, sum(p.nbytes for p in leaves), max(p.nbytes for p in leaves))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_the_tree_and_one_stacked_tensor(tmp_path, dtype):
  """Neither a second copy of them nor the files' pages stay in memory."""
  import ml_dtypes

  config = ModelConfig(16000, 6, 512, 8, 4, 64, 3072, 64, tied_head=False)
  kind = np.dtype(ml_dtypes.bfloat16)
  tensors = [
    (row.name(index), row.stored, kind, lambda row=row: np.ones(row.stored, kind))
    for row in hf_table.table(config)
    for index in row.indices()
  ]
  safetensors_file.write(tmp_path / "model.safetensors", tensors)
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", MEASURE, tmp_path, repr(config), dtype],
    capture_output=True,
    text=True,
    cwd=root,
    check=True,
  )
  peak, tree, largest = map(int, done.stdout.split())
  print(
    f"{dtype}: {peak / 1e6:.0f} MB at most for a tree of {tree / 1e6:.0f} MB, largest {largest / 1e6:.0f} MB"
  )
  # The constant: four threads with a stored and a converted tensor each, and what jax allocates once.
  assert peak < tree + largest + 80e6
