"""The exported torch model against this project's own: logits, tokens and cache bytes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from models.families import FAMILIES
from models.windows import HeadMask
from tests.models.hf_hybrid import exported
from tests.models.hf_hybrid.exported import LENGTH, WINDOW, in_chunks, jax_logits, load, save
from tests.models.hf_hybrid.exported import module_cache as module_cache  # a fixture
from tests.models.hf_tiny import hf_logits, random_ids, torch, transformers

TOLERANCE = 1e-4
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5)
CHUNKS = [  # sums to LENGTH; across the window in one step, token by token, and many steps
  [29, *[1] * 11],
  [3, 1, 1, 1, 1, 1, 1, 1, 1, 13, 1, 1, 7, 1, 1, 5],
  [WINDOW] * 5,
]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
  return exported.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  """A Llama with four sinks, and its folder."""
  folder = tmp_path_factory.mktemp("llama")
  made = exported.make("llama", folder / "a")
  return made, save(made, folder / "b", sinks=4)


@pytest.mark.parametrize("sinks", [0, 4])
def test_logits_of_every_family(tiny, tmp_path, sinks):
  ids = random_ids(LENGTH, rows=2)
  ours = jax_logits(tiny, ids, sinks)
  for permute in (True, False):
    model = load(save(tiny, tmp_path / str(permute), sinks, permute=permute))
    for length in LENGTHS:
      theirs = hf_logits(model, ids[:, :length])
      np.testing.assert_allclose(theirs, ours[:, :length], rtol=0, atol=TOLERANCE)
    for chunks in CHUNKS:
      theirs, _ = in_chunks(model, ids, chunks)
      np.testing.assert_allclose(theirs, ours, rtol=0, atol=TOLERANCE)
    with torch.no_grad():
      theirs = model(torch.tensor(ids), use_cache=False).logits.numpy()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=TOLERANCE)
  full = jax_logits(tiny._replace(mask=HeadMask.full(tiny.config)), ids)
  assert np.abs(full - ours).max() > 100 * TOLERANCE  # the windows were seen


def padded(rows):
  """Token ids of unequal rows with padding on the left, and the attention mask."""
  width = max(map(len, rows))
  ids = np.array([[0] * (width - len(row)) + list(row) for row in rows])
  mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
  return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize("sinks", [0, 4])
def test_greedy_tokens_of_padded_batches(tiny, tmp_path, sinks):
  """A row shorter than the sinks, beside one longer than the window."""
  model = load(save(tiny, tmp_path / "b", sinks))
  rows = [random_ids(2, seed=1)[0], random_ids(2 * WINDOW + 3, seed=2)[0]]
  new = LENGTH - len(rows[1])
  ids, mask = padded(rows)
  args = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
  tokens = model.generate(ids, attention_mask=mask, **args)
  recomputed = model.generate(ids, attention_mask=mask, use_cache=False, **args)
  np.testing.assert_array_equal(tokens, recomputed)
  for row, out in zip(rows, tokens.numpy(), strict=True):
    text = out[len(out) - new - len(row) :]
    greedy = jax_logits(tiny, text[None], sinks)[0].argmax(-1)
    np.testing.assert_array_equal(text[len(row) :], greedy[len(row) - 1 : -1])


@pytest.mark.parametrize("sinks", [0, 4])
def test_padded_rows_have_the_logits_of_their_own(llama, tmp_path, sinks):
  """In chunks, so that sinks come from behind padding and leave the window at different times."""
  made, _ = llama
  model = load(save(made, tmp_path / "b", sinks))
  rows = [random_ids(n, seed=n)[0] for n in (LENGTH, LENGTH - 6, LENGTH - 23, 5)]
  ids, mask = padded(rows)
  for chunks in (*CHUNKS, [LENGTH]):
    cache, out, at = None, [], 0
    for size in chunks:
      with torch.no_grad():
        seen = mask[:, : at + size]
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, at : at + size]
        result = model(ids[:, at : at + size], seen, places, cache, use_cache=True)
      cache, at = result.cache, at + size
      out.append(result.logits.numpy())
    out = np.concatenate(out, axis=1)
    assert np.isfinite(out).all()
    for row, logits in zip(rows, out, strict=True):
      ours = jax_logits(made, row[None], sinks)[0]
      np.testing.assert_allclose(logits[-len(row) :], ours, rtol=0, atol=TOLERANCE)


def test_right_padding_changes_nothing(llama):
  made, folder = llama
  model, ids = load(folder), random_ids(LENGTH, rows=2)
  mask = torch.ones(2, LENGTH, dtype=torch.long)
  mask[1, 21:] = 0
  with torch.no_grad():
    theirs = model(torch.tensor(ids), attention_mask=mask).logits.numpy()
  ours = jax_logits(made, ids, sinks=4)
  np.testing.assert_allclose(theirs[0], ours[0], rtol=0, atol=TOLERANCE)
  np.testing.assert_allclose(theirs[1, :21], ours[1, :21], rtol=0, atol=TOLERANCE)


def test_long_texts_are_masked_in_blocks(llama, monkeypatch):
  _, folder = llama
  model, ids = load(folder), random_ids(LENGTH)
  before = hf_logits(model, ids)
  monkeypatch.setattr(sys.modules[type(model).__module__], "QUERY_BLOCK", 7)
  np.testing.assert_allclose(hf_logits(model, ids), before, rtol=0, atol=1e-5)
  after, _ = in_chunks(model, ids, CHUNKS[1])
  np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("permute", [True, False])
def test_cache_takes_the_bytes_of_the_formula(llama, tmp_path, sinks, permute):
  made, _ = llama
  model = load(save(made, tmp_path / "b", sinks, permute=permute))
  for chunks in ([1], [WINDOW], [WINDOW + 1], [WINDOW + 4], [WINDOW + 5], [LENGTH], *CHUNKS):
    tokens = sum(chunks)
    _, cache = in_chunks(model, random_ids(tokens, rows=2), chunks)
    formula = made.mask.kv_bytes(made.config, tokens, WINDOW, sinks)  # of bf16, one row
    assert cache.nbytes == 2 * 2 * formula, chunks
    assert cache.get_seq_length() == tokens


def test_beams_and_a_second_turn(llama):
  """Reordered caches, and more text on a cache whose ring has turned."""
  model = load(llama[1])
  args = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
  ids = torch.tensor(random_ids(11))
  beams = [
    model.generate(ids, max_new_tokens=12, num_beams=3, use_cache=use, **args)
    for use in (True, False)
  ]
  np.testing.assert_array_equal(*beams)
  first = model.generate(ids, max_new_tokens=13, return_dict_in_generate=True, **args)
  text = torch.cat([first.sequences, torch.tensor(random_ids(6, seed=5))], dim=1)
  again = model.generate(text, max_new_tokens=10, cache=first.cache, **args)
  np.testing.assert_array_equal(again, model.generate(text, max_new_tokens=10, **args))


def test_two_folders_at_once(llama, tmp_path):
  made, folder = llama
  other = load(save(made, tmp_path / "other", sinks=0))
  model, ids = load(folder), random_ids(LENGTH)
  for loaded, sinks in ((model, 4), (other, 0)):
    ours = jax_logits(made, ids, sinks)
    np.testing.assert_allclose(hf_logits(loaded, ids), ours, rtol=0, atol=TOLERANCE)


def test_it_trains_and_is_saved_again(llama, tmp_path):
  made, folder = llama
  model = load(folder).train()
  ids = torch.tensor(random_ids(LENGTH))
  loss = model(ids, labels=ids).loss
  loss.backward()
  assert torch.isfinite(loss)
  for name, p in model.named_parameters():
    assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, name
  model.save_pretrained(tmp_path / "c")
  ours = jax_logits(made, ids.numpy(), sinks=4)
  again = load(tmp_path / "c")
  np.testing.assert_allclose(hf_logits(again, ids.numpy()), ours, rtol=0, atol=TOLERANCE)


def test_what_would_be_wrong_is_refused(llama):
  _, folder = llama
  with pytest.raises(ValueError, match="trust_remote_code"):
    load(folder, trust=False)
  for name in ("eager", "sdpa"):
    with pytest.raises(ValueError, match="would ignore the windows"):
      load(folder, attn_implementation=name)
  model, ids = load(folder), torch.tensor(random_ids(12))
  with pytest.raises(ValueError, match="would ignore the windows"):
    model.set_attn_implementation("eager")
  with pytest.raises(TypeError, match="no HybridCache"):
    model(ids, cache=transformers.DynamicCache())
  with pytest.raises(ValueError, match="cache_implementation"):
    model.generate(ids, max_new_tokens=2, cache_implementation="static")
  with pytest.raises(NotImplementedError, match="packed"):
    model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 5] * 2]), use_cache=False)
  with pytest.raises(NotImplementedError, match="4 dimensions"):
    model(ids, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool))
  with pytest.raises(NotImplementedError, match="cropped"):
    model(ids).cache.crop(-1)
  with pytest.raises(ValueError, match="5 tokens of 12"):
    model(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))


ALONE = """
import json, sys

class Nothing:
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in ("jax", "jaxlib", "flax", "models", "bosch_jax"):
      raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Nothing())
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([json.loads(sys.argv[2])])
out = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
print(json.dumps(out[0].tolist()))
"""


def test_without_jax(llama, tmp_path):
  made, folder = llama
  ids = random_ids(17)[0]
  done = subprocess.run(
    [sys.executable, "-c", ALONE, str(folder), json.dumps(ids.tolist())],
    capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path)},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  text = np.array(json.loads(done.stdout.splitlines()[-1]))
  greedy = jax_logits(made, text[None], sinks=4)[0].argmax(-1)
  np.testing.assert_array_equal(text[17:], greedy[16:-1])
