"""`python run.py export`: what lies in the folder, and every refusal in one sentence."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bosch_jax import cli
from models import registry
from models.export import save_folder
from models.windows import HeadMask
from tests.integration.families_test import write_folder

SCORES = {
  "full": {"nll": 0.5, "nll_se": 0.1, "exact_match": 0.75, "exact_match_se": 0.05, "n": 8},
  "mask": {"nll": 0.625, "nll_se": None, "exact_match": 0.5, "exact_match_se": None, "n": 8},
}
FACTS = {
  "model": "tiny",
  "window": 24,
  "sinks": 4,
  "target_ratio": 0.5,
  "method": "bosch",
  "seed": 3,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """A Qwen3 of 3 layers x 2 groups: its folder, configuration and parameters, and a mask of a run."""
  root = tmp_path_factory.mktemp("export")
  config, params = write_folder(root / "model", "qwen3")
  (root / "model" / "generation_config.json").write_text(
    json.dumps({"temperature": 0.5, "do_sample": True, "cache_implementation": "static"})
  )
  (root / "run").mkdir()
  HeadMask([[0, 1], [1, 0], [0, 1]]).save(
    root / "run" / "mask.json", config, **FACTS, scores=SCORES
  )
  return root, config, params


def export(tiny, out, *flags, mask="run/mask.json") -> int:
  root = tiny[0]
  return cli.main(
    [
      "export",
      "--model",
      str(root / "model"),
      "--mask",
      str(root / mask),
      "--out",
      str(out),
      *flags,
    ]
  )


def test_the_folder(tiny, tmp_path, capsys):
  root, config, params = tiny
  out = tmp_path / "out"
  assert export(tiny, out, mask="run") == 0  # the folder of a run will do
  assert "trust_remote_code=True" in capsys.readouterr().out
  assert {p.name for p in out.iterdir()} == {
    "README.md", "config.json", "generation_config.json", "mask.json", "model.safetensors",
    "modeling_bosch.py", "hybrid_cache.py", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
  }  # fmt: skip
  assert (out / "mask.json").read_bytes() == (root / "run" / "mask.json").read_bytes()
  generation = json.loads((out / "generation_config.json").read_text())
  assert generation == {"temperature": 0.5, "do_sample": True}
  record = json.loads((out / "config.json").read_text())["bosch"]
  assert (record["window"], record["sinks"]) == (24, 4)
  assert record["local"] == [[0, 1]] * 3 and record["order"] == [[0, 1], [1, 0], [0, 1]]
  loaded = registry.load(str(out))
  assert (
    loaded.config == config and HeadMask.load(out / "mask.json", loaded.config)[0].num_local == 3
  )
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
  assert loaded.tokenizer.encode("some text") == registry.load(
    str(root / "model")
  ).tokenizer.encode("some text")
  assert not list(tmp_path.glob("*.partial"))


def test_the_card_has_measured_figures_only(tiny, tmp_path):
  root, config, _ = tiny
  assert export(tiny, tmp_path / "a") == 0
  card = (tmp_path / "a" / "README.md").read_text()
  assert "3 of 6 key/value head groups of tiny see only the last 24 tokens and the first 4" in card
  assert "| full attention | 0.500 ± 0.100 | 0.75 ± 0.05 |" in card
  assert "| this mask | 0.625 | 0.50 |" in card
  assert "every group local" not in card and "haystack the search never saw." in card
  # 512 tokens: three groups keep all, three 28; two vectors of 16 float32 each.
  full, hybrid = 6 * 512 * 2 * 16 * 4 / 1024, 3 * (512 + 28) * 2 * 16 * 4 / 1024
  assert f"At 512 tokens: {hybrid:.1f} KiB instead of {full:.1f} KiB (53%)" in card
  assert "bosch, seed 3" in card and "later checkpoint" not in card

  run = root / "more"
  run.mkdir()
  mask = HeadMask([[0, 1], [1, 0], [0, 1]])
  mask.save(run / "mask.json", config, **FACTS, scores=SCORES)
  result = {
    **FACTS, "fingerprint": config.fingerprint, "ratio": 0.5, "task": "single", "haystack": "essay",
    "context": 300, "held_out": SCORES,
  }  # fmt: skip
  (run / "result.json").write_text(json.dumps(result))
  assert export(tiny, tmp_path / "b", "--checkpoint", str(root / "model"), mask="more") == 0
  card = (tmp_path / "b" / "README.md").read_text()
  assert "(single needles in essay, 300 tokens, 8 questions)" in card and "later checkpoint" in card
  (run / "result.json").write_text(json.dumps({**result, "seed": 4}))  # of another run
  assert export(tiny, tmp_path / "c", mask="more") == 0
  assert "300 tokens" not in (tmp_path / "c" / "README.md").read_text()

  mask.save(run / "bare.json", config, window=24, sinks=0)
  assert export(tiny, tmp_path / "d", mask="more/bare.json") == 0
  assert "Held-out" not in (tmp_path / "d" / "README.md").read_text()


def test_the_weights_of_a_checkpoint(tiny, tmp_path):
  _, config, params = tiny
  trained = jax.tree.map(lambda p: p + 1, params)
  save_folder(tmp_path / "ckpt", config, trained)  # without a tokenizer: the model's
  assert export(tiny, tmp_path / "out", "--checkpoint", str(tmp_path / "ckpt")) == 0
  loaded = registry.load(str(tmp_path / "out"))
  jax.tree.map(np.testing.assert_array_equal, loaded.params, trained)


def test_dtype_and_order(tiny, tmp_path):
  assert export(tiny, tmp_path / "out", "--dtype", "bfloat16", "--no-permute") == 0
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  assert (values["torch_dtype"], values["bosch"]["order"]) == ("bfloat16", None)
  assert values["bosch"]["local"] == [[0, 1], [1, 0], [0, 1]]


def test_whole_layers_are_native(tiny, tmp_path, capsys):
  root, config, _ = tiny
  HeadMask([[1, 1], [0, 0], [1, 1]]).save(root / "layers.json", config, window=24, sinks=0)
  assert export(tiny, tmp_path / "out", mask="layers.json") == 0
  assert "native" in capsys.readouterr().out
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  assert values["model_type"] == "qwen3" and "auto_map" not in values
  assert values["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
  assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text()
  assert not (tmp_path / "out" / "modeling_bosch.py").exists()
  assert registry.load_config(str(tmp_path / "out")) == config


def test_the_rest_of_a_stopped_export_is_no_hindrance(tiny, tmp_path):
  (tmp_path / "out.partial").mkdir()
  (tmp_path / "out.partial" / "config.json").write_text("{}")
  (tmp_path / "out").mkdir()
  assert export(tiny, tmp_path / "out") == 0


@pytest.mark.parametrize(
  ("case", "said"),
  [
    ("used", "exists and is not empty"),
    ("file", "exists and is not empty"),
    ("mask", "not for this model"),
    ("no mask", "cannot be read"),
    ("window", "has no usable 'window'"),
    ("kind", "give a Hugging Face folder (config.json and safetensors)"),
    ("other", "is another model"),
    ("native", "side by side"),
    ("model", "is not known"),
  ],
)
def test_bad_input_is_one_sentence(tiny, tmp_path, capsys, case, said):
  _, config, params = tiny
  out, flags, mask = tmp_path / "out", [], "run/mask.json"
  local = HeadMask([[0, 1], [1, 0], [0, 1]])
  other = dataclasses.replace(config, rope_theta=77.0)
  if case == "used":
    out.mkdir()
    (out / "notes.txt").write_text("mine")
  elif case == "file":
    out.write_text("mine")
  elif case == "mask":
    local.save(tmp_path / "m.json", other, window=24, sinks=0, model="another")
    mask = tmp_path / "m.json"
  elif case == "no mask":
    mask = tmp_path / "absent.json"
  elif case == "window":
    local.save(tmp_path / "m.json", config, sinks=0)
    mask = tmp_path / "m.json"
  elif case == "kind":
    (tmp_path / "ckpt" / "12").mkdir(parents=True)
    flags = ["--checkpoint", str(tmp_path / "ckpt" / "12")]
  elif case == "other":
    save_folder(tmp_path / "ckpt", other, params)
    flags = ["--checkpoint", str(tmp_path / "ckpt")]
  elif case == "native":
    flags = ["--form", "native"]
  elif case == "model":
    flags = ["--model", "nobody"]
  before = sorted(tmp_path.rglob("*"))
  assert export(tiny, out, *flags, mask=mask) == 2
  err = capsys.readouterr().err
  assert said in err and len(err.strip().splitlines()) == 1, err
  assert sorted(tmp_path.rglob("*")) == before  # nothing half-written
