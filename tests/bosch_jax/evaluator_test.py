import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bosch_jax import scoring
from bosch_jax.evaluator import Evaluator, common_prefix, forward_flops
from bosch_jax.journal import Journal
from models.transformer import Transformer
from models.windows import HeadMask
from tests.bosch_jax.tiny import CONFIG, random_masks, tiny_params, tiny_prompts

WINDOW = 6


@pytest.fixture(scope="module")
def params():
  return tiny_params()


forward = jax.jit(Transformer(CONFIG).apply)


def naive(params, prompts, mask):
  """Scores by the plain forward pass, all logits, no reuse: what the evaluator must equal."""
  logits = forward(
    {"params": params},
    jnp.asarray(prompts.tokens_BxT),
    HeadMask(mask).windows(WINDOW, CONFIG.num_heads),
    jnp.asarray(prompts.positions_BxT),
    jnp.asarray(prompts.segments_BxT),
  )
  logprob = np.asarray(jax.nn.log_softmax(logits, -1))
  B, Q, _ = prompts.target_BxQxA.shape
  nll, exact = np.zeros((B, Q)), np.zeros((B, Q), bool)
  for b in range(B):
    for q in range(Q):
      valid = prompts.valid_BxQxA[b, q]
      rows = logprob[b, prompts.answer_BxQxA[b, q][valid]]
      target = prompts.target_BxQxA[b, q][valid]
      nll[b, q] = -rows[np.arange(len(target)), target].mean()
      exact[b, q] = (rows.argmax(-1) == target).all()
  return nll, exact


def data_mesh(devices):
  return jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])


@pytest.mark.parametrize("devices", [None, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("state_bytes", [2**30, 1, 2 * 4 * 48 * 32 * 4])
def test_every_way_of_scoring_equals_the_naive_one(params, devices, batch, state_bytes):
  """Prefix reuse with all, some or no states kept, pairs folded, padded and spread."""
  prompts = tiny_prompts()
  mesh = None if devices is None else data_mesh(devices)
  evaluator = Evaluator(
    CONFIG, params, prompts, WINDOW, batch=batch, state_bytes=state_bytes, mesh=mesh
  )
  evaluator.score(random_masks(2, seed=9), [1, 3])  # the rest of a context's states comes later
  masks = random_masks(5)
  for base in (masks[0], masks[3]):
    evaluator.rebase(base)
    near = [base.copy() for _ in range(4)]
    for l, mask in enumerate(near):
      mask[l, 0] ^= True
    scores = evaluator.score([*masks, *near])
    for c, mask in enumerate([*masks, *near]):
      nll, exact = naive(params, prompts, mask)
      np.testing.assert_allclose(scores.nll[c], nll, atol=1e-5)
      np.testing.assert_array_equal(scores.exact[c], exact)


def test_packed_scores_equal_unpacked_ones(params):
  prompts = tiny_prompts()
  masks = random_masks(3)
  packed = Evaluator(CONFIG, params, prompts, WINDOW).score(masks)
  plain = Evaluator(CONFIG, params, prompts.unpack(), WINDOW).score(masks)
  np.testing.assert_allclose(packed.nll, plain.nll.reshape(packed.nll.shape), atol=1e-5)
  np.testing.assert_array_equal(packed.exact, plain.exact.reshape(packed.exact.shape))


def test_200_masks_trace_once_on_any_contexts(params, monkeypatch):
  chex.clear_trace_counter()
  scoring.compiled.cache_clear()
  for name, traces in (("score", 1), ("advance", 2)):  # `score` traces `advance` as well
    counted = chex.assert_max_traces(getattr(scoring, name), n=traces)
    monkeypatch.setattr(scoring, name, counted)
  evaluator = Evaluator(CONFIG, params, tiny_prompts(), WINDOW)
  for i, mask in enumerate(random_masks(200)):
    if i % 50 == 0:
      evaluator.rebase(mask)
    evaluator.score([mask], [i % 4, (i + 1) % 4])
  assert evaluator.masks_scored == len({mask.tobytes() for mask in random_masks(200)}) > 150


def test_nothing_is_scored_twice_and_contexts_add_up(params):
  evaluator = Evaluator(CONFIG, params, tiny_prompts(), WINDOW)
  masks = random_masks(3)
  part = evaluator.score(masks, [1, 2])
  cost = evaluator.cost
  evaluator.score(masks, [2, 1])
  assert evaluator.cost == cost and evaluator.masks_scored == 3
  whole = evaluator.score(masks)
  assert evaluator.masks_scored == 3 and cost < evaluator.cost < 2 * 3 + 1
  np.testing.assert_array_equal(whole.nll[:, [1, 2]], part.nll)


def test_cost_is_one_for_a_full_pass_and_less_after_a_shared_prefix(params):
  prompts = tiny_prompts()
  evaluator = Evaluator(CONFIG, params, prompts, WINDOW)
  full = np.zeros((4, 3), bool)
  evaluator.score([full])
  assert evaluator.cost == pytest.approx(1.0)
  top = full.copy()
  top[3, 0] = True
  evaluator.score([top])
  layer, head = forward_flops(CONFIG, prompts)
  assert evaluator.cost - 1.0 == pytest.approx((layer + head) / (4 * layer + head))


def test_a_resumed_evaluator_knows_the_scores_and_the_cost(params, tmp_path):
  prompts, masks = tiny_prompts(), random_masks(4)
  journal = Journal(tmp_path / "j", {"a": 1})
  first = Evaluator(CONFIG, params, prompts, WINDOW, journal=journal)
  before = first.score(masks)
  journal.close()
  again = Evaluator(
    CONFIG, params, prompts, WINDOW, journal=Journal(tmp_path / "j", {"a": 1}, True)
  )
  assert again.cost == 0.0
  again._forward = None  # nothing may be computed
  after = again.score(masks)
  assert again.cost == first.cost and again.masks_scored == 4
  np.testing.assert_array_equal(before.nll, after.nll)
  np.testing.assert_array_equal(before.exact, after.exact)


def test_common_prefix():
  a = np.zeros((3, 2), bool)
  b = a.copy()
  assert common_prefix(a, b) == 3
  b[1, 0] = True
  assert common_prefix(a, b) == 1


def test_a_half_written_batch_is_completed_and_nothing_is_computed_again(params, tmp_path):
  """A crash may leave some lines of a batch: those masks are not scored again."""
  prompts, masks = tiny_prompts(), random_masks(3)
  journal = Journal(tmp_path / "j", {})
  before = Evaluator(CONFIG, params, prompts, WINDOW, journal=journal, batch=12).score(masks)
  journal.close()
  lines = (tmp_path / "j").read_text().splitlines(keepends=True)
  assert len(lines) == 4
  (tmp_path / "j").write_text("".join(lines[:3]))
  journal = Journal(tmp_path / "j", {}, True)
  again = Evaluator(CONFIG, params, prompts, WINDOW, journal=journal, batch=12)
  forward, computed = again._forward, []
  again._forward = lambda new, *rest: computed.extend(new) or forward(new, *rest)
  after = again.score(masks)
  journal.close()
  assert len(computed) == 1 and (tmp_path / "j").read_text().splitlines(keepends=True) == lines
  np.testing.assert_array_equal(before.nll, after.nll)


def test_forgotten_states_are_computed_and_paid_again_and_scores_stay(params):
  a, b = np.zeros((2, 4, 3), bool)
  a[3, 0] = b[3, 1] = True
  evaluator = Evaluator(CONFIG, params, tiny_prompts(), WINDOW)
  first, cost = evaluator.score([a]).nll, evaluator.cost
  assert all(evaluator._states)
  evaluator.forget()
  assert not any(evaluator._states)
  assert np.array_equal(evaluator.score([a]).nll, first) and evaluator.cost == cost
  evaluator.score([b])
  assert evaluator.cost == pytest.approx(2 * cost)
