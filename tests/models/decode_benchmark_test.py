"""The benchmark of decoding runs, measures what it says, and leaves its file."""

import json

import pytest

from benchmarks.decode import Options, main, random_mask
from models import registry
from models.errors import InputError
from tests.integration.tiny_gguf import write_tiny_gguf


@pytest.mark.slow
def test_small_run(tmp_path):
  pytest.importorskip("torch")
  model = write_tiny_gguf(tmp_path / "tiny.gguf", layers=2)
  options = Options(
    model=str(model),
    contexts=(40, 64),
    ratios=(0.5,),
    window=8,
    tokens=4,
    repeats=1,
    chunk=16,
    out=str(tmp_path / "out"),
  )
  records = main(options)
  assert json.loads((tmp_path / "out" / "decode.json").read_text())["records"] == records
  names = ["ours, full", "ours, 50% local", "torch, dynamic", "torch, static"]
  assert [(r["context"], r["contender"]) for r in records] == [
    (context, name) for context in (40, 64) for name in names
  ]
  config = registry.load_config(str(model))
  for r in records:
    assert r["wall_s"] > 0 and r["cpu_s"] > 0
    ours = r["contender"].startswith("ours")
    assert r["kv_bytes"] == (r["kv_bytes_formula"] if ours else config.kv_bytes(r["context"], 4))
    assert (r["prompt_temporary_bytes"] is not None) == ours
  # Half of the groups keep 8 of 40 or 64 tokens.
  assert [round(r["kv_share"], 4) for r in records[1::4]] == [0.6, 0.5625]


def test_the_mask_has_the_exact_number_of_local_groups():
  config = registry.ModelConfig(
    vocab_size=8, num_layers=5, model_dim=8, num_heads=4, num_groups=2, head_dim=4, ffn_dim=8, context=8
  )  # fmt: skip
  assert random_mask(config, 0.75).num_local == 8
  assert random_mask(config, 0.75) == random_mask(config, 0.75)


@pytest.mark.parametrize(
  ("wrong", "named"),
  [({"tokens": 2}, "--tokens 2"), ({"ratios": (2.0,)}, "--ratios 2"), ({"repeats": 0}, "--repeats 0"), ({"contexts": (8,)}, "--contexts 8")],
)  # fmt: skip
def test_impossible_options_are_named(wrong, named):
  with pytest.raises(InputError, match=named):
    Options(**wrong)


def test_missing_torch_is_named(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(InputError, match="torch is not installed"):
    Options()
  Options(torch=False)
