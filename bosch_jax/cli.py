"""Command line: parses, calls, prints. Every refusal is one sentence and exit code 2."""

import contextlib
import dataclasses
import io
import math
import re
import sys
from collections.abc import Callable, Sequence

import tyro

from bosch_jax.settings import SelectSettings
from models.errors import InputError

OVERVIEW = """\
bosch_jax turns a pretrained language model into a head-level hybrid: most attention heads see only
a sliding window, a chosen few keep the whole context, and the key/value cache shrinks for real.

  python run.py select                 find which heads can become local (a few minutes on a CPU)
  python run.py select --ratio 0.75    the same with three quarters of the head groups local

Every command explains its flags:  python run.py select --help
A run writes runs/<name>/ with the mask, the figures, a picture and a report; README.md shows one.
"""


def _select(settings: SelectSettings) -> None:
  from bosch_jax.select import select  # jax starts only when there is work

  select(settings)


COMMANDS: dict[str, tuple[type, Callable]] = {
  "select": (SelectSettings, _select),
}


def main(args: Sequence[str]) -> int:
  """Runs one command.

  Returns:
    The exit code: 0 done, 2 bad input, 130 interrupted.
  """
  if not args:
    print(OVERVIEW, end="")
    return 0
  try:
    settings = parse(args)
    command = next(run for kind, run in COMMANDS.values() if isinstance(settings, kind))
    command(settings)
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("\nstopped; nothing scored is lost: the same command with --resume goes on", file=sys.stderr)
    return 130
  return 0


def parse(args: Sequence[str]) -> object:
  """The settings of the command named in args.

  Raises:
    InputError: a flag or value that cannot be read.
    SystemExit: help was asked for (code 0).
  """
  shown = io.StringIO()
  try:
    with contextlib.redirect_stderr(shown):
      return tyro.extras.subcommand_cli_from_dict(
        {name: kind for name, (kind, _) in COMMANDS.items()},
        prog="run.py",
        description=OVERVIEW,
        args=list(args),
        registry=_NUMBERS,
        config=(tyro.conf.FlagCreatePairsOff,),
        sort_subcommands=False,
      )
  except SystemExit as stop:
    if not stop.code:
      raise
    raise _refusal(shown.getvalue(), args) from None


def _refusal(box: str, args: Sequence[str]) -> InputError:
  """The parser's framed message as one sentence."""
  lines = [line.strip("│ ") for line in box.splitlines()]
  body = [line for line in lines[1:] if line and not re.match("[╭╰]", line)]
  rules = [i for i, line in enumerate(body) if re.fullmatch("[─-]+", line)]
  if rules and rules[0] == 0:
    body = body[1:]
    rules = [i - 1 for i in rules[1:]]
  sentence = " ".join(body[: rules[0]] if rules else body).rstrip(".")
  known = " " + args[0] if args[0] in COMMANDS else ""
  return InputError(f"run.py {' '.join(args)}", "", f"{sentence}; see python run.py{known} --help")


_NUMBERS = tyro.constructors.ConstructorRegistry()


def _number(kind: type, name: str, example: str) -> None:
  """Registers a reader of numbers whose refusal a newcomer understands."""

  def read(args: list[str]):
    try:
      value = kind(args[0])
    except ValueError:
      value = math.nan
    if not math.isfinite(value):
      raise ValueError(f"{args[0]!r} is not {name}; use for example {example}")
    return value

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


_number(int, "a whole number", "8")
_number(float, "a number", "0.5")
