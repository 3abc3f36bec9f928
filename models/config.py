"""Model configuration: what the transformer needs to know, and nothing it would ignore.

Dimension letters, used in names (`x_BxTxD`) and einsums throughout the project:

  B batch   T query tokens   S key tokens   D model width    H query heads   G key/value groups
  K head    F ffn width      V vocabulary   L layers         C candidates    A answer positions
  E experts (their F is moe_ffn_dim)
"""

import dataclasses
import hashlib
import json


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the context a model was first trained on.

  Attributes:
    kind: "linear" (every frequency divided by `factor`), "llama3" (long wavelengths divided, short
      ones kept, a ramp between) or "yarn" (the same with a ramp over dimensions, and cos and sin
      times `attention_factor`).
    factor: by how much.
    original_context: tokens of that first training (llama3, yarn).
    low_freq_factor, high_freq_factor: wavelengths above original_context / low are divided, below
      original_context / high kept (llama3).
    beta_fast, beta_slow: turns within the original context at which yarn's ramp begins and ends.
    truncate: yarn's ramp begins and ends on whole dimensions.
    attention_factor: multiplies cos and sin (yarn; its usual value is 0.1 ln(factor) + 1).
  """

  kind: str
  factor: float
  original_context: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float = 1.0

  def __post_init__(self):
    if self.kind not in ("linear", "llama3", "yarn"):
      raise ValueError(f"rope scaling {self.kind!r} is not linear, llama3 or yarn")
    if not self.factor >= 1:
      raise ValueError(f"rope scaling factor {self.factor} must be 1 or more")
    if self.kind != "linear" and self.original_context < 1:
      raise ValueError(
        f"rope scaling {self.kind} needs the original context, got {self.original_context}"
      )
    if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
        f"rope scaling low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
      )


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
    qk_norm: q and k pass an RMSNorm over the head dimension before rotation (Qwen3).
    qkv_bias: the q, k and v projections have a bias (Qwen2).
    rope_scaling: stretched rotary frequencies, or None.
    nope_layers: layers whose q and k are not rotated, in order (SmolLM3).
    num_experts: E, of every layer's feed-forward; 0 = one dense feed-forward.
    experts_per_token: experts each token passes through.
    moe_ffn_dim: F of one expert.
    norm_topk_prob: the weights of a token's experts are scaled to sum to 1.
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
  qk_norm: bool = False
  qkv_bias: bool = False
  rope_scaling: RopeScaling | None = None
  nope_layers: tuple[int, ...] = ()
  num_experts: int = 0
  experts_per_token: int = 0
  moe_ffn_dim: int = 0
  norm_topk_prob: bool = False

  def __post_init__(self):
    if self.num_heads % self.num_groups:
      raise ValueError(
        f"num_heads {self.num_heads} is not a multiple of num_groups {self.num_groups}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} must be even for rotary embedding")
    if list(self.nope_layers) != sorted({l for l in self.nope_layers if 0 <= l < self.num_layers}):
      raise ValueError(
        f"nope_layers {self.nope_layers} must be rising layer numbers below {self.num_layers}"
      )
    if self.num_experts:
      if not 1 <= self.experts_per_token <= self.num_experts:
        raise ValueError(
          f"experts_per_token {self.experts_per_token} must be 1 to num_experts {self.num_experts}"
        )
      if self.moe_ffn_dim < 1:
        raise ValueError(f"moe_ffn_dim {self.moe_ffn_dim} must be positive")
    elif self.experts_per_token or self.moe_ffn_dim or self.norm_topk_prob:
      raise ValueError("experts_per_token, moe_ffn_dim and norm_topk_prob need num_experts")

  @property
  def heads_per_group(self) -> int:
    """R = H / G, the query heads that share one key/value head."""
    return self.num_heads // self.num_groups

  @property
  def active_ffn_dim(self) -> int:
    """Width of the feed-forward that one token passes through, all of its experts together."""
    return self.experts_per_token * self.moe_ffn_dim if self.num_experts else self.ffn_dim

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
