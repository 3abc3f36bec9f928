import json

import numpy as np
import pytest

from models.errors import InputError
from tests.train.corpus import tokenizer, write_corpus
from train.data import sources
from train.data.tokens import prepare


@pytest.fixture(scope="module")
def words():
  return tokenizer()


def test_ids_on_disk_are_the_tokenizers_and_are_made_once(words, tmp_path):
  folder, cache = write_corpus(tmp_path / "text"), tmp_path / "cache"
  said = []
  corpus = prepare(str(folder), words, cache, said.append)
  names = sorted(p.name for p in folder.iterdir())
  for i, name in enumerate(names):
    ids = corpus.tokens_N[corpus.bounds_D1[i] : corpus.bounds_D1[i + 1]].tolist()
    assert ids == [*words.encode((folder / name).read_text()), words.eos_id]
    assert corpus.held_out_D[i] == sources.held_out(name)
  assert isinstance(corpus.tokens_N, np.memmap) and len(said) == 1
  again = prepare(str(folder), words, cache, said.append)
  assert len(said) == 1 and again.digest == corpus.digest
  assert [p.name for p in cache.iterdir()] == [corpus.digest]  # nothing half-made stays
  (folder / "0.txt").write_text("Other text.")
  other = prepare(str(folder), words, cache, said.append)
  assert len(said) == 2 and other.digest != corpus.digest


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_jsonl_and_parquet_say_the_same(words, tmp_path, kind):
  texts = [f"The number is {i}." for i in range(30)]
  path = tmp_path / f"data.{kind}"
  if kind == "jsonl":
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  else:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts, "number": list(range(30))}), path)
  corpus = prepare(str(path), words, tmp_path / "cache")
  found = [
    words.decode(corpus.tokens_N[a : b - 1])
    for a, b in zip(corpus.bounds_D1[:-1], corpus.bounds_D1[1:], strict=True)
  ]
  assert found == texts
  assert 0 < corpus.held_out_D.sum() < 30  # lines are split one by one


def test_a_single_text_is_cut(words, tmp_path):
  path = tmp_path / "one.txt"
  path.write_text("The grass is green. " * 100)
  corpus = prepare(str(path), words, tmp_path / "cache")
  sizes = np.diff(corpus.bounds_D1)
  assert corpus.held_out_D.tolist() == [False, True] and 15 < sizes[0] / sizes[1] < 25


def test_the_running_python_is_a_corpus():
  parts = sources.python_parts()
  names = {part.name for part in parts}
  assert {"argparse.py", "json/decoder.py"} <= names and any(n.startswith("topic ") for n in names)
  assert not any("site-packages" in name or name.startswith("test/") for name in names)
  share = np.mean([sources.held_out(name) for name in names])
  assert 0.02 < share < 0.09
  one = next(part for part in parts if part.name == "argparse.py")
  assert "class ArgumentParser" in next(one.documents())


@pytest.mark.parametrize(
  ("name", "content", "said"),
  [
    ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
    ("a.txt", b"", "holds no text"),
    ("a.txt", b"   \n", "holds no text"),
    ("a.txt", b"Too short.", "give more text"),
    ("a.jsonl", b"{", "line 1 is not JSON"),
    ("a.jsonl", b'{"text": "x"}\n{"words": "x"}', "line 2 has no text"),
    ("a.jsonl", b"[1]", "line 1 has no text"),
    ("a.parquet", b"PAR1 nothing", "parquet"),
  ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(words, tmp_path, name, content, said):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(InputError, match=said) as caught:
    prepare(str(path), words, tmp_path / "cache")
  assert "\n" not in str(caught.value)
  assert not list((tmp_path / "cache").glob("*")) and not list((tmp_path / "cache").glob(".*"))


def test_no_such_source(words, tmp_path):
  for source in (str(tmp_path), str(tmp_path / "none"), "no such thing"):
    with pytest.raises(InputError, match="--data"):
      prepare(source, words, tmp_path / "cache")


def test_a_damaged_cache_is_named(words, tmp_path):
  folder, cache = write_corpus(tmp_path / "text"), tmp_path / "cache"
  digest = prepare(str(folder), words, cache).digest
  (cache / digest / "tokens_N.npy").write_bytes(b"nonsense")
  with pytest.raises(InputError, match="--cache"):
    prepare(str(folder), words, cache)
