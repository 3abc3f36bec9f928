"""Tokenizers without torch: text to ids and back, and the model's own chat template."""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from models.errors import InputError
from models.gguf_file import GGUFFile, open_gguf
from models.spm_tokenizer import sentencepiece_bpe

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types
# How each kind of GGUF tokenizer splits text before the merges.
_WORDS = (  # of Qwen2 and Llama 3, which differ in how many digits stand together
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _words(digits: str) -> list:
  pattern = tokenizers.Regex(_WORDS.replace("DIGITS", digits))
  return [
    pre_tokenizers.Split(pattern, behavior="isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ]


_SPLITTERS = {
  "gpt2/smollm": [
    pre_tokenizers.Digits(individual_digits=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False),
  ],
  "gpt2/qwen2": _words(""),
  "gpt2/llama-bpe": _words("{1,3}"),
}
_SENTENCEPIECE = "llama/default"
_FILES, _TEMPLATE = ("tokenizer.json", "tokenizer_config.json"), "chat_template.jinja"


class Tokenizer:
  """A tokenizer with a chat template.

  Args:
    backend: the `tokenizers` object.
    template: jinja source of the chat template, or None.
    bos_id: id of the token that begins a document, or None.
    eos_id: id of the token that ends a document or a turn, or None.
    files: names and contents of the files it was read from, which `save` writes again.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    template: str | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    files: dict[str, str] | None = None,
  ):
    self._backend, self._template, self._files = backend, template, files
    self.bos_id, self.eos_id = bos_id, eos_id

  @classmethod
  def from_gguf(cls, file: GGUFFile | str | os.PathLike) -> "Tokenizer":
    """The tokenizer in a GGUF file's metadata.

    Ids equal those of Hugging Face's tokenizers of SmolLM2, Qwen2, Qwen3 and Llama 3 (its GGUF reader
    differs for numerals other than 0-9, which it does not split one by one), and of Llama 2 and
    Mistral (see `models.spm_tokenizer`).

    Args:
      file: an opened file or its path.

    Raises:
      InputError: unreadable file, damaged vocabulary, or a kind of tokenizer that is not verified.
    """
    file = file if isinstance(file, GGUFFile) else open_gguf(file)
    get = file.fields.get
    kind = f"{get('tokenizer.ggml.model')}/{get('tokenizer.ggml.pre', 'default')}"
    if kind not in (_SENTENCEPIECE, *_SPLITTERS):
      raise InputError(
        "--model",
        file.path,
        f"has a tokenizer of kind {kind!r:.60}, and only {', '.join((_SENTENCEPIECE, *_SPLITTERS))} are verified in "
        "GGUF files; give another model, or a Hugging Face folder",
      )
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    try:
      if kind == _SENTENCEPIECE:
        backend = sentencepiece_bpe(file.fields)
      else:
        backend = _byte_level_bpe(kind, tokens, types, get("tokenizer.ggml.merges"))
      ids = [get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")]
      template = get("tokenizer.chat_template")
      if not all(i is None or 0 <= i < len(tokens) for i in ids):
        raise ValueError
      if not isinstance(template, str | None):
        raise TypeError
    except Exception:  # `tokenizers` raises bare Exception on merges of unknown tokens
      raise InputError(
        "--model", file.path, "has a damaged vocabulary (tokenizer.ggml.*); fetch the file again"
      ) from None
    return cls(backend, template, *ids)

  @classmethod
  def from_folder(cls, folder: str | os.PathLike) -> "Tokenizer":
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json and, where
    there is one, chat_template.jinja.

    Raises:
      InputError: files missing or unreadable.
    """
    folder = pathlib.Path(folder)
    try:
      files = {name: (folder / name).read_text("utf-8") for name in _FILES}
      if (folder / _TEMPLATE).exists():
        files[_TEMPLATE] = (folder / _TEMPLATE).read_text("utf-8")
      backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
      config = json.loads(files["tokenizer_config.json"])
      template = files.get(_TEMPLATE, config.get("chat_template"))
      if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    except OSError as error:
      raise InputError(
        "--model",
        folder,
        f"cannot be read ({pathlib.Path(error.filename or '').name}: {error.strerror}); "
        "give a folder with tokenizer.json and tokenizer_config.json",
      ) from None
    except Exception as error:  # `tokenizers` raises bare Exception on a damaged file
      raise InputError(
        "--model",
        folder,
        f"has a damaged tokenizer.json or tokenizer_config.json ({type(error).__name__}); "
        "fetch it again",
      ) from None

    def token_id(name):
      token = config.get(name)
      token = token.get("content") if isinstance(token, dict) else token
      return None if token is None else backend.token_to_id(token)

    return cls(backend, template, token_id("bos_token"), token_id("eos_token"), files)

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the files of a Hugging Face tokenizer: those it was read from, or equal ones."""
    files = self._files
    if files is None:
      config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
      for name, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
        config[name] = None if i is None else self._backend.id_to_token(i)
      files = {
        "tokenizer.json": self._backend.to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1),
      }
      if self._template is not None:
        files[_TEMPLATE] = self._template
    for name, text in files.items():
      (pathlib.Path(folder) / name).write_text(text, "utf-8")

  @property
  def vocab_size(self) -> int:
    """Number of ids this tokenizer makes; a model's embedding may be padded beyond it."""
    return self._backend.get_vocab_size()

  @property
  def fingerprint(self) -> str:
    """16 hex digits that change whenever ids of some text might; ties stored ids to a tokenizer."""
    text = f"{self._backend.to_str()} {self.bos_id} {self.eos_id}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  @property
  def template(self) -> str | None:
    """Jinja source of the chat template, or None."""
    return self._template

  def encode(self, text: str, special: bool = False) -> list[int]:
    """Token ids of a text.

    Special tokens written in it are recognised. A byte without a token of its own is dropped, as
    Hugging Face does.

    Args:
      text: the text.
      special: add what the tokenizer itself puts around a text (often a first token), as Hugging
        Face does by default. False adds none, so a rendered chat template never begins twice.
    """
    return self._backend.encode(text, add_special_tokens=special).ids

  def decode(self, ids: Iterable[int], special: bool = True) -> str:
    """The text of token ids, with special tokens or without."""
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=not special)

  def stream(self) -> Callable[[int], str]:
    """A function to decode ids one by one: it returns the text that became certain with an id, ""
    within a character that several tokens make."""
    decoder = decoders.DecodeStream(skip_special_tokens=False)
    return lambda i: decoder.step(self._backend, int(i)) or ""

  def chat(self, messages: list[dict], lead: str = "") -> str:
    """The prompt that the model's chat template makes of messages, open for an answer.

    Args:
      messages: dicts with "role" and "content".
      lead: how the assistant's answer begins.

    Raises:
      InputError: no chat template, or one that refuses these messages.
    """
    if self._template is None:
      raise InputError("--model", "", "has no chat template; use an instruction-tuned model")
    special = {
      name: "" if i is None else self._backend.id_to_token(i)
      for name, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id))
    }
    try:
      template = _compile(self._template)
      prompt = template.render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **special
      )
    except Exception as error:  # a template is a program, and fails like one
      raise InputError(
        "chat template of --model",
        "",
        f"fails on these messages ({error!s:.120}); use another model",
      ) from None
    return prompt + lead


def _byte_level_bpe(
  kind: str, tokens: list[str], types: list[int], merges: list[str]
) -> tokenizers.Tokenizer:
  """GPT-2's byte-level BPE, with the words, digits and normal form of `kind`."""
  vocab = {token: i for i, token in enumerate(tokens)}
  pairs = [tuple(merge.split(" ")) for merge in merges]
  whole_words = kind == "gpt2/llama-bpe"  # Llama 3 takes a word of its vocabulary without merging
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs, ignore_merges=whole_words))
  backend.pre_tokenizer = pre_tokenizers.Sequence(_SPLITTERS[kind])
  if kind == "gpt2/qwen2":
    backend.normalizer = normalizers.NFC()
  backend.decoder = decoders.ByteLevel()
  added = [
    tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
    for token, kind in zip(tokens, types, strict=True)
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  backend.add_tokens(added)
  return backend


class _Generation(jinja2.ext.Extension):
  """`{% generation %}` ... `{% endgeneration %}`: marks what a model is trained on; text passes."""

  tags = frozenset({"generation"})

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(["name:endgeneration"], drop_needle=True)


@functools.cache
def _compile(source: str) -> jinja2.Template:
  """A template, with the settings and helpers that Hugging Face gives to templates.

  It is somebody else's code, so it runs in a sandbox. `strftime_now` is left undefined on purpose:
  templates fall back to a fixed date, and the same seed gives the same prompt tomorrow.
  """

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(value, **options):
    return json.dumps(value, ensure_ascii=False, **options)  # jinja's own escapes for HTML

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
  )
  environment.globals["raise_exception"] = raise_exception
  environment.filters["tojson"] = tojson
  return environment.from_string(source)
