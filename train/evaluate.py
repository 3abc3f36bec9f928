"""Held-out loss of text and of retrieval, with the windows that are trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer import Transformer
from train.data.packing import PackedRows, Row, blank
from train.data.retrieval import Retrieval
from train.loss import chunked_loss
from train.step import cast, head, normed_hidden
from train.subset import join


class HeldOut:
  """The held-out rows and questions, cut into batches of one size.

  Args:
    text: held-out rows.
    retrieval: makes held-out questions.
    rows, contexts: how many of each, at most.
    batch: rows of a batch.
    place: puts a tree of host arrays `[1, batch, ...]`, the same on every process, on the devices.
  """

  def __init__(self, text: PackedRows, retrieval: Retrieval, rows, contexts, batch, place):
    picked = np.linspace(0, len(text) - 1, min(rows, len(text))).astype(int)
    self._text = [
      place(Row(*(np.stack(x)[None] for x in zip(*group, strict=True))))
      for group in _groups([text[i] for i in picked], batch, blank(len(text[0].tokens)))
    ]
    made = retrieval.questions(contexts)
    names = ("tokens", "positions", "segments", "answer", "target", "valid")
    sizes = ("BxT", "BxT", "BxT", "BxQxA", "BxQxA", "BxQxA")
    arrays = [getattr(made, f"{name}_{size}") for name, size in zip(names, sizes, strict=True)]
    questions = [tuple(array[b] for array in arrays) for b in range(len(arrays[0]))]
    padding = tuple(np.zeros_like(x) for x in questions[0])
    self._questions = [
      place(tuple(np.stack(x)[None] for x in zip(*group, strict=True)))
      for group in _groups(questions, batch, padding)
    ]
    self._count = len(questions) * arrays[3].shape[1]

  def __call__(self, model: Transformer, trained: dict, frozen: dict, chunk: int, dtype) -> dict:
    """Means, as plain numbers: text_nll (nats per token), retrieval_nll (nats per answer token,
    mean over questions), retrieval_exact (share of questions answered whole by greedy decoding)."""
    nll = tokens = 0.0
    for batch in self._text:
      part = _text_sums(model, chunk, dtype, trained, frozen, batch)
      nll, tokens = nll + float(part[0]), tokens + float(part[1])
    question_nll = exact = 0.0
    for batch in self._questions:
      part = _question_sums(model, dtype, trained, frozen, batch)
      question_nll, exact = question_nll + float(part[0]), exact + float(part[1])
    return {
      "text_nll": nll / tokens,
      "retrieval_nll": question_nll / self._count,
      "retrieval_exact": exact / self._count,
    }


def _groups(items: list, size: int, padding) -> list[list]:
  """Items in groups of one size, the last one filled with padding."""
  items = items + [padding] * (-len(items) % size)
  return [items[i : i + size] for i in range(0, len(items), size)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _text_sums(model, chunk, dtype, trained, frozen, batch):
  batch = jax.tree.map(lambda x: x[0], batch)
  params = join(cast(trained, dtype), cast(frozen, dtype))
  x = normed_hidden(model, params, batch)
  sums = chunked_loss(x, head(model.config, params), batch.targets, batch.weights, chunk=chunk)
  return sums.nll, batch.weights.sum()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _question_sums(model, dtype, trained, frozen, batch):
  tokens, positions, segments, answer, target, valid = jax.tree.map(lambda x: x[0], batch)
  params = join(cast(trained, dtype), cast(frozen, dtype))
  x_BxTxD = normed_hidden(model, params, Row(tokens, None, None, positions, segments))
  B, Q, A = answer.shape
  picked = jnp.take_along_axis(x_BxTxD, answer.reshape(B, Q * A)[:, :, None], axis=1)
  picked = picked.reshape(B * Q * A, -1)
  logits = head(model.config, params).logits(picked).reshape(B, Q, A, -1)
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)[..., 0]
  asked = valid.any(-1)
  nll = jnp.where(valid, losses, 0.0).sum(-1) / jnp.maximum(valid.sum(-1), 1)
  whole = ((logits.argmax(-1) == target) | ~valid).all(-1) & asked
  return nll.sum(), whole.sum()
