"""Head-level hybrid attention for transformers: some key/value groups see a window, others all.

This file and hybrid_cache.py are copied into exported model folders, and run there without the
project that wrote them. Attention and cache are replaced; everything else is the family's own model.
Per layer the cache keeps all keys of full groups, and of local groups the first `sinks` and the last
`window` tokens.

Dimensions: B batch, Q queries, S keys, H query heads, G key/value groups, K head size.
"""

import torch
from transformers import (
  AttentionInterface,
  LlamaConfig,
  LlamaForCausalLM,
  Qwen2Config,
  Qwen2ForCausalLM,
  Qwen3Config,
  Qwen3ForCausalLM,
  Qwen3MoeConfig,
  Qwen3MoeForCausalLM,
  SmolLM3Config,
  SmolLM3ForCausalLM,
)
from transformers.conversion_mapping import (
  get_checkpoint_conversion_mapping,
  register_checkpoint_conversion_mapping,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from .hybrid_cache import Held, HybridCache, Spec, first_tokens, split, take_sinks

# Unlike the name that this file has in another exported folder: both may be loaded at once.
IMPLEMENTATION = f"bosch_hybrid.{__name__}"
QUERY_BLOCK = 512  # queries whose mask exists at one time


def padding_only(kv_length, mask_function=causal_mask_function, attention_mask=None, **kwargs):
  """What `hybrid_attention` gets as its mask: bool `[B, S]`, or None where nothing is padded."""
  if mask_function is not causal_mask_function:
    raise NotImplementedError(
      "hybrid attention takes one document a row, not packed sequences or masks of another pattern"
    )
  if attention_mask is None or bool(attention_mask.all()):
    return None
  if attention_mask.shape[-1] != kv_length:
    raise ValueError(f"attention_mask has {attention_mask.shape[-1]} tokens of {kv_length}")
  return attention_mask


def hybrid_attention(
  module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs
):
  """Causal attention with a window for the local groups of a layer (see AttentionInterface).

  Args:
    query: `[B, H, Q, K]`.
    key, value: `Held` from a `HybridCache`, or tensors `[B, G, S, K]` with all tokens.
    attention_mask: bool `[B, S]` over all tokens, or None.

  Returns:
    `[B, Q, H, K]` and None.
  """
  spec: Spec = module.bosch
  if attention_mask is not None and attention_mask.ndim != 2:
    raise NotImplementedError("hybrid attention takes a mask [batch, tokens], none of 4 dimensions")
  if isinstance(key, torch.Tensor):
    key, value = (Held(split(x, spec.parts), 0, 0, x.shape[2]) for x in (key, value))
  out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
  for i, part in enumerate(spec.parts):
    k, v = (held._replace(parts=held.parts[i]) for held in (key, value))
    attend = _attend_local if part.local else _attend_full
    q = query[:, part.heads]
    args = {"scaling": scaling, "dropout": dropout}
    out[:, :, part.heads] = attend(module, q, k, v, spec, attention_mask, args)
  return out, None


def _attend_full(module, q, k: Held, v: Held, spec, padding, args):
  if padding is None and q.shape[2] in (1, k.total):
    return sdpa_attention_forward(module, q, k.parts, v.parts, None, **args)[0]
  outs = []
  for begin, end, i in _blocks(q, k.total):
    visible = _near(i, 0, end, None, padding)
    outs.append(
      _masked(module, q[:, :, begin], k.parts[:, :, :end], v.parts[:, :, :end], visible, args)
    )
  return torch.cat(outs, dim=1)


def _attend_local(module, q, k: Held, v: Held, spec, padding, args):
  window, sinks = spec.window, spec.sinks
  # Up to window + sinks tokens, every past token is near or a sink.
  if padding is None and k.parts.shape[2] <= window + sinks and q.shape[2] in (1, k.total):
    return sdpa_attention_forward(module, q, k.parts, v.parts, None, **args)[0]
  first = None if padding is None else first_tokens(padding)
  outs = []
  if sinks:
    place = (first, k.start, k.slots, k.total, sinks)
    (k_sinks, number), (v_sinks, _) = take_sinks(k.parts, *place), take_sinks(v.parts, *place)
    real = True if padding is None else padding.gather(1, number.clamp(max=k.total - 1))
  for begin, end, i in _blocks(q, k.total):
    low = max(k.start, end - len(i) - window + 1)
    seen = slice(k.slots + low - k.start, k.slots + end - k.start)
    keys, values = k.parts[:, :, seen], v.parts[:, :, seen]
    visible = _near(i, low, end, window, padding)
    if sinks:  # those that lie before `low`; the others are among the keys, but maybe too far
      keys, values = torch.cat([k_sinks, keys], 2), torch.cat([v_sinks, values], 2)
      j = torch.arange(low, end, device=q.device)
      is_sink = (j >= number[:, :1]) & (j < number[:, :1] + sinks)
      visible = visible | _near(i, low, end, None, padding) & is_sink[:, None]
      old = ((number < low) & real)[:, None].expand(-1, len(i), -1)
      visible = torch.cat([old.expand(visible.shape[0], -1, -1), visible], -1)
    outs.append(_masked(module, q[:, :, begin], keys, values, visible, args))
  return torch.cat(outs, dim=1)


def _blocks(q, total):
  """(slice of the queries, one behind their last number, their numbers) of each block."""
  Q = q.shape[2]
  for begin in range(0, Q, QUERY_BLOCK):
    stop = min(begin + QUERY_BLOCK, Q)
    numbers = torch.arange(total - Q + begin, total - Q + stop, device=q.device)
    yield slice(begin, stop), total - Q + stop, numbers


def _near(i, low, end, window, padding):
  """bool `[B or 1, queries, end - low]`: past, within the window, no padding; or the query itself,
  so that a row of padding has something to attend to and stays finite."""
  distance = i[:, None] - torch.arange(low, end, device=i.device)
  visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
  if padding is None:
    return visible[None]
  return visible & padding[:, None, low:end] | (distance == 0)


def _masked(module, q, k, v, visible, args):
  visible = visible[:, None].expand(q.shape[0], -1, -1, -1)
  return sdpa_attention_forward(module, q, k, v, visible, **args)[0]


AttentionInterface.register(IMPLEMENTATION, hybrid_attention)
AttentionMaskInterface.register(IMPLEMENTATION, padding_only)


class HybridMixin:
  """Before a family's ForCausalLM: its attention and cache become hybrid."""

  def __init__(self, config):
    super().__init__(config)
    specs = Spec.of_layers(config)
    for layer, spec in zip(self.model.layers, specs, strict=True):
      layer.self_attn.bosch = spec

  def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
    if attn_implementation not in (None, IMPLEMENTATION):
      raise ValueError(
        f"attn_implementation {attn_implementation!r} would ignore the windows; leave it out"
      )
    return IMPLEMENTATION

  def forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    cache=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    **kwargs,
  ):
    """As the family's own; `cache` is a `HybridCache`, made here where it is wanted and missing."""
    cache = kwargs.pop("past_key_values", None) if cache is None else cache
    use_cache = self.config.use_cache if use_cache is None else use_cache
    if cache is None and use_cache:
      cache = HybridCache(self.config)
    if cache is not None:
      if not isinstance(cache, HybridCache):
        raise TypeError(f"{type(cache).__name__} is no HybridCache; leave it out")
      cache.note_padding(attention_mask)
    return super().forward(
      input_ids=input_ids,
      attention_mask=attention_mask,
      position_ids=position_ids,
      cache=cache,
      inputs_embeds=inputs_embeds,
      labels=labels,
      use_cache=use_cache,
      logits_to_keep=logits_to_keep,
      **kwargs,
    )

  def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
    if generation_config.cache_implementation not in (None, "dynamic"):
      raise ValueError("the hybrid cache is the only one here; leave cache_implementation out")
    if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
      model_kwargs["cache"] = HybridCache(self.config)
    return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


class BoschLlamaConfig(LlamaConfig):
  model_type = "bosch_llama"
  bosch: dict | None = None


class BoschLlamaForCausalLM(HybridMixin, LlamaForCausalLM):
  config_class = BoschLlamaConfig


class BoschQwen2Config(Qwen2Config):
  model_type = "bosch_qwen2"
  bosch: dict | None = None


class BoschQwen2ForCausalLM(HybridMixin, Qwen2ForCausalLM):
  config_class = BoschQwen2Config


class BoschQwen3Config(Qwen3Config):
  model_type = "bosch_qwen3"
  bosch: dict | None = None


class BoschQwen3ForCausalLM(HybridMixin, Qwen3ForCausalLM):
  config_class = BoschQwen3Config


class BoschQwen3MoeConfig(Qwen3MoeConfig):
  model_type = "bosch_qwen3_moe"
  bosch: dict | None = None


class BoschQwen3MoeForCausalLM(HybridMixin, Qwen3MoeForCausalLM):
  config_class = BoschQwen3MoeConfig


class BoschSmolLM3Config(SmolLM3Config):
  model_type = "bosch_smollm3"
  bosch: dict | None = None


class BoschSmolLM3ForCausalLM(HybridMixin, SmolLM3ForCausalLM):
  config_class = BoschSmolLM3Config


# Experts are stored one by one and held stacked; transformers knows how by the family's name.
register_checkpoint_conversion_mapping(
  BoschQwen3MoeConfig.model_type, get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True
)
