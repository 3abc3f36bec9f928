"""The process of one NOMAD run, started by `bosch_jax.solvers.nomad`; knows PyNomad only.

One JSON line in: keys, seed, block. Then in turn, one line out: a block of key vectors; one line
in: their losses. An empty block ends the run; so does the end of the input.
"""

import json
import os
import sys

import PyNomad


def main() -> None:
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # what NOMAD itself prints
  task = json.loads(sys.stdin.readline())
  n = len(task["keys"])

  def evaluate(block) -> list[int]:
    points = [block.get_x(i) for i in range(block.size())]
    keys = [[point.get_coord(i) for i in range(n)] for point in points]
    out.write(json.dumps(keys) + "\n")
    out.flush()
    line = sys.stdin.readline()
    if not line:
      os._exit(0)  # nobody is listening any more; NOMAD takes no other way out
    for point, loss in zip(points, json.loads(line), strict=True):
      point.setBBO(repr(loss).encode())
    return [1] * len(points)

  PyNomad.optimize(
    evaluate,
    task["keys"],
    [0.0] * n,
    [1.0] * n,
    [
      f"DIMENSION {n}",
      "BB_OUTPUT_TYPE OBJ",
      f"BB_MAX_BLOCK_SIZE {max(2, task['block'])}",  # 1 would mean another kind of callback
      f"SEED {task['seed']}",
      "DISPLAY_DEGREE 0",
      "MAX_BB_EVAL 100000000",
      f"MIN_MESH_SIZE * {0.05 / n}",  # smaller changes of keys hardly change their order
      "NB_THREADS_PARALLEL_EVAL 1",
    ],
  )
  out.write("[]\n")
  out.flush()


if __name__ == "__main__":
  main()
