import dataclasses
import json
import pathlib

import pytest

from bosch_jax import runs
from models.errors import InputError


@dataclasses.dataclass(frozen=True)
class Settings:
  ratio: float = 0.5
  out: pathlib.Path | None = None
  resume: bool = False
  force: bool = False


def test_a_new_folder_gets_the_settings(tmp_path):
  folder = runs.open_run(tmp_path / "a" / "b", Settings(), resume=False, force=False)
  assert json.loads((folder / "config.json").read_text()) == {"ratio": 0.5}


def test_a_used_folder_needs_resume_or_force(tmp_path):
  folder = runs.open_run(tmp_path / "a", Settings(), resume=False, force=False)
  (folder / "result.json").write_text("old")
  with pytest.raises(InputError, match="already used; pass --resume"):
    runs.open_run(folder, Settings(), resume=False, force=False)
  runs.open_run(folder, Settings(), resume=True, force=False)
  assert (folder / "result.json").exists()
  runs.open_run(folder, Settings(), resume=False, force=True)
  assert not (folder / "result.json").exists()


def test_resuming_with_other_settings_is_refused_by_name(tmp_path):
  folder = runs.open_run(tmp_path / "a", Settings(), resume=False, force=False)
  with pytest.raises(InputError, match=r"--ratio 0\.75: .* was made with 0\.5"):
    runs.open_run(folder, Settings(ratio=0.75), resume=True, force=False)


@pytest.mark.parametrize("force", [False, True])
def test_foreign_files_are_never_touched(tmp_path, force):
  (tmp_path / "thesis.txt").write_text("mine")
  with pytest.raises(InputError, match="not a run"):
    runs.open_run(tmp_path, Settings(), resume=False, force=force)
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_is_one_sentence(tmp_path):
  (tmp_path / "file").write_text("")
  for folder in (tmp_path / "file", tmp_path / "file" / "run"):
    with pytest.raises(InputError, match="--out"):
      runs.open_run(folder, Settings(), resume=False, force=False)


def test_a_refused_run_leaves_nothing_behind(tmp_path):
  folder = runs.open_run(tmp_path / "a", Settings(), resume=False, force=False)
  runs.discard(folder)
  assert not folder.exists()


def test_a_damaged_config_is_refused(tmp_path):
  folder = runs.open_run(tmp_path / "a", Settings(), resume=False, force=False)
  (folder / "config.json").write_text("{")
  with pytest.raises(InputError, match="damaged"):
    runs.open_run(folder, Settings(), resume=True, force=False)
