import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import InputError
from models.transformer import Transformer
from models.windows import HeadMask
from tests.train.tiny import CONFIG, MASK, WINDOW, on_mesh, tiny_batch, tiny_params, tiny_run
from train import partition, subset
from train.data.packing import Row
from train.step import loss_and_gradient, train_step


def run(batch, **options):
  plan, state, frozen, reference = tiny_run(**options)
  return jax.jit(functools.partial(loss_and_gradient, plan))(
    state.trained, frozen, reference, batch
  )


@pytest.fixture(scope="module")
def one_device():
  return run(tiny_batch(), distill=0.4)


def assert_same(got, wanted, tolerance=2e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted
  )


def test_the_loss_is_that_of_every_document_alone():
  """By the plain model with runtime windows, unpacked, groups in their own order, full logits."""
  batch = tiny_batch()
  means, _ = run(batch)
  windows = jnp.asarray(MASK.windows(WINDOW, CONFIG.num_heads))
  logits_of = jax.jit(
    lambda ids: Transformer(CONFIG).apply({"params": tiny_params()}, ids, windows)
  )
  total = weight = 0.0
  for row in range(batch.tokens.shape[1]):
    for segment in (1, 2):
      here = batch.segments[0, row] == segment
      padded = np.zeros((1, 24), np.int32)  # one length, one compilation; padding comes behind
      padded[0, : here.sum()] = batch.tokens[0, row, here]
      logp = jax.nn.log_softmax(logits_of(jnp.asarray(padded)))[0, : here.sum()]
      picked = logp[np.arange(here.sum()), batch.targets[0, row, here]]
      total -= float((picked * batch.weights[0, row, here]).sum())
      weight += float(batch.weights[0, row, here].sum())
  np.testing.assert_allclose(means.nll, total / weight, rtol=1e-5)
  np.testing.assert_allclose(means.loss, means.nll)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)])
def test_four_devices_give_the_loss_and_gradients_of_one(one_device, sizes):
  mesh = partition.make_mesh(*sizes)
  assert mesh.size == 4
  got = run(on_mesh(mesh, tiny_batch()), mesh=mesh, distill=0.4)
  assert_same(got, one_device)


def test_parameters_and_moments_are_split_as_said():
  mesh = partition.make_mesh(1, 2, 2)
  plan, state, frozen, _ = tiny_run(mesh=mesh)
  state, _ = jax.jit(functools.partial(train_step, plan))(
    state, frozen, None, on_mesh(mesh, tiny_batch())
  )
  kernel = state.trained["layers/mlp/up/kernel"]
  assert kernel.addressable_shards[0].data.shape == (3, 16, 24)
  moments = jax.tree.leaves(state.moments)
  assert any(m.shape == kernel.shape and m.sharding == kernel.sharding for m in moments)


def test_accumulation_equals_the_large_batch():
  small = tiny_batch(rows=2, accumulate=2)
  large = Row(*(x.reshape(1, 4, -1) for x in small))
  assert_same(run(small), run(large))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_nothing_but_memory(remat):
  assert_same(run(tiny_batch(), remat=remat), run(tiny_batch()))


@pytest.mark.slow
def test_bfloat16_is_near():
  means, gradient = run(tiny_batch(), dtype=jnp.bfloat16)
  wanted, _ = run(tiny_batch())
  np.testing.assert_allclose(means.loss, wanted.loss, rtol=0.02)
  assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_only_the_chosen_parameters_are_trained():
  plan, state, frozen, _ = tiny_run(train="attn/(q|k)/")
  assert set(state.trained) == {"layers/attn/q/kernel", "layers/attn/k/kernel"}
  before = jax.tree.map(np.asarray, state.trained)
  after, _ = jax.jit(functools.partial(train_step, plan))(state, frozen, None, tiny_batch())
  for path, leaf in after.trained.items():
    assert np.abs(np.asarray(leaf) - before[path]).max() > 1e-4
  _, whole = run(tiny_batch())
  _, part = run(tiny_batch(), train="attn/(q|k)/")
  assert_same(part, {path: whole[path] for path in part})


def test_a_pattern_that_matches_nothing_is_refused():
  for pattern, said in (("nothing", "no parameter"), ("(", "regular expression")):
    with pytest.raises(InputError, match=said):
      subset.split(tiny_params(), pattern)


def test_distillation_of_the_model_itself_is_free():
  """Full attention against full attention: no divergence, and no gradient of it."""
  full = HeadMask(np.zeros_like(MASK.local))
  means, gradient = run(tiny_batch(), mask=full, distill=1.0)
  assert abs(float(means.kl)) < 1e-5 and abs(float(means.loss)) < 1e-5
  assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-5
  means, _ = run(tiny_batch(), distill=1.0)
  assert float(means.kl) > 1e-3


def test_training_lowers_the_loss_in_one_trace():
  plan, state, frozen, _ = tiny_run()

  def one(state, frozen, reference, batch):
    return train_step(plan, state, frozen, reference, batch)

  step = jax.jit(chex.assert_max_traces(one, n=1))
  losses = []
  for _ in range(12):
    state, metrics = step(state, frozen, None, tiny_batch())
    losses.append(float(metrics["loss"]))
  assert losses[-1] < 0.8 * losses[0] and int(state.step) == 12
  assert set(metrics) == {"loss", "nll", "kl", "grad_norm", "lr"}


@pytest.mark.parametrize(
  ("sizes", "rows", "named"),
  [
    ((1, 4, 1), 6, "--batch 6"),
    ((1, 1, 4), 4, "--mesh.tensor"),
    ((3, 1, 1), 4, "--mesh"),
  ],
)
def test_a_mesh_that_does_not_divide_is_refused(sizes, rows, named):
  with pytest.raises(InputError) as caught:
    mesh = partition.make_mesh(*sizes)
    shapes = {path: leaf.shape for path, leaf in subset.split(tiny_params(), "all")[0].items()}
    partition.check(mesh, shapes, rows, CONFIG, tiny_run()[0].model.static_windows)
  assert named in str(caught.value)
