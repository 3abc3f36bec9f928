"""The default model exported to torch: the same greedy tokens and answers as ours."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bosch_jax.niah import make_niah
from bosch_jax.prompts import pack
from models import hybrid_folder, registry
from models.transformer import Transformer, answer_logits
from models.windows import HeadMask
from tests.models.hf_hybrid.exported import load
from tests.models.hf_hybrid.exported import module_cache as module_cache  # a fixture
from tests.models.hf_tiny import torch

pytestmark = pytest.mark.slow
PLAIN = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
TEXT = (
  "The history of the lighthouse begins long before the town itself. Sailors who passed the cape at"
  " night told of fires on the cliff, and the first keeper, whose name nobody wrote down, is said to"
) * 4


@pytest.fixture(scope="module")
def real():
  return registry.load()


def greedy_of(real, mask, window, sinks, prompts):
  """Our most likely token at every place of an answer, and the answers' own tokens, by one full
  forward over the packed questions (teacher forcing)."""
  model = Transformer(real.config, sinks=sinks)
  windows = jnp.asarray(mask.windows(window, real.config.num_heads))

  @jax.jit
  def run(params):
    arrays = (prompts.tokens_BxT, windows, prompts.positions_BxT, prompts.segments_BxT)
    x = model.apply({"params": params}, *map(jnp.asarray, arrays), method=Transformer.hidden)
    answers = jnp.asarray(prompts.answer_BxQxA[:, :, :].reshape(len(prompts), -1))
    return answer_logits(model, params, x, answers).argmax(-1)

  found = np.asarray(run(real.params)).reshape(prompts.target_BxQxA.shape)
  return found[prompts.valid_BxQxA], prompts.target_BxQxA[prompts.valid_BxQxA]


def test_64_greedy_tokens(real, tmp_path):
  """Three quarters of the groups local, chosen at random; the ring turns twice."""
  window, sinks = 32, 4
  mask = HeadMask(np.random.default_rng(0).random((30, 3)) < 0.75)
  hybrid_folder.save_hybrid(tmp_path / "x", real.config, real.params, mask, window, sinks)
  model = load(tmp_path / "x")
  ids = real.tokenizer.encode(TEXT)
  out = model.generate(
    torch.tensor([ids]), max_new_tokens=64, return_dict_in_generate=True, **PLAIN
  )
  text = out.sequences[0, len(ids) :].tolist()
  found, _ = greedy_of(real, mask, window, sinks, pack([ids[:-1]], [[(ids[-1:], text)]]))
  assert found.tolist() == text
  # The last token is never an input. float32 takes twice the formula's two bytes.
  formula = mask.kv_bytes(real.config, len(ids) + 63, window, sinks)
  assert out.cache.nbytes == 2 * formula < 0.6 * 2 * real.config.kv_bytes(len(ids) + 63)
  assert hybrid_folder.read_config(tmp_path / "x")[0].fingerprint == real.config.fingerprint


def test_needles(real, tmp_path):
  """Layers that a search finds easy are local with 256 tokens; numbers farther away than that are
  found by torch, generating from one cached haystack, exactly as by ours."""
  window = 256
  rows = np.zeros((30, 3), bool)
  rows[[1, 3, 24, 25, 28, 29]] = True
  mask = HeadMask(rows)
  hybrid_folder.save_hybrid(tmp_path / "x", real.config, real.params, mask, window)
  model = load(tmp_path / "x")
  made = make_niah(
    real.tokenizer, context=1024, window=window, samples=1, style="chatcopy", split="held_out"
  )
  ids, segments = made.tokens_BxT[0], made.segments_BxT[0]
  haystack = ids[segments == 0].astype(np.int64)
  with torch.no_grad():
    cache = model(torch.tensor(haystack[None]), logits_to_keep=1).cache
  assert cache.nbytes == 2 * mask.kv_bytes(real.config, len(haystack), window)
  questions, right = [], 0
  for q in range(made.num_questions):
    answer = made.target_BxQxA[0, q][made.valid_BxQxA[0, q]]
    question = ids[segments == q + 1][: -len(answer)]
    prompt = torch.tensor(np.concatenate([haystack, question])[None])
    out = model.generate(
      prompt, cache=copy.deepcopy(cache), max_new_tokens=len(answer), **PLAIN
    ).numpy()[0, prompt.shape[1] :]
    questions.append((question.tolist(), out.tolist()))
    right += out.tolist() == answer.tolist()
  found, generated = greedy_of(real, mask, window, 0, pack([haystack.tolist()], [questions]))
  assert found.tolist() == generated.tolist()
  assert right  # no seven digits are guessed; with full attention this small model misses some too
