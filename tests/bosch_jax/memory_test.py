import dataclasses

import numpy as np
import pytest

from bosch_jax.memory import pair_bytes, plan
from models.errors import InputError
from tests.bosch_jax.tiny import CONFIG, tiny_prompts

MODEL = dataclasses.replace(CONFIG, num_layers=28, model_dim=256, ffn_dim=1024)
PROMPTS = tiny_prompts(contexts=8)
SLOT = PROMPTS.tokens_BxT.size * MODEL.model_dim * 2
PARAMS = 10**6


def on(device_bytes, **more):
  return plan(MODEL, PROMPTS, 2, PARAMS, device_bytes=int(device_bytes), **more)


def test_a_cpu_computes_one_pair_at_a_time_and_keeps_every_state_that_fits():
  assert dataclasses.astuple(plan(MODEL, PROMPTS, 2, PARAMS)) == (1, 1)
  # Three states beside the embedding: the inputs of layers 7, 14 and 21.
  assert plan(MODEL, PROMPTS, 2, PARAMS, state_bytes=3 * SLOT + 1).stride == 7
  assert plan(MODEL, PROMPTS, 2, PARAMS, state_bytes=0).stride == 28


def test_states_of_shorter_contexts_are_counted_beside_those_of_the_longest():
  """Half of the contexts are of another length: the plan is for the longest, the states for all."""
  tokens = PROMPTS.tokens_BxT.size
  alone = plan(MODEL, PROMPTS, 2, PARAMS, state_bytes=3 * SLOT + 1)
  both = plan(MODEL, PROMPTS, 2, PARAMS, state_bytes=3 * SLOT + 1, state_tokens=3 * tokens)
  assert (alone.stride, both.stride) == (7, 14)


def test_what_is_chosen_fits():
  pair = pair_bytes(MODEL, PROMPTS, 2)
  seen = set()
  for device in np.linspace(1.2, 40, 30) * (PARAMS + pair):
    chosen = on(device)
    stored = (-(-MODEL.num_layers // chosen.stride) - 1) * SLOT
    assert PARAMS + chosen.batch * pair + stored <= 0.9 * device
    seen.add(chosen.batch)
  assert min(seen) == 1 and max(seen) == len(PROMPTS)  # more would only be padding


def test_more_devices_share_states_and_pairs():
  one, four = on(2**22), on(2**22, devices=4)
  assert four.stride < one.stride and four.batch == 2


def test_what_cannot_fit_is_refused():
  with pytest.raises(InputError, match="--context"):
    on(PARAMS)
  with pytest.raises(InputError, match="--context"):
    on(2 * PARAMS + 2 * pair_bytes(MODEL, PROMPTS, 2), batch=8)
