"""The lm-eval adapter against the real lm-eval and its own Hugging Face backend, on local tasks."""

import json
import logging
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tokenizers.processors import TemplateProcessing

from bosch_jax import cli, niah
from models import registry
from models.config import ModelConfig
from models.errors import InputError
from models.export import save_folder
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from models.windows import HeadMask
from tests.bosch_jax.tiny import tiny_params
from tests.integration.tiny_gguf import TEMPLATE, train_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")
pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="lm-eval's Hugging Face backend needs it")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from bosch_jax.integrations.lm_eval import HybridLM, Options  # noqa: E402

WINDOW = 6
WORDS = [sentence for sentence in niah.haystacks.NOISE]


@pytest.fixture(
  scope="module", params=["plain", pytest.param("begins with a token", marks=pytest.mark.slow)]
)
def folder(request, tmp_path_factory):
  """A tiny Llama whose tokenizer puts nothing, or a first token, before a text."""
  backend = train_tokenizer()
  if request.param != "plain":
    backend.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
  config = ModelConfig(
    vocab_size=backend.get_vocab_size(),
    num_layers=3,
    model_dim=48,
    num_heads=6,
    num_groups=3,
    head_dim=8,
    ffn_dim=48,
    context=96,
  )
  path = tmp_path_factory.mktemp("model") / "tiny"
  tokenizer = Tokenizer(backend, TEMPLATE, 1, 2)
  save_folder(path, config, tiny_params(config), tokenizer, shard_bytes=10**8)
  return path


@pytest.fixture(scope="module")
def mask(folder, tmp_path_factory):
  config = registry.load_config(str(folder))
  local = np.arange(config.total_groups).reshape(config.num_layers, -1) % 2 == 0
  path = tmp_path_factory.mktemp("mask") / "mask.json"
  HeadMask(local).save(path, config, model="tiny", window=WINDOW, sinks=1)
  return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  """Three tasks of local files, one for each of lm-eval's requests."""
  path = tmp_path_factory.mktemp("tasks")
  docs = [
    {"text": f"{a} {b}", "choices": [" green.", " blue.", " yellow and green."], "label": i % 3}
    for i, (a, b) in enumerate(zip(WORDS * 2, WORDS[1:] * 3, strict=False))
  ]
  (path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
  common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(path / "docs.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{text}}",
  }
  configs = {
    "choice": {
      "output_type": "multiple_choice",
      "doc_to_choice": "{{choices}}",
      "doc_to_target": "label",
      "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "text": {
      "output_type": "loglikelihood_rolling",
      "doc_to_text": "",
      "doc_to_target": "{{(text + ' ') * 5}}",  # longer than the context
      "metric_list": [{"metric": "word_perplexity"}],
    },
    "answer": {
      "output_type": "generate_until",
      "doc_to_target": "{{choices[label]}}",
      "generation_kwargs": {"until": [".", "in"], "do_sample": False, "max_gen_toks": 12},
      "metric_list": [{"metric": "exact_match"}],
    },
  }
  for name, config in configs.items():
    (path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **config}))
  return path, list(configs)


def evaluate(model, tasks, **options):
  path, names = tasks
  manager = TaskManager(include_path=str(path), include_defaults=False)
  return lm_eval.simple_evaluate(
    model, tasks=names, task_manager=manager, bootstrap_iters=0, **options
  )


@pytest.mark.parametrize("chat", [False, True])
def test_scores_equal_those_of_the_hugging_face_backend(folder, tasks, chat):
  from lm_eval.models.huggingface import HFLM

  logging.getLogger("lm_eval").setLevel(logging.ERROR)
  theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)
  ours = HybridLM(str(folder), batch_size=3)
  if chat:
    tasks = (tasks[0], ["choice", "answer"])
  results = [evaluate(model, tasks, apply_chat_template=chat) for model in (ours, theirs)]
  metrics = [
    {
      (task, metric): value
      for task, values in result["results"].items()
      for metric, value in values.items()
      if isinstance(value, float) and "stderr" not in metric
    }
    for result in results
  ]
  assert metrics[0] == pytest.approx(metrics[1], rel=1e-4) and len(metrics[0]) == 3 + (not chat)
  for name in tasks[1]:
    for a, b in zip(*(result["samples"][name] for result in results), strict=True):
      assert a["arguments"] == b["arguments"] or name != "answer"
      if name == "answer":
        assert a["resps"] == b["resps"]
      else:
        np.testing.assert_allclose(
          *(np.array(x["filtered_resps"], float) for x in (a, b)), atol=1e-4, rtol=1e-5
        )


def requests(kind, arguments):
  return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_a_mask_is_what_the_scores_are_made_with(folder, mask):
  pairs = [(WORDS[0], " The sky is"), (" ".join(WORDS), " blue."), ("", WORDS[1])]
  hybrid = HybridLM(str(folder), str(mask), batch_size=2)
  full = HybridLM(str(folder), batch_size=2)
  scores = [model.loglikelihood(requests("loglikelihood", pairs)) for model in (hybrid, full)]
  assert abs(scores[0][1][0] - scores[1][1][0]) > 1e-3  # longer than the window
  loaded = registry.load(str(folder))
  masked, record = HeadMask.load(mask, loaded.config)
  model = Transformer(loaded.config, record["sinks"], backend="reference")
  windows = jnp.asarray(masked.windows(WINDOW, loaded.config.num_heads))
  for (context, continuation), (value, greedy) in zip(pairs, scores[0], strict=True):
    ids = hybrid.tok_encode(context + continuation) if context else None
    asked = len(ids) - len(hybrid.tok_encode(context)) if context else None
    if not context:
      answer = hybrid.tok_encode(continuation, add_special_tokens=False)
      ids, asked = [hybrid.prefix_token_id, *answer], len(answer)
    logits = model.apply({"params": loaded.params}, jnp.asarray([ids[:-1]]), windows)[0, -asked:]
    log = np.asarray(logits, np.float64)
    log -= np.log(np.exp(log).sum(-1, keepdims=True))
    wanted = ids[-asked:]
    assert value == pytest.approx(log[np.arange(asked), wanted].sum(), abs=1e-4)
    assert greedy == (log.argmax(-1) == wanted).all()


@pytest.mark.slow
def test_a_masked_model_generates_what_it_scores_as_greedy(folder, mask):
  hybrid = HybridLM(str(folder), str(mask), batch_size=2)
  contexts = [" ".join(WORDS), WORDS[2], WORDS[3]]
  options = {"until": [], "max_gen_toks": 5}
  texts = hybrid.generate_until(requests("generate_until", [(c, options) for c in contexts]))
  for context, text in zip(contexts, texts, strict=True):
    ids = hybrid.tok_encode(context)
    # Random tokens do not come back from their text, so they are asked for again.
    (done,) = hybrid._generator.generate([ids], max_tokens=5).completions
    assert hybrid.loaded.tokenizer.decode(done.ids, special=False) == text
    if done.ids:
      assert hybrid._loglikelihood_tokens([(None, ids, done.ids)])[0][1]
      other = [done.ids[0], *((i + 1) % 300 for i in done.ids[1:])]
      assert len(other) == 1 or not hybrid._loglikelihood_tokens([(None, ids, other)])[0][1]
  assert any(texts)


def test_an_assistant_message_is_continued(folder):
  model = HybridLM(str(folder))
  history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is"}]
  assert model.apply_chat_template(history, add_generation_prompt=False) == (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nIt is"
  )
  assert model.chat_template(True) == TEMPLATE and model.chat_template(False) is None


def test_sampling_options_are_read_as_lm_eval_reads_them():
  assert Options({"do_sample": False, "temperature": 0.7}, 9).sampling.temperature == 0
  assert Options({"temperature": 0.7}, 9).sampling.temperature == 0.7
  assert Options({}, 9).sampling.temperature == 0
  drawn = Options({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, 9).sampling
  assert (drawn.temperature, drawn.top_p) == (0.7, 0.9)
  options = Options({"until": "\n", "max_new_tokens": 3}, 9)
  assert (options.until, options.max_tokens) == (["\n"], 3)
  with pytest.raises(InputError, match="repetition_penalty"):
    Options({"repetition_penalty": 2.0}, 9)


@pytest.mark.parametrize(
  ("arguments", "named"),
  [
    ({"batch_size": "auto"}, "--batch auto"),
    ({"max_length": 9999}, "--max-length 9999"),
    ({"device_map": "auto"}, "device_map"),
    ({"mask": "nowhere.json"}, "nowhere.json"),
  ],
)
def test_bad_input_is_named(folder, arguments, named):
  with pytest.raises(InputError, match=named):
    HybridLM(str(folder), **arguments)


def test_the_command_prints_and_writes_what_lm_eval_found(folder, mask, tasks, tmp_path, capsys):
  out = tmp_path / "results.json"
  arguments = ["lm-eval", "--model", str(folder), "--include", str(tasks[0]), "--tasks", "choice"]
  assert cli.main([*arguments, "--mask", str(mask), "--limit", "4", "--out", str(out)]) == 0
  assert "choice" in (printed := capsys.readouterr().out) and "acc" in printed
  record = json.loads(out.read_text())
  assert len(record["samples"]["choice"]) == 4
  assert cli.main([*arguments, "--tasks", "nothing_like_this"]) == 2
  err = capsys.readouterr().err
  assert "--tasks nothing_like_this" in err


@pytest.mark.parametrize(
  ("flags", "named"),
  [
    ("", "--tasks"),
    ("--tasks choice --batch 0", "--batch 0"),
    ("--tasks choice --window 5", "--window 5"),
    ("--tasks choice --include nowhere", "--include nowhere"),
    ("--tasks choice --metadata [1]", "--metadata [1]"),
    ("--tasks choice --out nowhere/x.json", "--out nowhere/x.json"),
  ],
)
def test_bad_flags_are_one_sentence(flags, named, capsys):
  assert cli.main(["lm-eval", *flags.split()]) == 2
  assert named in (err := capsys.readouterr().err) and len(err.splitlines()) == 1


def test_without_lm_eval_the_remedy_is_named(monkeypatch, capsys):
  for name in [n for n in sys.modules if n.partition(".")[0] == "lm_eval"]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  monkeypatch.delitem(sys.modules, "bosch_jax.integrations.lm_eval")
  assert cli.main(["lm-eval", "--tasks", "gsm8k"]) == 2
  assert "pip install -r requirements-eval.txt" in capsys.readouterr().err
