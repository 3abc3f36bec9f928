"""`python run.py generate` as a user runs it, and the example of docs/method.md as it stands there."""

import pathlib
import re

import numpy as np
import pytest

from bosch_jax import cli
from models import registry
from models.generate import Generator
from models.hybridize import hybridize
from models.windows import HeadMask
from tests.integration.command import ROOT, run
from tests.integration.tiny_gguf import write_tiny_gguf

MASK = HeadMask(np.random.default_rng(0).random((4, 3)) < 0.6)
PROMPT = "The grass is green. The sky is blue. One of the special magic numbers"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A tiny model, and a mask.json of it with window 9 and 2 sinks."""
  folder = tmp_path_factory.mktemp("model")
  path = write_tiny_gguf(folder / "tiny.gguf")
  config = registry.load_config(str(path))
  MASK.save(folder / "mask.json", config, model="tiny.gguf", window=9, sinks=2)
  return path, folder / "mask.json"


@pytest.fixture(scope="module")
def direct(model):
  """What the Python API says to the same prompt."""
  loaded = registry.load(str(model[0]))
  hybrid = hybridize(loaded.params, MASK, loaded.config)
  generator = Generator(loaded, hybrid, window=9, sinks=2)
  return loaded, generator.generate([PROMPT], max_tokens=20)


def call(capsys, *args):
  code = cli.main(["generate", *map(str, args)])
  return code, *capsys.readouterr()


def test_text_to_stdout_and_figures_to_stderr(model, direct, tmp_path):
  path, mask = model
  file = tmp_path / "prompt.txt"
  file.write_text(PROMPT)
  code, out, err = run("generate", "--model", path, "--mask", mask, "-f", file, "--max-tokens", 20)
  assert code == 0, err
  assert out == direct[1].completions[0].text + "\n"
  stats, config = direct[1].stats, direct[0].config
  assert stats.kv_bytes == 2 * MASK.kv_bytes(config, stats.capacity, 9, 2)
  share = 100 * stats.kv_bytes / stats.kv_bytes_full
  assert f"{share:.0f}% of" in err and f"{stats.capacity} tokens" in err
  assert re.search(r"first token after \d+\.\d\d s", err) and re.search(r"\d tokens/s", err)


def test_without_a_mask_the_model_is_whole(model, direct, capsys):
  code, out, err = call(capsys, "--model", model[0], "--prompt", PROMPT, "--max-tokens", 20)
  assert code == 0 and "100% of" in err
  assert out == Generator(direct[0]).generate([PROMPT], max_tokens=20).completions[0].text + "\n"
  assert out != direct[1].completions[0].text + "\n"


def test_several_prompts_and_chat(model, direct, capsys):
  path, mask = model
  loaded = direct[0]
  flags = ("--model", path, "--mask", mask, "--chat", "--max-tokens", 8)
  code, out, err = call(capsys, *flags, "--prompt", "What is it?", PROMPT)
  assert code == 0 and out.count("--- prompt") == 2 and "x 2" in err
  prompts = [
    loaded.tokenizer.chat([{"role": "user", "content": x}]) for x in ("What is it?", PROMPT)
  ]
  hybrid = hybridize(loaded.params, MASK, loaded.config)
  want = Generator(loaded, hybrid, window=9, sinks=2).generate(prompts, max_tokens=8).completions
  assert out == "".join(f"--- prompt {b + 1}\n{c.text}\n" for b, c in enumerate(want))


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    ([], "--prompt"),
    (["--prompt", ""], "--prompt: is empty"),
    (["--prompt", "a", "-f", "b.txt"], "one of the two"),
    (["-f", "nowhere.txt"], "--file nowhere.txt"),
    (["--prompt", "green " * 600], "leaves no room in this model's context of 512"),
    (["--prompt", "a", "--stop-ids", "99999"], "--stop-ids 99999: is unknown"),
    (["--prompt", "a", "--stop", ""], "--stop"),
    (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0"),
    (["--prompt", "a", "--temperature", "-1"], "--temperature -1"),
    (["--prompt", "a", "--top-p", "2", "--temperature", "1"], "--top-p 2"),
    (["--prompt", "a", "--top-k", "5"], "--temperature 0"),
    (["--prompt", "a", "--seed", "-1"], "--seed -1"),
    (["--prompt", "a", "--chunk", "0"], "--chunk 0"),
    (["--prompt", "a", "--window", "5"], "--window 5"),
    (["--prompt", "a", "--system", "x"], "--system x"),
    (["--prompt", "a", "--mask", "nowhere.json"], "mask nowhere.json"),
    (["--prompt", "a", "--model", "nobody"], "--model nobody"),
  ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
  model, flags, named, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  given = [] if "--model" in flags else ["--model", model[0]]
  code, out, err = call(capsys, *given, *flags)
  assert code == 2 and out == "" and named in err and len(err.strip().splitlines()) == 1, err


def test_a_mask_of_another_model_is_refused(model, capsys, tmp_path):
  other = write_tiny_gguf(tmp_path / "other.gguf", layers=3)
  code, out, err = call(capsys, "--model", other, "--mask", model[1], "--prompt", "a")
  assert code == 2 and out == "" and "was made for tiny.gguf" in err
  assert len(err.strip().splitlines()) == 1


def test_a_mask_without_its_window_is_refused(model, capsys, tmp_path):
  config = registry.load_config(str(model[0]))
  MASK.save(tmp_path / "mask.json", config, model="tiny.gguf")
  flags = ("--model", model[0], "--mask", tmp_path / "mask.json", "--prompt", "a")
  code, _, err = call(capsys, *flags)
  assert code == 2 and "no usable window" in err
  assert call(capsys, *flags, "--window", 7, "--max-tokens", 2)[0] == 0


def test_the_documented_example_runs(model, tmp_path, monkeypatch, capsys):
  text = (ROOT / "docs" / "method.md").read_text()
  code = re.search(r"```python\n(.*?)```", text, re.S)[1]
  assert len(code.splitlines()) <= 20
  monkeypatch.chdir(tmp_path)
  (tmp_path / "runs" / "my-run").mkdir(parents=True)
  pathlib.Path("runs/my-run/mask.json").write_bytes(model[1].read_bytes())
  assert code.count('"smollm2-135m"') == 1
  exec(compile(code.replace("smollm2-135m", str(model[0])), "example", "exec"), {})
  out = capsys.readouterr().out
  assert re.search(r"\d+ of \d+ bytes\n$", out) and len(out) > 40
