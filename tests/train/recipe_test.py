"""A recipe for several masks: what it fixes, what it refuses, what it does not repeat."""

import json
import pathlib

import jax
import pytest

from models.errors import InputError
from tests.integration.tiny_gguf import write_tiny_gguf
from tests.train.corpus import write_corpus
from train import cpt, run_folder
from train.recipe import Recipe
from train.settings import CptSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  write_corpus(folder / "corpus", files=2)
  return str(write_tiny_gguf(folder / "tiny.gguf", layers=1))


def make(model, **changes):
  data = str(pathlib.Path(model).parent / "corpus")
  return Recipe(**{"model": model, "context": 256, "updates": 120, "data": data} | changes)


class Loop:
  """Stands in for the loop: notes what it is asked for and leaves the files of a run behind.

  Args:
    stop: updates after which it is told to stop.
  """

  def __init__(self, stop: int | None = None):
    self.stop, self.asked = stop, []

  def __call__(self, settings: CptSettings, make_retrieval) -> dict:
    self.asked.append(settings)
    run_folder.claim(settings.folder, settings).close()
    (settings.folder / run_folder.CHECKPOINTS).mkdir(exist_ok=True)
    done = self.stop or settings.steps
    lines = [
      {"step": 0, "model": "full", "text_nll": 1.0},
      {"step": 0, "text_nll": 3.0},
      {"step": 1, "loss": 4.0},
      {"step": done, "text_nll": 2.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (settings.folder / run_folder.METRICS).write_text(text)
    result = {"updates": done, "of": settings.steps}
    (settings.folder / "result.json").write_text(json.dumps(result))
    return result


def test_it_is_the_default_recipe_with_rows_for_the_context(model, tmp_path):
  made = make(model, data="python").settings(tmp_path / "mask.json", tmp_path / "run")
  default = CptSettings(mask="full")
  assert made.identity() == default.identity() | {
    "model": model, "mask": str(tmp_path / "mask.json"), "eval_every": 15,
  }  # fmt: skip
  assert made.rows % jax.device_count() == 0
  long = make(model, context=400, updates=5).settings(tmp_path / "m", tmp_path / "run")
  assert (long.sequence, long.context, long.eval_every) == (512, 400, 1)  # all the model takes


def test_a_finished_run_is_read_and_a_stopped_one_goes_on(model, tmp_path, monkeypatch):
  mask, folder = tmp_path / "mask.json", tmp_path / "run"
  folder.mkdir()
  (folder / run_folder.LOCK).touch()  # a claim that was killed
  monkeypatch.setattr(cpt, "main", stopped := Loop(stop=7))
  with pytest.raises(KeyboardInterrupt):
    make(model).run(mask, folder, None)
  assert [s.resume for s in stopped.asked] == [False]
  assert (folder / run_folder.CHECKPOINTS).exists()
  monkeypatch.setattr(cpt, "main", whole := Loop())
  first = make(model).run(mask, folder, None)
  assert [s.resume for s in whole.asked] == [True]
  assert first["points"] == [{"step": 0, "text_nll": 3.0}, {"step": 120, "text_nll": 2.0}]
  assert not (folder / run_folder.CHECKPOINTS).exists()
  assert make(model).run(mask, folder, None) == first and len(whole.asked) == 1
  with pytest.raises(InputError, match=r"--resume: --steps 60: .* was made with 120"):
    make(model, updates=60).run(mask, folder, None)
  with pytest.raises(InputError, match="--resume: --mask"):
    make(model).run(tmp_path / "other.json", folder, None)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"train": "nothing"}, "--train nothing"),
    ({"data": "nowhere/at/all"}, "--data nowhere/at/all"),
    ({"model": "nowhere.gguf", "data": "python"}, "--model nowhere.gguf"),
    ({"updates": 0}, "--steps 0"),
  ],
)
def test_what_cannot_work_is_refused_before_any_weights_are_read(model, changes, named):
  with pytest.raises(InputError) as caught:
    make(**{"model": model} | changes)
  assert str(caught.value).startswith(named)


def test_rows_are_rounded_up_to_the_devices(model, tmp_path, monkeypatch):
  devices = jax.devices()
  monkeypatch.setattr(jax, "devices", lambda: devices[:3])
  monkeypatch.setattr(jax, "device_count", lambda: 3)
  made = make(model).settings(tmp_path / "mask.json", tmp_path / "run")
  assert made.batch == 6
