"""How the search engine's throughput grows with devices, as far as one machine's cores can show.

    python -m benchmarks.scaling

Every contender is a process of its own, held to so many cores and so many devices, and scores the
same masks on the real model; each takes several turns, and its fastest counts. Threads of one core
cannot help each other, so `1 core` is one device with one thread, and a mesh of N fake devices on
N cores is N such devices.
"""

import dataclasses
import json
import os
import subprocess
import sys

import tyro

CONTENDERS = {  # name -> cores, devices, pairs side by side
  "1 core, 1 device": (1, 1, 1),
  "{n} cores, 1 device, one pair at a time": (0, 1, 1),
  "{n} cores, 1 device (the default)": (0, 1, 0),
  "{n} cores, mesh data={n}": (0, 0, 1),
}


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    model: as in `python run.py select`.
    context, window: of the prompts.
    masks: scored in a turn, from the lowest layer.
    turns: the fastest counts.
    contender: measure this one alone, in this process: cores, devices, pairs side by side.
  """

  model: str = "smollm2-135m"
  context: int = 256
  window: int = 32
  masks: int = 2
  turns: int = 3
  contender: tuple[int, int, int] | None = None


def measure(options: Options, cores: int, devices: int, workers: int) -> list[float]:
  """Wall seconds of each turn."""
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  # Only now, so that the runtime counts these cores and devices.
  import time

  import numpy as np

  from bosch_jax import devices as devices_lib
  from bosch_jax.device_options import DeviceOptions
  from bosch_jax.evaluator import Evaluator
  from bosch_jax.select import calibration_prompts
  from bosch_jax.settings import SelectSettings
  from models import registry

  settings = SelectSettings(
    model=options.model, context=options.context, window=options.window, samples=4
  )
  loaded = registry.load(settings.model)
  mesh = devices_lib.start(DeviceOptions(mesh=f"data={devices}")) if devices > 1 else None
  evaluator = Evaluator(
    loaded.config, loaded.params, calibration_prompts(loaded.tokenizer, settings)[0],
    settings.window, mesh=mesh, workers=workers or None,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  shape = loaded.config.num_layers, loaded.config.num_groups

  def turn() -> float:
    masks = rng.random((options.masks, *shape)) < 0.5
    masks[:, 0] = True  # they differ from the base in the lowest layer: whole passes
    start = time.perf_counter()
    evaluator.score(list(masks))
    return time.perf_counter() - start

  turn()  # compiles
  return [turn() for _ in range(options.turns)]


def main(options: Options) -> None:
  """Prints seconds of all contenders and how many times faster than one core they are."""
  if options.contender is not None:
    print(json.dumps(measure(options, *options.contender)))
    return
  there = len(os.sched_getaffinity(0))
  seconds = {}
  for name, (cores, devices, workers) in CONTENDERS.items():
    command = [sys.executable, "-m", "benchmarks.scaling"]
    for field in ("model", "context", "window", "masks", "turns"):
      command += [f"--{field}", str(getattr(options, field))]
    command += ["--contender", str(cores or there), str(devices or there), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds[name.format(n=there)] = min(json.loads(done.stdout.splitlines()[-1]))
  one = next(iter(seconds.values()))
  for name, spent in seconds.items():
    print(f"{name:44s} {spent:7.2f} s  {one / spent:.2f}x")


if __name__ == "__main__":
  main(tyro.cli(Options))
