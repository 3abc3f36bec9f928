"""Tokenizers of Hugging Face folders against Hugging Face, and written back."""

import json

import pytest
import tokenizers
from tokenizers import processors

from models.tokenizer import Tokenizer
from tests.integration.tiny_gguf import TEMPLATE, train_tokenizer

# Begins with BOS, as Llama's does, asks for tools the way it does, and marks what is trained on.
LLAMA = (
  "{{ bos_token }}{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCS{% endif %}"
  "{% for m in messages %}<|im_start|>{{ m.role }}\n"
  "{% generation %}{{ m.content | trim }}{% endgeneration %}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": " What is the special magic number for river? 42 "}]
TEXTS = [
  "The special magic number for river is: 4093751.",
  "naïve 漢字 😀",
  "<|im_start|>user\nhi<|im_end|>",
  "",
]


@pytest.fixture
def backend():
  """A trained tokenizer that adds BOS by itself, as Llama's does."""
  backend = train_tokenizer()
  backend.post_processor = processors.TemplateProcessing(
    single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
  )
  return backend


def write(folder, backend, template):
  folder.mkdir(exist_ok=True)
  backend.save(str(folder / "tokenizer.json"))
  token = {
    "__type": "AddedToken",
    "content": "<|im_end|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
  }
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": token,
    "chat_template": template,
  }  # fmt: skip
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder


@pytest.mark.parametrize("template", [TEMPLATE, LLAMA], ids=["chatml", "llama"])
def test_chat_ids_equal_hugging_face_with_one_bos(tmp_path, backend, template):
  transformers = pytest.importorskip("transformers")
  folder = write(tmp_path, backend, template)
  ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
  prompt = ours.chat(MESSAGES)
  assert prompt == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
  ids = ours.encode(prompt)
  assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
  assert ids.count(0) == (template == LLAMA)
  for text in TEXTS:
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(
      ours.encode(text), clean_up_tokenization_spaces=False
    )
  assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (0, 2)


def test_exact_ids(tmp_path, backend):
  tokenizer = Tokenizer.from_folder(write(tmp_path, backend, LLAMA))
  ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "42"}]))
  letter = backend.token_to_id
  user, assistant = tokenizer.encode("user"), tokenizer.encode("assistant")
  assert ids == [
    0,
    1,
    *user,
    letter("Ċ"),
    letter("4"),
    letter("2"),
    2,
    letter("Ċ"),
    1,
    *assistant,
    letter("Ċ"),
  ]


@pytest.mark.parametrize("from_files", [True, False])
def test_saved_and_read_again(tmp_path, backend, from_files):
  transformers = pytest.importorskip("transformers")
  first = Tokenizer(backend, LLAMA, 0, 2)
  if from_files:
    first = Tokenizer.from_folder(write(tmp_path / "a", backend, LLAMA))
  (tmp_path / "b").mkdir()
  first.save(tmp_path / "b")
  if from_files:
    for path in (tmp_path / "a").iterdir():
      assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()
  again = Tokenizer.from_folder(tmp_path / "b")
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
  assert again.chat(MESSAGES) == first.chat(MESSAGES)
  assert theirs.apply_chat_template(
    MESSAGES, tokenize=False, add_generation_prompt=True
  ) == first.chat(MESSAGES)
  for text in TEXTS:
    assert (
      again.encode(text)
      == first.encode(text)
      == theirs(text, add_special_tokens=False)["input_ids"]
    )
  assert (again.bos_id, again.eos_id) == (0, 2)
  assert isinstance(again._backend, tokenizers.Tokenizer)
