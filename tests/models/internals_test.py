"""Queries and keys seen from outside are those attention works with: Hugging Face's own
attention probabilities follow from them, for every family."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.internals import observe_attention
from models.transformer import Transformer
from tests.models import hf_tiny
from tests.models.hf_tiny import LINEAR, LLAMA3, YARN, torch

T = 24


@pytest.mark.parametrize(
  ("family", "changes"),
  [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("mistral", {}),
    ("qwen2", {"rope_parameters": LINEAR}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3_moe", {}),
    ("smollm3", {}),
  ],
)
def test_attention_probabilities_are_hugging_faces(family, changes, tmp_path):
  model = hf_tiny.hf_model(family, attn_implementation="eager", **changes)
  model.save_pretrained(tmp_path)
  config, params = hf_tiny.load(tmp_path)
  ids = hf_tiny.random_ids(T)
  with torch.no_grad():
    theirs = model(torch.tensor(ids), output_attentions=True).attentions

  def probabilities(q_BxTxHxK, k_BxTxGxK):
    k_BxTxHxK = jnp.repeat(k_BxTxGxK, config.heads_per_group, axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q_BxTxHxK, k_BxTxHxK) * config.head_dim**-0.5
    scores = jnp.where(jnp.tri(T, dtype=bool)[None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)

  run = hf_tiny.quick_jit(
    lambda params, tokens, positions: observe_attention(
      Transformer(config), params, tokens, positions, jnp.zeros_like(tokens), probabilities
    )
  )
  tokens = jnp.asarray(ids, jnp.int32)
  ours = run(params, tokens, jnp.arange(T, dtype=jnp.int32)[None])
  assert ours.shape == (config.num_layers, 1, config.num_heads, T, T)
  np.testing.assert_allclose(ours, np.stack([a.numpy() for a in theirs]), rtol=1e-4, atol=1e-5)
