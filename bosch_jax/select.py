"""`python run.py select`: calibration prompts, search, held-out table, run folder."""

import dataclasses
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console

from bosch_jax import report
from bosch_jax.evaluator import Evaluator, Scores
from bosch_jax.journal import Journal
from bosch_jax.niah import make_niah
from bosch_jax.progress import SearchProgress
from bosch_jax.runs import open_run
from bosch_jax.search import run_stages
from bosch_jax.settings import SelectSettings
from models import registry
from models.windows import HeadMask, num_local_for, write_json


def select(settings: SelectSettings) -> dict:
  """Runs a selection and writes its folder.

  Args:
    settings: what `python run.py select` was given.

  Returns:
    The content of result.json.

  Raises:
    InputError: anything a user can put right.
  """
  started = time.time(), time.process_time()
  console = Console(stderr=True)
  config = registry.load_config(settings.model)
  settings.check_model(config)
  folder = open_run(settings)
  with folder:
    loaded = registry.load(settings.model)
    calibration, held_out = prompts(loaded.tokenizer, settings)
    header = {
      "model": loaded.name,
      "fingerprint": config.fingerprint,
      "prompts": calibration.digest,
      **settings.search_facts(),
    }
    journal = Journal(folder.path / "journal.jsonl", header, settings.resume)
    with SearchProgress(console, settings.budget) as progress:
      evaluator = Evaluator(
        config, loaded.params, calibration, settings.window,
        sinks=settings.sinks, journal=journal, progress=progress.update,
      )
      found = run_stages(evaluator, settings)
      progress.note("held-out prompts")
      table, held_out_cost = held_out_scores(loaded, held_out, settings, found.mask)
    journal.close()
    result = {
      "model": loaded.name,
      "fingerprint": config.fingerprint,
      "method": settings.method,
      "score": settings.score,
      "seed": settings.seed,
      "ratio": found.mask.ratio,
      "target_ratio": settings.ratio,
      "num_local": found.mask.num_local,
      "num_groups": config.total_groups,
      "window": settings.window,
      "sinks": settings.sinks,
      "context": settings.context,
      "task": settings.task,
      "haystack": settings.haystack,
      "anchors": {"full": found.anchors.full, "all_local": found.anchors.all_local},
      "stages": found.stages,
      "layers": found.layers,
      "held_out": table,
      "cost": {
        "full_forward_equivalents": evaluator.cost,
        "held_out_forward_equivalents": held_out_cost,
        "masks_scored": evaluator.masks_scored,
        "cpu_seconds": time.process_time() - started[1],
        "wall_seconds": time.time() - started[0],
        "peak_memory_bytes": peak_memory(),
      },
      "kv": kv_facts(config, found.mask, settings),
    }
    write_outputs(folder.path, config, found, result)
  console_out = Console()
  console_out.print(report.terminal_table(result))
  console_out.print(f"written to {folder.path}/ (mask.json, report.md, mask.png, result.json)", soft_wrap=True)
  return result
