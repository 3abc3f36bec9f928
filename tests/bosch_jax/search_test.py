"""Several ratios in one run: what they share is worked out once, and costs are told apart."""

import pytest
from rich.console import Console

from bosch_jax import rankings
from bosch_jax.evaluator import Evaluator
from bosch_jax.progress import SearchProgress
from bosch_jax.rankings import attention, gradients
from bosch_jax.rankings.registry import BY_RATIO
from bosch_jax.search import search
from bosch_jax.settings import SelectSettings
from tests.bosch_jax.rankings import handmade
from tests.bosch_jax.rankings.handmade import CONFIG, WINDOW

RATIOS = (2 / 6, 3 / 6, 4 / 6, 5 / 6)
SHARED = [method for method in rankings.METHODS if method not in BY_RATIO]


@pytest.fixture
def work(monkeypatch):
  """Calls of everything that a ranking computes with."""
  calls = {}

  def counted(owner, name):
    real, calls[name] = getattr(owner, name), 0

    def call(*args, **kwargs):
      calls[name] += 1
      return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)

  counted(attention, "_observe")
  counted(gradients, "_distill")
  counted(gradients, "_full_hidden")
  counted(Evaluator, "relax")
  return calls


def run(method, ratios, budget=14):
  evaluator = Evaluator(CONFIG, handmade.params(), handmade.prompts(), WINDOW)
  settings = SelectSettings(method=method, window=WINDOW, context=64, budget=budget, ratio=ratios)
  quiet, known = SearchProgress(Console(quiet=True), budget), {}
  return [search(evaluator, settings, ratio, quiet, known) for ratio in ratios], evaluator


@pytest.mark.parametrize("method", SHARED)
def test_a_ranking_is_made_once_for_all_ratios(work, method):
  (one,), evaluator = run(method, RATIOS[-1:], 14 * len(RATIOS))  # it may spend the budgets of all
  calls, scored = dict(work), evaluator.masks_scored
  work.update(dict.fromkeys(work, 0))
  found, evaluator = run(method, RATIOS)
  assert work == calls
  assert evaluator.masks_scored <= scored + len(RATIOS) - 1
  assert sum(f.cost for f in found) == pytest.approx(evaluator.cost)  # what was truly spent
  assert sum(f.cost for f in found[1:]) <= len(RATIOS) - 1  # the scores of their masks
  for f in found:
    assert f.stages[-1]["ranking_cost"] == pytest.approx(one.stages[-1]["ranking_cost"])
    assert 2 + one.stages[-1]["ranking_cost"] <= f.alone <= one.alone + 1
  assert one.alone == one.cost and found[0].alone == found[0].cost
  assert found[-1].alone == pytest.approx(one.alone)
  assert found[-1].mask == one.mask


@pytest.mark.parametrize("method", sorted(BY_RATIO))
def test_what_depends_on_the_ratio_is_made_for_each(method):
  found, _ = run(method, RATIOS)
  for ratio, f in zip(RATIOS, found, strict=True):
    (alone,), _ = run(method, (ratio,))
    assert f.mask == alone.mask, ratio


@pytest.mark.parametrize("method", ["bosch", "b-layer"])
def test_every_ratio_has_the_same_budget(work, method):
  """The anchors, scored once, count to each: the second ratio trains its gates as it would alone."""
  steps = []
  for ratios in (RATIOS[1:2], RATIOS[2:3], RATIOS[1:3]):
    work["relax"] = 0
    run(method, ratios)
    steps.append(work["relax"])
  assert steps[0] > 0 and steps[2] == steps[0] + steps[1]


def test_all_local_needs_nothing_of_what_easier_ratios_paid_for():
  (_, all_local), _ = run("bosch", (RATIOS[1], 1.0), budget=14)
  assert all_local.alone == pytest.approx(2.0)  # the anchors


def test_gates_of_a_harder_ratio_begin_where_the_easier_ones_ended(monkeypatch):
  shares, real = [], Evaluator.relax

  def relax(self, share, contexts):
    shares.append(share.copy())
    return real(self, share, contexts)

  monkeypatch.setattr(Evaluator, "relax", relax)
  (easy, hard), evaluator = run("bosch", RATIOS[1:3], budget=20)
  assert easy.mask.num_local == 3 and hard.mask.num_local == 4
  steps = len(shares) // 2
  first, last = shares[0].sum(), shares[steps - 1].sum()
  assert first == pytest.approx(1.5) and last == pytest.approx(3)  # half, then all of the three
  begun = next(i for i in range(1, len(shares)) if shares[i].std() < shares[i - 1].std() - 0.02)
  assert shares[begun].sum() == pytest.approx(3, abs=0.1)  # and the fourth on top of them
  assert shares[-1].sum() == pytest.approx(4)
  # What a run that ends with the ratio takes, and what is added up over ratios, is the same here.
  assert easy.cost + hard.cost == pytest.approx(evaluator.cost) == pytest.approx(hard.alone)
