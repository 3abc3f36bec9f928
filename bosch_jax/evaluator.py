"""The evaluator: many candidate masks in, calibration scores out. The only door the search uses.

How a score is made cheap without changing it:
  * several questions share one haystack (packed prompts), logits exist at answer positions only;
  * masks that agree with the *base* mask on all layers below l start from its stored hidden states
    at the input of layer l (prefix reuse); l is traced, so there is one trace for all;
  * nothing is ever scored twice (memo), and the memo is refilled from the journal on resume;
  * contexts are scored in micro-batches, candidates fold into the batch axis of an accelerator.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bosch_jax.journal import Journal, mask_key
from bosch_jax.prompts import PromptSet
from models import windows as windows_lib
from models.config import ModelConfig
from models.transformer import Transformer, answer_logits, embed, run_layers


class Batch(NamedTuple):
  """The arrays of B packed prompts (see `PromptSet`), as they enter compiled functions."""

  tokens_BxT: jax.Array
  positions_BxT: jax.Array
  segments_BxT: jax.Array
  answer_BxQxA: jax.Array
  target_BxQxA: jax.Array
  valid_BxQxA: jax.Array

  @classmethod
  def of(cls, prompts: PromptSet) -> "Batch":
    return cls(*(jnp.asarray(getattr(prompts, name)) for name in cls._fields))


def answer_scores(model, params, x_BxTxD, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Teacher-forced scores of the answers.

  Args:
    x_BxTxD: hidden states after the last layer.
    batch: the prompts they belong to.

  Returns:
    nll: float32 `[B, Q]`, mean negative log-likelihood (nats) over the answer's tokens.
    exact: bool `[B, Q]`, every answer token is the most likely one (which is when greedy
      decoding would produce the answer).
  """
  B, Q, A = batch.target_BxQxA.shape
  logits_BxQxAxV = answer_logits(model, params, x_BxTxD, batch.answer_BxQxA.reshape(B, Q * A))
  logits_BxQxAxV = logits_BxQxAxV.reshape(B, Q, A, -1)
  target_BxQxA, valid_BxQxA = batch.target_BxQxA, batch.valid_BxQxA
  picked = jnp.take_along_axis(logits_BxQxAxV, target_BxQxA[..., None], axis=-1)[..., 0]
  nll_BxQxA = jnp.where(valid_BxQxA, jax.nn.logsumexp(logits_BxQxAxV, -1) - picked, 0.0)
  hit_BxQxA = (jnp.argmax(logits_BxQxAxV, -1) == target_BxQxA) | ~valid_BxQxA
  return nll_BxQxA.sum(-1) / valid_BxQxA.sum(-1).astype(jnp.float32), hit_BxQxA.all(-1)


def score_from(
  model: Transformer, stride: int, params, states, batch: Batch, masks_CxLxG, window, start
):
  """Scores of C masks that agree with the base mask below layer `start`.

  Args:
    model, stride: compiled in.
    states: the base's hidden states at the input of layers 0, stride, 2 stride .., `[n, B, T, D]`.
    window: int32 scalar, W.
    start: int32 scalar, a multiple of stride.

  Returns:
    `answer_scores` of all masks, `[C, B, Q]` each.
  """
  C, B = masks_CxLxG.shape[0], batch.tokens_BxT.shape[0]
  windows_CxLxH = windows_lib.expand(masks_CxLxG, model.config.num_heads, window, jnp)
  windows_LxNxH = jnp.repeat(
    windows_CxLxH.swapaxes(0, 1), B, axis=1
  )  # candidates fold into N = C B
  folded = jax.tree.map(lambda a: jnp.tile(a, (C,) + (1,) * (a.ndim - 1)), batch)
  x = jax.lax.dynamic_index_in_dim(states, start // stride, keepdims=False)
  x = run_layers(
    model,
    params,
    jnp.tile(x, (C, 1, 1)),
    windows_LxNxH,
    folded.positions_BxT,
    folded.segments_BxT,
    start,
  )
  nll, exact = answer_scores(model, params, x, folded)
  return nll.reshape(C, B, -1), exact.reshape(C, B, -1)


def extend_states(
  model: Transformer, stride: int, params, states, batch: Batch, mask_LxG, window, first, last
):
  """The base's hidden states, recomputed from slot `first` up to slot `last`."""
  B = batch.tokens_BxT.shape[0]
  windows_LxH = windows_lib.expand(mask_LxG, model.config.num_heads, window, jnp)
  windows_LxBxH = jnp.repeat(windows_LxH[:, None], B, axis=1)
  states = states.at[0].set(embed(params, batch.tokens_BxT))

  def step(i, states):
    x = run_layers(
      model,
      params,
      states[i],
      windows_LxBxH,
      batch.positions_BxT,
      batch.segments_BxT,
      i * stride,
      (i + 1) * stride,
    )
    return jax.lax.dynamic_update_index_in_dim(states, x, i + 1, 0)

  return jax.lax.fori_loop(first, last, step, states)


# Compiled once per model and shape, whichever evaluator asks.
_score_from = jax.jit(score_from, static_argnums=(0, 1))
_extend_states = jax.jit(extend_states, static_argnums=(0, 1), donate_argnums=3)


@dataclasses.dataclass(frozen=True)
class Scores:
  """Scores of C masks on n contexts with Q questions each.

  Attributes:
    nll: float32 `[C, n, Q]`, nats per answer token.
    exact: bool `[C, n, Q]`.
  """

  nll: np.ndarray
  exact: np.ndarray

  def score(self, kind: str) -> np.ndarray:
    """S(z) of the paper, `[C]`, greater is better: minus the mean NLL, or the accuracy."""
    values = -self.nll.astype(np.float64) if kind == "nll" else self.exact.astype(np.float64)
    return values.mean((1, 2))


class Evaluator:
  """Scores head masks on a prompt set.

  Args:
    config, params: the model.
    prompts: B contexts of Q packed questions.
    window: W of local heads, in tokens.
    sinks: first tokens every head sees.
    backend: attention backend, None = automatic.
    journal: where scores are logged and read back from.
    batch: contexts in a micro-batch (must divide B); None = by platform.
    fold: candidates scored in one call, folded into the batch axis; None = by platform.
    state_bytes: memory for the base mask's hidden states. When they do not fit, only every n-th
      layer's input is kept and a candidate starts from the nearest one below.

  Attributes:
    cost: full-forward equivalents spent so far: FLOPs of the layers and answer heads run, over
      the FLOPs of one full pass over all contexts. A resumed run walks the same path again and
      counts what the journal answers like the run that scored it.
    masks_scored: masks with at least one score.
    stage: what the scores are for; written into the journal.
    on_scored: called with `(stage, cost so far)` after every batch of new scores.
  """

  def __init__(
    self,
    config: ModelConfig,
    params: dict,
    prompts: PromptSet,
    window: int,
    *,
    sinks: int = 0,
    backend: str | None = None,
    journal: Journal | None = None,
    batch: int | None = None,
    fold: int | None = None,
    state_bytes: int = 2**30,
  ):
    accelerator = jax.default_backend() != "cpu"
    self.config, self.params, self.prompts, self.window = config, params, prompts, window
    self.batch = batch or (math.gcd(len(prompts), 8) if accelerator else 1)
    self.fold = fold or (8 if accelerator else 1)
    if len(prompts) % self.batch:
      raise ValueError(f"batch {self.batch} does not divide {len(prompts)} contexts")
    self.journal = journal or Journal(None, {})
    self.cost, self.masks_scored, self.stage = 0.0, 0, ""
    self.on_scored: Callable[[str, float], None] = lambda stage, cost: None
    self._memo: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    self._model = Transformer(config, sinks, backend)
    self._rows = [
      Batch.of(prompts.take(range(i, i + self.batch))) for i in range(0, len(prompts), self.batch)
    ]
    tokens = prompts.tokens_BxT.shape[1]
    layer_bytes = 4 * len(prompts) * tokens * config.model_dim
    self._stride = max(1, math.ceil(config.num_layers * layer_bytes / max(state_bytes, 1)))
    self._layer_flops, self._head_flops = forward_flops(config, prompts)
    self._base = np.zeros((config.num_layers, config.num_groups), bool)
    self._states: list[jax.Array | None] = [None] * len(self._rows)
    self._depth = [-1] * len(self._rows)  # layers of the base whose inputs are stored
    self._paid = [-1] * len(self._rows)  # layers of the base whose inputs were charged for
    self._logged = {
      (entry["mask"], tuple(entry["contexts"])): entry for entry in self.journal.lines
    }

  def rebase(self, mask_LxG: np.ndarray) -> None:
    """Declares the mask whose hidden states later candidates start from (most share its lower
    layers). States are computed when first needed, and only as deep as needed."""
    mask_LxG = np.asarray(mask_LxG, bool)
    kept = common_prefix(self._base, mask_LxG)
    self._depth = [min(depth, kept) for depth in self._depth]
    self._paid = [min(depth, kept) for depth in self._paid]
    self._base = mask_LxG.copy()

  def score(self, masks: Sequence[np.ndarray], contexts: Sequence[int] | None = None) -> Scores:
    """Scores masks, new ones by forward passes, known ones from the memo.

    Args:
      masks: C arrays, bool `[L, G]`, True = local.
      contexts: indices of the contexts to score on; None = all.

    Returns:
      `Scores` of shape `[C, n, Q]`.
    """
    contexts = list(range(len(self.prompts))) if contexts is None else list(contexts)
    wanted = {i // self.batch for i in contexts}
    pending: dict[str, tuple[np.ndarray, list[int]]] = {}
    for mask in masks:
      known = self._memo.get(mask_key(mask), {})
      rows = [r for r in sorted(wanted) if r * self.batch not in known]
      if rows and mask_key(mask) not in pending:
        pending[mask_key(mask)] = (np.asarray(mask, bool), rows)
    self._run(list(pending.values()))
    known = [self._memo[mask_key(mask)] for mask in masks]
    return Scores(
      np.array([[k[i][0] for i in contexts] for k in known]),
      np.array([[k[i][1] for i in contexts] for k in known]),
    )

  def _run(self, pending: list[tuple[np.ndarray, list[int]]]) -> None:
    by_start: dict[tuple, list[np.ndarray]] = {}
    for mask, rows in pending:
      start = min(common_prefix(self._base, mask), self.config.num_layers - 1)
      by_start.setdefault((start // self._stride * self._stride, tuple(rows)), []).append(mask)
    for (start, rows), masks in by_start.items():
      for i in range(0, len(masks), self.fold):
        self._run_chunk(masks[i : i + self.fold], start, rows)

  def _run_chunk(self, masks: list[np.ndarray], start: int, rows: Sequence[int]) -> None:
    contexts = [r * self.batch + i for r in rows for i in range(self.batch)]
    spent = sum(self._pay_states(r, start) for r in rows)
    each = self.batch * len(rows) / len(self.prompts) * (1.0 - self._layers_cost(start))
    entries = [
      {
        "mask": mask_key(mask),
        "stage": self.stage,
        "contexts": contexts,
        "cost": each + (spent if c == 0 else 0.0),
      }
      for c, mask in enumerate(masks)
    ]
    logged = [self._logged.get((entry["mask"], tuple(contexts))) for entry in entries]
    if all(logged):  # an earlier run scored them: the same path is walked again, at the same cost
      entries = [old | entry for old, entry in zip(logged, entries, strict=True)]
    else:
      nll, exact = self._forward(masks, start, rows)
      for c, entry in enumerate(entries):
        entry |= {"nll": nll[c].tolist(), "exact": exact[c].astype(int).tolist()}
      self.journal.append([e for e, old in zip(entries, logged, strict=True) if old is None])
    for entry in entries:
      self._remember(entry)
    self.on_scored(self.stage, self.cost)

  def _forward(self, masks: list[np.ndarray], start: int, rows: Sequence[int]):
    padded = np.stack(masks + [masks[-1]] * (self.fold - len(masks)))
    for r in rows:
      self._ensure_states(r, start)
    outputs = [
      _score_from(
        self._model,
        self._stride,
        self.params,
        self._states[r],
        self._rows[r],
        padded,
        jnp.int32(self.window),
        jnp.int32(start),
      )
      for r in rows
    ]
    # Everything above is dispatched before the first result is waited for.
    return (np.concatenate([np.asarray(o[k]) for o in outputs], axis=1) for k in (0, 1))

  def _remember(self, entry: dict) -> None:
    known = self._memo.setdefault(entry["mask"], {})
    self.masks_scored += not known
    for context, nll, exact in zip(entry["contexts"], entry["nll"], entry["exact"], strict=True):
      known[context] = (np.asarray(nll, np.float32), np.asarray(exact, bool))
    self.cost += entry["cost"]

  def _pay_states(self, row: int, layer: int) -> float:
    """Cost of the base's states up to the input of `layer`, charged once per base. It is kept
    apart from what is computed, so that a resumed run, whose states are gone, takes the same
    decisions about its budget."""
    depth = self._paid[row]
    if depth >= layer:
      return 0.0
    self._paid[row] = layer
    return (
      self.batch
      / len(self.prompts)
      * self._layers_cost(layer - max(depth, 0) // self._stride * self._stride)
    )

  def _ensure_states(self, row: int, layer: int) -> None:
    """Computes the base's hidden states up to the input of `layer`."""
    depth = self._depth[row]
    if depth >= layer:
      return
    if self._states[row] is None:
      kept = math.ceil(self.config.num_layers / self._stride)
      dtype = self.params["embed"]["embedding"].dtype
      self._states[row] = jnp.zeros(
        (kept, *self._rows[row].tokens_BxT.shape, self.config.model_dim), dtype
      )
    self._states[row] = _extend_states(
      self._model,
      self._stride,
      self.params,
      self._states[row],
      self._rows[row],
      self._base,
      jnp.int32(self.window),
      jnp.int32(max(depth, 0) // self._stride),
      jnp.int32(layer // self._stride),
    )
    self._depth[row] = layer

  def _layers_cost(self, layers: int) -> float:
    return (
      layers * self._layer_flops / (self.config.num_layers * self._layer_flops + self._head_flops)
    )


def common_prefix(a_LxG: np.ndarray, b_LxG: np.ndarray) -> int:
  """Number of layers from the bottom on which two masks agree."""
  differing = np.flatnonzero((np.asarray(a_LxG) != np.asarray(b_LxG)).any(1))
  return int(differing[0]) if differing.size else len(a_LxG)


def forward_flops(config: ModelConfig, prompts: PromptSet) -> tuple[float, float]:
  """FLOPs of one layer, and of the answer head, on all prompts with full attention.

  Counted as 2 per multiply-add: projections and feed-forward per token, and the causal half of
  scores and values.
  """
  B, T = prompts.tokens_BxT.shape
  c = config
  per_token = 2 * c.model_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_groups)
  per_token += 2 * 3 * c.model_dim * c.active_ffn_dim
  attention = 4 * c.num_heads * c.head_dim * T * T / 2
  answers = prompts.target_BxQxA.size
  return float(B * (T * per_token + attention)), float(2.0 * answers * c.model_dim * c.vocab_size)
