"""Attention with a window of its own for every head.

backend     platform   windows         gradients   notes
reference   any        both            yes         the specification; T x T scores
blocked     any        both            yes         XLA loops, bounds from runtime windows
static      any        tuple           yes         XLA loops, one nest per window
flash_tpu   TPU        both            no          Pallas, scalar-prefetch grid
splash      TPU        tuple           yes         JAX's splash kernel, one call per window
triton      GPU        both            yes         Pallas, dynamic loop bounds
cudnn       GPU        tuple           yes         by name only
"""

import jax
import jax.numpy as jnp

from models.attention import plan
from models.attention.cudnn import cudnn
from models.attention.flash_tpu import flash_tpu
from models.attention.reference import as_array, reference, visible
from models.attention.sharded import sharded
from models.attention.splash import splash
from models.attention.triton import triton
from models.attention.xla import blocked, static

__all__ = ["BACKENDS", "as_array", "attention", "choose", "sharded_attention", "visible"]

BACKENDS = {
  "reference": reference,
  "blocked": blocked,
  "static": static,
  "flash_tpu": flash_tpu,
  "splash": splash,
  "triton": triton,
  "cudnn": cudnn,
}
PALLAS = frozenset({"flash_tpu", "splash", "triton"})  # those that can be interpreted
DENSE_TOKENS = 128  # up to here a dense score matrix costs less than loops do


def choose(
  platform: str, tokens: int, head_dim: int, static_runs: bool, layout: str, sinks: int
) -> str:
  """The backend used when none is asked for.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'.
    tokens: T.
    head_dim: K.
    static_runs: the windows are a tuple with one value per kv group.
    layout: 'plain', 'packed' or 'any' (see `attention`).
    sinks: as in `attention`.
  """
  if platform == "tpu":
    expressible = layout == "plain" or (layout == "packed" and not sinks)
    return "splash" if static_runs and expressible else "flash_tpu"
  if platform == "gpu" and head_dim <= 128:
    return "triton"
  if tokens <= DENSE_TOKENS:
    return "reference"
  return "static" if static_runs else "blocked"


def attention(
  q_BxTxHxK: jax.Array,
  k_BxTxGxK: jax.Array,
  v_BxTxGxK: jax.Array,
  windows_xH: jax.Array | tuple[int, ...],
  *,
  positions_BxT: jax.Array | None = None,
  segments_BxT: jax.Array | None = None,
  sinks: int = 0,
  scale: float | None = None,
  softcap: float | None = None,
  packed: bool = False,
  backend: str | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Causal grouped-query attention in which every head sees its own window of recent keys.

  Args:
    q_BxTxHxK: queries, any float dtype.
    k_BxTxGxK, v_BxTxGxK: keys and values; query head h uses group h // (H // G).
    windows_xH: the most recent keys a head sees, self included; `FULL` for all. Either int32 `[H]`
      or `[B, H]`, traced or not (another window needs no other trace), or a tuple of H ints that
      is compiled in (training, serving).
    positions_BxT: int32 positions within the document, below 2^30; default 0..T-1.
    segments_BxT: int32 segments (see `reference.visible`); default all 0.
    sinks: the first keys that stay visible to every head.
    scale: multiplies the scores; default K ** -0.5.
    softcap: scores become `softcap * tanh(scores / softcap)`; None = off.
    packed: a promise about positions and segments, which some backends need: documents stand one
      after another, each with a segment of its own from 1 up and positions from 0; padding is
      negative; no segment 0 is shared.
    backend: a key of `BACKENDS`; None = `choose` decides by platform and size.
    interpret: run a Pallas backend's steps as ordinary XLA operations, on any platform.

  Returns:
    `[B, T, H, K]` in the dtype of q; rows that see nothing (padding) are zero.

  Raises:
    NotImplementedError: the backend asked for cannot do this; the message says what can.
    ValueError: no such backend, or a window row of the wrong length.
  """
  B, T, H, K = q_BxTxHxK.shape
  G = k_BxTxGxK.shape[2]
  layout = "packed" if packed else "any"
  if positions_BxT is None and segments_BxT is None:
    layout = "plain"
  if positions_BxT is None:
    positions_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  if segments_BxT is None:
    segments_BxT = jnp.zeros((B, T), jnp.int32)
  windows_xH, static_runs = _windows(windows_xH, H, G)
  if backend is None:
    backend = choose(jax.default_backend(), T, K, static_runs, layout, sinks)
  if backend not in BACKENDS:
    raise ValueError(f"no attention backend {backend!r}; there are {', '.join(sorted(BACKENDS))}")
  if interpret and backend not in PALLAS:
    raise ValueError(f"backend {backend!r} is not a Pallas kernel, so it cannot be interpreted")
  return BACKENDS[backend](
    q_BxTxHxK,
    k_BxTxGxK,
    v_BxTxGxK,
    windows_xH,
    positions=positions_BxT,
    segments=segments_BxT,
    sinks=sinks,
    scale=K**-0.5 if scale is None else scale,
    softcap=softcap,
    layout=layout,
    **({"interpret": True} if interpret else {}),
  )


def _windows(windows, heads: int, groups: int):
  """Checks the window row; also says whether it is static with one window per group."""
  length = len(windows) if isinstance(windows, tuple) else windows.shape[-1]
  if length != heads:
    raise ValueError(f"{length} windows for {heads} heads; give one per query head")
  if not isinstance(windows, tuple):
    return windows, False
  R = heads // groups
  uniform = all(len(set(windows[g * R : (g + 1) * R])) == 1 for g in range(groups))
  return tuple(int(w) for w in windows), uniform


def sharded_attention(mesh: jax.sharding.Mesh, *, batch=None, heads=None):
  """`attention` over a device mesh: kernels run per shard, which no compiler does by itself.

  Args:
    mesh: the devices.
    batch: mesh axis (or axes) of the batch dimension; None = not sharded.
    heads: mesh axis of the head dimension; None = not sharded. It must divide the kv groups, and
      for static windows the groups of every run of equal windows.

  Returns:
    A function with the arguments of `attention`.
  """
  return sharded(attention, plan.runs, mesh, batch, heads)
