"""Every family against Hugging Face torch: logits in, logits out, and no field without effect."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import export, safetensors_file, safetensors_loader
from models.config import ModelConfig, RopeScaling
from models.families import FAMILIES
from models.rope import rope_angles
from models.transformer import Transformer, answer_logits, embed, layout, run_layers
from models.windows import FULL
from tests.models import hf_tiny
from tests.models.hf_tiny import LINEAR, LLAMA3, YARN, hf_logits, hf_model, load, logits, random_ids

TOLERANCE = 1e-4
RATIOS = {1: (4, 4), 3: (6, 2), 4: (4, 1), 8: (8, 1)}  # H / G -> H, G
SCALED = {"yarn2": {**YARN, "factor": 2.0}, "yarn4": YARN, "llama3": LLAMA3, "linear": LINEAR}


def compare(model, folder, length=40, start=0):
  model.save_pretrained(folder)
  config, params = load(folder)
  ids = random_ids(length, rows=2)
  positions = np.broadcast_to(np.arange(start, start + length), ids.shape)
  theirs, ours = hf_logits(model, ids, positions), logits(config, params, ids, positions)
  assert np.abs(theirs).max() > 1
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
  return config, params, ids, theirs


def sizes(family, ratio, tied, own_head_dim):
  heads, groups = RATIOS[ratio]
  changes = {
    "num_attention_heads": heads,
    "num_key_value_heads": groups,
    "tie_word_embeddings": tied,
  }
  if own_head_dim and family != "smollm3":
    changes["head_dim"] = 10
  elif family.startswith("qwen3"):
    changes["head_dim"] = 48 // heads
  return changes


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(tmp_path, family, ratio):
  tied = (ratio + len(family)) % 2 == 0
  compare(
    hf_model(family, ratio, **sizes(family, ratio, tied, own_head_dim=ratio in (3, 8))), tmp_path
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "ratio", "tied", "own"),
  [*itertools.product(FAMILIES, RATIOS, (True, False), (True, False))],
)
def test_logits_wide(tmp_path, family, ratio, tied, own):
  changes = sizes(family, ratio, tied, own)
  compare(
    hf_model(family, 7, vocab_size=113, intermediate_size=72, num_hidden_layers=4, **changes),
    tmp_path,
    100,
  )


@pytest.mark.parametrize(
  ("name", "start"),
  [("yarn2", 0), ("yarn4", 0), ("yarn4", 8000), ("llama3", 0), ("llama3", 8000), ("linear", 0)],
)
def test_scaled_rope_beyond_its_original_context(tmp_path, name, start):
  family = "llama" if name in ("llama3", "linear") else "qwen3"
  # 300 tokens are past the original 64, and past the stretched 128 or 256 too.
  compare(hf_model(family, rope_parameters=SCALED[name]), tmp_path, length=300, start=start)


@pytest.mark.parametrize("name", ["yarn4", "llama3", "linear"])
def test_scaling_is_visible(tmp_path, name):
  """The error of ignored scaling is large, also within the first tokens (not at the very first)."""
  family = "llama" if name in ("llama3", "linear") else "qwen3"
  config, params, ids, theirs = compare(hf_model(family, rope_parameters=SCALED[name]), tmp_path)
  plain = logits(dataclasses.replace(config, rope_scaling=None), params, ids)
  np.testing.assert_allclose(plain[:, 0], theirs[:, 0], atol=TOLERANCE)
  assert np.abs(plain[:, 30:] - theirs[:, 30:]).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
  "rope",
  [
    {**YARN, "attention_factor": 1.3},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "mscale": 0.8, "beta_fast": 20.0, "beta_slow": 2.0},
    {**YARN, "truncate": False},
    {**YARN, "original_max_position_embeddings": 1_000_000, "rope_theta": 1e6},
  ],
  ids=["attention_factor", "mscales", "one mscale and betas", "truncate", "no ramp"],
)
def test_yarn_options(tmp_path, rope):
  compare(hf_model("qwen3", rope_parameters=rope), tmp_path, length=100)


@pytest.mark.parametrize("old", [True, False])
def test_both_spellings_of_rope(tmp_path, old):
  model = hf_model("llama", rope_parameters=LLAMA3)
  config, *_ = compare(model, tmp_path)
  values = json.loads((tmp_path / "config.json").read_text())
  if old:
    rope = values.pop("rope_parameters")
    values |= {
      "rope_theta": rope.pop("rope_theta"),
      "rope_scaling": {**rope, "type": rope["rope_type"]},
    }
  (tmp_path / "config.json").write_text(json.dumps(values))
  assert load(tmp_path)[0] == config
  assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling("llama3", 8.0, 64))


def test_experts_of_a_layer_in_many_shards(tmp_path):
  model = hf_model("qwen3_moe")
  model.save_pretrained(tmp_path / "a")
  export.save_folder(tmp_path / "b", *load(tmp_path / "a"), shard_bytes=8000)
  where = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())["weight_map"]
  assert len({f for name, f in where.items() if ".0.mlp.experts." in name and "gate" in name}) > 2
  ids = random_ids(40)
  np.testing.assert_allclose(
    logits(*load(tmp_path / "b"), ids), hf_logits(model, ids), atol=TOLERANCE
  )


@pytest.mark.parametrize(("normalise", "top"), [(True, 1), (False, 1), (True, 3), (False, 6)])
def test_routing(tmp_path, normalise, top):
  model = hf_model("qwen3_moe", norm_topk_prob=normalise, num_experts_per_tok=top)
  config, params, ids, theirs = compare(model, tmp_path)
  other = logits(dataclasses.replace(config, norm_topk_prob=not normalise), params, ids)
  # With all experts chosen the weights sum to 1 either way.
  assert (np.abs(other - theirs).max() > 100 * TOLERANCE) == (top < 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close(tmp_path, family):
  # All experts chosen: a rounded router may choose others, which is a jump and no rounding error.
  changes = {"num_experts_per_tok": 6} if family == "qwen3_moe" else {}
  model = hf_model(family, **changes).to(hf_tiny.torch.bfloat16)
  model.save_pretrained(tmp_path)
  config, params = load(tmp_path, jnp.bfloat16)
  ids = random_ids(40)
  ours, theirs = logits(config, params, ids), hf_logits(model, ids)
  assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 0.05  # bf16 keeps 8 bits


@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_loaded_by_torch_with_equal_logits(tmp_path, family):
  rope = YARN if family == "qwen3" else LLAMA3 if family == "llama" else None
  model = hf_model(family, **({"rope_parameters": rope} if rope else {}))
  model.save_pretrained(tmp_path / "a")
  config, params = load(tmp_path / "a")
  export.save_folder(tmp_path / "b", config, params, shard_bytes=30_000)
  again = hf_tiny.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
  assert (tmp_path / "b" / "model.safetensors.index.json").exists()
  ids = random_ids(150)
  np.testing.assert_allclose(hf_logits(again, ids), hf_logits(model, ids), rtol=0, atol=1e-6)
  assert load(tmp_path / "b")[0] == config


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_round_trip_is_bit_equal(tmp_path, family):
  model = hf_model(family, tie_word_embeddings=family == "qwen3").to(hf_tiny.torch.bfloat16)
  model.save_pretrained(tmp_path / "a")
  config, params = load(tmp_path / "a", None)
  assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
  export.save_folder(tmp_path / "b", config, params)
  first, second = (safetensors_loader.open_folder(tmp_path / x) for x in "ab")
  assert first.keys() == second.keys()
  for name in first:
    assert (first[name].kind, first[name].shape) == ("BF16", second[name].shape)
    assert first[name].read().tobytes() == second[name].read().tobytes(), name
  assert safetensors_file.DTYPES["BF16"] == jnp.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_counts(tmp_path, family):
  hf_model(family, tie_word_embeddings=False).save_pretrained(tmp_path)
  config, params = load(tmp_path)
  ids = random_ids(40)
  before = logits(config, params, ids)
  leaves, tree = jax.tree.flatten(params)
  names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  rng = np.random.default_rng(0)
  for i, name in enumerate(names):
    noise = rng.normal(0, 0.1, leaves[i].shape).astype(np.float32)
    changed = jax.tree.unflatten(tree, [*leaves[:i], leaves[i] + noise, *leaves[i + 1 :]])
    assert np.abs(logits(config, changed, ids) - before).max() > 100 * TOLERANCE, name


@pytest.mark.parametrize("family", ["qwen3_moe", "smollm3"])
def test_every_way_through_the_layers_is_the_same(tmp_path, family):
  """Scanned, in a loop over traced layers (the search), and with static windows (training)."""
  hf_model(family).save_pretrained(tmp_path)
  config, params = load(tmp_path)
  ids = jnp.asarray(random_ids(40), jnp.int32)
  rows = np.where(np.arange(config.num_heads) < config.heads_per_group, 7, FULL).astype(np.int32)
  rows = jnp.asarray(np.stack([rows] * (config.num_layers - 1) + [np.full_like(rows, FULL)]))
  positions, segments = layout(ids)

  @hf_tiny.quick_jit
  def searched(params, first, last):
    x = run_layers(
      Transformer(config), params, embed(params, ids), rows[:, None], positions, segments, 0, first
    )
    x = run_layers(Transformer(config), params, x, rows[:, None], positions, segments, first, last)
    return answer_logits(Transformer(config), params, x, jnp.arange(40, dtype=jnp.int32)[None])

  scanned = hf_tiny.quick_jit(Transformer(config).apply)({"params": params}, ids, rows)
  static = Transformer(config, static_windows=tuple(map(tuple, rows.tolist())))
  fixed = hf_tiny.quick_jit(static.apply)({"params": params}, ids)
  np.testing.assert_allclose(
    searched(params, jnp.int32(1), jnp.int32(config.num_layers)), scanned, atol=1e-4
  )
  np.testing.assert_allclose(fixed, scanned, atol=1e-4)
  assert np.abs(scanned - logits(config, params, ids)).max() > 0.01  # the windows were seen


def test_every_field_counts(tmp_path):
  """Each field that does not shape a parameter changes logits by itself."""
  changed = {
    "rope_theta": 5000.0, "norm_eps": 1e-2, "norm_topk_prob": True, "experts_per_token": 3,
    "nope_layers": (1,), "rope_scaling": None,
  }  # fmt: skip
  shaping = {
    "vocab_size", "num_layers", "model_dim", "num_heads", "num_groups", "head_dim", "ffn_dim", "num_experts",
    "moe_ffn_dim", "tied_head", "qk_norm", "qkv_bias",
  }  # fmt: skip
  hf_model("qwen3_moe", rope_parameters=YARN).save_pretrained(tmp_path)
  config, params = load(tmp_path)
  fields = {f.name for f in dataclasses.fields(config)}
  assert fields == changed.keys() | shaping | {
    "context"
  }  # context is a limit, and computes nothing
  ids = random_ids(100)
  before, prints = logits(config, params, ids), {config.fingerprint}
  for name, value in changed.items():
    other = dataclasses.replace(config, **{name: value})
    assert np.abs(logits(other, params, ids) - before).max() > 10 * TOLERANCE, name
    prints.add(other.fingerprint)
  assert len(prints) == len(changed) + 1


@pytest.mark.parametrize(
  ("kind", "name", "value"),
  [
    ("yarn", "factor", 2.0), ("yarn", "original_context", 32), ("yarn", "beta_fast", 4.0),
    ("yarn", "beta_slow", 2.0), ("yarn", "truncate", False), ("yarn", "attention_factor", 1.3),
    ("llama3", "factor", 8.0), ("llama3", "original_context", 32), ("llama3", "low_freq_factor", 2.0),
    ("llama3", "high_freq_factor", 8.0), ("linear", "factor", 3.0),
  ],
)  # fmt: skip
def test_every_field_of_rope_scaling_counts(kind, name, value):
  """In the angles; the tests above show that angles count in the logits."""
  more = {"yarn": {"attention_factor": 1.14}}.get(kind, {})
  scaling = RopeScaling(kind, 4.0, 64, **more)
  config = ModelConfig(61, 1, 48, 6, 2, 32, 40, 64, rope_theta=100.0, rope_scaling=scaling)
  other = dataclasses.replace(config, rope_scaling=dataclasses.replace(scaling, **{name: value}))
  positions = jnp.arange(50, dtype=jnp.int32)[None]
  (first, _), (second, _) = (rope_angles(positions, c) for c in (config, other))
  assert np.abs(first - second).max() > 0.01
  assert other.fingerprint != config.fingerprint


def test_sizes_are_what_the_tables_say(tmp_path):
  from models.hf_table import num_params

  for family in FAMILIES:
    model = hf_model(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / family)
    config = load(tmp_path / family)[0]
    assert num_params(config) == sum(p.numel() for p in model.parameters())
    assert config.vocab_size == hf_tiny.SIZES["vocab_size"]
