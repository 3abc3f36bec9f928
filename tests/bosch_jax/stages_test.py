"""The stages on a planted objective: an evaluator without a model, where the best mask is known."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch_jax import gates, paper, stages
from bosch_jax.evaluator import Evaluator, Scores
from bosch_jax.journal import Journal
from bosch_jax.settings import SearchOptions, SelectSettings
from models.config import ModelConfig
from models.windows import num_local_for
from tests.bosch_jax.tiny import CONFIG, tiny_params, tiny_prompts


class PlantedEvaluator:
  """Scores masks by a formula: every group has a cost, and pairs of groups are critical jointly.

  nll(context) = base + cost . z + sum over pairs of height * z_a z_b + a little noise per context.
  """

  def __init__(self, layers, groups, seed, contexts=8, noise=0.0, pairs=3):
    rng = np.random.default_rng(seed)
    self.config = ModelConfig(11, layers, 8, groups, groups, 2, 8, 64)
    self.contexts, self.calibration = range(contexts), contexts
    self.cost_of = rng.exponential(0.05, layers * groups)
    self.pairs = [tuple(rng.choice(layers * groups, 2, replace=False)) for _ in range(pairs)]
    self.noise = rng.normal(0, noise, (contexts, layers * groups))
    self.cost, self.stage, self.masks_scored, self.memo = 0.0, "", 0, set()
    self.on_scored = lambda stage, cost: None

  def nll(self, mask, context):
    z = mask.ravel().astype(float)
    joint = sum(0.8 * z[a] * z[b] for a, b in self.pairs)
    return 0.1 + z @ (self.cost_of + self.noise[context]) + joint

  def rebase(self, mask):
    pass

  def relax(self, share, contexts):
    s = share.ravel().astype(float)
    gradient = self.cost_of + self.noise[list(contexts)].mean(0)  # a copy
    for a, b in self.pairs:
      gradient[a] += 0.8 * s[b]
      gradient[b] += 0.8 * s[a]
    self.cost += 3 * len(contexts) / len(self.contexts)
    return float(np.mean([self.nll(s, c) for c in contexts])), gradient.reshape(share.shape)

  def score(self, masks, contexts=None):
    contexts = list(self.contexts) if contexts is None else list(contexts)
    for mask in masks:
      new = {(mask.tobytes(), c) for c in contexts} - self.memo
      self.memo |= new
      self.cost += len(new) / len(self.contexts)
    nll = np.array([[[self.nll(mask, c)] for c in contexts] for mask in masks])
    return Scores(nll, nll < 0.2)


def run(evaluator, ratio, recipe=stages, **options):
  options = {"budget": 200, **options}
  chosen = SelectSettings(
    ratio=ratio, budget=options.pop("budget"), search=SearchOptions(**options)
  )
  search = stages.Search(evaluator, chosen, ratio)
  importance = recipe.layer_importance(search)
  assigned = recipe.assign_ratios(search, importance)
  mask = recipe.select_heads(search, assigned)
  return search, importance, assigned, mask


@settings(deadline=None, max_examples=25)
@given(
  st.sampled_from([gates, stages, paper]),
  st.integers(2, 8),
  st.integers(1, 7),
  st.sampled_from([0.25, 0.5, 0.75, 0.875]),
  st.integers(0, 99),
)
def test_the_number_of_local_groups_is_always_exact(recipe, layers, groups, ratio, seed):
  k = num_local_for(ratio, layers * groups)
  if not 0 < k < layers * groups:
    return
  evaluator = PlantedEvaluator(layers, groups, seed, pairs=min(2, layers * groups - 1))
  search, importance, assigned, mask = run(evaluator, ratio, recipe)
  assert assigned.mask.sum() == mask.sum() == k
  assert ((assigned.weight_L >= 0) & (assigned.weight_L <= 1)).all()
  assert search.loss([mask])[0] <= search.loss([assigned.mask])[0]
  assert importance.cost_LxG.shape == (layers, groups)


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_the_count_is_exact_and_the_budget_kept_even_when_it_is_tiny(budget):
  evaluator = PlantedEvaluator(8, 3, seed=1)
  _, _, _, mask = run(evaluator, 0.5, budget=budget)
  assert mask.sum() == 12
  stage_one = 2 + 24 * 0.25 * 2  # anchors and probes are always run
  assert evaluator.cost <= max(budget, stage_one) + 4.5


def test_costs_of_stage_one_are_the_planted_ones():
  evaluator = PlantedEvaluator(6, 3, seed=2, pairs=0)
  search, importance, _, _ = run(evaluator, 0.5)
  span = search.objective.full - search.objective.all_local
  np.testing.assert_allclose(importance.cost_LxG.ravel() * span, evaluator.cost_of, atol=1e-9)


@pytest.mark.parametrize("recipe", [gates, stages])
def test_without_interactions_the_best_mask_is_found(recipe):
  evaluator = PlantedEvaluator(8, 3, seed=3, pairs=0)
  _, _, _, mask = run(evaluator, 0.5, recipe)
  assert set(np.flatnonzero(mask)) == set(np.argsort(evaluator.cost_of)[:12])


@pytest.mark.parametrize("recipe", [gates, stages])
def test_groups_that_are_redundant_singly_and_critical_jointly_are_not_both_localised(recipe):
  for seed in range(5):
    evaluator = PlantedEvaluator(10, 3, seed=seed, noise=0.01, pairs=4)
    _, _, _, mask = run(evaluator, 0.5, recipe)
    assert not any(mask.ravel()[a] and mask.ravel()[b] for a, b in evaluator.pairs), seed


@pytest.mark.parametrize(("budget", "size"), [(40, 1), (60, 1), (120, 2), (200, 3)])
def test_a_large_budget_buys_contexts_of_a_gradient_and_not_ever_more_of_them(budget, size):
  evaluator = PlantedEvaluator(4, 3, seed=0)
  sizes = []
  relax = evaluator.relax
  evaluator.relax = lambda share, contexts: sizes.append(len(contexts)) or relax(share, contexts)
  run(evaluator, 0.5, gates, budget=budget)
  assert set(sizes) == {size} and len(sizes) <= gates.MOST_STEPS
  assert 3 / 8 * sum(sizes) == pytest.approx(0.9 * (budget - 2), abs=3 / 8 * size)


def test_the_same_seed_gives_the_same_path():
  paths = []
  for _ in range(2):
    evaluator = PlantedEvaluator(8, 3, seed=4, noise=0.02)
    _, _, _, mask = run(evaluator, 0.75, budget=30)
    paths.append((mask.tobytes(), evaluator.cost, frozenset(evaluator.memo)))
  assert paths[0] == paths[1]


def test_layer_groups_by_equal_ratio_easiest_first_and_not_too_large():
  groups = stages.layer_groups(np.array([3, 1, 2, 2, 0, 1, 2]), 3, most_bits=6)
  assert [g.tolist() for g in groups] == [[2, 3], [6], [1, 5]]


def test_weights_rank_layers_by_what_their_groups_cost():
  w = stages.weights(np.array([[0.0, -0.1], [0.1, 0.1], [0.6, 0.0]]))
  assert w[0] == 0 and w[0] < w[1] < w[2] < 1
  np.testing.assert_array_equal(stages.weights(np.zeros((2, 2))), [0, 0])


def test_accuracy_can_be_the_score():
  evaluator = PlantedEvaluator(6, 3, seed=5)
  chosen = dataclasses.replace(SelectSettings(), score="accuracy")
  search = stages.Search(evaluator, chosen, 0.5)
  assert search.objective.full == 1.0 and search.objective.all_local == 0.0


@pytest.mark.parametrize(
  ("recipe", "budget"), [(stages, 14), (stages, 22), (gates, 14), (gates, 30)]
)
def test_a_search_killed_after_any_line_resumes_to_the_same_mask_and_journal(
  tmp_path, recipe, budget
):
  """On a real (tiny) model, with a budget that ends the search early."""
  chosen = SelectSettings(ratio=0.5, budget=budget)
  params, prompts = tiny_params(), tiny_prompts(contexts=4)

  def search(resume):
    journal = Journal(tmp_path / "journal.jsonl", {}, resume)
    evaluator = Evaluator(CONFIG, params, prompts, 6, journal=journal)
    found = stages.Search(evaluator, chosen, 0.5)
    assigned = recipe.assign_ratios(found, recipe.layer_importance(found))
    mask = recipe.select_heads(found, assigned)
    journal.close()
    return mask.tolist(), evaluator.cost, (tmp_path / "journal.jsonl").read_text()

  whole = search(resume=False)
  assert whole[1] > budget  # the budget did decide when to stop
  lines = whole[2].splitlines(keepends=True)
  for kept in range(1, len(lines), 5):
    (tmp_path / "journal.jsonl").write_text("".join(lines[:kept]) + lines[kept][: kept % 40])
    assert search(resume=True) == whole, kept


def test_the_papers_stage_one_tries_every_choice_and_keeps_the_cascade():
  evaluator = PlantedEvaluator(5, 4, seed=6, pairs=0)
  _search, importance, _, _ = run(evaluator, 0.5, paper)
  np.testing.assert_array_equal(importance.cascade.sum(1), 2)
  cheapest = np.sort(np.argsort(evaluator.cost_of.reshape(5, 4), axis=1)[:, :2], axis=1)
  np.testing.assert_array_equal(np.nonzero(importance.cascade)[1].reshape(5, 2), cheapest)
  assert (np.diff(importance.best_L) <= 0).all()  # top down, the drop only grows


def test_the_papers_buckets_give_hard_layers_fewer_local_groups():
  search, *_ = run(PlantedEvaluator(4, 4, seed=7, pairs=0), 0.5, paper)
  hard_first = stages.Importance(
    np.zeros((4, 4)), np.array([1.0, 0.5, 0.3, 0.0]), np.zeros((4, 4), bool)
  )
  assert paper.assign_ratios(search, hard_first).mask.sum(1).tolist() == [0, 1, 3, 4]
