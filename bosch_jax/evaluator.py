"""The evaluator: many candidate masks in, calibration scores out. The only door the search uses.

How a score is made cheap without changing it:
  * several questions share one haystack (packed prompts), logits exist at answer positions only;
  * masks that agree with the *base* mask on all layers below l start from its stored hidden states
    at the input of layer l (prefix reuse); l is traced, so there is one trace for all;
  * nothing is ever scored twice (memo), and the memo is refilled from the journal on resume;
  * the unit of work is a pair of a mask and a context: pairs fold into the batch axis of an
    accelerator, spread over the devices of a mesh, and share the cores of a CPU.
"""

import concurrent.futures
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bosch_jax import memory, scoring
from bosch_jax.contexts import Contexts
from bosch_jax.device_options import AXIS
from bosch_jax.journal import Journal, mask_key
from bosch_jax.prompts import PromptSet
from models.config import ModelConfig
from models.transformer import Transformer

GRADIENT_PASSES = 3  # forward 1, backward 2, as training is counted


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
    also: further lengths, as pairs of prompts and W; contexts are numbered in turns over all
      lengths (`Contexts`).
    sinks: first tokens every head sees.
    backend: attention backend, None = automatic.
    journal: where scores are logged and read back from.
    batch: pairs of a mask and a context that a device computes at once; None = by platform and
      memory.
    state_bytes: memory of a device for the base mask's hidden states; None = by platform and
      memory. When they do not fit, only every n-th layer's input is kept and a candidate starts
      from the nearest one below.
    mesh: devices to spread the pairs over (one axis, `AXIS`); None = the default device.
    calibration: the first so many contexts are what masks are scored on, and what a full pass is
      counted over; the others serve `relax` only. None = all.

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
    state_bytes: int | None = None,
    mesh: Mesh | None = None,
    workers: int | None = None,
    also: Sequence[tuple[PromptSet, int]] = (),
    calibration: int | None = None,
  ):
    devices, L = 1 if mesh is None else mesh.size, config.num_layers
    self.config, self.prompts, self.window, self._mesh = config, prompts, window, mesh
    sets, windows = zip((prompts, window), *also, strict=True)
    self.contexts = Contexts(sets, windows)
    self.calibration = calibration or len(self.contexts)
    self.params = params if mesh is None else jax.tree.map(self._everywhere, params)
    self._padded = self.contexts.padded(devices)  # stored states are split along the tokens
    dtype = params["embed"]["embedding"].dtype
    params_bytes = sum(p.nbytes for p in jax.tree.leaves(params))
    plan = memory.plan(
      config,
      self._padded.longest(self.calibration),
      dtype.itemsize,
      params_bytes,
      devices,
      batch,
      state_bytes,
      sum(len(self._padded.tokens(b)) for b in range(self.calibration)),
    )
    self.batch, self._stride, self._at_once = plan.batch, plan.stride, plan.batch * devices
    self.journal = journal or Journal(None, {})
    self.cost, self.masks_scored, self.stage = 0.0, 0, ""
    self.on_scored: Callable[[str, float], None] = lambda stage, cost: None
    self._memo: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    self._compiled = scoring.compiled(Transformer(config, sinks, backend), mesh)
    # One context leaves cores idle between its matrix products, so as many run side by side.
    on_cores = mesh is None and jax.default_backend() == "cpu"
    self._workers = workers or (len(os.sched_getaffinity(0)) if on_cores else 1)
    self._pool = concurrent.futures.ThreadPoolExecutor(self._workers)
    self._flops = [forward_flops(config, p.take([0])) for p in self.contexts.sets]
    whole = [L * layer + head for layer, head in self._flops]
    each = [whole[self.contexts.length(b)] for b in range(len(self.contexts))]
    total = sum(each[: self.calibration])
    self._share = [flops / total for flops in each]  # of a full pass
    self._base = np.zeros((L, config.num_groups), bool)
    # For each context: slot -> the base's hidden states [T, D] at the input of layer slot * stride.
    # Slot 0, the embedding, is not stored.
    self._states: list[dict[int, jax.Array]] = [{} for _ in each]
    self._paid = [0] * len(each)  # layers of the base whose inputs were charged for
    self._logged = {
      (entry.get("mask") or entry["relaxed"], tuple(entry["contexts"])): entry
      for entry in self.journal.lines
    }

  def rebase(self, mask_LxG: np.ndarray) -> None:
    """Declares the mask whose hidden states later candidates start from (most share its lower
    layers). States are computed when first needed, and only as deep as needed."""
    mask_LxG = np.asarray(mask_LxG, bool)
    kept = common_prefix(self._base, mask_LxG) // self._stride
    self._states = [{s: x for s, x in states.items() if s <= kept} for states in self._states]
    self._paid = [min(paid, kept * self._stride) for paid in self._paid]
    self._base = mask_LxG.copy()

  def forget(self) -> None:
    """Gives the memory of the base's hidden states back; scores stay known."""
    self._states = [{} for _ in self._states]
    self._paid = [0] * len(self._paid)  # whoever needs them again computes and pays them again

  def score(self, masks: Sequence[np.ndarray], contexts: Sequence[int] | None = None) -> Scores:
    """Scores masks, new ones by forward passes, known ones from the memo.

    Args:
      masks: C arrays, bool `[L, G]`, True = local.
      contexts: indices of the contexts to score on; None = all for calibration.

    Returns:
      `Scores` of shape `[C, n, Q]`.
    """
    contexts = list(range(self.calibration)) if contexts is None else list(contexts)
    pending: dict[tuple, dict[str, np.ndarray]] = {}
    for mask in masks:
      known = self._memo.get(mask_key(mask), {})
      if missing := tuple(b for b in sorted(set(contexts)) if b not in known):
        start = min(common_prefix(self._base, mask), self.config.num_layers - 1)
        group = (start // self._stride, missing)
        pending.setdefault(group, {})[mask_key(mask)] = np.asarray(mask, bool)
    for (slot, missing), group in pending.items():
      # As many masks as fill whole calls, or all cores; their lines reach the disk together.
      fill = self._at_once * self._workers
      size = fill // math.gcd(fill, len(missing))
      for i in range(0, len(group), size):
        self._score_new(list(group.values())[i : i + size], slot, missing)
    known = [self._memo[mask_key(mask)] for mask in masks]
    return Scores(
      np.array([[k[b][0] for b in contexts] for k in known]),
      np.array([[k[b][1] for b in contexts] for k in known]),
    )

  def relax(self, share_LxG: np.ndarray, contexts: Sequence[int]) -> tuple[float, np.ndarray]:
    """The loss under a relaxed mask, and its gradient: the white-box signal of the search.

    Journalled like scores. Costs `GRADIENT_PASSES` times the share of the contexts.

    Args:
      share_LxG: float32 in [0, 1], local share of every group (see `models.relaxed`).
      contexts: what to average over.

    Returns:
      Mean answer NLL in nats per token, and float64 `[L, G]`.
    """
    share_LxG = np.asarray(share_LxG, np.float32)
    entry = {
      "relaxed": hashlib.sha256(share_LxG.tobytes()).hexdigest()[:24],
      "stage": self.stage,
      "contexts": list(contexts),
      "cost": GRADIENT_PASSES * sum(self._share[b] for b in contexts),
    }
    logged = self._logged.get((entry["relaxed"], tuple(contexts)))
    if logged is None:

      def relax(share_PxLxG, rows):
        return self._compiled.relax(self.params, *self._inputs(share_PxLxG, rows))

      # One context a device: a backward pass holds more than the memory plan counts for a pair.
      devices = 1 if self._mesh is None else self._mesh.size
      outputs = self._in_calls(relax, [(share_LxG, b) for b in contexts], by_pair, devices)
      loss_n, gradient_nxLxG = (np.array(o, np.float64) for o in zip(*outputs, strict=True))
      entry |= {"loss": float(loss_n.mean()), "gradient": gradient_nxLxG.mean(0).ravel().tolist()}
      self.journal.append([entry])
    else:
      entry = logged | entry
    self.cost += entry["cost"]
    self.on_scored(self.stage, self.cost)
    return entry["loss"], np.array(entry["gradient"]).reshape(share_LxG.shape)

  def _score_new(self, masks: list[np.ndarray], slot: int, contexts: tuple[int, ...]) -> None:
    start = slot * self._stride
    spent = sum(self._pay_states(b, start) for b in contexts)
    each = sum(self._share[b] * (1.0 - self._layers_cost(b, start)) for b in contexts)
    entries = [
      {
        "mask": mask_key(mask),
        "stage": self.stage,
        "contexts": list(contexts),
        "cost": each + (spent if c == 0 else 0.0),
      }
      for c, mask in enumerate(masks)
    ]
    logged = [self._logged.get((entry["mask"], contexts)) for entry in entries]
    # What an earlier run scored is not computed: the same path is walked again, at the same cost.
    new = [c for c, old in enumerate(logged) if old is None]
    if new:
      nll, exact = self._forward([masks[c] for c in new], slot, contexts)
      for i, c in enumerate(new):
        entries[c] |= {"nll": nll[i].tolist(), "exact": exact[i].astype(int).tolist()}
      self.journal.append([entries[c] for c in new])
    for entry, old in zip(entries, logged, strict=True):
      self._remember((old or {}) | entry)
    self.on_scored(self.stage, self.cost)

  def _remember(self, entry: dict) -> None:
    known = self._memo.setdefault(entry["mask"], {})
    self.masks_scored += not known
    for context, nll, exact in zip(entry["contexts"], entry["nll"], entry["exact"], strict=True):
      known[context] = (np.asarray(nll, np.float32), np.asarray(exact, bool))
    self.cost += entry["cost"]

  def _forward(self, masks: list[np.ndarray], slot: int, contexts: Sequence[int]):
    """NLL and exact match of all masks on all contexts, `[C, n, Q]` each."""
    self._ensure_states(slot, contexts)

    def score(masks_PxLxG, rows):
      xs = tuple(self._state(b, slot) for b in rows)
      start = np.int32(slot * self._stride)
      return self._compiled.score(self.params, xs, *self._inputs(masks_PxLxG, rows), start)

    outputs = self._in_calls(score, [(mask, b) for mask in masks for b in contexts], by_pair)
    shape = len(masks), len(contexts), -1
    return (np.array(part).reshape(shape) for part in zip(*outputs, strict=True))

  def _ensure_states(self, slot: int, contexts: Sequence[int]) -> None:
    """Computes the base's hidden states up to `slot`."""

    def advance(masks_PxLxG, rows):
      xs = tuple(self._state(b, s - 1) for b in rows)
      layers = np.int32((s - 1) * self._stride), np.int32(s * self._stride)
      return self._compiled.advance(self.params, xs, *self._inputs(masks_PxLxG, rows), *layers)

    for s in range(1, slot + 1):
      rows = [b for b in contexts if s not in self._states[b]]
      for b, x in zip(rows, self._in_calls(advance, [(self._base, b) for b in rows]), strict=True):
        self._states[b][s] = x

  def _in_calls(
    self, function, pairs: list[tuple[np.ndarray, int]], split: Callable = tuple, size: int = 0
  ) -> list:
    """`function(masks, contexts)` of all pairs, `size` (or what the plan says) in one call.

    Returns:
      For each pair what `split` makes of the output of its call.
    """
    size = size or self._at_once
    lengths = [[] for _ in self.contexts.sets]  # one call holds one length
    for i, (_, b) in enumerate(pairs):
      lengths[self.contexts.length(b)].append(i)
    calls = [order[i : i + size] for order in lengths for i in range(0, len(order), size)]

    def run(call):
      call = call + [call[-1]] * (size - len(call))
      masks, rows = zip(*(pairs[i] for i in call), strict=True)
      return function(np.stack(masks), rows)

    if self._workers == 1:
      outputs = []
      for call in calls:
        outputs.append(run(call))
        # One call computes while the next is prepared; more would fill the device with their inputs.
        jax.block_until_ready(outputs[-2:-1])
    else:
      outputs = list(self._pool.map(lambda call: jax.block_until_ready(run(call)), calls))
    made = {}
    for call, output in zip(calls, outputs, strict=True):
      made |= dict(zip(call, split(output), strict=False))  # the last call may be padded
    return [made[i] for i in range(len(pairs))]

  def _state(self, context: int, slot: int) -> jax.Array:
    if slot:
      return self._states[context][slot]
    return self._compiled.embed(self.params, self._padded.tokens(context))

  def _inputs(self, masks_PxLxG: np.ndarray, contexts: Sequence[int]) -> tuple:
    length = self.contexts.length(contexts[0])
    rows = [self._padded.row(b) for b in contexts]
    inputs = scoring.Batch.of(self._padded.sets[length], rows), masks_PxLxG
    window = np.int32(self.contexts.windows[length])
    if self._mesh is None:
      return *inputs, window
    return *jax.tree.map(lambda x: self._put(x, PartitionSpec(AXIS)), inputs), window

  def _everywhere(self, x):
    return self._put(x, PartitionSpec())

  def _put(self, x, spec: PartitionSpec) -> jax.Array:
    """A host array, the same in all processes, on the mesh."""
    sharding = NamedSharding(self._mesh, spec)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
      return x
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

  def _pay_states(self, context: int, layer: int) -> float:
    """Cost of the base's states up to the input of `layer`, charged once per base. It is kept
    apart from what is computed, so that a resumed run, whose states are gone, takes the same
    decisions about its budget."""
    paid, self._paid[context] = self._paid[context], max(self._paid[context], layer)
    return self._layers_cost(context, max(0, layer - paid)) * self._share[context]

  def _layers_cost(self, context: int, layers: int) -> float:
    """Share of these layers in a pass over a context."""
    layer_flops, head_flops = self._flops[self.contexts.length(context)]
    return layers * layer_flops / (self.config.num_layers * layer_flops + head_flops)


def by_pair(output: tuple) -> list[tuple]:
  """Arrays `[P, ...]` of one call as P tuples, on the host."""
  return list(zip(*map(np.asarray, output), strict=True))


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
