"""`python run.py compare --cpt`: the same continual pretraining from every method's mask."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator

from rich.console import Console

from bosch_jax import interrupts
from bosch_jax.compare_report import cell_folder
from bosch_jax.compare_settings import CompareSettings
from bosch_jax.retrieval import Retrieval
from models.errors import InputError
from models.windows import write_json

RUNS, RESULT = "cpt", "recovery.json"
SEED = 1
POINT = ("step", "text_nll", "retrieval_nll", "retrieval_exact")
_FLAGS = {
  "--steps": "--cpt-updates", "--train": "--cpt-train", "--data": "--cpt-data", "--mask": "--cpt-ratio",
}  # fmt: skip


class Recovery:
  """The runs of a comparison, one for each method, at one ratio, from the masks of the first seed.

  Args:
    settings: of the comparison.
    make_recipe: `train.recipe.Recipe`, passed in because the method does not import train.

  Raises:
    InputError: what the recipe refuses, or runs of the comparison that were made otherwise.
  """

  def __init__(self, settings: CompareSettings, make_recipe: Callable):
    self._settings, chosen = settings, settings.recovery
    with _own_flags():
      self._recipe = make_recipe(
        model=settings.model, context=settings.context, dtype=settings.dtype, seed=SEED,
        updates=chosen.cpt_updates, train=chosen.cpt_train, data=chosen.cpt_data,
      )  # fmt: skip
      if settings.resume:
        for method in settings.methods:
          self._recipe.settings(*self._paths(method))

  def run(self, console: Console) -> None:
    """Trains what is not finished, then writes recovery.json (see `summary`)."""
    s, found = self._settings, {}
    for number, method in enumerate(s.methods, 1):
      interrupts.check()
      text = f"cpt {number} of {len(s.methods)}: {method}, {s.recovery_ratio:g} local"
      console.print(text, highlight=False)
      with _own_flags():
        found[method] = self._recipe.run(*self._paths(method), Retrieval)
    write_json(s.folder / RESULT, summary(s.recovery_ratio, found))

  def _paths(self, method: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Mask and folder of a method's run."""
    mask = cell_folder(self._settings, method, SEED, self._settings.recovery_ratio) / "mask.json"
    return mask, self._settings.folder / RUNS / f"{method}-s{SEED}"


def summary(ratio: float, runs: dict[str, dict]) -> dict:
  """The content of recovery.json.

  Args:
    ratio: share of local groups.
    runs: by method, what `train.recipe.Recipe.run` returned.

  Returns:
    What the runs have in common; `full`, the losses of full attention before training; by method
    its `points` (update, held-out text and retrieval NLL, share of questions answered whole),
    `gap_closed`, the share of the retrieval gap to `full` that the last point has closed (None
    without a gap), and `half_at`, the first evaluated update by which half of it was (None: never).
  """
  first = next(iter(runs.values()))
  full = {name: first["full"][name] for name in POINT[1:]}
  methods = {}
  for method, run in runs.items():
    points = [{name: point[name] for name in POINT} for point in run["points"]]
    gap = points[0]["retrieval_nll"] - full["retrieval_nll"]
    closed = [(points[0]["retrieval_nll"] - p["retrieval_nll"]) / gap for p in points if gap > 0]
    half = (p["step"] for p, share in zip(points, closed, strict=False) if share >= 0.5)
    methods[method] = {
      "points": points, "gap_closed": closed[-1] if closed else None, "half_at": next(half, None),
      "num_local": run["num_local"], "seconds_per_update": run["seconds_per_update"],
    }  # fmt: skip
  return {
    "ratio": ratio, "seed": SEED, "updates": first["updates"], "tokens": first["tokens"],
    "window": first["window"], "full": full, "methods": methods,
  }  # fmt: skip


def load(settings: CompareSettings) -> dict:
  """{"recovery": the content of recovery.json, for the methods compared now}; nothing where there is
  none of them."""
  path = settings.folder / RESULT
  if not path.exists():
    return {}
  made = json.loads(path.read_text(encoding="utf-8"))
  made["methods"] = {m: made["methods"][m] for m in settings.methods if m in made["methods"]}
  return {"recovery": made} if made["methods"] else {}


@contextlib.contextmanager
def _own_flags() -> Iterator[None]:
  """Refusals of cpt name the flags of compare."""
  try:
    yield
  except InputError as error:
    *before, flag = error.field.split(" ")
    raise InputError(
      " ".join([*before, _FLAGS.get(flag, flag)]), error.value, error.remedy
    ) from None
