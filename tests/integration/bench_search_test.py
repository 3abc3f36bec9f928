"""The search benchmark measures what it says: all contenders give the same scores."""

import importlib.util
import json

import pytest

from benchmarks import search
from models.attention import as_array
from models.errors import InputError
from models.windows import expand
from tests.bosch_jax.tiny import CONFIG, random_masks, tiny_prompts
from tests.integration.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def options(tmp_path_factory):
  folder = tmp_path_factory.mktemp("bench")
  return search.Options(
    model=str(write_tiny_gguf(folder / "tiny.gguf")), context=400, window=24, samples=4, budget=25,
    out=str(folder / "out"),
  )  # fmt: skip


@pytest.mark.slow
def test_small_run(options):
  pytest.importorskip("torch")
  facts = search.main(options)
  with open(f"{options.out}/search.json") as file:
    assert json.load(file) == json.loads(json.dumps(facts))
  assert set(facts["largest_nll_difference"]) == {"plain JAX", "Hugging Face torch"}
  assert max(facts["largest_nll_difference"].values()) < 1e-4
  assert {"anchors", "1", "2", "3"} <= set(facts["stages"])
  assert all(stage["answers"] > 0 and stage["cpu"] > 0 for stage in facts["stages"].values())
  assert 0 < facts["share_of_matmul_peak"]["cpu"] < 1


def test_without_torch_it_says_so(monkeypatch, options):
  found = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest)
  )
  with pytest.raises(InputError, match="torch: is not installed"):
    search.hf_torch(None, None, 1)


def test_flops_are_those_of_pairs_that_see_each_other():
  prompts, window = tiny_prompts(), 6
  work = search.Work(CONFIG, prompts, window)
  mask = random_masks(1)[0]
  windows = expand(mask, CONFIG.num_heads, window)
  seen = 0
  for row in windows[1:3]:
    for w in row:
      seen += as_array([w], prompts.positions_BxT[2], prompts.segments_BxT[2]).sum()
  dense = 2 * prompts.tokens_BxT.shape[1] * (
    CONFIG.model_dim * CONFIG.head_dim * 2 * (CONFIG.num_heads + CONFIG.num_groups)
    + 3 * CONFIG.model_dim * CONFIG.ffn_dim
  )  # fmt: skip
  assert work.layers(mask, 2, 1, 3) == 2 * dense + 4 * CONFIG.head_dim * seen
