"""Generation on a tiny model: equal to recomputing everything, stopping where it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import HeadMask, decode
from models import generate as generate_lib
from models.config import ModelConfig
from models.decode import extend
from models.errors import InputError
from models.generate import Generator
from models.hybridize import hybridize
from models.registry import Loaded
from models.sampling import Sampling
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from tests.integration.tiny_gguf import TEMPLATE, train_tokenizer
from tests.models.cached import QUICK, forward

W, SINKS = 5, 2
MASK = HeadMask([[0, 1], [1, 1]])


@pytest.fixture(scope="module")
def loaded():
  backend = train_tokenizer()
  config = ModelConfig(
    vocab_size=backend.get_vocab_size(),
    num_layers=2,
    model_dim=32,
    num_heads=4,
    num_groups=2,
    head_dim=16,
    ffn_dim=48,
    context=96,
  )
  windows = jnp.zeros((config.num_layers, config.num_heads), jnp.int32)
  init = jax.jit(Transformer(config).init, compiler_options=QUICK)
  params = init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), windows)
  params = jax.tree.map(lambda p: 2.5 * p if p.ndim > 2 else p, params["params"])
  return Loaded("tiny", config, params, Tokenizer(backend, TEMPLATE, 1, None))


@pytest.fixture(scope="module")
def generator(loaded):
  hybrid = hybridize(loaded.params, MASK, loaded.config)
  return Generator(loaded, hybrid, window=W, sinks=SINKS, chunk=7)


def slow_greedy(loaded, prompt, count, mask=MASK):
  """Greedy tokens without a cache."""
  ids = list(prompt)
  for _ in range(count):
    padded = np.zeros((1, 64), int)  # causal: what follows changes nothing
    padded[0, : len(ids)] = ids
    logits = forward(loaded.config, loaded.params, mask, W, SINKS, padded)
    ids.append(int(logits[0, len(ids) - 1].argmax()))
  return ids[len(prompt) :]


PROMPTS = [list(range(40, 60)), [5, 9, 300], [7]]


def test_greedy_equals_recomputing(loaded, generator):
  output = generator.generate(PROMPTS, max_tokens=12)
  for prompt, completion in zip(PROMPTS, output.completions, strict=True):
    assert completion.ids == slow_greedy(loaded, prompt, 12)
    assert completion.text == loaded.tokenizer.decode(completion.ids)
    assert (completion.stopped, completion.prompt_tokens) == ("length", len(prompt))
  full = HeadMask.full(loaded.config)
  assert Generator(loaded).generate(PROMPTS[:1], max_tokens=12).completions[0].ids == slow_greedy(
    loaded, PROMPTS[0], 12, full
  )
  assert len({tuple(c.ids) for c in output.completions}) == 3


def test_masks_in_calls_give_what_hybrid_models_do_with_one_compilation(
  loaded, generator, monkeypatch
):
  traced = []  # a layer calls it once a trace
  attend = decode._attend
  monkeypatch.setattr(decode, "_attend", lambda *args: (traced.append(1), attend(*args))[1])
  shared = Generator(loaded, window=W, sinks=SINKS, chunk=7)
  masks = [MASK, HeadMask([[1, 0], [0, 1]]), HeadMask([[1, 1], [1, 1]])]
  texts = {}
  for mask in [*masks, HeadMask.full(loaded.config)]:
    texts[mask] = [c.ids for c in shared.generate(PROMPTS, max_tokens=11, mask=mask).completions]
    # Layers, and two kinds of step: a chunk of prompt and one token.
    assert len(traced) == loaded.config.num_layers * 2
  monkeypatch.undo()
  hybrid = hybridize(loaded.params, masks[1], loaded.config)
  alone = Generator(loaded, hybrid, window=W, sinks=SINKS, chunk=7)
  for mask, static in ((MASK, generator), (masks[1], alone)):
    assert texts[mask] == [c.ids for c in static.generate(PROMPTS, max_tokens=11).completions]
  assert len({str(ids) for ids in texts.values()}) == 4
  with pytest.raises(ValueError, match="window and no hybrid"):
    alone.generate(PROMPTS, mask=MASK)
  with pytest.raises(ValueError, match="window and no hybrid"):
    Generator(loaded).generate(PROMPTS, mask=MASK)


def test_stats(loaded, generator):
  stats = generator.generate(PROMPTS, max_tokens=12).stats
  config = loaded.config
  assert stats.capacity == config.context  # 32 tokens rounded up, at most the context
  assert stats.kv_bytes == 3 * 2 * MASK.kv_bytes(config, 96, W, SINKS)  # float32, three rows
  assert stats.kv_bytes_full == 3 * config.kv_bytes(96, 4)
  assert stats.new_tokens == 36 and stats.tokens_per_s > 0 and stats.first_token_s > 0


def test_streaming_gives_the_text(generator):
  seen = {0: "", 1: "", 2: ""}

  def on_text(row, piece):
    assert piece
    seen[row] += piece

  output = generator.generate(PROMPTS, max_tokens=12, on_text=on_text)
  assert [seen[b] for b in range(3)] == [c.text for c in output.completions]


def test_stop_tokens(generator):
  whole = generator.generate(PROMPTS[:1], max_tokens=12).completions[0].ids
  stop = next(i for i in whole[3:] if i not in whole[:3])
  completion = generator.generate(PROMPTS[:1], max_tokens=12, stop_ids=[stop]).completions[0]
  assert completion.ids == whole[: whole.index(stop)] and completion.stopped == "stop token"


def test_the_end_token_stops_by_itself(loaded, generator):
  whole = generator.generate(PROMPTS[:1], max_tokens=12).completions[0].ids
  tokenizer = Tokenizer(train_tokenizer(), TEMPLATE, 1, whole[2])
  other = Generator(
    dataclasses.replace(loaded, tokenizer=tokenizer),
    hybridize(loaded.params, MASK, loaded.config),
    window=W,
    sinks=SINKS,
    chunk=7,
  )
  assert (
    other.generate(PROMPTS[:1], max_tokens=12).completions[0].ids == whole[: whole.index(whole[2])]
  )
  assert other.generate(PROMPTS[:1], max_tokens=12, stop_ids=()).completions[0].ids == whole


def test_stop_strings_end_one_row_and_not_the_others(generator):
  whole = generator.generate(PROMPTS, max_tokens=12).completions
  stop = whole[0].text[4:7]
  output = generator.generate(PROMPTS, max_tokens=12, stop=[stop])
  first = output.completions[0]
  assert first.text == whole[0].text[: whole[0].text.index(stop)] and first.stopped == "stop string"
  for b in (1, 2):
    if stop not in whole[b].text:
      assert output.completions[b] == whole[b]
  assert any(stop not in whole[b].text for b in (1, 2))


def test_the_context_ends_the_text(loaded, generator):
  prompt = (list(range(40, 60)) * 5)[:90]
  completion = generator.generate([prompt], max_tokens=50).completions[0]
  assert completion.stopped == "context" and len(completion.ids) == 6


def test_seeds(generator):
  def draw(seed, prompts):
    sampling = Sampling(temperature=1.5, top_k=50)
    output = generator.generate(prompts, max_tokens=12, sampling=sampling, seed=seed)
    return [c.ids for c in output.completions]

  same = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
  first = draw(1, same)
  assert first == draw(1, same) != draw(2, same)
  assert first[0] != first[1]  # rows draw for themselves
  assert draw(1, PROMPTS[:1])[0] == first[0]  # and the same in any company


def test_one_trace_for_chunks_and_one_for_decoding(generator, monkeypatch):
  traces = []

  def counted(spec, params, cache, logits, tokens, *rest):
    traces.append(tokens.shape)
    return extend.__wrapped__(spec, params, cache, logits, tokens, *rest)

  step = jax.jit(counted, static_argnames="spec", donate_argnames=("cache", "logits"))
  monkeypatch.setattr(generate_lib, "extend", step)
  generator._compiled.clear()
  for prompts in (PROMPTS, [PROMPTS[2], PROMPTS[1], list(range(50))]):
    generator.generate(prompts, max_tokens=6)
  assert sorted(traces) == [(3, 1), (3, 7)]


@pytest.mark.parametrize(
  ("prompts", "options", "named"),
  [
    ([], {}, "--prompt"),
    ([""], {}, "--prompt: is empty"),
    ([[]], {}, "--prompt: is empty"),
    ([[3] * 96], {}, "of 96 tokens: leaves no room"),
    ([[3, 99999]], {}, "token 99999"),
    ([[-1]], {}, "token -1"),
    ([[3]], {"max_tokens": 0}, "--max-tokens 0"),
    ([[3]], {"stop": [""]}, "--stop"),
    ([[3]], {"stop_ids": [99999]}, "--stop-ids 99999: is unknown"),
    ([[3]], {"stop_ids": [-1]}, "--stop-ids -1"),
  ],
)
def test_bad_input_is_named(generator, prompts, options, named):
  with pytest.raises(InputError, match=named):
    generator.generate(prompts, **options)


def test_misuse(loaded, generator):
  with pytest.raises(TypeError, match=r"\[prompt\]"):
    generator.generate("text")
  with pytest.raises(TypeError, match=r"\[stop\]"):
    generator.generate(["text"], stop="x")
  with pytest.raises(ValueError, match="needs its window"):
    Generator(loaded, hybridize(loaded.params, MASK, loaded.config))
  with pytest.raises(InputError, match="--chunk 0"):
    Generator(loaded, chunk=0)
