"""SentencePiece vocabularies in GGUF files: ids and texts against the sentencepiece package."""

import json

import gguf
import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import InputError
from models.gguf_file import open_gguf
from models.tokenizer import Tokenizer
from tests.models.tokenizer_test import TEXTS

USER_DEFINED, CONTROLS = ["<tool>", "<to", "#  #"], ["[INST]", "[/INST]"]
TEMPLATE = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]"
CORPUS = [
  *(line for text in TEXTS for line in text.replace("\0", "").splitlines() if line),
  *("x" + " " * n + "y" for n in range(2, 18)),
  "the river and the magic number, then the other rivers and numbers " * 4,
]
# Texts of a few characters and pieces meet merges, spaces and specials far more often than any text.
NASTY = st.lists(
  st.sampled_from([*" abehimnrtu0129\n\t\x00▁é漢😀", "  ", " the", "river", "<0x0A>", "\u0301"]),
  max_size=30,
).map("".join)
ANY = st.one_of(st.text(max_size=60), NASTY)


def trained(folder, **changes) -> str:
  """Path of a small SentencePiece model with the settings of Llama 2's."""
  path = folder / "tokenizer.model"
  with open(path, "wb") as file:
    options = {
      "vocab_size": 480, "model_type": "bpe", "byte_fallback": True, "split_digits": True,
      "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
      "allow_whitespace_only_pieces": True, "character_coverage": 0.98, "minloglevel": 2,
    } | changes  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(CORPUS * 3), model_writer=file, **options
    )
  return str(path)


def processor(path: str):
  return sentencepiece.SentencePieceProcessor(model_file=path)


def write_vocabulary(writer: gguf.GGUFWriter, model, user_defined=()) -> None:
  """The vocabulary as llama.cpp's converter writes it."""
  ids = range(model.get_piece_size())
  pieces = [model.id_to_piece(i) for i in ids]
  kinds = [
    2 if model.is_unknown(i)
    else 3 if model.is_control(i)
    else 6 if model.is_byte(i)
    else 4 if pieces[i] in user_defined
    else 1
    for i in ids
  ]  # fmt: skip
  writer.add_tokenizer_model("llama")
  writer.add_tokenizer_pre("default")
  writer.add_token_list(
    [piece.replace("▁", " ") if k == 4 else piece for piece, k in zip(pieces, kinds, strict=True)]
  )
  writer.add_token_scores([model.get_score(i) for i in ids])
  writer.add_token_types(kinds)
  writer.add_bos_token_id(model.bos_id())
  writer.add_eos_token_id(model.eos_id())
  writer.add_unk_token_id(model.unk_id())


def read(folder, model, user_defined=(), change=lambda writer: None) -> Tokenizer:
  writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
  write_vocabulary(writer, model, user_defined)
  change(writer)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return Tokenizer.from_gguf(folder / "m.gguf")


@pytest.fixture(scope="module", params=[True, False], ids=["user-defined", "plain"])
def pair(request, tmp_path_factory):
  """Ours, and Hugging Face's slow tokenizer around the sentencepiece model."""
  folder = tmp_path_factory.mktemp("spm")
  symbols = [piece.replace(" ", "▁") for piece in USER_DEFINED] if request.param else []
  path = trained(folder, control_symbols=CONTROLS, user_defined_symbols=symbols)
  slow = transformers.tokenization_utils_sentencepiece.SentencePieceBackend(
    vocab_file=path, unk_token="<unk>", bos_token="<s>", eos_token="</s>", legacy=True,
    additional_special_tokens=CONTROLS,
  )  # fmt: skip
  return read(folder, processor(path), symbols), slow


def theirs(slow, text: str) -> list[int]:
  return slow(text, add_special_tokens=False)["input_ids"]


def test_ids_and_texts(pair):
  ours, slow = pair
  assert ours.vocab_size == slow.sp_model.get_piece_size() == 480
  assert (ours.bos_id, ours.eos_id) == (1, 2)
  for text in [*TEXTS, "the▁river", "▁", " ▁ the", "\n", "x" * 3000, CORPUS[-1] * 50]:
    assert ours.encode(text) == theirs(slow, text), text
    assert ours.decode(ours.encode(text)) == slow.sp_model.decode(slow.sp_model.encode(text)), text

  @settings(max_examples=500, deadline=None)
  @given(ANY)
  def any_text(text):
    assert ours.encode(text) == theirs(slow, text)
    assert ours.decode(ours.encode(text)) == slow.sp_model.decode(slow.sp_model.encode(text))

  any_text()


def test_bytes_outside_the_vocabulary(pair):
  ours, slow = pair
  piece = slow.sp_model.piece_to_id
  assert ours.encode("\u20ac\x00") == [
    piece(p) for p in ("▁", "<0xE2>", "<0x82>", "<0xAC>", "<0x00>")
  ]
  assert piece("<0x0A>") not in ours.encode("<0x0A>")  # spelt out, it is no byte
  assert ours.decode([piece("▁the"), piece("<0xE2>")]) == "the\ufffd"


def test_control_tokens_and_text_between(pair):
  ours, slow = pair
  specials = ["<s>", "</s>", "<unk>", *CONTROLS]

  @settings(max_examples=300, deadline=None)
  @given(st.lists(st.one_of(st.sampled_from(specials), st.text(max_size=5), NASTY), max_size=8))
  def mixed(parts):
    text = "".join(parts)
    assert ours.encode(text) == theirs(slow, text)

  mixed()
  the = slow.sp_model.piece_to_id("▁the")
  assert ours.encode("<s>the</s>the") == [1, the, 2, the]


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_user_defined_tokens(pair):
  ours, slow = pair
  symbols = [slow.sp_model.piece_to_id(piece) for piece in ("<tool>", "<to", "#▁▁#")]
  space = slow.sp_model.piece_to_id("▁")
  assert ours.encode("<tool><to<tool>#  #") == [
    space,
    symbols[0],
    symbols[1],
    symbols[0],
    symbols[2],
  ]

  @settings(max_examples=300, deadline=None)
  @given(st.lists(st.one_of(st.sampled_from(USER_DEFINED), ANY), max_size=8))
  def mixed(parts):
    text = "".join(part for part in parts if "<0x" not in part)  # see sentencepiece_bpe
    assert ours.encode(text) == theirs(slow, text)
    assert ours.decode(ours.encode(text)) == slow.sp_model.decode(slow.sp_model.encode(text))

  mixed()


def test_no_double_bos(pair, tmp_path):
  """A template that writes BOS into the text, and a vocabulary that asks for one."""
  _, slow = pair
  path = slow.vocab_file
  ours = read(tmp_path, processor(path), change=lambda w: w.add_chat_template(TEMPLATE))
  ids = ours.encode(ours.chat([{"role": "user", "content": "the river"}]))
  assert ids == theirs(slow, "<s>[INST] the river [/INST]")
  assert ids.count(1) == 1 and ids[0] == 1


@pytest.mark.parametrize(("bos", "eos"), [(None, None), (False, False), (True, True)])
def test_written_tokenizer_in_hugging_face(pair, tmp_path, bos, eos):
  """What `save` writes: the same ids, and BOS and EOS added as the file says, or as Llama does."""

  def change(writer):
    if bos is not None:
      writer.add_add_bos_token(bos)
    if eos is not None:
      writer.add_add_eos_token(eos)

  _, slow = pair
  ours = read(tmp_path, processor(slow.vocab_file), change=change)
  ours.save(tmp_path)
  config = json.loads((tmp_path / "tokenizer_config.json").read_text())
  assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
  again, hf = Tokenizer.from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in ["the river", " a  b\n", "[INST] 漢 [/INST]", ""]:
    ids = theirs(slow, text)
    assert again.encode(text) == ours.encode(text) == ids
    assert hf(text)["input_ids"] == [1] * (bos is not False) + ids + [2] * bool(eos)
    assert again.decode(ids) == ours.decode(ids)


def test_without_a_space_in_front(tmp_path):
  model = processor(trained(tmp_path, add_dummy_prefix=False))
  ours = read(tmp_path, model, change=lambda w: w.add_add_space_prefix(False))

  @settings(max_examples=200, deadline=None)
  @given(ANY)
  def any_text(text):
    assert ours.encode(text) == model.encode(text)
    assert ours.decode(ours.encode(text)) == model.decode(model.encode(text))

  any_text()


def test_without_byte_tokens_the_unknown_token_stands_in(tmp_path):
  model = processor(trained(tmp_path, byte_fallback=False, vocab_size=200))
  ours = read(tmp_path, model)
  assert ours.encode("the \u20ac\u20ac\x00 river") == model.encode("the \u20ac\u20ac\x00 river")
  assert 0 in ours.encode("\u20ac")


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("scores", None),
    ("scores", [0.0, 1.0]),
    ("scores", float("nan")),
    ("token_type", None),
    ("tokens", "twice"),
    ("add_bos_token", 3),
    ("unknown_token_id", 100_000),
    ("bos_token_id", -1),
  ],
)
def test_damaged_vocabularies(tmp_path, field, value):
  path = trained(tmp_path)
  read(tmp_path, processor(path))
  file = open_gguf(tmp_path / "m.gguf")
  key = f"tokenizer.ggml.{field}"
  if value is None:
    del file.fields[key]
  elif value == "twice":
    file.fields[key][300] = file.fields[key][301]
  elif value != value:
    file.fields[key][300] = value
  else:
    file.fields[key] = value
  with pytest.raises(InputError, match="damaged vocabulary"):
    Tokenizer.from_gguf(file)


def test_kinds_that_are_not_verified(tmp_path):
  with pytest.raises(InputError, match=r"'llama/other'.*llama/default"):
    read(
      tmp_path,
      processor(trained(tmp_path)),
      change=lambda w: w.add_string("tokenizer.ggml.pre", "other"),
    )


def test_older_files_do_not_name_the_kind_of_words(tmp_path):
  ours = read(tmp_path, processor(trained(tmp_path)))
  file = open_gguf(tmp_path / "m.gguf")
  del file.fields["tokenizer.ggml.pre"]
  assert Tokenizer.from_gguf(file).encode("the river") == ours.encode("the river")
