"""Hybrid folders: native where a family can say the mask, and read back as what they were."""

import json

import numpy as np
import pytest

from models import registry
from models.errors import InputError
from models.hybrid_folder import native_fields, read_config, restore
from models.safetensors_loader import load_params
from models.windows import HeadMask
from tests.models.hf_hybrid import exported
from tests.models.hf_hybrid.exported import LENGTH, WINDOW, in_chunks, jax_logits, load, save
from tests.models.hf_hybrid.exported import module_cache as module_cache  # a fixture
from tests.models.hf_tiny import hf_logits, random_ids, torch, transformers

FULL, LOCAL = [0, 0, 0], [1, 1, 1]
LAYERS = [FULL, LOCAL, LOCAL, FULL]
NATIVE = {  # by family: the mask's rows, and the class that loads it
  "qwen2": (LAYERS, "Qwen2ForCausalLM"),
  "qwen3": (LAYERS, "Qwen3ForCausalLM"),
  "smollm3": (LAYERS, "SmolLM3ForCausalLM"),
  "qwen3_moe": ([LOCAL] * 4, "Qwen3MoeForCausalLM"),
  "llama": ([LOCAL] * 4, "MistralForCausalLM"),
  "mistral": ([LOCAL] * 4, "MistralForCausalLM"),
}


@pytest.mark.parametrize("family", NATIVE)
def test_native_logits_and_tokens(family, tmp_path):
  rows, architecture = NATIVE[family]
  tiny = exported.make(family, tmp_path / "a", rows)
  model = load(save(tiny, tmp_path / "b", native=True), trust=False)
  assert type(model).__name__ == architecture
  assert type(model).__module__.startswith("transformers.models.")
  assert not list((tmp_path / "b").glob("*.py"))
  ids = random_ids(LENGTH, rows=2)
  ours = jax_logits(tiny, ids)
  for length in (WINDOW - 1, WINDOW, WINDOW + 1, LENGTH):
    theirs = hf_logits(model, ids[:, :length])
    np.testing.assert_allclose(theirs, ours[:, :length], rtol=0, atol=1e-4)
  theirs, _ = in_chunks(model, ids, [WINDOW + 3, *[1] * (LENGTH - WINDOW - 3)])
  np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)
  full = jax_logits(tiny._replace(mask=HeadMask.full(tiny.config)), ids)
  assert np.abs(full - ours).max() > 0.01
  config, order = read_config(tmp_path / "b")
  assert (config, order) == (tiny.config, None)


def test_no_local_group_is_the_plain_model(tmp_path):
  tiny = exported.make("llama", tmp_path / "a", [FULL, FULL])
  model = load(save(tiny, tmp_path / "b", sinks=4), trust=False)
  assert type(model) is transformers.LlamaForCausalLM
  ids = random_ids(LENGTH)
  np.testing.assert_allclose(hf_logits(model, ids), jax_logits(tiny, ids), rtol=0, atol=1e-4)


def test_layers_local_at_the_end_are_said_in_the_old_field_too():
  fields, _ = native_fields("qwen2", HeadMask([FULL, LOCAL, LOCAL]), 8, 0)
  assert fields["max_window_layers"] == 1
  fields, _ = native_fields("qwen2", HeadMask([FULL, LOCAL, FULL]), 8, 0)
  assert "max_window_layers" not in fields
  config = transformers.Qwen2Config(num_hidden_layers=3, **fields)
  assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
  ("kind", "rows", "sinks", "why"),
  [
    ("qwen2", [FULL, [0, 1, 0]], 0, "1 layers have local and full groups side by side"),
    ("qwen3", [FULL, LOCAL], 4, "4 sinks are kept"),
    ("llama", [FULL, LOCAL], 0, "one window for all layers or none"),
    ("qwen3_moe", [FULL, LOCAL], 0, "one window for all layers or none"),
  ],
)
def test_native_is_refused_with_the_reason(kind, rows, sinks, why, tmp_path):
  assert why in native_fields(kind, HeadMask(rows), 8, sinks)[1]
  tiny = exported.make(kind, tmp_path / "a", rows)
  with pytest.raises(InputError, match=why):
    save(tiny, tmp_path / "b", sinks, native=True)
  assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("permute", [True, False])
def test_a_folder_is_read_back_bit_for_bit(tmp_path, permute):
  tiny = exported.make("qwen2", tmp_path / "a")
  folder = save(tiny, tmp_path / "b", permute=permute)
  config, order = read_config(folder)
  stored = load_params(folder, config)
  assert config == tiny.config and (order is not None) == permute
  exported.leaves_equal(restore(stored, order, config), tiny.params)
  assert registry.load_config(str(folder)) == tiny.config
  path, read = registry.resolve(str(folder)), registry.load_params
  exported.leaves_equal(read(path)[1], tiny.params)
  if permute:
    moved = np.abs(
      np.asarray(stored["layers"]["attn"]["k"]["kernel"])
      - tiny.params["layers"]["attn"]["k"]["kernel"]
    )
    assert moved.max() > 0.1


def test_custom_is_possible_where_native_is(tmp_path):
  tiny = exported.make("qwen3", tmp_path / "a", [LOCAL, FULL])
  model = load(save(tiny, tmp_path / "b", native=False))
  ids = random_ids(LENGTH)
  np.testing.assert_allclose(hf_logits(model, ids), jax_logits(tiny, ids), rtol=0, atol=1e-4)
  with torch.no_grad():
    assert model(torch.tensor(ids)).cache.nbytes == 2 * tiny.mask.kv_bytes(
      tiny.config, LENGTH, WINDOW
    )


@pytest.mark.parametrize(
  "change",
  [
    lambda record: record.pop("format"),
    lambda record: record.update(model_type="bert"),
    lambda record: record.update(order=[[0, 0, 1]] * 2),
    lambda record: record.update(order="abc"),
  ],
  ids=["format", "family", "order", "text"],
)
def test_a_damaged_record_is_refused(tmp_path, change):
  folder = save(exported.make("llama", tmp_path / "a"), tmp_path / "b")
  values = json.loads((folder / "config.json").read_text())
  change(values["bosch"])
  (folder / "config.json").write_text(json.dumps(values))
  with pytest.raises(InputError, match="damaged field 'bosch'"):
    registry.load_config(str(folder))
