"""Which tokens the filters leave, against literal sets and Hugging Face's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import InputError
from models.sampling import Sampling, choose, filtered

P = np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32)


def kept(**options):
  logits = filtered(jnp.log(jnp.asarray(P))[None], Sampling(temperature=1.0, **options))
  return np.flatnonzero(np.isfinite(logits[0])).tolist()


@pytest.mark.parametrize(
  ("options", "tokens"),
  [
    ({}, [0, 1, 2, 3, 4]),
    ({"top_k": 1}, [1]),
    ({"top_k": 3}, [1, 3, 4]),
    ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.01}, [1]),
    ({"top_p": 0.5}, [1, 3]),
    ({"top_p": 0.86}, [1, 2, 3, 4]),
    ({"min_p": 0.3}, [1, 3, 4]),
    ({"min_p": 1.0}, [1]),
    # Of the three left by top-k, .4 / .85 and .3 / .85 hold 0.82.
    ({"top_k": 3, "top_p": 0.8}, [1, 3]),
    ({"top_p": 0.86, "min_p": 0.3}, [1, 3, 4]),
  ],
)
def test_filters_written_out(options, tokens):
  assert kept(**options) == tokens


@pytest.mark.parametrize(
  "options",
  [
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
  ],
)
def test_filters_equal_hugging_face(options):
  torch = pytest.importorskip("torch")
  warpers = pytest.importorskip("transformers.generation.logits_process")
  logits = np.random.default_rng(0).normal(0, 2, (50, 40)).astype(np.float32)
  theirs = torch.tensor(logits) / options["temperature"]
  for name, field in (("TopK", "top_k"), ("TopP", "top_p"), ("MinP", "min_p")):
    if field in options:
      theirs = getattr(warpers, f"{name}LogitsWarper")(options[field])(None, theirs)
  ours = np.asarray(filtered(jnp.asarray(logits), Sampling(**options)))
  assert not np.isfinite(ours).all()
  np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_greedy_takes_the_first_of_the_best():
  logits = jnp.array([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
  assert choose(logits, jax.random.split(jax.random.key(0)), Sampling()).tolist() == [1, 0]


def test_draws_follow_the_probabilities():
  keys = jax.random.split(jax.random.key(0), 4000)
  logits = jnp.tile(jnp.log(jnp.asarray(P))[None], (4000, 1))
  tokens = choose(logits, keys, Sampling(temperature=1.0, top_k=3))
  counts = np.bincount(tokens, minlength=5) / 4000
  want = np.where(np.isin(np.arange(5), [1, 3, 4]), P, 0)
  np.testing.assert_allclose(counts, want / want.sum(), atol=0.03)
  cold = choose(logits, keys, Sampling(temperature=0.05))
  assert (np.asarray(cold) == 1).mean() > 0.98


def test_a_row_draws_the_same_in_any_company():
  keys = jax.random.split(jax.random.key(3), 4)
  logits = jax.random.normal(jax.random.key(1), (4, 30))
  sampling = Sampling(temperature=1.0, top_p=0.9)
  together = choose(logits, keys, sampling)
  assert [
    int(choose(logits[b : b + 1], keys[b : b + 1], sampling)[0]) for b in range(4)
  ] == together.tolist()


@pytest.mark.parametrize(
  ("options", "named"),
  [
    ({"temperature": -1.0}, "--temperature -1"),
    ({"temperature": float("nan")}, "--temperature nan"),
    ({"temperature": 1.0, "top_k": -1}, "--top-k -1"),
    ({"temperature": 1.0, "top_p": 0.0}, "--top-p 0"),
    ({"temperature": 1.0, "top_p": 1.5}, "--top-p 1.5"),
    ({"temperature": 1.0, "min_p": 2.0}, "--min-p 2"),
    ({"top_k": 5}, "--temperature 0"),
  ],
)
def test_impossible_settings_are_named(options, named):
  with pytest.raises(InputError, match=named):
    Sampling(**options)
