"""The benchmark runs, measures what it says, and leaves its files."""

import json

import pytest

from benchmarks.attention import Options, main, window_row
from benchmarks.gpu_attention import layouts
from models.windows import FULL


@pytest.mark.slow
def test_small_run(tmp_path):
  options = Options(
    lengths=(160, 192),
    ratios=(0.5,),
    heads=4,
    groups=2,
    head_dim=16,
    window=16,
    repeats=1,
    backward=False,
    dense_tokens=160,
    out=str(tmp_path),
  )
  records = main(options)
  saved = json.loads((tmp_path / "attention.json").read_text())
  assert saved["records"] == records and saved["options"]["window"] == 16
  assert (tmp_path / "attention.png").stat().st_size > 10_000
  names = {r["contender"] for r in records if r["tokens"] == 160}
  assert {"static", "runtime", "dense masked", "jax.nn"} <= names
  # Beyond `dense_tokens` nothing with a T x T array runs, so there is no speed-up to report.
  assert {r["contender"] for r in records if r["tokens"] == 192} == {"static", "runtime"}
  assert all((r["speedup"] is not None) == (r["tokens"] == 160) for r in records)


def test_window_row():
  assert window_row(Options(heads=4, groups=2, window=9), 0.5) == (FULL, FULL, 9, 9)


def test_gpu_layouts_fill_their_rows():
  for _, places in layouts(1000):
    for name in ("positions_BxT", "segments_BxT"):
      assert name not in places or places[name].shape == (1, 1000)
