"""A model whose heads are built by hand, so that their right order is known.

Kinds of heads, all with one kv group each:
  self    looks at its own token
  first   looks at the first token, else at its own
  far     looks back a fixed distance
Every head copies the token it looks at into the second half of the hidden state, which the output
head reads; `far` does so loudly, the others quietly. Prompts are random tokens behind token 0, and
the answer is the token `FAR` places back.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bosch_jax.prompts import PromptSet, pack
from models.config import ModelConfig
from models.rope import frequencies
from models.transformer import Transformer

V = 32  # tokens, and the head size, so that a value is a token one-hot
FAR, WINDOW = 13, 6
LAYOUT = (("self", "first", "far"), ("first", "self", "self"))
CONFIG = ModelConfig(
  vocab_size=V,
  num_layers=2,
  model_dim=2 * V,
  num_heads=3,
  num_groups=3,
  head_dim=V,
  ffn_dim=4,
  context=256,
  qkv_bias=True,
  tied_head=False,
)


def params(layout=LAYOUT) -> dict:
  """Parameters; an entry of `layout` may also be a distance."""
  windows = jnp.zeros((CONFIG.num_layers, CONFIG.num_heads), jnp.int32)
  shapes = jax.eval_shape(Transformer(CONFIG).init, jax.random.key(0), windows[:, :1], windows)
  tree = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), shapes["params"])
  for norm in (tree["final_norm"], tree["layers"]["attn_norm"], tree["layers"]["mlp_norm"]):
    norm["scale"][:] = 1.0
  one = np.eye(V, dtype=np.float32)
  tree["embed"]["embedding"][:, :V] = one
  tree["head"]["kernel"][V:] = one
  attn = tree["layers"]["attn"]
  for l, row in enumerate(layout):
    for h, kind in enumerate(row):
      distance = {"self": 0, "first": 0, "far": FAR}.get(kind, kind)
      gain = 2.0 if kind == "first" else 12.0
      attn["q"]["bias"][l, h], attn["k"]["bias"][l, h] = looking_back(distance, gain)
      if kind == "first":  # the slowest pair of dimensions hardly turns: a match by token
        attn["q"]["bias"][l, h, V // 2 - 1] += 12.0
        attn["k"]["kernel"][l, 0, h, V // 2 - 1] = 2.0
      attn["v"]["kernel"][l, :V, h] = one
      attn["o"]["kernel"][l, h, :, V:] = (0.6 if distance else 0.02) * one
  return jax.tree.map(jnp.asarray, tree)


def looking_back(distance: int, gain: float) -> tuple[np.ndarray, np.ndarray]:
  """q and k whose rotated product is highest `distance` tokens apart."""
  angle = distance * frequencies(CONFIG)
  # Rotated by position, q turns ahead of k by the angle of their distance: start it as far behind.
  q = gain * np.concatenate([np.cos(angle), -np.sin(angle)])
  return q.astype(np.float32), np.concatenate([np.ones(V // 2), np.zeros(V // 2)]).astype(
    np.float32
  )


def prompts(contexts: int = 4, seed: int = 0) -> PromptSet:
  """Two questions a context; each answer stands `FAR` tokens before the place that predicts it."""
  rng = np.random.default_rng(seed)
  haystacks, questions = [], []
  for _ in range(contexts):
    haystack = [0, *rng.integers(1, V, 39).tolist()]
    pairs = []
    for length in (3, 5):
      question = rng.integers(1, V, length).tolist()
      text = haystack + question
      pairs.append((question, [text[len(text) - 1 - FAR]]))
    haystacks.append(haystack)
    questions.append(pairs)
  return pack(haystacks, questions)
