"""bosch_jax: turn a pretrained language model into a head-level hybrid. `python run.py` explains."""

import os
import sys

from bosch_jax import huge_pages

STOPPED = "stopped; every score so far is on disk: the same command with --resume goes on"


def main() -> int:
  try:  # imports inside: Ctrl-C during them is no traceback either
    from bosch_jax import cli, interrupts

    interrupts.install()
    return cli.main(sys.argv[1:])
  except KeyboardInterrupt:
    print(f"\n{STOPPED}", file=sys.stderr)
    return 130


if __name__ == "__main__":
  huge_pages.restart()
  code = main()
  if code == 130:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the runtime may still be computing; waiting for them is not wanted
  sys.exit(code)
