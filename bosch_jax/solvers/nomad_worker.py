"""The process of one NOMAD run, started by `bosch_jax.solvers.nomad`; knows PyNomad only.

One JSON line in: keys, seed, block. Then in turn, one line out: a block of key vectors; one line
in: their losses. When NOMAD's mesh has become too fine to matter it starts again from the best
keys with the next seed; the end of the input ends the process.
"""

import itertools
import json
import math
import os
import sys

import PyNomad


def main() -> None:
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # what NOMAD itself prints
  task = json.loads(sys.stdin.readline())
  n = len(task["keys"])
  best = (math.inf, task["keys"])

  def evaluate(block) -> list[int]:
    nonlocal best
    points = [block.get_x(i) for i in range(block.size())]
    keys = [[point.get_coord(i) for i in range(n)] for point in points]
    out.write(json.dumps(keys) + "\n")
    out.flush()
    line = sys.stdin.readline()
    if not line:
      os._exit(0)  # nobody is listening any more; NOMAD takes no other way out
    for point, values, loss in zip(points, keys, json.loads(line), strict=True):
      point.setBBO(repr(loss).encode())
      if loss < best[0]:
        best = (loss, values)
    return [1] * len(points)

  for seed in itertools.count(task["seed"]):
    parameters = [
      f"DIMENSION {n}",
      "BB_OUTPUT_TYPE OBJ",
      f"BB_MAX_BLOCK_SIZE {max(2, task['block'])}",  # 1 would mean another kind of callback
      f"SEED {seed}",
      "DISPLAY_DEGREE 0",
      "MAX_BB_EVAL 100000000",
      "INITIAL_FRAME_SIZE * 0.5",  # half the range: smaller moves rarely change which keys are top
      f"MIN_MESH_SIZE * {0.05 / n}",
      "NB_THREADS_PARALLEL_EVAL 1",
      "QUAD_MODEL_SEARCH no",  # losses are constant between changes of order: nothing to model
      "NM_SEARCH no",  # in 90 dimensions its simplices take most of the time for next to no proposal
      "DIRECTION_TYPE ORTHO 2N",
      "EVAL_QUEUE_SORT DIR_LAST_SUCCESS",
    ]
    PyNomad.optimize(evaluate, best[1], [0.0] * n, [1.0] * n, parameters)


if __name__ == "__main__":
  main()
