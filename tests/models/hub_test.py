"""Ids of huggingface.co on a machine without it: what is cached works, what is not is one sentence."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from models import export, registry
from models.errors import InputError
from models.tokenizer import Tokenizer
from tests.integration.tiny_gguf import TEMPLATE, train_tokenizer
from tests.models.safetensors_loader_test import DENSE, random_params

ROOT = pathlib.Path(__file__).parents[2]
READ = """
import sys
from models import registry
from models.errors import InputError
try:
  config = registry.load_config(sys.argv[1])
  loaded = registry.load(sys.argv[1])
  print(loaded.name, config.fingerprint == loaded.config.fingerprint, loaded.config.fingerprint)
except InputError as error:
  print("refused:", error)
"""


def read(model, cache):
  """What loading an id gives where the cache is all there is."""
  environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, "-c", READ, model],
    capture_output=True,
    text=True,
    env=environment,
    cwd=cache,
    check=True,
  )
  return done.stdout.strip()


@pytest.fixture
def cache(tmp_path):
  """A cache of huggingface_hub that holds tiny/model: refs/main names a snapshot."""
  import dataclasses

  backend = train_tokenizer()
  config = dataclasses.replace(DENSE, vocab_size=backend.get_vocab_size())
  repository = tmp_path / "hub" / "models--tiny--model"
  snapshot = repository / "snapshots" / ("0" * 40)
  export.save_folder(snapshot, config, random_params(config), Tokenizer(backend, TEMPLATE, 1, 2))
  (repository / "refs").mkdir()
  (repository / "refs" / "main").write_text("0" * 40)
  return tmp_path, snapshot, config


def test_a_cached_id_is_loaded_offline(cache):
  folder, _, config = cache
  assert read("tiny/model", folder) == f"tiny/model True {config.fingerprint}"


def test_a_cache_without_the_weights(cache):
  folder, snapshot, _ = cache
  (snapshot / "model.safetensors").unlink()
  text = read("tiny/model", folder)
  assert text.startswith("refused: --model") and "has no model.safetensors" in text


def test_an_id_that_is_not_cached_is_one_sentence(tmp_path):
  text = read("nobody/nothing", tmp_path)
  assert text.startswith("refused: --model nobody/nothing: is neither in the Hugging Face cache")
  for word in ("hf download nobody/nothing", "smollm2-135m", ".gguf"):
    assert word in text
  assert "\n" not in text


def test_gated_and_unknown_ids_are_told_apart(monkeypatch):
  import huggingface_hub
  from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

  for kind, words in (
    (GatedRepoError, "licence"),
    (RepositoryNotFoundError, "spelling"),
    (OSError, "cache"),
  ):

    def fail(*args, kind=kind, **kwargs):
      raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(InputError, match=words) as info:
      registry.load_config("a/b")
    assert str(info.value).startswith("--model a/b:")


def test_a_local_folder_goes_before_an_id(cache, tmp_path, monkeypatch):
  _, snapshot, config = cache
  shutil.copytree(snapshot, tmp_path / "owner" / "name")
  monkeypatch.chdir(tmp_path)
  loaded = registry.load("owner/name")
  assert (loaded.name, loaded.config) == ("name", config)
