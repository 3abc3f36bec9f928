import dataclasses

import pytest

from models.errors import InputError
from tests.train.tiny import CONFIG
from train.settings import CptSettings, HostOptions, MeshOptions


@pytest.mark.parametrize(
  ("options", "named"),
  [
    ({"mask": ""}, "--mask"),
    ({"lr": 0.0}, "--lr"),
    ({"lr": -1.0}, "--lr"),
    ({"clip": 0.0}, "--clip"),
    ({"steps": 0}, "--steps"),
    ({"eval_every": 0}, "--eval-every"),
    ({"warmup": -1}, "--warmup"),
    ({"retrieval": 1.5}, "--retrieval"),
    ({"distill": -0.1}, "--distill"),
    ({"context": 500}, "--context"),
    ({"resume": True, "force": True}, "--force and --resume"),
  ],
)
def test_bad_settings_are_named(options, named):
  with pytest.raises(InputError) as caught:
    CptSettings(**{"mask": "full", **options})
  assert str(caught.value).startswith(named) and "\n" not in str(caught.value)


def test_meshes_and_hosts_are_checked():
  for make, named in (
    (lambda: MeshOptions(data=0), "--mesh.data"),
    (lambda: MeshOptions(fsdp=-1), "--mesh.fsdp"),
    (lambda: HostOptions(processes=2), "--hosts.coordinator"),
    (lambda: HostOptions(coordinator="a:1", processes=2, process=2), "--hosts.process"),
  ):
    with pytest.raises(InputError, match=named):
      make()


def test_rows_must_fit_the_model():
  with pytest.raises(InputError, match="--sequence 384"):
    CptSettings(mask="full").check_model(CONFIG)
  CptSettings(mask="full", sequence=128, context=64).check_model(CONFIG)


def test_only_what_decides_the_result_ties_a_run():
  one = CptSettings(mask="full")
  assert dataclasses.replace(one, out="x", keep=9, save_every=3).identity() == one.identity()
  assert dataclasses.replace(one, lr=1.0).identity() != one.identity()
  assert dataclasses.replace(one, lr=1.0).folder != one.folder
