import pytest

from bosch_jax import cli
from bosch_jax.settings import SearchOptions, SelectSettings
from models.config import ModelConfig
from models.errors import InputError
from tests.bosch_jax.tiny import CONFIG

BAD = [
  ("--ratio 1.5", "--ratio 1.5"),
  ("--ratio -0.1", "--ratio -0.1"),
  ("--ratio nan", "--ratio"),
  ("--ratio half", "--ratio"),
  ("--window 0", "--window 0"),
  ("--window 256", "--window 256"),
  ("--window 1.5", "--window"),
  ("--context 0", "--context 0"),
  ("--seed 0", "--seed 0"),
  ("--seed -3", "--seed -3"),
  ("--seed x", "--seed"),
  ("--budget 0", "--budget 0"),
  ("--budget 1.5", "--budget"),
  ("--samples 0", "--samples 0"),
  ("--held-out 0", "--held-out 0"),
  ("--sinks -1", "--sinks -1"),
  ("--sinks 224", "--sinks 224"),
  ("--resume --force", "--force"),
  ("--also 512", "--also 512"),
  ("--also 64:512", "--also 64:512"),
  ("--also 512:-1", "--also 512:-1"),
  ("--also 256:32", "--also 256:32"),
  ("--also 512:64 512:64", "--also 512:64 512:64"),
  ("--also 512:64 --samples 1", "--samples 1"),
  ("--also 512:64 --method razor", "--also 512:64"),
  ("--score f1", "--score"),
  ("--bogus 1", "--bogus"),
  ("--screen 0", "--screen 0"),
  ("--patience 0", "--patience 0"),
  ("--slack -1", "--slack"),
  ("--ratio", "--ratio"),
  ("--samples 1000000000", "--samples"),
  ("--seed " + "1" * 400, "--seed"),
  ("--model nowhere/nothing", "--model nowhere/nothing"),
  ("--model none.gguf", "--model none.gguf"),
]


@pytest.mark.parametrize(("flags", "named"), BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(flags, named, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cli.main(["select", *flags.split()]) == 2
  out, err = capsys.readouterr()
  assert out == "" and len(err.splitlines()) == 1 and err.startswith("error: ") and named in err
  assert not list(tmp_path.iterdir())


def test_an_unknown_command_is_one_sentence(capsys):
  assert cli.main(["selct"]) == 2
  assert "selct" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_without_arguments_it_explains_itself(capsys, args):
  assert cli.main(args) == 0
  assert "python run.py select" in capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_its_flags(capsys, command):
  with pytest.raises(SystemExit) as stop:
    cli.main([*command.split(), "--help"])
  assert stop.value.code == 0
  assert f"run.py {command}" in capsys.readouterr().out


def test_help_names_every_setting(capsys):
  with pytest.raises(SystemExit) as stop:
    cli.main(["select", "--help"])
  assert stop.value.code == 0
  shown = capsys.readouterr().out
  for field in (
    "ratio",
    "window",
    "context",
    "samples",
    "budget",
    "method",
    "score",
    "seed",
    "out",
    "resume",
    "force",
  ):
    assert f"--{field}" in shown


def test_flags_reach_the_settings():
  settings = cli.parse(
    "run.py select", SelectSettings, ["--ratio", "0.75", "--screen", "0.5", "--resume"]
  )
  assert settings == SelectSettings(ratio=0.75, search=SearchOptions(screen=0.5), resume=True)


def test_a_full_disk_is_one_sentence(monkeypatch, capsys):
  def full(settings):
    raise OSError(28, "No space left on device", "runs/a/journal.jsonl")

  monkeypatch.setattr("bosch_jax.select.select", full)
  assert cli.main(["select"]) == 1
  err = capsys.readouterr().err
  assert len(err.splitlines()) == 1 and "journal.jsonl" in err and "--resume" in err


def test_what_depends_on_the_model_is_checked():
  with pytest.raises(InputError, match="--context 256: is beyond this model's 128 tokens"):
    SelectSettings().check_model(CONFIG)
  with pytest.raises(InputError, match="--also 512: is beyond this model's 128 tokens"):
    SelectSettings(context=100, window=10, also=("512:64",)).check_model(CONFIG)
  wide = ModelConfig(61, 4, 32, 6, 3, 8, 48, 1024)
  for ratio in (0.01, 0.99):
    with pytest.raises(InputError, match="cannot be reached"):
      SelectSettings(ratio=ratio).check_model(wide)
  for ratio in (0, 1, 0.5, 1 / 12):
    SelectSettings(ratio=ratio).check_model(wide)
  with pytest.raises(InputError, match=r"--budget 4: is less than .* use 7 or more"):
    SelectSettings(budget=4).check_model(wide)
  SelectSettings(budget=7).check_model(wide)


def test_the_default_folder_tells_settings_apart():
  folders = {
    SelectSettings(**change).folder
    for change in (
      {},
      {"ratio": 0.75},
      {"budget": 60},
      {"score": "accuracy"},
      {"search": SearchOptions(screen=0.5)},
      {"model": "Qwen/Qwen3-1.7B"},
      {"model": "Qwen/Qwen3-0.6B"},
    )
  }
  assert len(folders) == 7
  assert str(SelectSettings(model="x/y.gguf").folder) == "runs/y-bosch-r0.5-w32-c256-s1"
  assert all(folder.parent.name == "runs" for folder in folders)
