"""Ids and prompts against Hugging Face's, and tokenizers that must be refused."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.download import default_gguf
from models.errors import InputError
from models.tokenizer import Tokenizer
from tests.models.conftest import SPECIALS, TEMPLATE, write_tiny_gguf

TEXTS = [
  "",
  " ",
  "Hello, world!",
  "The special magic number for river is: 4093751.",
  "1234567890 3.14 1e-9 x42y 0x1F",
  "naïve café — “quoted” … 漢字かな한글 😀👩‍👩‍👧 e\u0301 \u200bzero",
  "def f(x):\n\treturn [i ** 2 for i in range(x)]  # squares\n",
  "  two leading, three trailing   ",
  "\n\n\n\t\t \r\n x\u00a0y",
  "it's we'll THEY'RE don't 'tis",
  "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
  "a<|im_end|>b <|endoftext|> <|im_start <|im_end|><|im_end|>",
  "<repo_name>x<file_sep>y<issue_start> <empty_output>",
  "\x00\x01\x7f\ufffd",
]


# Hugging Face's reading of GGUF files forgets that smollm splits numerals before it merges. It shows
# on numerals other than 0-9 only, and there the split (llama.cpp's too) is right.
OTHER_NUMERALS = ("Nd", "Nl", "No")
TEXT = st.text(max_size=80)
COMPARABLE = TEXT.filter(
  lambda text: not any(c > "9" and unicodedata.category(c) in OTHER_NUMERALS for c in text)
)
# Bytes that occur in no UTF-8 text, or only in unassigned planes and odd controls, have no token.
NO_TOKEN = {*range(0xF1, 0xF3), 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}
SPELLABLE = TEXT.filter(lambda text: NO_TOKEN.isdisjoint(text.encode()))


@pytest.fixture(scope="module")
def real_tokenizer():
  return Tokenizer.from_gguf(default_gguf())


@pytest.fixture(scope="module")
def hf_tokenizer():
  pytest.importorskip("torch")
  from transformers import AutoTokenizer

  path = default_gguf()
  return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_ids_equal_hugging_face(real_tokenizer, hf_tokenizer):
  for text in TEXTS:
    ids = real_tokenizer.encode(text)
    assert ids == hf_tokenizer(text, add_special_tokens=False)["input_ids"], text
    assert real_tokenizer.decode(ids) == text
  assert real_tokenizer.vocab_size == len(hf_tokenizer) == 49152
  assert real_tokenizer.bos_id == hf_tokenizer.bos_token_id == 1
  assert real_tokenizer.eos_id == hf_tokenizer.eos_token_id == 2

  @settings(max_examples=200, deadline=None)
  @given(COMPARABLE)
  def any_text(text):
    assert real_tokenizer.encode(text) == hf_tokenizer(text, add_special_tokens=False)["input_ids"]

  any_text()


@settings(max_examples=200, deadline=None)
@given(text=SPELLABLE)
def test_round_trip(real_tokenizer, text):
  assert real_tokenizer.decode(real_tokenizer.encode(text)) == text


def test_every_numeral_is_a_piece_of_its_own(real_tokenizer):
  for text in ("42", "٣٤٥", " ½", "Ⅷ4"):
    ids = real_tokenizer.encode(text)
    assert ids == [i for c in text for i in real_tokenizer.encode(c)], text


@pytest.mark.parametrize("system", [False, True])
def test_chat_equals_hugging_face(real_tokenizer, hf_tokenizer, system):
  messages = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": " Sure?\n"},
  ]
  if system:
    messages.insert(0, {"role": "system", "content": "Be brief."})
  expected = hf_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert real_tokenizer.chat(messages) == expected
  assert real_tokenizer.chat(messages, lead="It is") == expected + "It is"


def test_chat_exact_ids(real_tokenizer):
  """Written out: one beginning, no second one."""
  messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi 42"}]
  prompt = real_tokenizer.chat(messages)
  assert prompt == (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi 42<|im_end|>\n<|im_start|>assistant\n"
  )
  start, end, newline, system, user, assistant = 1, 2, 198, [9690], [4093], [520, 9531]
  assert real_tokenizer.encode(prompt) == [
    *[start, *system, newline, 67, end, newline],
    *[start, *user, newline, 6004, 216, 36, 34, end, newline],
    *[start, *assistant, newline],
  ]


def folder_of(path, tokenizer, **config):
  path.mkdir(exist_ok=True)
  (path / "tokenizer.json").write_text(tokenizer._backend.to_str())
  (path / "tokenizer_config.json").write_text(json.dumps(config))
  return path


@pytest.fixture
def tiny(tmp_path):
  write_tiny_gguf(tmp_path / "m.gguf")
  return Tokenizer.from_gguf(tmp_path / "m.gguf")


def test_tiny_ids(tiny):
  he, ll, space_he, hell, tool = 259, 260, 261, 262, 263
  assert tiny.encode("hell he<|tool|><|im_end|>") == [hell, space_he, tool, 2]
  assert tiny.encode("hello")[0] == hell
  assert tiny.encode("h") != tiny.encode("he") == [he]
  assert tiny.encode("ll") == [ll]
  assert tiny.vocab_size == 264
  assert (
    tiny.chat([{"role": "user", "content": "he"}])
    == "<|im_start|>user he<|im_end|><|im_start|>assistant "
  )


def test_folder_equals_gguf(tmp_path, tiny):
  folder = folder_of(
    tmp_path / "hf",
    tiny,
    chat_template=TEMPLATE,
    bos_token=SPECIALS[0],
    eos_token={"content": SPECIALS[2]},
  )
  loaded = Tokenizer.from_folder(folder)
  for text in TEXTS:
    assert loaded.encode(text) == tiny.encode(text)
  assert (loaded.bos_id, loaded.eos_id, loaded.vocab_size) == (0, 2, 264)
  messages = [{"role": "user", "content": "hell"}]
  assert loaded.chat(messages, "x") == tiny.chat(messages, "x")


def test_folder_with_a_template_file_or_named_templates(tmp_path, tiny):
  named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
  folder = folder_of(tmp_path / "hf", tiny, chat_template=named)
  assert Tokenizer.from_folder(folder).chat([]) == "yes"
  (folder / "chat_template.jinja").write_text("file")
  assert Tokenizer.from_folder(folder).chat([]) == "file"


def test_no_double_bos(tmp_path, tiny):
  """A template that writes BOS, and a tokenizer.json that adds one: it stands there once."""
  from tokenizers import processors

  bos = SPECIALS[0]
  tiny._backend.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A", special_tokens=[(bos, 0)]
  )
  folder = folder_of(tmp_path / "hf", tiny, chat_template="{{ bos_token }}he", bos_token=bos)
  loaded = Tokenizer.from_folder(folder)
  assert loaded.encode(loaded.chat([])) == [0, 259]


@pytest.mark.parametrize(
  ("template", "word"),
  [
    (None, "no chat template"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% for", "fails"),
    ("{{ messages[0].content + 1 }}", "fails"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
  ],
)
def test_templates_that_fail(tmp_path, tiny, template, word):
  loaded = Tokenizer.from_folder(folder_of(tmp_path / "hf", tiny, chat_template=template))
  with pytest.raises(InputError, match=word):
    loaded.chat([{"role": "user", "content": "x"}])


def test_template_helpers(tmp_path, tiny):
  source = (
    "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
    "{{ m | tojson }}\n{% endfor %}{{ strftime_now is defined }}"
  )
  loaded = Tokenizer.from_folder(folder_of(tmp_path / "hf", tiny, chat_template=source))
  assert loaded.chat([{"content": "<é>"}, {}]) == '{"content": "<é>"}\nFalse'


@pytest.mark.parametrize(
  "fields",
  [
    {"tokenizer.ggml.pre": "deepseek-llm"},
    {"tokenizer.ggml.model": "llama"},
    {"tokenizer.ggml.pre": None},
  ],
)
def test_unverified_kinds_are_refused(tmp_path, fields):
  write_tiny_gguf(tmp_path / "m.gguf", fields=fields)
  with pytest.raises(InputError, match="are verified in GGUF files"):
    Tokenizer.from_gguf(tmp_path / "m.gguf")


def test_eos_beyond_the_vocabulary(tmp_path):
  write_tiny_gguf(tmp_path / "m.gguf", fields={"tokenizer.ggml.eos_token_id": 264})
  with pytest.raises(InputError, match="damaged vocabulary"):
    Tokenizer.from_gguf(tmp_path / "m.gguf")


def test_folders_that_are_refused(tmp_path, tiny):
  with pytest.raises(InputError, match=r"tokenizer\.json"):
    Tokenizer.from_folder(tmp_path)
  folder = folder_of(tmp_path / "hf", tiny)
  (folder / "tokenizer_config.json").unlink()
  with pytest.raises(InputError, match=r"tokenizer_config\.json"):
    Tokenizer.from_folder(folder)
  (folder / "tokenizer_config.json").write_text("{")
  with pytest.raises(InputError, match="damaged"):
    Tokenizer.from_folder(folder)
  (folder / "tokenizer_config.json").write_text("{}")
  (folder / "tokenizer.json").write_text('{"model": 1}')
  with pytest.raises(InputError, match="damaged"):
    Tokenizer.from_folder(folder)
