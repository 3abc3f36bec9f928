"""Command line: parses, calls, prints. Every refusal is one sentence and exit code 2."""

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Callable, Sequence

import tyro

from models.errors import InputError

OVERVIEW = """\
bosch_jax turns a pretrained language model into a head-level hybrid: most attention heads see only
a sliding window, a chosen few keep the whole context, and the key/value cache shrinks.

  python run.py select                 find which heads can become local (a few minutes on a CPU)
  python run.py select --ratio 0.75    the same with three quarters of the head groups local
  python run.py generate --mask M      text through the hybrid cache, streamed (--prompt, --chat)
  python run.py export --mask M        a Hugging Face folder that torch runs with a hybrid cache
  python run.py cpt --mask M           train the hybrid: brings back what local heads cost
  python run.py evaluate --mask M      measure masks on the needle tasks, by generation
  python run.py compare                all methods at all ratios: tables, plots, one report
  python run.py compare --cpt          the same, then training from every mask: recovery curves
  python run.py lm-eval --tasks gsm8k  tasks of lm-eval on a model, whole or with a mask
  python run.py models                 which model families can be run, and how each was verified
  python run.py info --model X         a model's layers, head groups, parameters and cache
  python run.py bench search           what scoring a mask costs, against plain loops in JAX and torch
  python run.py bench rankings         what every rival's ranking costs and what its mask is worth
  python run.py bench attention        what windows save in attention itself, against other libraries
  python run.py bench solvers          search algorithms on planted objectives, side by side
  python run.py bench decode           what a mask saves in generation: cache bytes and tokens/s
  python run.py bench train            what a training step costs, against torch and of a hybrid

Every command explains its flags:  python run.py select --help
A run writes runs/<name>/ with the mask, the figures, a picture and a report; README.md shows one.
"""

# Command -> where its settings and its function are, and what the function is handed besides (train and
# the method do not import each other); nothing is imported before it is wanted.
COMMANDS = {
  "select": ("bosch_jax.settings:SelectSettings", "bosch_jax.select:select"),
  "generate": ("bosch_jax.generate:GenerateSettings", "bosch_jax.generate:generate"),
  "evaluate": ("bosch_jax.evaluate_settings:EvaluateSettings", "bosch_jax.evaluate:evaluate"),
  "compare": (
    "bosch_jax.compare_settings:CompareSettings",
    "bosch_jax.compare:compare",
    "train.recipe:Recipe",
  ),
  "lm-eval": (
    "bosch_jax.integrations.lm_eval_command:LmEvalSettings",
    "bosch_jax.integrations.lm_eval_command:lm_eval_command",
  ),
  "models": ("bosch_jax.info:ModelsSettings", "bosch_jax.info:models_command"),
  "info": ("bosch_jax.info:InfoSettings", "bosch_jax.info:info_command"),
  "export": ("bosch_jax.export:ExportSettings", "bosch_jax.export:export_command"),
  "bench attention": ("benchmarks.attention:Options", "benchmarks.attention:main"),
  "bench rankings": ("benchmarks.rankings:Options", "benchmarks.rankings:main"),
  "bench search": ("benchmarks.search:Options", "benchmarks.search:main"),
  "bench solvers": ("benchmarks.solvers:Options", "benchmarks.solvers:main"),
  "bench decode": ("benchmarks.decode:Options", "benchmarks.decode:main"),
  "bench train": ("benchmarks.train:Options", "benchmarks.train:main"),
  "cpt": ("train.settings:CptSettings", "train.cpt:main", "bosch_jax.retrieval:Retrieval"),
}


def main(args: Sequence[str]) -> int:
  """Runs one command.

  Returns:
    The exit code: 0 done, 1 the disk or the terminal failed, 2 bad input.

  Raises:
    KeyboardInterrupt: Ctrl-C or SIGTERM; run.py says how to go on.
  """
  for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="replace")  # a terminal that cannot show "±" shows "?"
  if not args or args[0] in ("-h", "--help", "help"):
    print(OVERVIEW, end="")
    return 0
  try:
    command, rest = split_command(args)
    settings_name, function_name, *handed = COMMANDS[command]
    settings = parse(f"run.py {command}", _load(settings_name), rest)
    _load(function_name)(settings, *map(_load, handed))
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except OSError as error:
    what = error.filename or "writing the run"
    print(
      f"error: {what}: {error.strerror}; make room, then the same command with --resume goes on",
      file=sys.stderr,
    )
    return 1
  return 0


def split_command(args: Sequence[str]) -> tuple[str, list[str]]:
  """The command that args begin with, and the arguments behind it.

  Raises:
    InputError: no such command.
  """
  for words in (2, 1):
    if (command := " ".join(args[:words])) in COMMANDS:
      return command, list(args[words:])
  raise InputError("command", args[0], f"is not known; use one of: {', '.join(COMMANDS)}")


def parse(prog: str, kind: type, args: Sequence[str]) -> object:
  """The settings that args describe.

  Args:
    prog: how the command is called, for messages.
    kind: frozen dataclass of the settings.

  Raises:
    InputError: a flag or value that cannot be read.
    SystemExit: help was asked for (code 0).
  """
  shown = io.StringIO()
  try:
    with contextlib.redirect_stderr(shown):
      return tyro.cli(
        kind, prog=prog, args=list(args), registry=_NUMBERS, config=(tyro.conf.FlagCreatePairsOff,)
      )
  except SystemExit as stop:
    if not stop.code:
      raise
    sentence = _sentence(shown.getvalue())
    raise InputError(prog, "", f"{sentence}; see python {prog} --help") from None


def _load(name: str) -> Callable:
  module, attribute = name.split(":")
  return getattr(importlib.import_module(module), attribute)


def _sentence(box: str) -> str:
  """What the parser's framed message says, without frame and help text."""
  lines = [line.strip("│ ") for line in box.splitlines()]
  body = [line for line in lines[1:] if line and not re.match("[╭╰]", line)]
  if body and re.fullmatch("[─-]+", body[0]):
    body = body[1:]
  rule = next((i for i, line in enumerate(body) if re.fullmatch("[─-]+", line)), len(body))
  return " ".join(body[:rule]).rstrip(".").removeprefix("Error parsing ")


_NUMBERS = tyro.constructors.ConstructorRegistry()


def _number(kind: type, name: str, example: str) -> None:
  """Registers a reader of numbers whose refusal a newcomer understands."""

  def read(args: list[str]):
    try:
      value = kind(args[0])
      if abs(value) < 2**53:  # NaN fails this too
        return value
    except ValueError:
      pass
    raise ValueError(f"{args[0][:40]!r} is not {name}; use for example {example}")

  @_NUMBERS.primitive_rule
  def rule(info: tyro.constructors.PrimitiveTypeInfo):
    if info.type is not kind:
      return None
    return tyro.constructors.PrimitiveConstructorSpec(
      nargs=1,
      metavar=kind.__name__.upper(),
      instance_from_str=read,
      is_instance=lambda value: isinstance(value, kind),
      str_from_instance=lambda value: [str(value)],
    )


_number(int, "a usable whole number", "8")
_number(float, "a usable number", "0.5")
