"""SentencePiece vocabularies in GGUF files (Llama 2, Mistral, TinyLlama) as `tokenizers` objects.

The file has the pieces, their scores and types; the merges follow from them. Ids are those of
SentencePiece itself between special tokens, each such stretch of text with a space put before it:
what Hugging Face calls legacy, and what llama.cpp does.
"""

import math
import types

import tokenizers
from tokenizers import processors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ggml's token types
_SETTING = "tokenizer.ggml."


def sentencepiece_bpe(fields: dict[str, object]) -> tokenizers.Tokenizer:
  """The tokenizer that a GGUF file's metadata describes.

  Pieces of type user-defined are taken whole wherever they stand. One difference to SentencePiece is
  left, in vocabularies that have such pieces: a whole stretch of text that is itself a piece is never
  split, even where the merges would not have led to that piece.

  Args:
    fields: metadata by key.

  Returns:
    A tokenizer whose post-processor adds what `add_bos_token` and `add_eos_token` say.

  Raises:
    ValueError, TypeError, KeyError: metadata that is missing or contradicts itself.
  """
  # Takes a second, and files of other kinds need nothing of it.
  from transformers.convert_slow_tokenizer import SpmConverter

  def setting(name, default):
    value = fields.get(_SETTING + name, default)
    if not isinstance(value, bool):
      raise TypeError
    return value

  kinds, scores = fields[_SETTING + "token_type"], fields[_SETTING + "scores"]
  tokens = [
    # Converters spell the spaces of added tokens as they stand in the text.
    token.replace(" ", "▁") if kind == _USER_DEFINED else token
    for token, kind in zip(fields[_SETTING + "tokens"], kinds, strict=True)
  ]
  vocab = {token: i for i, token in enumerate(tokens)}
  if len(vocab) < len(tokens) or not all(map(math.isfinite, scores)):
    raise ValueError
  ids = {name: fields.get(f"{_SETTING}{name}_token_id") for name in ("bos", "eos", "unknown")}
  if ids["unknown"] is None:
    ids["unknown"] = kinds.index(_UNKNOWN)
  space = setting("add_space_prefix", True)
  model = types.SimpleNamespace(
    pieces=[
      types.SimpleNamespace(score=score, type=kind)
      for score, kind in zip(scores, kinds, strict=True)
    ],
    trainer_spec=types.SimpleNamespace(
      byte_fallback=_BYTE in kinds, unk_piece=tokens[ids["unknown"]]
    ),
    normalizer_spec=types.SimpleNamespace(
      precompiled_charsmap=b"",
      remove_extra_whitespaces=False,
      escape_whitespaces=True,
      add_dummy_prefix=space,
    ),
  )
  backend = SpmConverter.build_tokenizer_from_spm_proto(model, vocab, legacy=True)
  named = {i for i in ids.values() if i is not None}
  backend.add_special_tokens(
    [
      tokenizers.AddedToken(token, special=True, normalized=False)
      for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
      if kind in (_UNKNOWN, _CONTROL) or i in named
    ]
  )
  begin, end = (
    [(tokens[ids[name]], ids[name])]
    if setting(f"add_{name}_token", default) and ids[name] is not None
    else []
    for name, default in (("bos", True), ("eos", False))
  )
  single = [*(token for token, _ in begin), "$A", *(token for token, _ in end)]
  backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=begin + end)
  return backend
