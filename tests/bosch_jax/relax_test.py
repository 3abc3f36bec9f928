"""Relaxed masks: binary shares are the masks themselves, and the gradient is that of the blend."""

import jax
import numpy as np
import pytest

from bosch_jax.device_options import AXIS
from bosch_jax.evaluator import GRADIENT_PASSES, Evaluator
from bosch_jax.journal import Journal
from models import relaxed
from tests.bosch_jax.tiny import CONFIG, random_masks, tiny_params, tiny_prompts

WINDOW = 6


def evaluator(**options):
  return Evaluator(CONFIG, tiny_params(), tiny_prompts(), WINDOW, **options)


@pytest.mark.parametrize("sinks", [0, 2])
def test_binary_shares_score_like_masks(sinks):
  ours = evaluator(sinks=sinks)
  for mask in [np.zeros((4, 3), bool), np.ones((4, 3), bool), *random_masks(3)]:
    loss, _ = ours.relax(mask, [0, 1, 2, 3])
    np.testing.assert_allclose(loss, ours.score([mask]).nll.mean(), rtol=1e-5)


def test_gradient_is_the_slope_of_the_loss():
  ours, rng = evaluator(), np.random.default_rng(0)
  share, direction = rng.uniform(0.2, 0.8, (4, 3)), rng.normal(size=(4, 3))
  _, gradient = ours.relax(share, [0, 2])
  step = 2e-3
  ahead, behind = (ours.relax(share + sign * step * direction, [0, 2])[0] for sign in (1, -1))
  np.testing.assert_allclose((gradient * direction).sum(), (ahead - behind) / 2 / step, rtol=2e-2)


def test_recomputed_layers_give_the_same(monkeypatch):
  share = np.random.default_rng(1).random((4, 3))
  stored = evaluator().relax(share, [1])
  monkeypatch.setattr(relaxed, "REMAT_TOKENS", 1)
  # Another backend is another model, so nothing compiled is reused.
  recomputed = evaluator(backend="reference").relax(share, [1])
  np.testing.assert_allclose(stored[0], recomputed[0], rtol=1e-5)
  np.testing.assert_allclose(stored[1], recomputed[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("contexts", [[0, 1, 2, 3], [1, 2, 3]])
def test_a_mesh_gives_the_same(contexts):
  share = np.random.default_rng(2).random((4, 3))
  mesh = jax.make_mesh((2,), (AXIS,))
  one, two = evaluator(), evaluator(mesh=mesh)
  (loss, gradient), (loss_2, gradient_2) = one.relax(share, contexts), two.relax(share, contexts)
  np.testing.assert_allclose(loss, loss_2, rtol=1e-5)
  np.testing.assert_allclose(gradient, gradient_2, rtol=1e-3, atol=1e-6)
  assert one.cost == two.cost == GRADIENT_PASSES * len(contexts) / 4


def test_journal_answers_after_a_restart(tmp_path, monkeypatch):
  share, path = np.random.default_rng(3).random((4, 3)), tmp_path / "journal.jsonl"
  first = evaluator(journal=Journal(path, {}))
  before = first.relax(share, [0, 3])
  first.score(random_masks(2), [1])
  first.journal.close()
  again = evaluator(journal=Journal(path, {}, resume=True))
  monkeypatch.setattr(again, "_in_calls", None)  # nothing may be computed
  after = again.relax(share, [0, 3])
  again.score(random_masks(2), [1])
  assert before[0] == after[0] and np.array_equal(before[1], after[1])
  assert again.cost == first.cost
