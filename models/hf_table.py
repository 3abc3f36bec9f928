"""Which Hugging Face tensor is which parameter: one table, used for reading and for writing."""

import dataclasses
import itertools
import re

import numpy as np

from models.config import ModelConfig

_LAYER = r"model\.layers\.(\d+)\."


@dataclasses.dataclass(frozen=True)
class Row:
  """One parameter.

  Attributes:
    pattern: regex of the tensor's names; its groups are the leading indices of the parameter.
    stored: shape of one tensor in the checkpoint.
    target: path of the parameter.
    counts: sizes of the leading axes that the groups of the pattern number: (), (L,) or (L, E).
    shape: of the parameter at one leading index.
    matrix: stored is `[out, in]` and the parameter `[in, out]`, up to a reshape.
  """

  pattern: str
  stored: tuple[int, ...]
  target: str
  counts: tuple[int, ...]
  shape: tuple[int, ...]
  matrix: bool = True

  @property
  def full_shape(self) -> tuple[int, ...]:
    return (*self.counts, *self.shape)

  def indices(self):
    """Every leading index, in order; one empty index for a parameter without any."""
    return itertools.product(*map(range, self.counts))

  def name(self, index: tuple[int, ...]) -> str:
    """The tensor's name at a leading index."""
    name = self.pattern.replace("\\.", ".")
    for number in index:
      name = name.replace(r"(\d+)", str(number), 1)
    return name

  def to_ours(self, stored: np.ndarray) -> np.ndarray:
    return (stored.T if self.matrix else stored).reshape(self.shape)

  def to_hf(self, value: np.ndarray) -> np.ndarray:
    if not self.matrix:
      return value.reshape(self.stored)
    return value.reshape(self.stored[::-1]).T


def table(c: ModelConfig) -> list[Row]:
  """The rows of a model, embedding first, head last."""
  V, D, L, H, G, K = c.vocab_size, c.model_dim, c.num_layers, c.num_heads, c.num_groups, c.head_dim
  rows = [Row(r"model\.embed_tokens\.weight", (V, D), "embed/embedding", (), (V, D), matrix=False)]

  def layer(name, stored, target, shape, matrix=True):
    rows.append(Row(_LAYER + name, stored, f"layers/{target}", (L,), shape, matrix))

  layer(r"input_layernorm\.weight", (D,), "attn_norm/scale", (D,), matrix=False)
  for name, heads in (("q", H), ("k", G), ("v", G)):
    layer(rf"self_attn\.{name}_proj\.weight", (heads * K, D), f"attn/{name}/kernel", (D, heads, K))
    if c.qkv_bias:
      layer(
        rf"self_attn\.{name}_proj\.bias",
        (heads * K,),
        f"attn/{name}/bias",
        (heads, K),
        matrix=False,
      )
  if c.qk_norm:
    for name in "qk":
      layer(rf"self_attn\.{name}_norm\.weight", (K,), f"attn/{name}_norm/scale", (K,), matrix=False)
  layer(r"self_attn\.o_proj\.weight", (D, H * K), "attn/o/kernel", (H, K, D))
  layer(r"post_attention_layernorm\.weight", (D,), "mlp_norm/scale", (D,), matrix=False)
  F = c.moe_ffn_dim or c.ffn_dim
  for name, (wide, narrow) in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
    if c.num_experts:
      pattern = _LAYER + rf"mlp\.experts\.(\d+)\.{name}_proj\.weight"
      target = f"layers/mlp/experts/{name}/kernel"
      rows.append(Row(pattern, (wide, narrow), target, (L, c.num_experts), (narrow, wide)))
    else:
      layer(rf"mlp\.{name}_proj\.weight", (wide, narrow), f"mlp/{name}/kernel", (narrow, wide))
  if c.num_experts:
    layer(r"mlp\.gate\.weight", (c.num_experts, D), "mlp/router/kernel", (D, c.num_experts))
  rows.append(Row(r"model\.norm\.weight", (D,), "final_norm/scale", (), (D,), matrix=False))
  if not c.tied_head:
    rows.append(Row(r"lm_head\.weight", (V, D), "head/kernel", (), (D, V)))
  return rows


def num_params(config: ModelConfig, active: bool = False) -> int:
  """Parameters of a model; `active`: only those that one token passes through."""
  total = 0
  for row in table(config):
    size = int(np.prod(row.full_shape, dtype=np.int64))
    if active and len(row.counts) == 2:
      size = size * config.experts_per_token // config.num_experts
    total += size
  return total


def find(rows: list[Row], name: str) -> list[Row]:
  """The rows whose pattern a tensor's name matches; one, or the name is a fault."""
  return [row for row in rows if re.fullmatch(row.pattern, name)]
