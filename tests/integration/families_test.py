"""`select`, `info` and `models` on Hugging Face folders of other families, as a user runs them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bosch_jax.niah import make_niah
from models import registry
from models.config import ModelConfig, RopeScaling
from models.export import save_folder
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from models.windows import HeadMask
from tests.integration.command import SMALL, run
from tests.integration.tiny_gguf import TEMPLATE, train_tokenizer

SHAPE = {
  "num_layers": 3,
  "model_dim": 40,
  "num_heads": 4,
  "num_groups": 2,
  "head_dim": 16,
  "ffn_dim": 48,
  "context": 512,
}
FAMILIES = {
  "qwen3_moe": {
    "qk_norm": True,
    "num_experts": 4,
    "experts_per_token": 2,
    "moe_ffn_dim": 24,
    "tied_head": False,
  },
  "qwen3": {"qk_norm": True, "rope_scaling": RopeScaling("yarn", 4.0, 128, attention_factor=1.14)},
}


def write_folder(folder: pathlib.Path, family: str) -> tuple[ModelConfig, dict]:
  """A random model of a family with the tokenizer of NIAH prompts."""
  backend = train_tokenizer()
  config = ModelConfig(vocab_size=backend.get_vocab_size(), **SHAPE, **FAMILIES[family])
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), windows)[
    "params"
  ]
  params = jax.tree.map(lambda p: 2.5 * p if p.ndim > 2 else p, params)  # sharper attention
  save_folder(folder, config, params, Tokenizer(backend, TEMPLATE, 1, 2), shard_bytes=50_000)
  return config, params


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param) / f"tiny-{request.param}"
  return folder, *write_folder(folder, request.param)


def test_select(model, tmp_path):
  folder, config, _ = model
  code, _, err = run("select", "--model", folder, *SMALL, "--out", tmp_path / "a")
  assert code == 0, err
  result = json.loads((tmp_path / "a" / "result.json").read_text())
  assert (result["model"], result["num_local"]) == (folder.name, 3)
  mask, record = HeadMask.load(tmp_path / "a" / "mask.json", registry.load_config(str(folder)))
  assert (mask.num_local, record["fingerprint"]) == (3, config.fingerprint)
  columns = [result["held_out"][name]["nll"] for name in ("full", "all_local", "mask")]
  assert np.isfinite(columns).all() and len(set(columns)) == 3


def test_info(model):
  folder, config, _ = model
  code, out, err = run("info", "--model", folder, "--ratio", "0.5", "--window", "128")
  assert code == 0, err
  assert config.fingerprint in out and "q/k norm" in out and "3 of 6 groups local" in out
  assert "saves 37.5%" in out  # half of the groups keep 128 of 512 tokens
  assert ("2 of 4 a token" in out) == bool(config.num_experts)
  assert ("yarn x 4" in out) == (config.rope_scaling is not None)


def test_a_folder_is_loaded_as_it_was_written(model):
  folder, config, params = model
  loaded = registry.load(str(folder))
  assert (loaded.name, loaded.config) == (folder.name, config)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_the_tokenizer_of_a_folder_makes_the_same_prompts(model):
  folder, *_ = model
  kwargs = dict(
    context=400,
    window=24,
    samples=2,
    task="multikey",
    haystack="noise",
    seed=1,
    split="calibration",
  )
  direct = make_niah(Tokenizer(train_tokenizer(), TEMPLATE, 1, 2), **kwargs)
  assert make_niah(Tokenizer.from_folder(folder), **kwargs).digest == direct.digest


def test_models_are_listed():
  code, out, err = run("models")
  assert code == 0, err
  for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3"):
    assert name in out


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    (("--ratio", "2"), "--ratio 2"),
    (("--context", "9999"), "--context 9999"),
    (("--model", "nobody"), "--model nobody"),
  ],
)
def test_info_refuses_in_one_sentence(model, flags, named):
  code, _, err = run("info", "--model", model[0], *flags)
  assert code == 2 and named in err and len(err.strip().splitlines()) == 1, err
