"""README.md of an exported model: what it is, how to load it, and only figures that were measured."""

import json
import pathlib
from typing import NamedTuple

from bosch_jax.report import human_bytes, with_error
from models.config import ModelConfig
from models.windows import HeadMask

_ROWS = (("full", "full attention"), ("all_local", "every group local"), ("mask", "this mask"))


class Facts(NamedTuple):
  """What a card is written from.

  Attributes:
    config, mask: the model and its mask.
    record: content of mask.json.
    result: content of the run's result.json, or None.
    native: the folder needs no custom code.
  """

  config: ModelConfig
  mask: HeadMask
  record: dict
  result: dict | None
  native: bool


def result_beside(mask_path: pathlib.Path, record: dict) -> dict | None:
  """result.json of the run that wrote a mask; None where there is none, or one of another mask."""
  try:
    result = json.loads((mask_path.parent / "result.json").read_text("utf-8"))
  except (OSError, ValueError):
    return None
  same = ("fingerprint", "method", "seed", "window", "sinks", "ratio", "target_ratio")
  if not isinstance(result, dict) or any(result.get(k) != record.get(k) for k in same):
    return None
  return result


def markdown(facts: Facts, bytes_per_number: int, checkpoint: pathlib.Path | None = None) -> str:
  """The card.

  Args:
    facts: what is known.
    bytes_per_number: of the weights, which the cache has too.
    checkpoint: the weights are from here, and not those that the figures were measured on.
  """
  c, mask, record = facts.config, facts.mask, facts.record
  window, sinks = record["window"], record["sinks"]
  name = record.get("model") or "a language model"
  sees = f"the last {window} tokens" + (f" and the first {sinks}" if sinks else "")
  trust = "" if facts.native else ", trust_remote_code=True"
  lines = [
    "---",
    "library_name: transformers",
    "pipeline_tag: text-generation",
    "---",
    "",
    f"# {name}, head-level hybrid",
    "",
    f"{mask.num_local} of {c.total_groups} key/value head groups of {name} see only {sees}; the others keep the"
    " whole context. mask.json says which.",
    "",
    "## Use",
    "",
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'folder = "."  # this one',
    "tokenizer = AutoTokenizer.from_pretrained(folder)",
    f"model = AutoModelForCausalLM.from_pretrained(folder{trust})",
    'inputs = tokenizer("The capital of France is", return_tensors="pt")',
    "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
    "```",
    "",
  ]
  if facts.native:
    lines += ["No custom code: config.json says it in the family's own fields."]
  else:
    lines += [
      "modeling_bosch.py and hybrid_cache.py replace attention and cache; they need torch and transformers 5.24 or newer. The cache"
      " keeps every token of full groups, and of local groups what they see.",
    ]
  lines += ["", *_cache(c, mask, window, sinks, bytes_per_number), *_scores(facts, checkpoint)]
  return "\n".join(lines)


def _cache(c: ModelConfig, mask: HeadMask, window: int, sinks: int, size: int) -> list[str]:
  full = c.kv_bytes(c.context, size)
  hybrid = mask.kv_bytes(c, c.context, window, sinks) * size // 2  # kv_bytes reckons two bytes
  return [
    "## Key/value cache",
    "",
    f"At {c.context} tokens: {human_bytes(hybrid)} instead of {human_bytes(full)} ({hybrid / full:.0%}), computed"
    " from the mask and the number format of the weights.",
    "",
  ]


def _scores(facts: Facts, checkpoint: pathlib.Path | None) -> list[str]:
  """The table of held-out scores; nothing where the mask has none."""
  scores, result = facts.record.get("scores"), facts.result
  usable = isinstance(scores, dict) and [
    (title, scores[key])
    for key, title in _ROWS
    if isinstance(scores.get(key), dict) and "nll" in scores[key] and "exact_match" in scores[key]
  ]
  if not usable:
    return []
  lines = ["## Held-out questions", "", "| | answer NLL | exact match |", "|---|---|---|"]
  lines += [
    f"| {title} | {with_error(s['nll'], s.get('nll_se'), 3)} |"
    f" {with_error(s['exact_match'], s.get('exact_match_se'), 2)} |"
    for title, s in usable
  ]
  about = ""
  if result is not None:
    about = (
      f" ({result['task']} needles in {result['haystack']}, {result['context']} tokens,"
      f" {result['held_out']['mask']['n']} questions)"
    )
  lines += [
    "",
    f"Needles in a haystack the search never saw{about}. NLL is in nats per answer token, lower is better; ± is one"
    " standard error over contexts."
    + (
      " Measured on the model the mask was searched on, not on the weights in this folder, which come from a"
      " later checkpoint."
      if checkpoint is not None
      else ""
    ),
    "",
  ]
  if method := facts.record.get("method"):
    lines += [f"The mask was found by {method}, seed {facts.record.get('seed')}.", ""]
  return lines
