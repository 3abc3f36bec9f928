"""A number hidden in 4096 tokens, found by generation: through our cache and by the exported model in torch."""

import numpy as np
import pytest

import models
from bosch_jax.niah import make_niah
from models import hybrid_folder
from models.hybridize import hybridize
from tests.models.hf_hybrid.exported import load
from tests.models.hf_hybrid.exported import module_cache as module_cache  # a fixture
from tests.models.hf_tiny import torch

pytestmark = pytest.mark.slow
WINDOW = 512


def test_needle_at_4096_tokens(tmp_path):
  """A third of the layers, lowest and highest ones, where little is retrieved, are local."""
  loaded = models.load()
  rows = np.zeros((30, 3), bool)
  rows[[*range(1, 5), *range(24, 30)]] = True
  mask = models.HeadMask(rows)
  made = make_niah(
    loaded.tokenizer, context=4096, window=WINDOW, samples=1, task="single", split="held_out"
  )
  answer = made.target_BxQxA[0, 0][made.valid_BxQxA[0, 0]].tolist()
  ids = made.tokens_BxT[0][made.segments_BxT[0] >= 0].tolist()
  prompt, told = ids[: -len(answer)], ids[-len(answer) :]
  assert told == answer and len(prompt) > 3500

  generator = models.Generator(loaded, hybridize(loaded.params, mask, loaded.config), window=WINDOW)
  ours = generator.generate([prompt], max_tokens=len(answer), stop_ids=[])
  assert ours.stats.kv_bytes < 0.72 * ours.stats.kv_bytes_full

  hybrid_folder.save_hybrid(tmp_path / "x", loaded.config, loaded.params, mask, WINDOW)
  exported = load(tmp_path / "x")
  options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
  out = exported.generate(torch.tensor([prompt]), max_new_tokens=len(answer), **options)
  theirs = out[0, len(prompt) :].tolist()

  assert ours.completions[0].ids == theirs == answer
