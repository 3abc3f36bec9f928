"""`python run.py generate`: text from a model, through the hybrid cache of its mask."""

import dataclasses
import os
import pathlib
import sys
from typing import Annotated, Literal

import tyro
from rich.console import Console

from bosch_jax import interrupts
from bosch_jax.report import human_bytes
from models.errors import InputError, flag


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
  """Continue a prompt with a model, whole or with a head mask. Text goes to stdout, figures to stderr."""

  prompt: tuple[str, ...] = ()
  """Texts to continue; several are read as one batch."""
  file: Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(aliases=["-f"], metavar="FILE ...")] = ()
  """Files with texts to continue; - is stdin."""
  mask: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
  """mask.json of a run. Default: none, every head sees the whole context."""
  model: str = "smollm2-135m"
  """Model: smollm2-135m (fetched once, 93 MB), a .gguf file, a Hugging Face folder, or an id such as
  Qwen/Qwen3-1.7B."""
  chat: bool = False
  """The prompt is a question: put it in the model's chat format."""
  system: str = ""
  """System message of --chat. Default: the model's own."""
  max_tokens: int = 256
  """Most tokens to generate."""
  temperature: float = 0.0
  """0 takes the most likely token; more draws at random, the higher the wilder."""
  top_k: int = 0
  """Draw from the k most likely tokens only; 0 = all."""
  top_p: float = 1.0
  """Draw from the most likely tokens that hold this share of probability; 1 = all."""
  min_p: float = 0.0
  """Draw from tokens at least this share as likely as the most likely one; 0 = all."""
  seed: int = 0
  """Seed of the draws; the same seed gives the same text."""
  stop: tuple[str, ...] = ()
  """Strings that end the text."""
  stop_ids: tuple[int, ...] = ()
  """Tokens that end the text, besides the model's own end token."""
  window: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
  """Tokens a local head sees. Default: what the mask was searched with."""
  chunk: int = 512
  """Tokens of a prompt that are read at once; memory grows with it."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Number format of parameters, activations and cache."""

  def __post_init__(self):
    from models.sampling import Sampling

    if bool(self.prompt) == bool(self.file):
      raise InputError("--prompt", "", "is missing; give --prompt TEXT or -f FILE, one of the two")
    for field in ("max_tokens", "chunk"):
      if getattr(self, field) < 1:
        raise InputError(
          flag(field), getattr(self, field), "must be a positive number; use 1 or more"
        )
    if self.window is not None and (self.mask is None or self.window < 1):
      raise InputError("--window", self.window, "must be positive, and belongs to a --mask")
    if self.system and not self.chat:
      raise InputError("--system", self.system, "belongs to --chat; pass that too")
    if not 0 <= self.seed < 2**32:
      raise InputError("--seed", self.seed, "must be from 0 to 4294967295; use for example 1")
    Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


def generate(settings: GenerateSettings) -> None:
  """Streams the text of one prompt; several are printed one after another.

  Raises:
    InputError: anything a user can put right.
  """
  from models import registry
  from models.generate import Generator
  from models.sampling import Sampling

  texts = list(settings.prompt) or [_read(path) for path in settings.file]
  for text in texts:
    if not text:
      raise InputError("--prompt", "", "is empty; give at least one word")
  hybrid, record = None, {}
  if settings.mask is not None:  # refused before weights are read
    mask, record = _mask(settings, registry.load_config(settings.model))
  loaded = registry.load(settings.model, settings.dtype)
  if settings.mask is not None:
    from models.hybridize import hybridize

    hybrid = hybridize(loaded.params, mask, loaded.config)
  if settings.chat:
    texts = [_chat(loaded.tokenizer, text, settings.system) for text in texts]
  window = settings.window or record.get("window")
  generator = Generator(
    loaded, hybrid, window=window, sinks=record.get("sinks", 0), chunk=settings.chunk
  )
  del loaded, hybrid  # the generator has its own copy
  tokenizer, one = generator.tokenizer, len(texts) == 1
  stop_ids = set(settings.stop_ids) | ({tokenizer.eos_id} - {None})

  def show(_, piece: str) -> None:
    print(piece, end="", flush=True)

  try:
    output = generator.generate(
      texts,
      max_tokens=settings.max_tokens,
      sampling=Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
      stop=settings.stop,
      stop_ids=sorted(stop_ids),
      seed=settings.seed,
      on_text=show if one else None,
      between=interrupts.check,
    )
    for b, completion in enumerate(output.completions):
      print("" if one else f"--- prompt {b + 1}\n{completion.text}")
    sys.stdout.flush()
  except BrokenPipeError:  # the reader has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return
  except KeyboardInterrupt:
    print("\nstopped", file=sys.stderr)
    raise SystemExit(130) from None
  Console(stderr=True).print(
    figures(output, settings), soft_wrap=True, highlight=False, markup=False
  )


def figures(output, settings: GenerateSettings) -> str:
  """The lines below the text."""
  s = output.stats
  ends = sorted({c.stopped for c in output.completions})
  share = f"{100 * s.kv_bytes / s.kv_bytes_full:.0f}% of {human_bytes(s.kv_bytes_full)} with full attention"
  return (
    f"KV cache {human_bytes(s.kv_bytes)}, {share}, for {s.capacity} tokens"
    + (f" x {len(output.completions)}" if len(output.completions) > 1 else "")
    + f" ({settings.dtype})\n"
    f"first token after {s.first_token_s:.2f} s ({sum(c.prompt_tokens for c in output.completions)} prompt tokens), "
    f"then {s.tokens_per_s:.1f} tokens/s; {s.new_tokens} tokens, ended by {', '.join(ends)}; "
    f"compiling took {s.compile_s:.1f} s"
  )


def _mask(settings: GenerateSettings, config):
  """The mask and its record.

  Raises:
    InputError: of another model, or without the window it was made for.
  """
  from models.windows import HeadMask

  mask, record = HeadMask.load(settings.mask, config)
  for field, least in (("window", 1), ("sinks", 0)):
    value = record.get(field, 0 if field == "sinks" else settings.window)
    if not isinstance(value, int) or value < least:
      raise InputError(
        "mask",
        settings.mask,
        f"records no usable {field} ({value!r:.40}); give --window, or the mask.json of a run",
      )
  return mask, record


def _read(path: pathlib.Path) -> str:
  try:
    if str(path) == "-":
      return sys.stdin.read()
    return path.read_text(encoding="utf-8")
  except OSError as error:
    raise InputError(
      "--file", path, f"cannot be read ({error.strerror}); give a text file"
    ) from None
  except UnicodeDecodeError:
    raise InputError("--file", path, "is not UTF-8 text; convert it first") from None


def _chat(tokenizer, text: str, system: str) -> str:
  messages = [{"role": "user", "content": text}]
  if system:
    messages = [{"role": "system", "content": system}, *messages]
  return tokenizer.chat(messages)
