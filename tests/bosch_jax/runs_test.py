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


def open_run(folder, settings, **claim):
  """Opens and lets go at once; returns the folder."""
  runs.open_run(folder, settings, {"a": 1}, **claim).close()
  return folder


def test_a_new_folder_gets_the_settings(tmp_path):
  folder = open_run(tmp_path / "a" / "b", Settings(), resume=False, force=False)
  assert json.loads((folder / "config.json").read_text()) == {"format": "bosch-run/1", "ratio": 0.5}


def test_a_used_folder_needs_resume_or_force(tmp_path):
  folder = open_run(tmp_path / "a", Settings(), resume=False, force=False)
  (folder / "result.json").write_text("old")
  with pytest.raises(InputError, match="already used; pass --resume"):
    open_run(folder, Settings(), resume=False, force=False)
  open_run(folder, Settings(), resume=True, force=False)
  assert (folder / "result.json").exists()
  open_run(folder, Settings(), resume=False, force=True)
  assert not (folder / "result.json").exists()


def test_resuming_with_other_settings_is_refused_by_name(tmp_path):
  folder = open_run(tmp_path / "a", Settings(), resume=False, force=False)
  with pytest.raises(InputError, match=r"--ratio 0\.75: .* was made with 0\.5"):
    open_run(folder, Settings(ratio=0.75), resume=True, force=False)


def test_free_fields_may_change_and_the_newer_ones_are_recorded(tmp_path):
  claim = {"resume": True, "force": False, "free": ("ratio",)}
  for ratio in (0.5, 0.75):
    folder = open_run(tmp_path / "a", Settings(ratio=ratio), **claim)
    assert json.loads((folder / "config.json").read_text())["ratio"] == ratio
  with pytest.raises(InputError, match=r"--ratio 0\.5"):
    open_run(folder, Settings(), resume=True, force=False)


@pytest.mark.parametrize("kept", [0, 5, 999])
def test_a_run_killed_before_its_settings_were_written_can_go_on(tmp_path, kept):
  """The journal is there first, because it is the lock."""
  folder = open_run(tmp_path / "a", Settings(), resume=False, force=False)
  (folder / "config.json").rename(folder / "config.json.partial")
  journal = folder / "journal.jsonl"
  journal.write_bytes(journal.read_bytes()[:kept])
  with pytest.raises(InputError, match="already used"):
    open_run(folder, Settings(), resume=False, force=False)
  open_run(folder, Settings(), resume=True, force=False)
  assert (folder / "config.json").exists()


def test_a_foreign_journal_is_not_taken_for_a_killed_run(tmp_path):
  (tmp_path / "journal.jsonl").write_text("mine")
  with pytest.raises(InputError, match="not a run"):
    open_run(tmp_path, Settings(), resume=True, force=False)


@pytest.mark.parametrize("force", [False, True])
def test_foreign_files_are_never_touched(tmp_path, force):
  (tmp_path / "thesis.txt").write_text("mine")
  with pytest.raises(InputError, match="not a run"):
    open_run(tmp_path, Settings(), resume=False, force=force)
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_is_one_sentence(tmp_path):
  (tmp_path / "file").write_text("")
  for folder in (tmp_path / "file", tmp_path / "file" / "run"):
    with pytest.raises(InputError, match="--out"):
      open_run(folder, Settings(), resume=False, force=False)


def test_a_folder_with_somebody_elses_config_is_not_a_run(tmp_path):
  """Hugging Face folders hold a config.json too."""
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  (tmp_path / "report.md").write_text("mine")
  for claim in ({"force": True, "resume": False}, {"force": False, "resume": True}):
    with pytest.raises(InputError, match="not a run"):
      open_run(tmp_path, Settings(), **claim)
  assert (tmp_path / "report.md").read_text() == "mine"


def test_checking_touches_nothing(tmp_path):
  runs.check_folder(tmp_path / "a" / "b", Settings(), resume=False, force=False)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{", "[1]", "null", "5", "{}"])
def test_a_damaged_config_is_refused(tmp_path, text):
  folder = open_run(tmp_path / "a", Settings(), resume=False, force=False)
  (folder / "config.json").write_text(text)
  with pytest.raises(InputError, match="not a run"):
    open_run(folder, Settings(), resume=True, force=False)


def test_two_runs_cannot_share_a_folder(tmp_path):
  journal = runs.open_run(tmp_path / "a", Settings(), {}, resume=False, force=False)
  for claim in ({"force": True, "resume": False}, {"force": False, "resume": True}):
    with pytest.raises(InputError, match="in use by another run"):
      open_run(tmp_path / "a", Settings(), **claim)
  journal.close()


def test_a_nested_setting_is_named_alone(tmp_path):
  @dataclasses.dataclass(frozen=True)
  class Outer:
    search: Settings = dataclasses.field(default_factory=Settings)

  folder = open_run(tmp_path / "a", Outer(), resume=False, force=False)
  with pytest.raises(InputError, match=r"--ratio 0\.75"):
    open_run(folder, Outer(Settings(ratio=0.75)), resume=True, force=False)
