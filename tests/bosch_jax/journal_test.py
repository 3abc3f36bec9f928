import json

import numpy as np
import pytest

from bosch_jax.journal import Journal, mask_key
from models.errors import InputError


def line(mask):
  return {"mask": mask, "contexts": [0], "nll": [[0.5]], "exact": [[1]], "cost": 1.0}


@pytest.mark.parametrize(
  "bad",
  [
    b"5",
    b"[]",
    b"{}",
    b"null",
    b"\xff\xfe",
    b'{"mask": "00", "contexts": [0], "nll": [], "exact": []}',
  ],
)
def test_a_damaged_line_with_lines_behind_it_is_refused(tmp_path, bad):
  path = tmp_path / "journal.jsonl"
  journal = Journal(path, {"seed": 1})
  journal.append([line("00"), line("01")])
  journal.close()
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b"".join([*lines[:2], bad + b"\n", *lines[2:]]))
  with pytest.raises(InputError, match="line 3 is damaged"):
    Journal(path, {"seed": 1}, resume=True)


def test_lines_come_back_after_a_resume(tmp_path):
  path = tmp_path / "journal.jsonl"
  journal = Journal(path, {"seed": 1})
  journal.append([line("00"), line("01")])
  journal.close()
  journal = Journal(path, {"seed": 1}, resume=True)
  assert [entry["mask"] for entry in journal.lines] == ["00", "01"]
  journal.append([line("02")])
  journal.close()
  assert [json.loads(text).get("mask") for text in path.read_text().splitlines()] == [
    None,
    "00",
    "01",
    "02",
  ]


@pytest.mark.parametrize("keep", range(1, 13))
def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path, keep):
  path = tmp_path / "journal.jsonl"
  journal = Journal(path, {"seed": 1})
  journal.append([line("00")])
  journal.close()
  whole = path.read_bytes()
  last = (json.dumps(line("01")) + "\n").encode()
  path.write_bytes(whole + last[: keep * len(last) // 13])
  journal = Journal(path, {"seed": 1}, resume=True)
  assert [entry["mask"] for entry in journal.lines] == ["00"]
  journal.append([line("01")])
  journal.close()
  assert path.read_bytes() == whole + last


def test_a_torn_header_starts_over(tmp_path):
  path = tmp_path / "journal.jsonl"
  path.write_bytes(b'{"format": "bosch')
  Journal(path, {"seed": 1}, resume=True).close()
  assert json.loads(path.read_text())["seed"] == 1


def test_another_configuration_is_refused_by_name(tmp_path):
  path = tmp_path / "journal.jsonl"
  Journal(path, {"seed": 1, "window": 32}).close()
  with pytest.raises(InputError, match="window 64: the run there was made with 32"):
    Journal(path, {"seed": 1, "window": 64}, resume=True)
  with pytest.raises(InputError, match="window"):
    Journal(path, {"seed": 1}, resume=True)


def test_without_resume_an_old_journal_is_replaced(tmp_path):
  path = tmp_path / "journal.jsonl"
  journal = Journal(path, {"seed": 1})
  journal.append([line("00")])
  journal.close()
  assert Journal(path, {"seed": 2}).lines == []


def test_keys_differ_for_different_masks():
  masks = [np.array([[a, b, c]], bool) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
  assert len({mask_key(mask) for mask in masks}) == 8
