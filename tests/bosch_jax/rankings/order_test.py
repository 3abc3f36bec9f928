"""Every ranking on heads built by hand, where the right order is known."""

import numpy as np
import pytest

from bosch_jax import rankings, stages
from bosch_jax.evaluator import Evaluator
from bosch_jax.rankings.registry import RANKINGS, rank
from bosch_jax.settings import SelectSettings
from tests.bosch_jax.rankings import handmade
from tests.bosch_jax.rankings.handmade import CONFIG, FAR, LAYOUT, WINDOW

KINDS = np.array(LAYOUT)
TOTAL = CONFIG.total_groups


@pytest.fixture(scope="module")
def evaluator():
  return Evaluator(CONFIG, handmade.params(), handmade.prompts(), WINDOW)


def ranking(evaluator, method, num_local=TOTAL - 1, **settings):
  settings = {"budget": 25, "context": 64, **settings}
  evaluator.cost = 0.0
  chosen = SelectSettings(method=method, window=WINDOW, **settings)
  return rank(method, stages.Search(evaluator, chosen, num_local / TOTAL), stages)


def test_every_method_is_registered_and_no_other():
  assert tuple(RANKINGS) == rankings.METHODS


def test_the_handmade_model_answers_with_the_far_head_and_not_without(evaluator):
  full = np.zeros((2, 3), bool)
  scores = evaluator.score([full, KINDS == "far", KINDS != "far"])
  assert scores.exact[0].all() and scores.exact[2].all() and not scores.exact[1].all()


# From the least needed to the most; kinds of one tuple may come in any order.
ORDERS = {
  "dcam": (("self",), ("far",), ("first",)),
  "dcam-nosinks": (("self", "first"), ("far",)),
  "apl": (("self", "first"), ("far",)),
  "proxy": (("self", "first"), ("far",)),
  "qada": (("self", "first"), ("far",)),
  "fisher": (("self",), ("first",), ("far",)),
  "nll": (("self",), ("first",), ("far",)),
  "duo": (("self", "first"), ("far",)),
}


@pytest.mark.parametrize("method", ORDERS)
def test_heads_come_in_the_right_order(evaluator, method):
  score_LxG = ranking(evaluator, method).score_LxG
  lowest_of_last = -np.inf
  for kinds in ORDERS[method]:
    values = score_LxG[np.isin(KINDS, kinds)]
    assert values.min() > lowest_of_last, (method, kinds, score_LxG)
    lowest_of_last = values.max()


def test_values_are_what_the_formulas_say(evaluator):
  far = KINDS == "far"
  lag = ranking(evaluator, "apl").score_LxG
  np.testing.assert_allclose(lag[far], FAR, atol=1e-6)
  np.testing.assert_allclose(lag[~far], 0, atol=1e-6)
  share = -ranking(evaluator, "qada").score_LxG
  assert (share[~far] > 0.95).all() and (share[far] < 0.2).all()
  blocks = ranking(evaluator, "proxy").score_LxG  # of W / 2 = 3 tokens; 13 is no multiple of 3
  np.testing.assert_allclose(blocks[KINDS == "self"], 1, atol=0.1)
  assert (blocks[far] > 1.5).all()


def test_razor_finds_the_echo_and_the_induction_head():
  period = 16  # of 64 tokens
  layout = (("self", "first", period), ("first", period - 1, "self"))
  evaluator = Evaluator(CONFIG, handmade.params(layout), handmade.prompts(), WINDOW)
  found = ranking(evaluator, "razor", num_local=4)
  np.testing.assert_array_equal(found.mask(4), [[1, 1, 0], [1, 0, 1]])
  assert (found.score_LxG[~found.mask(4)] == 1.0).all()


def test_ablations_find_the_far_head(evaluator):
  for method in ("b-single", "b-multi"):  # 2 local groups in the first layer, 3 in the second
    found = ranking(evaluator, method).mask(TOTAL - 1)
    np.testing.assert_array_equal(found, KINDS != "far", method)
  by_layer = ranking(evaluator, "b-layer", num_local=3).mask(3)
  np.testing.assert_array_equal(by_layer, [[0, 0, 0], [1, 1, 1]])
  remainder = ranking(evaluator, "b-layer", num_local=4).mask(4)
  np.testing.assert_array_equal(remainder, [[1, 0, 0], [1, 1, 1]])


def test_costs_are_counted(evaluator):
  free = [ranking(evaluator, method).cost for method in ("rand", "intr", "bme")]
  assert free == [0, 0, 0]
  assert ranking(evaluator, "fisher").cost == pytest.approx(3)
  # One pass without the output head, and its scores again.
  once = [ranking(evaluator, method).cost for method in ("dcam", "apl", "qada")]
  assert once == [once[0]] * 3 and 0.9 < once[0] < 1.5
  for method, budget in (("duo", 14), ("duo", 20), ("b-multi", 12)):
    assert ranking(evaluator, method, budget=budget).cost <= budget
  assert ranking(evaluator, "duo", budget=20).cost > 17


def test_nll_uses_as_many_contexts_as_the_budget_pays_for():
  costs = []
  for budget in (4, 5, 30):
    evaluator = Evaluator(CONFIG, handmade.params(), handmade.prompts(), WINDOW)
    chosen = SelectSettings(window=WINDOW, budget=budget, context=64)
    search = stages.Search(evaluator, chosen, 0.5)
    costs.append(rank("nll", search, stages).cost)
    assert evaluator.cost <= budget + 1
  # A probe costs 1 or 1/2 of a pass, three groups a layer.
  assert costs[0] < costs[1] < costs[2] and costs[2] <= 3 * 1.5 + 1


def test_the_same_seed_gives_the_same_ranking_and_another_may_not(evaluator):
  for method in ("razor", "duo", "rand"):
    scores = [ranking(evaluator, method, budget=14, seed=7).score_LxG for _ in range(2)]
    np.testing.assert_array_equal(*scores)
  orders = {ranking(evaluator, "rand", seed=seed).score_LxG.tobytes() for seed in range(1, 9)}
  assert len(orders) == 2  # there are two layers


def test_a_ranking_that_serves_every_ratio_has_the_budgets_of_all(evaluator):
  ratios = (4 / TOTAL, 5 / TOTAL)
  alone = ranking(evaluator, "duo", num_local=4, budget=14).cost
  both = ranking(evaluator, "duo", num_local=4, budget=14, ratio=ratios).cost
  assert 14 < both <= 28 and both > 1.5 * alone
  # What is ranked anew for every ratio has its own budget only.
  assert ranking(evaluator, "b-multi", num_local=4, budget=12, ratio=ratios).cost <= 12
  # All local needs no ranking, so it brings no budget.
  assert ranking(evaluator, "duo", num_local=4, budget=14, ratio=(4 / TOTAL, 1.0)).cost == alone
