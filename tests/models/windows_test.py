import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models.config import ModelConfig
from models.errors import InputError
from models.windows import FULL, HeadMask, num_local_for

CONFIG = ModelConfig(50, 3, 32, 4, 2, 8, 64, 128)
MASKS = hnp.arrays(bool, (3, 2))


def test_windows_of_a_mask_written_out():
  mask = HeadMask([[1, 0], [0, 0], [1, 1]])
  expected = [[5, 5, FULL, FULL], [FULL] * 4, [5] * 4]
  windows = mask.windows(5, num_heads=4)
  assert windows.dtype == np.int32
  np.testing.assert_array_equal(windows, expected)


@pytest.mark.parametrize(
  ("ratio", "total", "expected"),
  [
    (0.5, 90, 45),
    (0.75, 90, 68),
    (0.875, 90, 79),
    (0.5, 3, 2),
    (0.0, 90, 0),
    (1.0, 90, 90),
    (0.25, 90, 23),
    (0.35, 90, 32),
    (0.15, 90, 14),
  ],
)
def test_number_of_local_groups_rounds_half_up(ratio, total, expected):
  assert num_local_for(ratio, total) == expected


@given(MASKS, MASKS)
def test_distances_are_symmetric_and_zero_on_equal_masks(a, b):
  a, b = HeadMask(a), HeadMask(b)
  for distance in (HeadMask.jaccard, HeadMask.turnover):
    assert distance(a, b) == pytest.approx(distance(b, a))
    assert 0 <= distance(a, b) <= 1
    assert distance(a, a) == pytest.approx(0)


def test_distances_by_hand():
  a, b = HeadMask([[1, 1], [0, 0]]), HeadMask([[1, 0], [1, 1]])
  assert a.jaccard(b) == pytest.approx(1 - 1 / 4)
  assert a.turnover(b) == pytest.approx(1 - 1 / np.sqrt(6))


@given(MASKS, st.integers(1, 200), st.integers(0, 4))
def test_kv_bytes_count_every_group(local, tokens, sinks):
  mask, window = HeadMask(local), 16
  per_group = 2 * CONFIG.head_dim * 2
  by_hand = sum(
    per_group * (min(tokens, window + sinks) if bit else tokens) for bit in local.ravel()
  )
  assert mask.kv_bytes(CONFIG, tokens, window, sinks) == by_hand
  assert HeadMask.full(CONFIG).kv_bytes(CONFIG, tokens, window) == CONFIG.kv_bytes(tokens)


@given(MASKS)
def test_saved_and_loaded_masks_are_equal(local):
  import tempfile

  with tempfile.TemporaryDirectory() as folder:
    HeadMask(local).save(f"{folder}/mask.json", CONFIG, model="tiny", window=5)
    mask, record = HeadMask.load(f"{folder}/mask.json", CONFIG)
  assert mask == HeadMask(local) and hash(mask) == hash(HeadMask(local))
  assert record["format"] == "bosch-mask/1" and record["window"] == 5
  assert (record["layers"], record["groups"], record["heads"]) == (3, 2, 4)


def test_a_mask_cannot_be_changed():
  with pytest.raises(ValueError, match="read-only"):
    HeadMask.full(CONFIG).local[0, 0] = True


def test_a_mask_of_another_model_is_refused_by_name(tmp_path):
  HeadMask.full(CONFIG).save(tmp_path / "mask.json", CONFIG, model="tiny")
  other = ModelConfig(50, 3, 32, 4, 2, 8, 64, 128, rope_theta=5000.0)
  with pytest.raises(InputError, match="was made for tiny"):
    HeadMask.load(tmp_path / "mask.json", other)


@pytest.mark.parametrize(
  "change",
  [
    lambda r: r.update(format="x"),
    lambda r: r.update(swa=[[1, 0]]),
    lambda r: r.update(swa=[[2, 0]] * 3),
    lambda r: r.update(swa=[["a", 0]] * 3),
    lambda r: r.pop("swa"),
    lambda r: r.update(swa=[[1], [1, 0], [1, 1]]),
  ],
)
def test_a_broken_mask_file_is_one_sentence(tmp_path, change):
  path = tmp_path / "mask.json"
  HeadMask.full(CONFIG).save(path, CONFIG, model="tiny")
  record = json.loads(path.read_text())
  change(record)
  path.write_text(json.dumps(record))
  with pytest.raises(InputError, match="mask"):
    HeadMask.load(path, CONFIG)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_file_that_is_no_mask_is_one_sentence(tmp_path, text):
  path = tmp_path / "mask.json"
  path.write_text(text)
  with pytest.raises(InputError):
    HeadMask.load(path, CONFIG)
  with pytest.raises(InputError, match="cannot be read"):
    HeadMask.load(tmp_path / "none.json", CONFIG)
