"""The decoder as linen modules and pure functions of (config, params, tokens, windows).

Parameters, as `Transformer.init` makes them; layers are stacked on a leading axis:

    embed/embedding            [V, D]
    layers/attn_norm/scale     [L, D]        layers/mlp_norm/scale      [L, D]
    layers/attn/q/kernel       [L, D, H, K]  layers/mlp/gate/kernel     [L, D, F]
    layers/attn/k/kernel       [L, D, G, K]  layers/mlp/up/kernel       [L, D, F]
    layers/attn/v/kernel       [L, D, G, K]  layers/mlp/down/kernel     [L, F, D]
    layers/attn/o/kernel       [L, H, K, D]
    layers/attn/{q,k,v}/bias   [L, N, K]     (qkv_bias; N is H for q, G for k and v)
    layers/attn/q_norm/scale   [L, K]        (qk_norm; k_norm likewise; shared by all heads)
    final_norm/scale           [D]
    head/kernel                [D, V]        (only when the head is not tied)

With experts, `layers/mlp` is the tree described in `models.moe` instead.
"""

import itertools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import attention
from models.config import ModelConfig
from models.moe import MoE
from models.rope import rope_angles, rope_tables, rotate, switched

REMAT = {
  "none": lambda step: step,
  "dots": lambda step: jax.checkpoint(
    step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  ),
  "full": jax.checkpoint,
}  # what of a layer is computed again in the backward pass: nothing, all but products, everything


class RMSNorm(nn.Module):
  """Root-mean-square norm, computed in float32: `x / sqrt(mean(x^2) + eps) * scale`."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
    # Broadcast by a product with ones: its gradient is a product as well, where a broadcast's is a sum of
    # products, which XLA makes 2.5 times as slow on a CPU.
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    x32 = x32 * jnp.matmul(inverse, ones, precision=jax.lax.Precision.HIGHEST)
    return x32.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


class Projection(nn.Module):
  """`x W + b` over the last axes of x, as one product of two matrices.

  Rows are flattened: with the batch and token axes apart, the gradient of W would be a product over
  both, for which XLA transposes its operands in memory first.

  Attributes:
    ins, outs: the axes of x that W takes, and those it makes; W is `[*ins, *outs]`.
    use_bias: there is a b, `[*outs]`.
  """

  ins: tuple[int, ...]
  outs: tuple[int, ...]
  use_bias: bool = False

  @nn.compact
  def __call__(self, x):
    size_in, size_out = math.prod(self.ins), math.prod(self.outs)

    def init(rng, shape, dtype=jnp.float32):
      return nn.initializers.lecun_normal()(rng, (size_in, size_out), dtype).reshape(shape)

    kernel = self.param("kernel", init, (*self.ins, *self.outs)).astype(x.dtype)
    rows = x.shape[: x.ndim - len(self.ins)]
    out = x.reshape(-1, size_in) @ kernel.reshape(size_in, size_out)
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros_init(), self.outs).astype(x.dtype)
      out = out + bias.reshape(1, size_out)
    return out.reshape(*rows, *self.outs)


class Attention(nn.Module):
  config: ModelConfig
  attention: Callable = attention

  @nn.compact
  def __call__(
    self,
    x_BxTxD,
    windows_xH,
    positions_BxT,
    segments_BxT,
    sinks=0,
    backend=None,
    rotary=None,
    packed=False,
    attend=None,
    angles=None,
  ):
    c = self.config

    def project(name, heads):
      x = Projection((c.model_dim,), (heads, c.head_dim), c.qkv_bias, name=name)(x_BxTxD)
      return RMSNorm(c.norm_eps, name=f"{name}_norm")(x) if c.qk_norm and name != "v" else x

    cos, sin = switched(*(angles or rope_angles(positions_BxT, c)), rotary)
    q_BxTxHxK = rotate(project("q", c.num_heads), cos, sin)
    k_BxTxGxK = rotate(project("k", c.num_groups), cos, sin)
    v_BxTxGxK = project("v", c.num_groups)
    if attend is not None:
      out_BxTxHxK, kept = attend(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK)
    else:
      kept = None
      out_BxTxHxK = self.attention(
        q_BxTxHxK,
        k_BxTxGxK,
        v_BxTxGxK,
        windows_xH,
        # Without segments the row is one document, which static kernels are told by leaving both out.
        positions_BxT=None if segments_BxT is None else positions_BxT,
        segments_BxT=segments_BxT,
        sinks=sinks,
        backend=backend,
        packed=packed,
      )
    output = Projection((c.num_heads, c.head_dim), (c.model_dim,), name="o")
    return output(out_BxTxHxK), kept


class MLP(nn.Module):
  """SwiGLU: `down(silu(gate(x)) * up(x))`."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x):
    wide, narrow = (self.config.ffn_dim,), (self.config.model_dim,)
    hidden = nn.silu(Projection(narrow, wide, name="gate")(x))
    hidden = hidden * Projection(narrow, wide, name="up")(x)
    return Projection(wide, narrow, name="down")(hidden)


class Layer(nn.Module):
  """One decoder layer: pre-norm attention and feed-forward, each added to the residual stream."""

  config: ModelConfig
  sinks: int = 0
  backend: str | None = None
  packed: bool = False
  attention: Callable = attention

  @nn.compact
  def __call__(
    self, x_BxTxD, windows_xH, positions_BxT, segments_BxT, rotary=None, attend=None, angles=None
  ):
    """The layer's output `[B, T, D]`, and what `attend` keeps.

    Args:
      rotary: bool scalar, whether this layer rotates q and k (`rotary_layers`); None = yes.
      attend: function of the rotated q, k and v that returns the heads' output `[B, T, H, K]` and
        anything it wants kept, in place of `models.attention` (a key/value cache, `models.decode`);
        windows and segments are then its own affair.
      angles: `rope_angles` of the positions; None = computed here.
    """
    eps = self.config.norm_eps
    feed_forward = MoE if self.config.num_experts else MLP
    normed = RMSNorm(eps, name="attn_norm")(x_BxTxD)
    mixed, kept = Attention(self.config, self.attention, name="attn")(
      normed,
      windows_xH,
      positions_BxT,
      segments_BxT,
      self.sinks,
      self.backend,
      rotary,
      self.packed,
      attend,
      angles,
    )
    x_BxTxD = x_BxTxD + mixed
    normed = RMSNorm(eps, name="mlp_norm")(x_BxTxD)
    x_BxTxD = x_BxTxD + feed_forward(self.config, name="mlp")(normed)
    return x_BxTxD, kept


class Transformer(nn.Module):
  """The whole decoder. Windows come in one of two forms, with the same parameters:

  * at run time: `windows_LxH` in the call, layers scanned with their row as scanned input;
  * static: `static_windows` at construction, compiled in (training, serving). Neighbouring layers
    with equal rows share one scan, so a model sorted by `models.hybridize` compiles few kernels.

  Attributes:
    config: the architecture.
    sinks: keys at the start of a document that every head sees.
    backend: attention backend; None = the best for the platform (see `models.attention`).
    static_windows: L tuples of H ints, or None for windows at run time.
    packed: a promise about segments, see `models.attention.attention`.
    attention: `models.attention.attention`, or what `sharded_attention` makes of it for a mesh.
    remat: what the backward pass of static windows computes again, a key of `REMAT`.
    unroll: no scan with static windows: larger programs, but no stacking of what the backward
      pass needs, which on a CPU costs a fifth of a training step.
  """

  config: ModelConfig
  sinks: int = 0
  backend: str | None = None
  static_windows: tuple[tuple[int, ...], ...] | None = None
  packed: bool = False
  attention: Callable = attention
  remat: str = "none"
  unroll: bool = False

  def setup(self):
    c = self.config
    self.embed = nn.Embed(c.vocab_size, c.model_dim)
    self.layers = nn.scan(
      Layer,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=(0, nn.broadcast, nn.broadcast, 0),
      length=c.num_layers,
    )(c, self.sinks, self.backend, self.packed, self.attention)
    self.final_norm = RMSNorm(c.norm_eps)
    if not c.tied_head:
      self.head = nn.Dense(c.vocab_size, use_bias=False)

  def __call__(self, tokens_BxT, windows_LxH=None, positions_BxT=None, segments_BxT=None):
    """Logits at every position, float32 `[B, T, V]`. For short texts and tests; scoring reads
    answer positions only (`answer_logits`)."""
    return self.logits(self.hidden(tokens_BxT, windows_LxH, positions_BxT, segments_BxT))

  def hidden(self, tokens_BxT, windows_LxH=None, positions_BxT=None, segments_BxT=None):
    """Hidden states `[B, T, D]` after the last layer, before the final norm."""
    if (windows_LxH is None) == (self.static_windows is None):
      raise ValueError("give windows either in the call or, static, at construction")
    one_document = positions_BxT is None and segments_BxT is None
    positions_BxT, segments_BxT = layout(tokens_BxT, positions_BxT, segments_BxT)
    segments_BxT = None if one_document else segments_BxT
    x_BxTxD, rotary_L = self.embed(tokens_BxT), rotary_layers(self.config)
    if self.static_windows is not None and self.is_initializing():
      # Parameters do not depend on windows; the scan below makes them, stacked.
      windows_LxH = jnp.asarray(self.static_windows, jnp.int32)
    if windows_LxH is not None:
      return self.layers(x_BxTxD, windows_LxH, positions_BxT, segments_BxT, rotary_L)[0]
    runs = [(row, len(list(same))) for row, same in itertools.groupby(self.static_windows)]
    if self.unroll:
      runs = [(row, 1) for row in self.static_windows]
    sizes = [size for _, size in runs]
    of_layers = self.variables["params"]["layers"], rotary_L
    # A leaf may be a tuple of L arrays instead of one: training on a CPU keeps layers apart.
    leaves, treedef = jax.tree.flatten(
      of_layers, is_leaf=lambda x: x is not of_layers and isinstance(x, tuple)
    )
    parts = zip(*(_parts(leaf, sizes) for leaf in leaves), strict=True)
    layer = Layer(self.config, self.sinks, self.backend, self.packed, self.attention, parent=None)
    angles = rope_tables(positions_BxT, self.config) if self.unroll else None
    for (row, _), part in zip(runs, parts, strict=True):

      def step(x, inputs, row=row):
        params_l, rotary = inputs
        places = positions_BxT, segments_BxT
        return layer.apply({"params": params_l}, x, row, *places, rotary, angles=angles)

      step, inputs = REMAT[self.remat](step), treedef.unflatten(part)
      if len(part[0]) == 1:
        x_BxTxD, _ = step(x_BxTxD, jax.tree.map(lambda p: jax.lax.squeeze(p, (0,)), inputs))
      else:
        x_BxTxD, _ = jax.lax.scan(step, x_BxTxD, inputs)
    return x_BxTxD

  def logits(self, x_xD):
    """Final norm and output head at the given hidden states: float32 `[..., V]`."""
    x_xD = self.final_norm(x_xD)
    return (self.embed.attend(x_xD) if self.config.tied_head else self.head(x_xD)).astype(
      jnp.float32
    )


def _parts(leaf, sizes: list[int]) -> list[jax.Array]:
  """An array `[L, ...]`, or a tuple of L arrays, cut along its layers."""
  if isinstance(leaf, tuple):
    layers = iter(leaf)
    return [jnp.stack(list(itertools.islice(layers, size))) for size in sizes]
  # A split, not slices: its gradient is one concatenation, theirs a sum of padded copies.
  return jax.lax.split(leaf, sizes)


def rotary_layers(config: ModelConfig):
  """bool `[L]`: the layers that rotate q and k; None when all of them do."""
  if not config.nope_layers:
    return None
  return jnp.array([l not in config.nope_layers for l in range(config.num_layers)])


def layout(tokens_BxT, positions_BxT=None, segments_BxT=None):
  """Defaults for one document per row: positions 0..T-1, segment 0."""
  if positions_BxT is None:
    positions_BxT = jnp.broadcast_to(
      jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32), tokens_BxT.shape
    )
  if segments_BxT is None:
    segments_BxT = jnp.zeros(tokens_BxT.shape, jnp.int32)
  return positions_BxT, segments_BxT


def embed(params, tokens_BxT):
  """Hidden states at the input of layer 0: `[B, T, D]`."""
  return params["embed"]["embedding"][tokens_BxT]


def run_layers(
  model: Transformer, params, x_BxTxD, windows_LxBxH, positions_BxT, segments_BxT, start, stop=None
):
  """Layers `start` .. `stop` - 1 on the hidden states at the input of layer `start`.

  Args:
    windows_LxBxH: int32, for all L layers; a row of the batch may have windows of its own (that
      is how candidates fold into the batch axis).
    start, stop: int32 scalars, traced or not, so one trace serves every first layer; stop
      defaults to L.

  Returns:
    Hidden states `[B, T, D]` at the input of layer `stop`, before any final norm.
  """
  layer, rotary_L = Layer(model.config, model.sinks, model.backend), rotary_layers(model.config)

  def step(l, x):
    params_l = jax.tree.map(lambda p: p[l], params["layers"])
    rotary = None if rotary_L is None else rotary_L[l]
    return layer.apply(
      {"params": params_l}, x, windows_LxBxH[l], positions_BxT, segments_BxT, rotary
    )[0]

  stop = model.config.num_layers if stop is None else stop
  return jax.lax.fori_loop(start, stop, step, x_BxTxD)


def answer_logits(model: Transformer, params, x_BxTxD, answer_BxA):
  """Logits only where answers are predicted.

  Args:
    x_BxTxD: hidden states after the last layer.
    answer_BxA: int32 indices on the token axis.

  Returns:
    float32 `[B, A, V]`.
  """
  picked_BxAxD = jnp.take_along_axis(x_BxTxD, answer_BxA[:, :, None], axis=1)
  return model.apply({"params": params}, picked_BxAxD, method=Transformer.logits)
