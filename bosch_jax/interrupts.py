"""Ctrl-C and SIGTERM: stop at the next safe point, always.

Python raises KeyboardInterrupt wherever it happens to be; inside a callback of the runtime it is
printed and forgotten. So a handler also sets a flag, and long work asks for it between batches.
"""

import signal
import sys

_requested = False


def install() -> None:
  """Handles SIGINT and SIGTERM alike from now on."""
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, _handle)
  show = sys.unraisablehook
  # The runtime's callbacks report what they swallow; an interrupt is acted on by `check` instead.
  sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else show(lost)


def _handle(number, frame) -> None:
  global _requested
  _requested = True
  raise KeyboardInterrupt


def check() -> None:
  """Raises KeyboardInterrupt if one was asked for and got lost."""
  if _requested:
    raise KeyboardInterrupt
