"""Generation: prompts through the hybrid cache in chunks, then one token of every row at a time.

loaded = models.load("smollm2-135m")
mask, record = models.HeadMask.load("mask.json", loaded.config)
hybrid = hybridize(loaded.params, mask, loaded.config)
generator = models.Generator(loaded, hybrid, window=record["window"])
output = generator.generate(["Once upon a time"], max_tokens=50)
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import cache as kv
from models.cache import CacheSpec
from models.decode import extend, unstack
from models.errors import InputError
from models.hybridize import Hybrid
from models.registry import Loaded
from models.sampling import Sampling, choose
from models.text_stream import TextStream
from models.windows import HeadMask

ROUND = 256  # capacities are multiples, so that prompts of similar length share what is compiled


@dataclasses.dataclass(frozen=True)
class Completion:
  """What was generated behind one prompt.

  Attributes:
    text: without stop string or stop token.
    ids: the tokens, without the stop token.
    prompt_tokens: length of the prompt.
    stopped: "stop token", "stop string", "length" (as many tokens as asked for) or "context" (the
      model's context is full).
  """

  text: str
  ids: list[int]
  prompt_tokens: int
  stopped: str


@dataclasses.dataclass(frozen=True)
class Stats:
  """What it took. Seconds are wall time.

  Attributes:
    capacity: tokens a row of the cache had room for.
    kv_bytes: bytes of the cache's buffers.
    kv_bytes_full: bytes if every group were full.
    compile_s: compiling, which the times below leave out.
    first_token_s: from the prompts to the first tokens.
    tokens_per_s: tokens decoded after the first, all rows together; 0 if there were none.
    new_tokens: tokens generated, all rows together.
  """

  capacity: int
  kv_bytes: int
  kv_bytes_full: int
  compile_s: float
  first_token_s: float
  tokens_per_s: float
  new_tokens: int


@dataclasses.dataclass(frozen=True)
class Output:
  completions: list[Completion]
  stats: Stats


_choose = jax.jit(choose, static_argnames="sampling")


@jax.jit
def _keys(seed, rows_B, step):
  key = jax.random.fold_in(jax.random.key(seed), step)
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


class Generator:
  """A model ready to generate.

  Args:
    loaded: the model. Its parameters are copied layer by layer.
    hybrid: the same model reordered by `models.hybridize`; None = every group is full.
    window: tokens a local group sees, itself included; needed with `hybrid` and with masks in calls.
    sinks: first tokens that local groups see as well.
    chunk: tokens of a prompt read at once.
  """

  def __init__(
    self,
    loaded: Loaded,
    hybrid: Hybrid | None = None,
    *,
    window: int | None = None,
    sinks: int = 0,
    chunk: int = 512,
  ):
    c = loaded.config
    if hybrid is not None and window is None:
      raise ValueError("a hybrid model needs its window; HeadMask.load gives the mask's record")
    if chunk < 1:
      raise InputError("--chunk", chunk, "must be a positive number of tokens; use for example 512")
    self.config, self.tokenizer, self.chunk = c, loaded.tokenizer, chunk
    self._full_groups = hybrid.full_groups if hybrid else (c.num_groups,) * c.num_layers
    self._hybrid, self._window, self._sinks = hybrid is not None, window, sinks
    self._params = unstack(hybrid.params if hybrid else loaded.params)
    self._compiled: set = set()

  def spec(self, batch: int, capacity: int) -> CacheSpec:
    """The cache for `batch` rows of up to `capacity` tokens."""
    dtype = self._params["embed"]["embedding"].dtype
    return CacheSpec(
      self.config, self._full_groups, self._window or self.config.context, self._sinks, batch,
      capacity, dtype,
    )  # fmt: skip

  def generate(
    self,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
    mask: HeadMask | None = None,
    on_text: Callable[[int, str], None] | None = None,
    between: Callable[[], None] | None = None,
  ) -> Output:
    """Continues every prompt; rows of one call are independent of one another.

    Args:
      prompts: texts or token ids, of any lengths.
      max_tokens: most tokens generated for each.
      sampling: how tokens are chosen; None = greedy.
      stop: strings that end a text.
      stop_ids: tokens that end a text; None = the tokenizer's end token, () = none.
      seed: of the draws; the same seed gives the same text.
      mask: groups that are local in this call, of a generator with a window and without `hybrid`.
        One compilation serves every mask, and the cache saves nothing: for measuring many masks.
      on_text: called with (row, piece of text) as soon as a piece is certain.
      between: called between steps, to check for interrupts.

    Raises:
      InputError: no prompt, an empty one, one that fills the context, unknown tokens, an empty stop
        string.
    """
    if mask is not None and (self._hybrid or self._window is None):
      raise ValueError("a mask in a call is for a generator that has a window and no hybrid model")
    sampling = sampling or Sampling()
    prompts = self._prompts(prompts, max_tokens)
    stop_ids = self._stop_ids(stop, stop_ids)
    longest = max(map(len, prompts))
    capacity = min(self.config.context, -(-(longest + max_tokens) // ROUND) * ROUND)
    # A short prompt is not padded to a whole chunk; powers of two keep the number of traces small.
    chunk = min(self.chunk, 1 << (longest - 1).bit_length())
    spec = self.spec(len(prompts), capacity)
    rows = [
      _Row(b, prompt, max_tokens, self.config.context, TextStream(self.tokenizer, stop))
      for b, prompt in enumerate(prompts)
    ]
    windows = None if mask is None else mask.windows(self._window, self.config.num_groups)
    state = _State(self, spec, between or (lambda: None), windows)
    compile_s = state.compile(chunk, sampling)
    started = time.perf_counter()
    state.read(prompts, chunk)
    step, decoded, first_s = 0, 0, 0.0
    while True:
      tokens = state.next(sampling, seed, step)
      now = time.perf_counter() - started
      if step == 0:
        first_s = now
      active = [row for row in rows if row.ended is None]
      decoded += len(active) if step else 0
      for row in active:
        row.take(int(tokens[row.number]), stop_ids, on_text)
      if all(row.ended for row in rows):
        break
      state.extend(tokens, [int(row.ended is None) for row in rows])
      step += 1
    for row in rows:
      row.close(on_text)
    stats = Stats(
      capacity=capacity,
      kv_bytes=kv.num_bytes(state.cache),
      kv_bytes_full=spec.full().num_bytes,
      compile_s=compile_s,
      first_token_s=first_s,
      tokens_per_s=decoded / (now - first_s) if decoded else 0.0,
      new_tokens=sum(len(row.ids) for row in rows),
    )
    return Output([row.completion() for row in rows], stats)

  def _prompts(self, prompts, max_tokens) -> list[list[int]]:
    if isinstance(prompts, str):
      raise TypeError("prompts is a list; give [prompt] for a single one")
    if max_tokens < 1:
      raise InputError("--max-tokens", max_tokens, "must be a positive number; use for example 256")
    if not prompts:
      raise InputError("--prompt", "", "is missing; give a text or a file")
    rows = [
      self.tokenizer.encode(p) if isinstance(p, str) else [int(i) for i in p] for p in prompts
    ]
    for row in rows:
      if not row:
        raise InputError("--prompt", "", "is empty; give at least one token")
      if len(row) >= self.config.context:
        raise InputError(
          "--prompt",
          f"of {len(row)} tokens",
          f"leaves no room in this model's context of {self.config.context}; use at most {self.config.context - 1} tokens",
        )
      for i in (min(row), max(row)):
        if not 0 <= i < self.config.vocab_size:
          raise InputError(
            "--prompt", f"token {i}", f"is unknown; use tokens 0 to {self.config.vocab_size - 1}"
          )
    return rows

  def _stop_ids(self, stop, stop_ids) -> frozenset[int]:
    if isinstance(stop, str):
      raise TypeError("stop is a list of strings; give [stop] for a single one")
    if "" in stop:
      raise InputError("--stop", "", "is empty and would end every text; leave it out")
    if stop_ids is None:
      stop_ids = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
    for i in stop_ids:
      if not 0 <= i < self.tokenizer.vocab_size:
        raise InputError(
          "--stop-ids", i, f"is unknown; this model has tokens 0 to {self.tokenizer.vocab_size - 1}"
        )
    return frozenset(stop_ids)


class _Row:
  """One prompt and what follows it. `ended` says why nothing more does, or is None."""

  def __init__(
    self, number: int, prompt: list[int], max_tokens: int, context: int, stream: TextStream
  ):
    self.number, self._prompt, self._stream = number, prompt, stream
    self._max_tokens, self._context = max_tokens, context
    self.ids: list[int] = []
    self.ended: str | None = None

  def take(self, token: int, stop_ids: frozenset[int], on_text) -> None:
    if token in stop_ids:
      self.ended = "stop token"
      return
    self.ids.append(token)
    if (piece := self._stream.add(token)) and on_text:
      on_text(self.number, piece)
    if self._stream.stopped is not None:
      self.ended = "stop string"
    elif len(self.ids) == self._max_tokens:
      self.ended = "length"
    elif len(self._prompt) + len(self.ids) == self._context:
      self.ended = "context"

  def close(self, on_text) -> None:
    """Gives out what the stream held back."""
    if (rest := self._stream.close()) and on_text:
      on_text(self.number, rest)

  def completion(self) -> Completion:
    return Completion(self._stream.text, self.ids, len(self._prompt), self.ended)


class _State:
  """The cache of one call, and the logits behind each row."""

  def __init__(
    self,
    generator: Generator,
    spec: CacheSpec,
    between: Callable[[], None],
    window_LxG: np.ndarray | None,
  ):
    self._params, self._seen, self._between = generator._params, generator._compiled, between
    self.spec, self.cache, self._window_LxG = spec, kv.empty(spec), window_LxG
    self.logits = jnp.zeros((spec.batch, spec.config.vocab_size), jnp.float32)

  def compile(self, chunk: int, sampling: Sampling) -> float:
    """Compiles what is new in this call; seconds."""
    started = time.perf_counter()
    for T in (chunk, 1):
      if (form := (self.spec, T, self._window_LxG is None)) not in self._seen:
        tokens, count = (
          np.zeros((self.spec.batch, T), np.int32),
          np.zeros(self.spec.batch, np.int32),
        )
        inputs = self._params, self.cache, self.logits, tokens, count, self._window_LxG
        extend.lower(self.spec, *inputs).compile()
        self._seen.add(form)
    self.next(sampling, 0, 0)
    return time.perf_counter() - started

  def read(self, rows: list[list[int]], chunk: int) -> None:
    """Reads prompts of different lengths."""
    for first in range(0, max(map(len, rows)), chunk):
      self._between()
      parts = [row[first : first + chunk] for row in rows]
      tokens = np.zeros((len(rows), chunk), np.int32)
      for b, part in enumerate(parts):
        tokens[b, : len(part)] = part
      self._extend(tokens, [len(part) for part in parts])

  def extend(self, tokens_B, active_B) -> None:
    self._between()
    self._extend(np.asarray(tokens_B, np.int32)[:, None], active_B)

  def _extend(self, tokens_BxT: np.ndarray, count_B) -> None:
    inputs = tokens_BxT, np.asarray(count_B, np.int32), self._window_LxG
    self.cache, self.logits = extend(self.spec, self._params, self.cache, self.logits, *inputs)

  def next(self, sampling: Sampling, seed: int, step: int) -> np.ndarray:
    """The next token of every row."""
    rows = np.arange(self.spec.batch, dtype=np.int32)
    keys = _keys(np.uint32(seed), rows, np.int32(step))
    return np.asarray(_choose(self.logits, keys, sampling=sampling))
