"""A hybrid model behind lm-eval's interface, so that its tasks run with their own code.

    from bosch_jax.integrations.lm_eval import HybridLM
    import lm_eval

    results = lm_eval.simple_evaluate(HybridLM("smollm2-135m", mask="mask.json"), tasks=["gsm8k"])

Conventions are those of lm-eval's Hugging Face backend: a tokenizer's own special tokens are added unless
the text begins with them, contexts that are too long lose their beginning, an empty context is the
first token, and special tokens are left out of generated text.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bosch_jax import interrupts
from models import registry
from models.errors import InputError
from models.generate import Generator
from models.hybridize import hybridize
from models.sampling import Sampling
from models.transformer import Transformer
from models.windows import FULL, HeadMask

try:
  from lm_eval import utils as lm_utils
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
  raise InputError(
    "lm-eval", "", f"is not installed ({error}); pip install -r requirements-eval.txt"
  ) from None

LENGTHS = 128  # token counts are rounded up to a multiple, so that few shapes are compiled
TARGETS = 64  # positions whose logits exist at once
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_KNOWN = ("do_sample", "until", "max_gen_toks", *_SAMPLING)
_log = logging.getLogger(__name__)

Request = tuple[
  tuple[str, str] | None, list[int], list[int]
]  # texts, context ids, continuation ids


@register_model("bosch")
class HybridLM(TemplateLM):
  """A model with a head mask, or with full attention.

  Args:
    model: as `--model` of every command.
    mask: mask.json of a run; None = full attention.
    window: tokens a local head sees; None = what the mask was searched with.
    batch_size: prompts computed at once.
    max_length: most tokens of a context with its continuation; None = the model's context.
    max_gen_toks: most tokens generated where a task does not say.
    dtype: of parameters, activations and cache.
    seed: of tasks that draw their answers.
    between: called between computations, to stop when asked to.

  Raises:
    InputError: a model or mask that cannot be used.
  """

  def __init__(
    self,
    model: str = "smollm2-135m",
    mask: str | None = None,
    window: int | None = None,
    batch_size: int | str = 1,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    dtype: str = "float32",
    seed: int = 0,
    between: Callable[[], None] = interrupts.check,
    **unused,
  ):
    super().__init__()
    if unused := {name: value for name, value in unused.items() if value is not None}:
      unused.pop("max_batch_size", None)
      unused.pop("device", None)  # lm-eval hands them to every model
      if unused:
        raise InputError("--model-args", ", ".join(unused), "are not known to this model")
    if str(batch_size) == "auto" or int(batch_size) < 1:
      raise InputError("--batch", batch_size, "must be a positive number; use for example 8")
    config = registry.load_config(model)
    head_mask, record = HeadMask.full(config), {}
    if mask is not None:
      head_mask, record = HeadMask.load(mask, config)
    window = window or record.get("window", FULL)
    self.loaded = registry.load(model, dtype)
    self.head_mask, self._window, self._sinks = head_mask, window, record.get("sinks", 0)
    self.max_length, self.max_gen_toks = max_length or config.context, max_gen_toks
    if not 1 < self.max_length <= config.context:
      raise InputError(
        "--max-length", max_length, f"must be from 2 to this model's {config.context} tokens"
      )
    self.batch_size, self._seed, self._between = int(batch_size), seed, between
    self._model = Transformer(config, self._sinks)
    self._windows_LxH = jnp.asarray(head_mask.windows(window, config.num_heads))
    self._generator: Generator | None = None

  # --- text ----------------------------------------------------------------------------------------

  @property
  def eot_token_id(self) -> int:
    return self.loaded.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """What stands in for an empty context."""
    bos = self.loaded.tokenizer.bos_id
    return self.eot_token_id if bos is None else bos

  @property
  def tokenizer_name(self) -> str:
    return self.loaded.name.replace("/", "__")

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    tokenizer = self.loaded.tokenizer
    if add_special_tokens is None:
      add_special_tokens = not string.startswith(tokenizer.decode([self.prefix_token_id]))
    return tokenizer.encode(string, special=add_special_tokens)

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    return self.loaded.tokenizer.template if chat_template else None

  def apply_chat_template(
    self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """The prompt of a conversation; without a generation prompt, the last message is continued."""
    history, lead = list(chat_history), ""
    if not add_generation_prompt:
      lead = history.pop()["content"]
    tokenizer = self.loaded.tokenizer
    try:
      return tokenizer.chat(history, lead)
    except InputError:
      without = [message for message in history if message["role"] != "system"]
      if len(without) == len(history):
        raise
      _log.warning("the chat template refuses a system message; it is left out")
      return tokenizer.chat(without, lead)

  # --- log-likelihoods -----------------------------------------------------------------------------

  def _loglikelihood_tokens(
    self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs
  ) -> list[tuple[float, bool]]:
    """For each continuation, its log-likelihood and whether greedy decoding would produce it."""
    rows = [
      ((context + continuation)[-(self.max_length + 1) :], len(continuation))
      for _, context, continuation in requests
    ]
    for ids, count in rows:
      if not 0 < count < len(ids):
        raise ValueError(
          f"a continuation of {count} tokens in {len(ids)}: nothing to predict it by"
        )
    results: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
    for batch in self._batches([len(ids) + count for ids, count in rows]):
      for i, result in zip(batch, self._score([rows[i] for i in batch]), strict=True):
        results[i] = result
        if requests[i][0] is not None:
          self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
    return results

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """The log-likelihood of whole texts; those longer than `max_length` in windows, each token
    predicted once (lm-eval's own windows)."""
    totals = []
    for (text,) in (request.args for request in requests):
      windows = map(
        lm_utils.make_disjoint_window,
        lm_utils.get_rolling_token_windows(
          token_list=self.tok_encode(text),
          prefix_token=self.prefix_token_id,
          max_seq_len=self.max_length,
          context_len=1,
        ),
      )
      parts = self._loglikelihood_tokens([(None, *window) for window in windows])
      totals.append(float(sum(value for value, _ in parts)))
      self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
    return totals

  def _score(self, rows: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    self._between()
    B = self.batch_size
    T = _round(max(len(ids) for ids, _ in rows) - 1, LENGTHS)
    A = _round(max(count for _, count in rows), TARGETS)
    tokens, at, target = (np.zeros((B, n), np.int32) for n in (T, A, A))
    valid = np.zeros((B, A), bool)
    for b, (ids, count) in enumerate(rows):
      tokens[b, : len(ids) - 1] = ids[:-1]
      at[b, :count] = np.arange(len(ids) - 1 - count, len(ids) - 1)
      target[b, :count], valid[b, :count] = ids[-count:], True
    logprob_BxA, hit_BxA = map(
      np.asarray,
      target_scores(self._model, self.loaded.params, tokens, self._windows_LxH, at, target),
    )
    return [
      (float(logprob_BxA[b][valid[b]].sum(dtype=np.float64)), bool(hit_BxA[b][valid[b]].all()))
      for b in range(len(rows))
    ]

  # --- generation ----------------------------------------------------------------------------------

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Continues contexts through the hybrid cache, up to a stop string or the end token."""
    texts: list[str] = [""] * len(requests)
    groups: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
      groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
    for members in groups.values():
      options = Options(requests[members[0]].args[1], self.max_gen_toks)
      room = self.max_length - options.max_tokens
      if room < 1:
        raise InputError(
          "--max-length",
          self.max_length,
          f"leaves no room for {options.max_tokens} generated tokens; raise it, or lower max_gen_toks",
        )
      prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in members]
      for batch in self._batches([len(ids) for ids in prompts]):
        generated = self._generate([prompts[j] for j in batch], options)
        for j, text in zip(batch, generated, strict=True):
          texts[members[j]] = text
          self.cache_hook.add_partial("generate_until", requests[members[j]].args, text)
    return texts

  def _generate(self, prompts: list[list[int]], options: "Options") -> list[str]:
    if self._generator is None:
      c = self.loaded.config
      hybrid = hybridize(self.loaded.params, self.head_mask, c)
      window = min(self._window, c.context)
      self._generator = Generator(self.loaded, hybrid, window=window, sinks=self._sinks)
    tokenizer = self.loaded.tokenizer
    padded = prompts + [prompts[-1]] * (self.batch_size - len(prompts))  # one shape
    output = self._generator.generate(
      padded,
      max_tokens=options.max_tokens,
      sampling=options.sampling,
      stop=options.until,
      seed=self._seed,
      between=self._between,
    )
    return [
      postprocess_generated_text(
        tokenizer.decode(completion.ids, special=False), options.until, None
      )
      for completion in output.completions[: len(prompts)]
    ]

  def _batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices in batches of similar size, the longest first."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for i in range(0, len(order), self.batch_size):
      yield order[i : i + self.batch_size]


class Options:
  """What a request asks of generation.

  Args:
    kwargs: of the task (`generation_kwargs`).
    default_tokens: most tokens where they do not say.

  Raises:
    InputError: an option that would change the text and is not supported.
  """

  def __init__(self, kwargs: dict, default_tokens: int):
    known = normalize_gen_kwargs(kwargs, default_tokens)
    if unknown := sorted(set(known) - set(_KNOWN)):
      raise InputError(
        "generation_kwargs", ", ".join(unknown), f"are not supported; use {', '.join(_KNOWN)}"
      )
    self.until = [text for text in known["until"] if text]
    self.max_tokens = int(known["max_gen_toks"])
    # Without sampling, its parameters mean nothing; a temperature alone asks for it.
    drawn = {k: known[k] for k in _SAMPLING if k in known} if known.get("do_sample") else {}
    self.sampling = Sampling(**{"temperature": 1.0, **drawn} if drawn else {})


@functools.partial(jax.jit, static_argnums=0)
def target_scores(
  model: Transformer,
  params: dict,
  tokens_BxT: jax.Array,
  windows_LxH: jax.Array,
  at_BxA: jax.Array,
  target_BxA: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities of wanted tokens.

  Args:
    model: compiled in.
    tokens_BxT: int32, padded at the end.
    windows_LxH: int32.
    at_BxA: int32, positions whose next token is wanted; A is below or a multiple of `TARGETS`.
    target_BxA: int32, these tokens.

  Returns:
    logprob: float32 `[B, A]`.
    hit: bool `[B, A]`, whether it is the most likely token.
  """
  x_BxTxD = model.apply({"params": params}, tokens_BxT, windows_LxH, method=Transformer.hidden)
  x_BxAxD = jnp.take_along_axis(x_BxTxD, at_BxA[:, :, None], axis=1)
  B, A, D = x_BxAxD.shape
  C = min(A, TARGETS)

  def part(inputs):
    x_BxCxD, target_BxC = inputs
    logits_BxCxV = model.apply({"params": params}, x_BxCxD, method=Transformer.logits)
    picked_BxC = jnp.take_along_axis(logits_BxCxV, target_BxC[..., None], axis=-1)[..., 0]
    logprob_BxC = picked_BxC - jax.nn.logsumexp(logits_BxCxV, axis=-1)
    return logprob_BxC, jnp.argmax(logits_BxCxV, axis=-1) == target_BxC

  logprob, hit = jax.lax.map(
    part,
    (
      x_BxAxD.reshape(B, A // C, C, D).swapaxes(0, 1),
      target_BxA.reshape(B, A // C, C).swapaxes(0, 1),
    ),
  )
  return logprob.swapaxes(0, 1).reshape(B, A), hit.swapaxes(0, 1).reshape(B, A)


def _round(count: int, unit: int) -> int:
  """The next power of two below `unit`, the next multiple of it above."""
  if count < unit:
    return 1 << (count - 1).bit_length()
  return -(-count // unit) * unit
