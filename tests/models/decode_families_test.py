"""Every family through the hybrid cache; greedy tokens of the whole model equal torch's `generate`."""

import numpy as np
import pytest

from models.families import FAMILIES
from models.generate import Generator
from models.windows import HeadMask
from tests.models.cached import Cached, forward
from tests.models.hf_tiny import LLAMA3, YARN, hf_model, load, random_ids, torch

W = 6
VARIANTS = {
  **{family: (family, {}) for family in FAMILIES},
  "yarn": ("qwen3", {"rope_parameters": YARN}),
  "llama3": ("llama", {"rope_parameters": LLAMA3}),
}


def mixed_mask(config) -> HeadMask:
  """Layers of every kind: one group local, all local, the other local, none ..."""
  kinds = ([1, 0], [1, 1], [0, 1], [0, 0])
  return HeadMask([kinds[l % 4] for l in range(config.num_layers)])


@pytest.mark.parametrize("name", VARIANTS)
def test_hybrid_cache_equals_the_full_pass_and_greedy_equals_torch(tmp_path, name):
  family, changes = VARIANTS[name]
  model = hf_model(family, **changes)
  model.save_pretrained(tmp_path)
  config, params = load(tmp_path)
  mask, ids = mixed_mask(config), random_ids(3 * W + 5, rows=2, seed=2)
  want = forward(config, params, mask, W, 1, ids)
  cached = Cached(config, params, mask, W, 1, 2, 40)
  got = cached.prompt([ids[0, : 2 * W + 1], ids[1, : W - 1]], 8)
  for t in range(5):
    for b, n in enumerate((2 * W + 1, W - 1)):
      np.testing.assert_allclose(got[b], want[b, n - 1 + t], atol=3e-5 * np.abs(want).max())
    step = [[ids[0, 2 * W + 1 + t]], [ids[1, W - 1 + t]]]
    got = cached.read(np.array(step), [1, 1])

  # Greedy, full attention, two prompts of different lengths; torch is given them padded on the left.
  lengths, new = (13, 7), 12
  whole = Cached(config, params, HeadMask.full(config), W, 0, 2, 40)
  logits = whole.prompt([ids[b, :n] for b, n in enumerate(lengths)], 8)
  tokens = []
  for _ in range(new):
    tokens.append(logits.argmax(-1))
    logits = whole.read(tokens[-1][:, None], [1, 1])
  padded, seen = np.zeros((2, 13), int), np.zeros((2, 13), int)
  for b, n in enumerate(lengths):
    padded[b, 13 - n :], seen[b, 13 - n :] = ids[b, :n], 1
  with torch.no_grad():
    theirs = model.generate(
      torch.tensor(padded), attention_mask=torch.tensor(seen), do_sample=False,
      max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
  np.testing.assert_array_equal(np.stack(tokens, 1), theirs[:, 13:].numpy())


@pytest.mark.slow
def test_greedy_text_of_the_default_model_equals_torch(real_model, tmp_path):
  """64 tokens, by way of a Hugging Face folder of the same weights."""
  import transformers

  from models.export import save_folder

  save_folder(tmp_path, real_model.config, real_model.params)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
  chat = real_model.tokenizer.chat([{"role": "user", "content": "Tell me about the river Rhine."}])
  prompts = [real_model.tokenizer.encode(x) for x in (chat, "Once upon a time there was")]
  output = Generator(real_model, chunk=32).generate(prompts, max_tokens=64, stop_ids=())
  for prompt, completion in zip(prompts, output.completions, strict=True):
    with torch.no_grad():
      theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None,
      )  # fmt: skip
    assert completion.ids == theirs[0, len(prompt) :].tolist()
