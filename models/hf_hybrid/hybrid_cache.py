"""The key/value cache of a head-level hybrid in torch: a part for full groups, a part for local ones.

Copied into exported folders beside modeling_bosch.py, whose docstring lists the dimensions.
"""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Part(NamedTuple):
  """The groups of a layer that have the same window; `groups` and `heads` index a head axis."""

  local: bool
  groups: slice | list[int]
  heads: slice | list[int]


class Spec(NamedTuple):
  """How one layer attends."""

  parts: list[Part]
  window: int
  sinks: int

  @classmethod
  def of_layers(cls, config) -> "list[Spec]":
    """The layers of a config whose field `bosch` records window, sinks and local groups."""
    record, repeat = config.bosch, config.num_attention_heads // config.num_key_value_heads
    specs = []
    for row in record["local"]:
      parts = []
      for local in (0, 1):
        groups = [g for g, bit in enumerate(row) if bit == local]
        heads = [g * repeat + r for g in groups for r in range(repeat)]
        if groups:
          parts.append(Part(bool(local), _index(groups), _index(heads)))
      specs.append(cls(parts, record["window"], record["sinks"]))
    return specs


def _index(rising: list[int]) -> slice | list[int]:
  """A slice where that is possible: it copies nothing."""
  first, last = rising[0], rising[-1]
  return slice(first, last + 1) if last - first + 1 == len(rising) else rising


def split(x_BxGxSxK, parts: list[Part]) -> list[torch.Tensor]:
  """The groups of each part."""
  groups = [p.groups for p in parts]
  there = sum(g.stop - g.start if isinstance(g, slice) else len(g) for g in groups)
  if x_BxGxSxK.shape[1] != there:  # a slice would say nothing
    raise NotImplementedError(
      f"{x_BxGxSxK.shape[1]} of {there} key/value groups: tensor parallelism is not supported"
    )
  return [x_BxGxSxK[:, g] for g in groups]


class Held(NamedTuple):
  """Keys or values of a layer, one tensor `[B, groups, S, K]` per part.

  A local part holds `slots` sinks, then the tokens from number `start` up to `total` - 1. Tokens are
  numbered along the row, padding included.
  """

  parts: list[torch.Tensor]
  start: int
  slots: int
  total: int


class HybridLayer(CacheLayerMixin):
  """The cache of one layer. `update` returns `Held`s, which only `hybrid_attention` understands."""

  is_sliding = False

  def __init__(self, spec: Spec):
    super().__init__()
    self.spec = spec
    self.first = None  # int64 [B], number of each row's first token; None = 0 (no padding)
    self.reset()

  def reset(self):
    self.store, self.is_initialized = [[], []], False  # keys, values; one tensor per part
    self.total = self.start = self.slots = self.head = 0  # head: where the ring's oldest token is

  def lazy_initialization(self, key_states, value_states):
    states = (key_states, value_states)
    self.store = [[part[:, :, :0] for part in split(x, self.spec.parts)] for x in states]
    self.is_initialized = True

  def update(self, key_states, value_states, *args, **kwargs):
    if not self.is_initialized:
      self.lazy_initialization(key_states, value_states)
    states, new = (key_states, value_states), key_states.shape[-2]
    ring = new == 1 and self.start > 0 and self.first is None and not key_states.requires_grad
    if not ring:
      self._straighten()
    self.total += new
    held = []
    for store, x in zip(self.store, states, strict=True):
      for i, added in enumerate(split(x, self.spec.parts)):
        if ring and self.spec.parts[i].local:  # over the oldest: attention knows no order of keys
          store[i][:, :, self.spec.sinks + self.head] = added[:, :, 0]
        else:
          store[i] = torch.cat([store[i], added], dim=2)
      held.append(Held(list(store), self.start, self.slots, self.total))
    if ring:
      self.head = (self.head + 1) % self.spec.window
      self.start += 1
      return tuple(h._replace(start=self.start) for h in held)
    self._forget()
    return tuple(held)

  def _straighten(self):
    """Tokens of the ring in their order."""
    sinks, head = self.spec.sinks, self.head

    def ordered(x):
      return torch.cat([x[:, :, :sinks], x[:, :, sinks:].roll(-head, dims=2)], dim=2)

    if head:
      self._map(ordered, local_only=True)
      self.head = 0

  def _forget(self):
    """Leaves of local groups the sinks and the window."""
    window, sinks = self.spec.window, self.spec.sinks
    if self.total <= window + sinks:
      return
    cut = self.slots + self.total - window - self.start
    self._map(
      lambda x: torch.cat(
        [take_sinks(x, self.first, self.start, self.slots, self.total, sinks)[0], x[:, :, cut:]],
        dim=2,
      ),
      local_only=True,
    )
    self.start, self.slots = self.total - window, sinks

  def _map(self, function, local_only=False):
    for store in self.store:
      for i, part in enumerate(self.spec.parts[: len(store)]):
        if part.local or not local_only:
          store[i] = function(store[i])

  def get_mask_sizes(self, query_length):
    return self.total + query_length, 0

  def get_seq_length(self):
    return self.total

  def get_max_length(self):
    return -1

  def reorder_cache(self, beam_idx):
    self.batch_select_indices(beam_idx)

  def batch_select_indices(self, indices):
    self._map(lambda x: x[indices.to(x.device)])
    self.first = None if self.first is None else self.first[indices.to(self.first.device)]

  def batch_repeat_interleave(self, repeats):
    self._map(lambda x: x.repeat_interleave(repeats, dim=0))
    self.first = None if self.first is None else self.first.repeat_interleave(repeats)

  def crop(self, tokens_to_remove):
    raise NotImplementedError("a hybrid cache has forgotten tokens, and cannot be cropped")


class HybridCache(Cache):
  """The cache of a model; `nbytes` is what its keys and values take."""

  def __init__(self, config):
    super().__init__(layers=[HybridLayer(spec) for spec in Spec.of_layers(config)])

  def note_padding(self, attention_mask) -> None:
    """Where the tokens of each row begin: from the 2D mask over all tokens so far, or None."""
    padded = attention_mask is not None and not bool(attention_mask.all())
    first = first_tokens(attention_mask) if padded else None
    for layer in self.layers:
      layer.first = first

  @property
  def nbytes(self) -> int:
    """Bytes of the memory behind the keys and values, whatever part of it they show."""
    tensors = (x for layer in self.layers for store in layer.store for x in store)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def first_tokens(mask_BxS):
  """int64 `[B]`: the first place that is no padding."""
  return mask_BxS.to(torch.uint8).argmax(-1)


def take_sinks(x, first, start, slots, total, sinks):
  """The first `sinks` tokens of each row, out of a local part of a `Held`.

  Returns:
    `[B, groups, sinks, K]`, and the tokens' numbers `[B or 1, sinks]`. A row that has fewer tokens
    yet gets its last one in their stead; its number says that it is not a past token.
  """
  offsets = torch.arange(sinks, device=x.device)
  number = offsets[None] if first is None else first.to(x.device)[:, None] + offsets
  behind = slots + (number - start).clamp(max=total - 1 - start)
  place = torch.where(number < start, offsets, behind)
  if first is None:
    return x[:, :, place[0]], number
  index = place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
  return x.gather(2, index), number
