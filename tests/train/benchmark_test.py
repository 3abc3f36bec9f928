"""`python run.py bench train` on a tiny model: both sides do the same work."""

import json

import numpy as np
import pytest

from benchmarks.train import Options, Ours, Torch, main, spread_mask
from models import registry
from tests.integration.tiny_gguf import write_tiny_gguf

pytest.importorskip("torch")
TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=2))


def test_our_update_is_torchs(model):
  """The loss, and the loss after one update: the same gradients, clipping and AdamW."""
  loaded, options = registry.load(model), Options(model=model, batch=2)
  ours, theirs = Ours(loaded, options, TOKENS, 0.0), Torch(loaded, options, TOKENS)
  first, second = (ours(), ours()), (theirs(), theirs())
  np.testing.assert_allclose(first, second, rtol=2e-5)
  assert abs(first[1] - first[0]) > 1e-3  # the update did something


def test_every_contender_is_measured_and_written(model, tmp_path):
  options = Options(
    model=model, torch_tokens=TOKENS, hybrid_tokens=2 * TOKENS, repeats=1, out=str(tmp_path)
  )
  records = main(options)
  assert [r["tokens"] for r in records] == [TOKENS] * 2 + [2 * TOKENS] * 2
  assert json.loads((tmp_path / "train.json").read_text())["records"] == records
  assert all(r["wall_s"] > 0 and r["cpu_s"] > 0 for r in records)
  assert records[0]["ratio"] == records[2]["ratio"] == 1
  assert records[3]["flops"] < records[2]["flops"]


def test_the_spread_mask_has_the_ratio_in_every_part(model):
  config = registry.load_config(model)
  assert spread_mask(config, 0.5).num_local == config.total_groups // 2
  assert spread_mask(config, 0.0).num_local == 0
