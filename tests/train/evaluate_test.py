"""Held-out losses against the search's own evaluator and the plain model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bosch_jax.evaluator import Evaluator
from models.hybridize import hybridize, static_windows
from models.transformer import Transformer
from models.windows import HeadMask
from tests.bosch_jax.tiny import CONFIG, random_masks, tiny_params, tiny_prompts
from tests.train.corpus import number_corpus
from train import partition, subset
from train.data.packing import PackedRows
from train.data.tokens import Corpus
from train.evaluate import HeldOut
from train.setup import put
from train.step import make_model

WINDOW = 5


class Prompts:
  """Held-out questions of the search's tests."""

  def questions(self, samples):
    return tiny_prompts(samples)


def corpus() -> Corpus:
  made = number_corpus([20, 31, 9], held_out=[0, 2])
  return Corpus(made.tokens_N % CONFIG.vocab_size, made.bounds_D1, made.held_out_D, "small")


@pytest.mark.parametrize("devices", [1, 2])
def test_both_losses_are_those_of_the_plain_model(devices):
  mesh = partition.make_mesh(1, devices, 1, jax.devices()[:devices])
  mask = HeadMask(random_masks(1)[0])
  hybrid = hybridize(tiny_params(), mask, CONFIG)
  windows = static_windows(hybrid.full_groups, WINDOW, CONFIG)
  rows = PackedRows(corpus(), 12, held_out=True)
  place = functools.partial(jax.tree.map, functools.partial(put, mesh))
  held_out = HeldOut(rows, Prompts(), 10, 3, 2, place)
  model = make_model(CONFIG, windows, mesh=mesh, packed=False)
  trained, frozen = subset.split(hybrid.params, "all")
  found = held_out(model, trained, frozen, 8, jnp.float32)

  scores = Evaluator(CONFIG, tiny_params(), tiny_prompts(3), WINDOW).score([mask.local])
  np.testing.assert_allclose(found["retrieval_nll"], scores.nll.mean(), rtol=1e-4)
  np.testing.assert_allclose(found["retrieval_exact"], scores.exact.mean())

  runtime = jnp.asarray(mask.windows(WINDOW, CONFIG.num_heads))
  total = count = 0
  for i in range(len(rows)):
    row = jax.tree.map(lambda x: jnp.asarray(x)[None], rows[i])
    logits = Transformer(CONFIG).apply(
      {"params": tiny_params()}, row.tokens, runtime, row.positions, row.segments
    )
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), row.targets[..., None], -1)[..., 0]
    total, count = total + float((nll * row.weights).sum()), count + float(row.weights.sum())
  np.testing.assert_allclose(found["text_nll"], total / count, rtol=1e-4)
