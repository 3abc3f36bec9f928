"""`python run.py cpt`: the loop, from a claimed folder to a trained model."""

import contextlib
import math
import signal
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table

from models.errors import InputError
from models.export import save_folder
from models.hybridize import dehybridize
from models.windows import write_json
from train import run_folder
from train.checkpoints import Checkpoints
from train.data.pipeline import position
from train.flops import peak_flops, step_flops
from train.hosts import barrier, connect, first
from train.progress import TrainProgress, draw_curve, event_writer
from train.settings import CptSettings
from train.setup import Run, set_up
from train.subset import join


def main(settings: CptSettings, make_retrieval: Callable) -> dict:
  """Runs, or goes on with, a continual pretraining.

  Args:
    settings: what `python run.py cpt` was given.
    make_retrieval: see `train.setup.set_up`.

  Returns:
    The content of result.json; of a run that was stopped, what it has so far.

  Raises:
    InputError: whatever a user can put right, and a loss that is no number any more.
  """
  folder, console = settings.folder, Console(stderr=True)
  if settings.hosts.process == 0:
    run_folder.check(folder, settings)
    if settings.export is not None and (settings.export / "config.json").exists():
      raise InputError("--export", settings.export, "holds a model already; give another folder")
  connect(settings.hosts)
  notice = _notice(console)
  try:
    run = set_up(settings, make_retrieval, notice)
    events = event_writer(folder / "tensorboard") if settings.tensorboard and first() else None
    # Only now is anything written: whatever model, mask or data refuse leaves no trace.
    lock = run_folder.claim(folder, settings) if first() else contextlib.nullcontext()
    barrier("folder claimed")
    with lock, _Stop() as stop:
      return _run(run, folder, stop, events, console)
  except NotImplementedError as error:  # attention that a backend cannot express
    raise InputError("--mask", settings.mask, f"cannot be trained here: {error}") from None


def _run(run: Run, folder, stop: "_Stop", events, console: Console) -> dict:
  s = run.settings
  checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS, run.identity, s.keep)
  start = checkpoints.latest() or 0
  baseline = run.evaluate(full=True) if not start and run.windows != run.full_windows else None
  if start:
    run.saved, taken = checkpoints.restore(run.layout)
    console.print(f"resumed at update {start}", highlight=False)
  else:
    taken = 0
  data = run.batches(taken)
  record = _Record(run, folder, start, events)
  if not start:
    if baseline:
      record.evaluation(0, baseline, model="full")
    record.evaluation(0, run.evaluate())
  dtype = "bfloat16" if jax.default_backend() != "cpu" else s.dtype
  peak = jax.device_count() * peak_flops(jax.local_devices()[0], dtype)
  work = s.accumulate * step_flops(
    run.config, run.windows, s.batch, s.sequence, run.full_windows if s.distill else None
  )
  progress = TrainProgress(console, s.steps, start, s.rows * s.sequence, work / peak)
  done, pending, before = start, None, time.perf_counter()

  def flush():
    """Fetches the metrics of the update before, while the next one runs."""
    nonlocal pending, before
    if pending is None:
      return
    step, metrics = pending
    pending = None
    values = {name: float(value) for name, value in metrics.items()}
    seconds, before = time.perf_counter() - before, time.perf_counter()
    _check_finite(step, values, checkpoints)
    record.update(
      step, values | {"seconds": seconds} | progress.update(step, values["loss"], seconds)
    )

  with progress:
    while done < s.steps and not stop.asked():
      run.state, metrics = run.step(run.state, run.place(next(data)))
      done += 1
      flush()
      pending = done, metrics
      last = done == s.steps
      if last or done % s.eval_every == 0 or done % s.save_every == 0:
        flush()
        if last or done % s.eval_every == 0:
          record.evaluation(done, values := run.evaluate())
          progress.note(f"cpt {done}: " + "  ".join(f"{k} {v:.4f}" for k, v in values.items()))
        checkpoints.save(done, lambda: run.saved, position(data), record.best_by())
        before = time.perf_counter()
    flush()
    if done < s.steps:
      checkpoints.save(done, lambda: run.saved, position(data), record.best_by())
  checkpoints.close()
  return _finish(run, folder, record, done, console)


def _finish(run: Run, folder, record: "_Record", done: int, console: Console) -> dict:
  s = run.settings
  record.close()
  result = record.result(done)
  finished = done == s.steps
  if finished and s.export is not None:
    export(run, s.export)
  if not first():
    return result
  write_json(folder / "result.json", result)
  if run.choice.mask.num_local:
    facts = {"model": run.loaded.name, "window": run.choice.window, "sinks": run.choice.sinks}
    run.choice.mask.save(folder / "mask.json", run.config, **facts)
  draw_curve(folder / "curve.png", record.records, f"{run.loaded.name}, {s.mask}")
  if not finished:
    console.print(
      f"stopped at update {done} of {s.steps}, saved: the same command with --resume goes on",
      highlight=False, soft_wrap=True,
    )  # fmt: skip
    return result
  out = Console()
  out.print(_table(result))
  out.print(f"written to {folder}/", soft_wrap=True, highlight=False, markup=False)
  return result


def export(run: Run, folder) -> None:
  """Writes the trained model as a Hugging Face folder, groups in the checkpoint's own order."""
  params = join(run.saved.trained, run.frozen)
  if jax.process_count() > 1:
    params = multihost_utils.process_allgather(params, tiled=True)
  if first():
    params = dehybridize(jax.device_get(params), run.order, run.config)
    folder = save_folder(folder, run.config, params, run.loaded.tokenizer)
    facts = {"model": run.loaded.name, "window": run.choice.window, "sinks": run.choice.sinks}
    run.choice.mask.save(folder / "mask.json", run.config, **facts)


def _check_finite(step: int, values: dict, checkpoints: Checkpoints) -> None:
  if all(math.isfinite(v) for v in values.values()):
    return
  checkpoints.close()
  good = checkpoints.latest()
  kept = "no checkpoint was saved before" if good is None else f"the last good checkpoint is {good}"
  raise InputError(
    f"update {step}: loss",
    values["loss"],
    f"is not finite (gradient norm {values['grad_norm']:g}); {kept}; start again with a lower --lr",
  )


class _Record:
  """metrics.jsonl and TensorBoard events, and what becomes of them."""

  def __init__(self, run: Run, folder, start: int, events):
    self._run, self._events, self._began = run, events, (time.monotonic(), time.process_time())
    # Without a checkpoint everything is made again, the evaluation before the first update too.
    since = start or -1
    self._metrics = run_folder.Metrics(folder / run_folder.METRICS, since) if first() else None
    self.records: list[dict] = self._metrics.records if self._metrics else []
    self._latest = self._evaluations()[-1] if self._evaluations() else None

  def update(self, step: int, values: dict) -> None:
    self._write({"step": step, **values})

  def evaluation(self, step: int, values: dict, **facts) -> None:
    self._write({"step": step, **facts, **values})
    if not facts:
      self._latest = values

  def best_by(self) -> float | None:
    """What checkpoints are ranked by: the last held-out loss of what is trained."""
    name = "retrieval_nll" if self._run.settings.retrieval else "text_nll"
    return self._latest and self._latest[name]

  def close(self) -> None:
    if self._metrics:
      self._metrics.close()
    if self._events:
      self._events.close()

  def result(self, done: int) -> dict:
    run, s = self._run, self._run.settings
    points = [r for r in self.records if r.get("model") == "full"]
    own = self._evaluations()
    seconds = sorted(r["seconds"] for r in self.records if "loss" in r)
    return {
      "model": run.loaded.name, "fingerprint": run.config.fingerprint, "mask": s.mask,
      "num_local": run.choice.mask.num_local, "num_groups": run.config.total_groups,
      "window": run.choice.window, "updates": done, "of": s.steps,
      "tokens": done * s.rows * s.sequence,
      "full": points[0] if points else None, "before": own[0] if own else None,
      "after": own[-1] if own else None,
      "seconds_per_update": seconds[len(seconds) // 2] if seconds else None,
      "wall_seconds": time.monotonic() - self._began[0],
      "cpu_seconds": time.process_time() - self._began[1],
    }  # fmt: skip

  def _evaluations(self) -> list[dict]:
    return [r for r in self.records if "text_nll" in r and r.get("model") != "full"]

  def _write(self, record: dict) -> None:
    if self._metrics:
      self._metrics.write(record)
    if self._events:
      for name, value in record.items():
        if name != "step" and isinstance(value, float) and record.get("model") != "full":
          self._events.add_scalar(name, value, record["step"])


def _table(result: dict) -> Table:
  table = Table(
    title=f"{result['model']}: {result['num_local']} of {result['num_groups']} head groups local, "
    f"{result['updates']} updates, {result['tokens'] / 1e6:.2f} million tokens"
  )
  for i, name in enumerate(("", "retrieval NLL", "answered whole", "text NLL")):
    table.add_column(name, justify="right" if i else "left")
  for name, label in (
    ("full", "full attention, untrained"),
    ("before", "hybrid, before"),
    ("after", "hybrid, after"),
  ):
    if row := result[name]:
      table.add_row(
        label, f"{row['retrieval_nll']:.3f}", f"{row['retrieval_exact']:.2f}", f"{row['text_nll']:.3f}"
      )  # fmt: skip
  return table


class _Stop:
  """SIGTERM and Ctrl-C end the loop behind the update that runs; a run is then saved and done."""

  def __enter__(self) -> "_Stop":
    self._asked = False
    self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number, frame) -> None:
    self._asked = True

  def asked(self) -> bool:
    """Whether any process was told to stop; all of them get the same answer."""
    if jax.process_count() == 1:
      return self._asked
    return bool(multihost_utils.process_allgather(jax.numpy.array(self._asked)).any())


def _notice(console: Console) -> Callable[[str], None]:
  return lambda text: console.print(text, highlight=False) if first() else None
