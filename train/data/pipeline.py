"""Batches in an order that only the seed decides, each process its share, resumable by number.

Row r of batch n is the same whatever the number of processes: process p of P takes every P-th row
from the p-th on. So the position of a run in its data is one number, the batches taken so far.
"""

import grain

from train.data.packing import PackedRows, Row
from train.data.retrieval import RetrievalRows


def batches(
  text: PackedRows,
  retrieval: RetrievalRows | None,
  *,
  share: float,
  rows: int,
  seed: int,
  start: int = 0,
  process: int = 0,
  processes: int = 1,
):
  """An endless iterator of batches.

  Args:
    text: rows of text, reshuffled every epoch over the whole corpus.
    retrieval: rows of retrieval text, or None.
    share: of retrieval rows, from 0 to 1.
    rows: of a batch, over all processes, which must divide it.
    seed: of the order.
    start: batches to skip, at no cost.
    process, processes: which share of every batch is wanted.

  Returns:
    A grain iterator of `Row` with arrays `[rows / processes, T]`; `get_state()["next_index"]` is the
    number of batches taken, `start` included.
  """
  mixed = []
  if share < 1:
    mixed.append((grain.MapDataset.source(text).seed(seed).shuffle().repeat(), 1 - share))
  if share > 0:
    mixed.append((grain.MapDataset.source(retrieval), share))
  sets, weights = zip(*mixed, strict=True)
  data = grain.MapDataset.mix(sets, weights=weights) if len(sets) > 1 else sets[0]
  data = data[process::processes].batch(rows // processes)
  # One thread ahead of the step is enough: rows are cheap, and the order stays exact.
  iterator = iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
  iterator.set_state({"next_index": start})
  return iterator


def position(iterator) -> int:
  """Batches taken so far."""
  return int(iterator.get_state()["next_index"])


__all__ = ["Row", "batches", "position"]
