import dataclasses

import jax
import numpy as np
import pytest

from models.windows import FULL
from tests.train.tiny import CONFIG
from train.flops import forward_flops, peak_flops, step_flops, visible_pairs


@pytest.mark.parametrize(("window", "tokens"), [(1, 5), (3, 5), (5, 5), (FULL, 7)])
def test_visible_pairs_are_counted(window, tokens):
  distance = np.subtract.outer(np.arange(tokens), np.arange(tokens))
  assert visible_pairs(window, tokens) == ((distance >= 0) & (distance < window)).sum()


def test_a_forward_pass_counted_by_hand():
  full = ((FULL,) * 8,) * 3
  layer = 32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 48
  weights = 3 * layer + 64 * 32
  attention = 3 * 8 * 2 * 8 * (10 * 11 // 2)
  assert forward_flops(CONFIG, full, 2, 10) == 2 * 2 * (weights * 10 + attention)
  untied = dataclasses.replace(CONFIG, tied_head=False)
  assert forward_flops(untied, full, 2, 10) == forward_flops(CONFIG, full, 2, 10)
  local = ((3,) * 8,) * 3
  assert forward_flops(CONFIG, local, 2, 10) < forward_flops(CONFIG, full, 2, 10)
  taught = step_flops(CONFIG, local, 2, 10, teacher=full)
  assert taught == 3 * forward_flops(CONFIG, local, 2, 10) + forward_flops(CONFIG, full, 2, 10)


def test_experts_count_as_often_as_a_token_passes_through_them():
  moe = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2, moe_ffn_dim=24)
  full = ((FULL,) * 8,) * 3
  router = 3 * 32 * 4
  assert forward_flops(moe, full, 1, 10) == forward_flops(CONFIG, full, 1, 10) + 2 * 10 * router


def test_a_cpu_measures_itself():
  assert 1e8 < peak_flops(jax.devices()[0]) < 1e14
