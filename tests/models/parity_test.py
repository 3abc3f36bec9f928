"""The whole model against Hugging Face torch, from the same GGUF file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.download import default_gguf
from models.transformer import Transformer
from models.windows import HeadMask

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHORT = [
  "The quick brown fox jumps over the lazy dog, and 1234567 is a number.",
  "def fibonacci(n):\n  return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
]
LONG = " ".join(
  f"Chapter {i}: in the year {1700 + 13 * i} the river was {i} metres deep, and nobody crossed it."
  for i in range(22)
)
QUESTION = [
  {"role": "system", "content": "You are a helpful AI assistant."},
  {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def hf_model():
  """Hugging Face's own mapping of the file; its `from_pretrained` would ask for accelerate."""
  from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

  Config, Model = transformers.LlamaConfig, transformers.LlamaForCausalLM
  with torch.device("meta"):  # gives the names of the parameters only
    names = Model(Config(num_hidden_layers=30))
  found = load_gguf_checkpoint(default_gguf(), return_tensors=True, model_to_load=names)
  model = Model(Config.from_dict(found["config"])).eval()
  missing, unexpected = model.load_state_dict(found["tensors"], strict=False)
  assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
  model.tie_weights()
  return model


@pytest.fixture(scope="module")
def logits(real_model):
  """Function of ids: logits `[T, V]` with full attention."""
  config = real_model.config
  windows = jnp.asarray(HeadMask.full(config).windows(1, config.num_heads))
  apply = jax.jit(Transformer(config).apply)

  def run(ids, pad_to=None):
    padded = np.zeros((1, pad_to or len(ids)), np.int32)  # causal: what follows changes nothing
    padded[0, : len(ids)] = ids
    return np.asarray(apply({"params": real_model.params}, jnp.asarray(padded), windows))[
      0, : len(ids)
    ]

  return run


def compare(ours, hf_model, ids):
  """Largest difference over the largest logit, at most 1e-5; the same best token everywhere."""
  with torch.no_grad():
    theirs = hf_model(torch.tensor([ids])).logits[0].numpy()
  error = np.abs(ours - theirs).max() / np.abs(theirs).max()
  print(f"{len(ids)} tokens: largest difference {error:.2e} of the largest logit")
  assert error < 1e-5
  assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def test_logits_of_short_texts(real_model, logits, hf_model):
  for text in SHORT:
    ids = real_model.tokenizer.encode(text)
    compare(logits(ids, pad_to=64), hf_model, ids)


@pytest.mark.slow
def test_logits_of_a_long_text(real_model, logits, hf_model):
  ids = real_model.tokenizer.encode(LONG)
  assert 550 < len(ids) < 700
  compare(logits(ids), hf_model, ids)


@pytest.mark.slow
def test_greedy_text(real_model, logits, hf_model):
  tokenizer = real_model.tokenizer
  prompt = tokenizer.encode(tokenizer.chat(QUESTION))
  ids = list(prompt)
  for _ in range(20):
    ids.append(int(logits(ids, pad_to=64)[-1].argmax()))
  assert len(ids) <= 64
  with torch.no_grad():
    theirs = hf_model.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
      max_new_tokens=20,
      min_new_tokens=20,
      do_sample=False,
      eos_token_id=None,
    )[0].tolist()
  assert ids == theirs
  assert tokenizer.decode(ids[len(prompt) :]).startswith("The capital of France is Paris.")
