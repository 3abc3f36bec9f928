"""How many pairs a device computes at once, and how many hidden states it keeps."""

import dataclasses
import math

import jax

from bosch_jax.prompts import PromptSet
from models.config import ModelConfig
from models.errors import InputError

CPU_STATE_BYTES = 2**30
FULL_TOKENS = 2**16  # tokens in a call beyond which an accelerator gains nothing from more


@dataclasses.dataclass(frozen=True)
class Plan:
  """How an evaluator uses a device.

  Attributes:
    batch: pairs of a mask and a context computed at once.
    stride: the base mask's hidden states are kept at the input of every stride-th layer.
  """

  batch: int
  stride: int


def plan(
  config: ModelConfig,
  prompts: PromptSet,
  itemsize: int,
  params_bytes: int,
  devices: int = 1,
  batch: int | None = None,
  state_bytes: int | None = None,
  state_tokens: int | None = None,
  device_bytes: int | None = None,
) -> Plan:
  """Splits the work on a prompt set so that it fits.

  Args:
    config: the model.
    prompts: the longest contexts, as many as a call may hold.
    itemsize: bytes of an activation.
    params_bytes: of the parameters, which lie on every device.
    devices: that share the pairs of a call and the stored states.
    batch, state_bytes: chosen by the caller; None = here. What is left of a device's memory beside
      the parameters goes to the pairs of a call first, and to states what they leave.
    state_tokens: tokens of all contexts whose states are kept; None = those of `prompts`.
    device_bytes: memory of a device; None = ask it. A CPU computes one pair at a time: folding
      gains nothing where matrix products already use a whole core.

  Raises:
    InputError: not even one pair fits.
  """
  contexts, tokens = prompts.tokens_BxT.shape
  if device_bytes is None and jax.default_backend() != "cpu":
    device_bytes = jax.local_devices()[0].memory_stats()["bytes_limit"]
  if device_bytes is None:
    batch, state_bytes = batch or 1, CPU_STATE_BYTES if state_bytes is None else state_bytes
  else:
    free = int(0.9 * device_bytes) - params_bytes
    pair = pair_bytes(config, prompts, itemsize)
    if batch is None:
      useful = min(FULL_TOKENS // tokens, math.ceil(contexts / devices))
      batch = min(free // pair, max(1, useful))
    if batch < 1 or batch * pair > free:
      raise InputError(
        "--context",
        prompts.context,
        f"does not fit a device: a pair of a mask and a context takes {pair / 1e9:.1f} GB and there are "
        f"{max(free, 0) / 1e9:.1f} GB beside the parameters; use a shorter context or --dtype bfloat16",
      )
    if state_bytes is None:
      state_bytes = free - batch * pair
  slot = (state_tokens or contexts * tokens) * config.model_dim * itemsize / devices
  slots = int(state_bytes // slot)  # beside slot 0, the embedding
  return Plan(batch, max(1, math.ceil(config.num_layers / (slots + 1))))


def pair_bytes(config: ModelConfig, prompts: PromptSet, itemsize: int) -> int:
  """Memory of one pair in a call, an upper estimate (tests/aot compares it with compilers').

  Its hidden states come in, are stacked, carried and normalised; queries, keys, values and the
  attention output lie beside them, and after them the hidden layer of the feed-forward part. Logits
  are float32, and there are some of the answers' only.
  """
  c = config
  tokens = prompts.tokens_BxT.shape[1]
  heads = 2 * c.num_heads * c.head_dim + 2 * c.num_groups * c.head_dim
  layer = tokens * itemsize * (6 * c.model_dim + 2 * max(heads, 2 * c.active_ffn_dim))
  answers = prompts.target_BxQxA[0].size
  return layer + 3 * 4 * answers * c.vocab_size
