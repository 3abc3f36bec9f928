"""Model configuration: what the transformer needs to know, and nothing it would ignore.

Dimension letters, used in names (`x_BxTxD`) and einsums throughout the project:

  B batch   T query tokens   S key tokens   D model width    H query heads   G key/value groups
  K head    F ffn width      V vocabulary   L layers         C candidates    A answer positions
"""

import dataclasses
import hashlib
import json


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Architecture of a decoder-only transformer of the Llama type.

  Attributes:
    vocab_size: V.
    num_layers: L.
    model_dim: D.
    num_heads: H, query heads.
    num_groups: G, key/value heads; query head h belongs to group h // (H // G).
    head_dim: K.
    ffn_dim: F.
    context: longest sequence the model was made for, in tokens.
    rope_theta: base of the rotary angles.
    norm_eps: epsilon of RMSNorm.
    tied_head: the output head is the transposed embedding.
  """

  vocab_size: int
  num_layers: int
  model_dim: int
  num_heads: int
  num_groups: int
  head_dim: int
  ffn_dim: int
  context: int
  rope_theta: float = 10000.0
  norm_eps: float = 1e-5
  tied_head: bool = True

  def __post_init__(self):
    if self.num_heads % self.num_groups:
      raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} must be even for rotary embedding")

  @property
  def heads_per_group(self) -> int:
    """R = H / G, the query heads that share one key/value head."""
    return self.num_heads // self.num_groups

  @property
  def total_groups(self) -> int:
    """N = L * G, the number of bits of a head mask."""
    return self.num_layers * self.num_groups

  @property
  def fingerprint(self) -> str:
    """16 hex digits that change whenever any field does; ties a mask to its model."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def kv_bytes(self, tokens: int, bytes_per_number: int = 2) -> int:
    """Bytes of a full key/value cache of `tokens` tokens (bf16 by default)."""
    return 2 * self.total_groups * self.head_dim * tokens * bytes_per_number
