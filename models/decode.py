"""The model over its cache: reads T more tokens of every row, gives the logits behind the last.

One function serves both uses: `extend` with T = the chunk reads a prompt piece by piece, in memory
linear in the chunk, and with T = 1 decodes. The layers are `models.transformer.Layer`, whatever the
family; only where its keys come from is different here.
"""

import functools

import jax
import jax.numpy as jnp

from models import cache as kv
from models.attention import attention
from models.cache import Cache, CacheSpec, LayerCache
from models.transformer import Layer, Transformer, answer_logits, embed

FLOOR = -1e30


def unstack(params: dict) -> dict:
  """Parameters with `layers` as a list of L trees.

  A slice of a stacked array is copied before a CPU multiplies with it, which would double what a
  step of decoding reads.
  """
  layers = params["layers"]
  count = len(jax.tree.leaves(layers)[0])
  return {**params, "layers": [jax.tree.map(lambda p, l=l: p[l], layers) for l in range(count)]}


@functools.partial(jax.jit, static_argnames="spec", donate_argnames=("cache", "logits_BxV"))
def extend(
  spec: CacheSpec,
  params: dict,
  cache: Cache,
  logits_BxV: jax.Array,
  tokens_BxT: jax.Array,
  count_B: jax.Array,
  window_LxG: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
  """Reads `count_B` tokens more of each row into the cache.

  Args:
    spec: of the cache.
    params: of the hybridized model, unstacked (`unstack`).
    cache: what was read before; its buffers are reused (donated).
    logits_BxV: the result of the step before, for rows that read nothing now; donated.
    tokens_BxT: int32; row b's are its first `count_B[b]`, what follows is ignored.
    count_B: int32, 0 .. T. No row may grow beyond the capacity (tokens there would be dropped).
    window_LxG: int32, tokens that each group sees besides the sinks: a mask as data, with one
      compilation for all masks. Only for a cache whose groups are all full: they keep all tokens.

  Returns:
    The cache, and float32 logits `[B, V]` behind each row's last token.
  """
  T, c = tokens_BxT.shape[1], spec.config
  offset_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], tokens_BxT.shape)
  position_BxT = cache.length_B[:, None] + offset_BxT
  real_BxT = offset_BxT < count_B[:, None]
  end_B = cache.length_B + count_B
  x_BxTxD, layers = embed(params, tokens_BxT), []
  for l, layer in enumerate(cache.layers):
    attend = functools.partial(
      _attend, spec, spec.full_groups[l], layer, cache.length_B, end_B, position_BxT, real_BxT,
      None if window_LxG is None else window_LxG[l],
    )  # fmt: skip
    rotary = None if not c.nope_layers else jnp.array(l not in c.nope_layers)
    x_BxTxD, layer = Layer(c).apply(
      {"params": params["layers"][l]}, x_BxTxD, None, position_BxT, None, rotary, attend
    )
    layers.append(layer)
  last_Bx1 = jnp.maximum(count_B - 1, 0)[:, None]
  outer = {name: p for name, p in params.items() if name != "layers"}
  new_BxV = answer_logits(Transformer(c), outer, x_BxTxD, last_Bx1)[:, 0]
  return Cache(tuple(layers), end_B), jnp.where((count_B > 0)[:, None], new_BxV, logits_BxV)


def _attend(
  spec, n_full, layer: LayerCache, start_B, end_B, position_BxT, real_BxT, window_G, q, k, v
):
  """Attention of one layer: `[B, T, H, K]` and the layer's cache with the new tokens in it."""
  outs, heads = [], n_full * spec.config.heads_per_group
  full_k, full_v, local_k, local_v = layer
  if n_full:
    slots = kv.full_slots(position_BxT, real_BxT)
    full_k = kv.write(full_k, k[:, :, :n_full], slots)
    full_v = kv.write(full_v, v[:, :, :n_full], slots)
    windows = None if window_G is None else (window_G, spec.sinks)
    outs.append(_attend_full(q[:, :, :heads], full_k, full_v, position_BxT, end_B, windows))
  if n_full < spec.config.num_groups:
    q, k, v = q[:, :, heads:], k[:, :, n_full:], v[:, :, n_full:]
    slots = kv.local_slots(position_BxT, real_BxT, end_B, spec)
    if q.shape[1] > 1:  # reads the ring before new tokens overwrite what the first of them sees
      outs.append(_attend_chunk(spec, q, k, v, local_k, local_v, start_B, position_BxT, real_BxT))
    local_k, local_v = kv.write(local_k, k, slots), kv.write(local_v, v, slots)
    if q.shape[1] == 1:  # all that a ring holds is seen by the newest token
      visible_BxS = kv.held(end_B, spec) >= 0
      outs.append(_attend_ring(q, local_k, local_v, visible_BxS))
  return jnp.concatenate(outs, 2), LayerCache(full_k, full_v, local_k, local_v)


def _to_groups(q_BxTxHxK, groups):
  """`[B, T, H, K]` to `[B, G, R * T, K]`, scaled."""
  B, T, H, K = q_BxTxHxK.shape
  q = q_BxTxHxK.reshape(B, T, groups, H // groups, K).transpose(0, 2, 3, 1, 4)
  return q.reshape(B, groups, H // groups * T, K) * jnp.asarray(K**-0.5, q.dtype)


def _from_groups(out_BxGxMxK, tokens):
  B, G, M, K = out_BxGxMxK.shape
  out = out_BxGxMxK.reshape(B, G, M // tokens, tokens, K).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, tokens, G * M // tokens, K)


def _scores(q_BxGxMxK, k_BxGxSxK, visible_BxGxTxS):
  """float32 scores `[B, G, M, S]`, `FLOOR` where a query does not see the key (G may be 1)."""
  s = jnp.einsum("bgmk,bgsk->bgms", q_BxGxMxK, k_BxGxSxK, preferred_element_type=jnp.float32)
  B, G, M, S = s.shape
  T = visible_BxGxTxS.shape[2]
  s = jnp.where(visible_BxGxTxS[:, :, None], s.reshape(B, G, M // T, T, S), FLOOR)
  return s.reshape(B, G, M, S)


def _mix(p_BxGxMxS, v_BxGxSxK):
  return jnp.einsum(
    "bgms,bgsk->bgmk",
    p_BxGxMxS.astype(v_BxGxSxK.dtype),
    v_BxGxSxK,
    preferred_element_type=jnp.float32,
  )


def _attend_ring(q_Bx1xHxK, k_BxGxSxK, v_BxGxSxK, visible_BxS):
  q = _to_groups(q_Bx1xHxK, k_BxGxSxK.shape[1])
  p = jax.nn.softmax(_scores(q, k_BxGxSxK, visible_BxS[:, None, None]), axis=-1)
  return _from_groups(_mix(p, v_BxGxSxK), 1).astype(q_Bx1xHxK.dtype)


def _attend_full(q_BxTxHxK, k_BxGxSxK, v_BxGxSxK, position_BxT, end_B, windows=None):
  """Softmax attention in blocks of keys, up to the longest row's end and no further: a step costs
  what is filled, not the capacity. `windows`: tokens `[G]` that groups see, and how many sinks."""
  (B, T, H, K), (G, S) = q_BxTxHxK.shape, k_BxGxSxK.shape[1:3]
  q_BxGxMxK = _to_groups(q_BxTxHxK, G)
  block = min(S, 1024 if T == 1 else 512)

  def step(j, carry):
    top, total, out = carry
    first = jnp.minimum(j * block, S - block)  # the last block reaches back into the one before
    k, v = (jax.lax.dynamic_slice_in_dim(x, first, block, 2) for x in (k_BxGxSxK, v_BxGxSxK))
    key = (first + jnp.arange(block, dtype=jnp.int32))[None, None, None]
    distance = position_BxT[:, None, :, None] - key
    visible = (distance >= 0) & (key >= j * block)
    if windows is not None:
      window_G, sinks = windows
      visible &= (distance < window_G[None, :, None, None]) | (key < sinks)
    s = _scores(q_BxGxMxK, k, visible)
    new = jnp.maximum(top, s.max(-1))
    p = jnp.exp(s - new[..., None])
    shrink = jnp.exp(top - new)
    return new, total * shrink + p.sum(-1), out * shrink[..., None] + _mix(p, v)

  shape = (B, G, H // G * T)
  zero = jnp.zeros(shape, jnp.float32)
  # Every query sees key 0 in the first block, or at least itself: once it has a real score, `shrink`
  # takes away whatever blocks before it have added.
  start = (jnp.full(shape, FLOOR, jnp.float32), zero, jnp.zeros((*shape, K), jnp.float32))
  blocks = (end_B.max() + block - 1) // block
  _, total, out = jax.lax.fori_loop(0, blocks, step, start)
  out = out / jnp.maximum(total, 1e-30)[..., None]
  return _from_groups(out, T).astype(q_BxTxHxK.dtype)


def _attend_chunk(spec, q, k, v, ring_k, ring_v, start_B, position_BxT, real_BxT):
  """Local groups of a whole chunk: the ring as it was, then the chunk, in `models.attention`."""
  (B, _, H, K), slots = q.shape, spec.slots
  ring_position = kv.held(start_B, spec)
  position = jnp.concatenate([ring_position, position_BxT], 1)
  filled = jnp.concatenate([ring_position >= 0, real_BxT], 1)

  def behind(ring_BxGxSxK, x_BxTxGxK):
    ring = ring_BxGxSxK.transpose(0, 2, 1, 3).astype(x_BxTxGxK.dtype)
    return jnp.concatenate([ring, x_BxTxGxK], 1)

  out = attention(
    jnp.concatenate([jnp.zeros((B, slots, H, K), q.dtype), q], 1),
    behind(ring_k, k),
    behind(ring_v, v),
    (spec.window,) * H,
    positions_BxT=jnp.maximum(position, 0),
    segments_BxT=jnp.where(filled, 0, -1).astype(jnp.int32),
    sinks=spec.sinks,
  )
  return out[:, slots:]
