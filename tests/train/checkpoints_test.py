import dataclasses
import functools

import jax
import numpy as np
import pytest

from models.errors import InputError
from tests.train.tiny import CONFIG, on_mesh, tiny_batch, tiny_run
from train import partition
from train.checkpoints import Checkpoints
from train.step import train_step

IDENTITY = {
  "model": dataclasses.asdict(CONFIG),
  "weights": "abc",
  "mask": [[1, 0], [0, 1]],
  "settings": {"lr": 0.1, "train": "all"},
}


def start(mesh=None):
  plan, state, frozen, _ = tiny_run(mesh=mesh, train="attn")
  step = jax.jit(functools.partial(train_step, plan))
  return state, lambda state: step(state, frozen, None, on_mesh(mesh, tiny_batch()))[0]


def assert_equal(got, wanted):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, wanted
  )


@pytest.mark.parametrize("count", [1, 2])
def test_saved_on_four_devices_restored_on_fewer(tmp_path, count):
  four = partition.make_mesh(1, 2, 2)
  state, step = start(four)
  state = step(state)
  checkpoints = Checkpoints(tmp_path / "c", IDENTITY, keep=2)
  checkpoints.save(1, lambda: state, position=17, held_out=0.5)
  checkpoints.close()
  fewer = partition.make_mesh(1, count, 1, jax.devices()[:count])
  fresh, step_on_fewer = start(fewer)
  restored, position = Checkpoints(tmp_path / "c", IDENTITY, keep=2).restore(fresh)
  assert position == 17 and int(restored.step) == 1
  assert_equal(restored, state)
  for leaf in restored.trained.values():
    assert leaf.sharding.mesh == fewer
  after, wanted = step_on_fewer(restored), step(state)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    after.trained,
    wanted.trained,
  )


def test_another_run_is_refused_by_name(tmp_path):
  state, _ = start(partition.make_mesh(1, 1, 1, jax.devices()[:1]))
  checkpoints = Checkpoints(tmp_path, IDENTITY, keep=2)
  checkpoints.save(3, lambda: state, 3, None)
  checkpoints.close()
  for change, said in (
    ({"model": {**IDENTITY["model"], "num_layers": 7}}, "model num_layers 3 is not this run's 7"),
    ({"mask": [[0, 1], [0, 1]]}, "its mask is not this run's"),
    ({"weights": "def"}, "its weights abc is not this run's def"),
    ({"settings": {"lr": 0.2, "train": "all"}}, "settings lr 0.1 is not this run's 0.2"),
  ):
    with pytest.raises(InputError) as caught:
      Checkpoints(tmp_path, {**IDENTITY, **change}, keep=2).restore(state)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_latest_and_the_best_are_kept_and_partial_steps_ignored(tmp_path):
  state, _ = start(partition.make_mesh(1, 1, 1, jax.devices()[:1]))
  checkpoints = Checkpoints(tmp_path, IDENTITY, keep=2)
  for step, held_out in ((1, 0.9), (2, 0.1), (3, 0.5), (4, 0.4), (5, 0.3)):
    checkpoints.save(step, lambda: state, step, held_out)
  checkpoints.close()
  assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 4, 5]
  (tmp_path / "9").mkdir()  # a step folder that a kill left empty
  (tmp_path / "8").mkdir()
  (tmp_path / "8" / "_CHECKPOINT_METADATA").write_text("{}")  # and one cut short
  again = Checkpoints(tmp_path, IDENTITY, keep=2)
  assert again.latest() == 5 and again.steps() == [2, 4, 5]
  assert again.restore(state)[1] == 5
  again.save(9, lambda: state, 9, 0.2)
  again.save(9, lambda: pytest.fail("not wanted"), 10, 0.2)  # already there: left alone
  again.close()
  assert Checkpoints(tmp_path, IDENTITY, keep=2).restore(state)[1] == 9
