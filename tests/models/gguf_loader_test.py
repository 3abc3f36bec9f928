"""GGUF loading against what was written, and every way a file can be wrong."""

import dataclasses
import pathlib
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models import gguf_file, gguf_loader, registry
from models.errors import InputError
from models.transformer import Transformer
from tests.models.conftest import TINY, tiny_weights, write_tiny_gguf

TOLERANCE = {"F32": 0, "F16": 2e-3, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_1": 0.3}
UNTIED = dataclasses.replace(TINY, tied_head=False)


def refused(path, *words) -> str:
  """The sentence with which loading is refused."""
  with pytest.raises(InputError) as info:
    gguf_loader.load_gguf(path)
  message = str(info.value)
  assert str(path) in message and "\n" not in message
  for word in words:
    assert word in message, message
  return message


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_loads_what_was_written(tmp_path, config, kind):
  weights = write_tiny_gguf(tmp_path / "m.gguf", config, kind)
  read_config, params = gguf_loader.load_gguf(tmp_path / "m.gguf")
  assert read_config == config
  c = config
  expected = {
    "embed/embedding": weights["token_embd.weight"],
    "final_norm/scale": weights["output_norm.weight"],
  }
  if not c.tied_head:
    expected["head/kernel"] = weights["output.weight"].T
  for target, name, shape in [
    ("attn_norm/scale", "attn_norm", (c.model_dim,)),
    ("mlp_norm/scale", "ffn_norm", (c.model_dim,)),
    ("attn/q/kernel", "attn_q", (c.model_dim, c.num_heads, c.head_dim)),
    ("attn/k/kernel", "attn_k", (c.model_dim, c.num_groups, c.head_dim)),
    ("attn/v/kernel", "attn_v", (c.model_dim, c.num_groups, c.head_dim)),
    ("attn/o/kernel", "attn_output", (c.num_heads, c.head_dim, c.model_dim)),
    ("mlp/gate/kernel", "ffn_gate", (c.model_dim, c.ffn_dim)),
    ("mlp/up/kernel", "ffn_up", (c.model_dim, c.ffn_dim)),
    ("mlp/down/kernel", "ffn_down", (c.ffn_dim, c.model_dim)),
  ]:
    layers = [weights[f"blk.{l}.{name}.weight"].T.reshape(shape) for l in range(c.num_layers)]
    expected[f"layers/{target}"] = np.stack(layers)
  flat = {
    "/".join(k.key for k in path): p for path, p in jax.tree_util.tree_leaves_with_path(params)
  }
  assert flat.keys() == expected.keys()
  for path, value in expected.items():
    tolerance = 0 if path.endswith("scale") else TOLERANCE[kind] * np.abs(value).max()
    np.testing.assert_allclose(flat[path], value, rtol=0, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_tree_is_the_one_the_model_makes(tmp_path, config):
  write_tiny_gguf(tmp_path / "m.gguf", config)
  _, params = gguf_loader.load_gguf(tmp_path / "m.gguf", jnp.bfloat16)
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  made = jax.eval_shape(
    lambda: Transformer(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), windows)
  )["params"]
  assert jax.tree.structure(params) == jax.tree.structure(made)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, made)
  assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_is_the_rounded_float32(tmp_path):
  write_tiny_gguf(tmp_path / "m.gguf")
  _, params = gguf_loader.load_gguf(tmp_path / "m.gguf")
  _, rounded = gguf_loader.load_gguf(tmp_path / "m.gguf", jnp.bfloat16)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), params, rounded
  )


def test_all_faults_in_one_sentence(tmp_path):
  weights = tiny_weights(TINY)
  del weights["blk.0.attn_q.weight"], weights["output_norm.weight"]
  weights["blk.1.attn_q.bias"] = np.zeros(128, np.float32)
  weights["blk.2.ffn_up.weight"] = weights["blk.1.ffn_up.weight"]
  weights["blk.1.ffn_down.weight"] = np.zeros((32, 96), np.float32)
  write_tiny_gguf(tmp_path / "m.gguf", weights=weights)
  refused(
    tmp_path / "m.gguf",
    "blk.0.attn_q.weight is missing",
    "output_norm.weight is missing",
    "blk.1.attn_q.bias is unexpected",
    "blk.2.ffn_up.weight is of a layer beyond the last",
    "blk.1.ffn_down.weight has shape (32, 96) instead of (64, 96)",
  )


def test_many_faults_are_counted(tmp_path):
  weights = {k: v for k, v in tiny_weights(TINY).items() if "attn" not in k}
  write_tiny_gguf(tmp_path / "m.gguf", weights=weights)
  refused(tmp_path / "m.gguf", "and 5 more")


def test_transposed_norm_does_not_broadcast(tmp_path):
  weights = tiny_weights(TINY)
  weights["output_norm.weight"] = np.ones(1, np.float32)
  write_tiny_gguf(tmp_path / "m.gguf", weights=weights)
  refused(tmp_path / "m.gguf", "output_norm.weight has shape (1,) instead of (64,)")


@pytest.mark.parametrize(
  ("fields", "word"),
  [
    (
      {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
      "llama.rope.scaling.type 'yarn'",
    ),
    ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear 2.0"),
    ({"llama.expert_count": 8}, "llama.expert_count 8"),
    ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count 16"),
    ({"llama.attention.value_length": 16}, "llama.attention.value_length 16"),
    ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window 64"),
    ({"llama.attention.head_count_kv": 3}, "num_groups 3"),
    ({"llama.block_count": 0}, "llama.block_count is 0"),
    ({"llama.block_count": 4_000_000_000}, "more"),
    ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
    ({"llama.context_length": None}, "llama.context_length is missing"),
    ({"llama.feed_forward_length": 97}, "instead of (97, 64)"),
    ({"llama.vocab_size": 265}, "instead of (265, 64)"),
  ],
)
def test_metadata_that_cannot_be_run(tmp_path, fields, word):
  write_tiny_gguf(tmp_path / "m.gguf", fields=fields)
  refused(tmp_path / "m.gguf", word)


def test_neutral_metadata_is_accepted(tmp_path):
  fields = {
    "llama.rope.scaling.type": "none",
    "llama.expert_count": 0,
    "llama.rope.scale_linear": 1.0,
  }
  write_tiny_gguf(tmp_path / "m.gguf", fields=fields)
  assert gguf_loader.load_gguf(tmp_path / "m.gguf")[0] == TINY


def test_rope_theta_and_eps_are_read(tmp_path):
  config = dataclasses.replace(TINY, rope_theta=500000.0, norm_eps=1e-6)
  write_tiny_gguf(tmp_path / "m.gguf", config)
  assert gguf_loader.load_gguf(tmp_path / "m.gguf")[0] == config


def test_other_architecture(tmp_path):
  write_tiny_gguf(tmp_path / "m.gguf", architecture="gemma2")
  refused(tmp_path / "m.gguf", "'gemma2'", "llama")


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_numbers_that_are_not_finite(tmp_path, kind, value):
  weights = tiny_weights(TINY)
  write_tiny_gguf(tmp_path / "m.gguf", weights=weights, kind=kind)
  tensor = gguf_file.open_gguf(tmp_path / "m.gguf").tensors["blk.1.ffn_up.weight"]
  number = np.array(value, np.float32 if kind == "F32" else np.float16)  # a scale in Q8_0
  with open(tmp_path / "m.gguf", "r+b") as file:
    file.seek(tensor.offset)
    file.write(number.tobytes())
  refused(tmp_path / "m.gguf", "undefined numbers in blk.1.ffn_up.weight")


def test_names_in_messages_are_printable(tmp_path):
  weights = tiny_weights(TINY) | {"a\nb\x1b[0m": np.ones(4, np.float32)}
  write_tiny_gguf(tmp_path / "m.gguf", weights=weights)
  refused(tmp_path / "m.gguf", "a?b?[0m is unexpected")


def test_no_such_file_and_a_folder(tmp_path):
  refused(tmp_path / "none.gguf", "No such file")
  refused(tmp_path, "directory")


@pytest.mark.parametrize(
  "content", [b"", b"GGUF", b"GGUF\x03\0\0\0", b"PK\x03\x04" * 50, b"\xff" * 99]
)
def test_not_gguf(tmp_path, content):
  path = tmp_path / "m.gguf"
  path.write_bytes(content)
  refused(path)


def test_big_endian_and_future_versions(tmp_path):
  for version in (struct.pack(">I", 3), struct.pack("<I", 4)):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + version + bytes(64))
    refused(path, "version")


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory):
  path = tmp_path_factory.mktemp("gguf") / "m.gguf"
  write_tiny_gguf(path, kind="Q8_0")
  return path, path.read_bytes()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.1, 0.5, 0.9, 0.999])
def test_truncated(tmp_path, tiny_bytes, share):
  path = tmp_path / "m.gguf"
  content = tiny_bytes[1]
  path.write_bytes(content[: int(len(content) * share)])
  refused(path, "damaged")


FUZZ = settings(
  max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(tmp_path, content, magic):
  path = tmp_path / "m.gguf"
  path.write_bytes((b"GGUF\x03\0\0\0" if magic else b"") + content)
  with pytest.raises(InputError):
    registry.load(str(path))


@FUZZ
@given(st.data())
def test_damaged_header_loads_or_is_refused(tmp_path, tiny_bytes, data):
  """Any bytes overwritten in the header: never another exception, never a huge allocation."""
  good, content = tiny_bytes
  header = min(t.offset for t in gguf_file.open_gguf(good).tensors.values())
  content = bytearray(content)
  for _ in range(data.draw(st.integers(1, 3))):
    at = data.draw(st.integers(0, header - 1))
    patch = data.draw(st.sampled_from([b"\xff", b"\0", b"\x08", b"\x09", b"\xff" * 8, b"\x01"]))
    content[at : at + len(patch)] = patch
  path = pathlib.Path(tmp_path / "m.gguf")
  path.write_bytes(content)
  try:
    registry.load(str(path))
  except InputError as error:
    assert "\n" not in str(error)


@pytest.mark.slow
def test_memory_of_loading_the_real_model(real_model):
  code = (
    "from tests.memory import peak_kib\n"
    "from models import load\n"
    "load('smollm2-135m')\n"
    "print(peak_kib())"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert int(done.stdout) < 1.8 * 2**20  # KiB
