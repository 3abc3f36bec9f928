"""Rivals of the search: rankings of head groups, least needed first, and ablations of the search.

    by layer       rand, intr, bme                                  `layers`
    by attention   dcam, dcam-nosinks, apl, proxy, qada, razor      `attention`
    by gradient    fisher, duo                                      `gradients`
    by loss        nll                                              `loss`
    ablations      b-single, b-multi, b-layer                       `ablations`

`rank` runs one of them (`registry`).
"""

import math

METHODS = (
  "rand", "intr", "bme", "dcam", "dcam-nosinks", "apl", "proxy", "qada", "razor", "fisher", "nll",
  "duo", "b-single", "b-multi", "b-layer",
)  # fmt: skip
# What looks at the model through scores of masks alone, so at contexts of any lengths.
BY_SCORE = ("bosch", "rand", "intr", "bme", "nll", "b-single", "b-multi", "b-layer")
# What depends on K, the number of local groups; the others serve every ratio of a run.
BY_RATIO = frozenset({"intr", "bme", "b-single", "b-multi", "b-layer"})
DUO_LEAST_STEPS = 10  # with fewer, gates have hardly left their start


def least_passes(method: str, layers: int, groups: int, samples: int, stage_one: float) -> int:
  """Full-forward equivalents below which a ranking cannot do its work, anchors and the score of its
  mask aside.

  Args:
    method: one of `METHODS`.
    layers, groups: L and G of the model.
    samples: calibration contexts.
    stage_one: what the search's first stage takes at least.
  """
  least = {
    "rand": 0.0,
    "intr": 0.0,
    "bme": 0.0,
    "fisher": 3.0,
    "nll": (groups * (layers + 1) / 2 + 1) / samples,
    "duo": 4 * DUO_LEAST_STEPS / samples,
    "b-single": stage_one,
    "b-layer": stage_one,
  }
  return math.ceil(least.get(method, 2.0))
