"""bosch_jax: turn a pretrained language model into a head-level hybrid. `python run.py` explains."""

import sys

from bosch_jax.cli import main

if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
