"""Tiny exported hybrids in torch, and this project's logits of the same."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import hybrid_folder
from models.config import ModelConfig
from models.transformer import Transformer
from models.windows import HeadMask
from tests.models import hf_tiny
from tests.models.hf_tiny import torch, transformers

WINDOW = 8
LENGTH = 40  # of whatever runs here, so that one compilation serves


class Tiny(NamedTuple):
  family: str
  config: ModelConfig
  params: dict
  mask: HeadMask


def make(family: str, folder: pathlib.Path, rows=None) -> Tiny:
  """A random model of 3 groups, and a mask (mixed layers, first and last group of either kind)."""
  model = hf_tiny.hf_model(family, num_attention_heads=6, num_key_value_heads=3)
  model.save_pretrained(folder)
  config, params = hf_tiny.load(folder)
  rows = rows or [[0, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0]]
  return Tiny(family, config, params, HeadMask(rows[: config.num_layers]))


def save(tiny: Tiny, folder: pathlib.Path, sinks=0, **kwargs) -> pathlib.Path:
  hybrid_folder.save_hybrid(folder, tiny.config, tiny.params, tiny.mask, WINDOW, sinks, **kwargs)
  return folder


def load(folder: pathlib.Path, trust=True, **kwargs):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=trust, **kwargs
  ).eval()


@functools.cache
def _apply(config: ModelConfig, sinks: int):
  return hf_tiny.quick_jit(Transformer(config, sinks=sinks).apply)


def jax_logits(tiny: Tiny, ids_BxT, sinks=0) -> np.ndarray:
  """float32 `[B, T, V]` for at most two rows of at most `LENGTH` tokens."""
  padded = np.zeros((2, LENGTH), np.int32)
  padded[: len(ids_BxT), : ids_BxT.shape[1]] = ids_BxT
  windows = jnp.asarray(tiny.mask.windows(WINDOW, tiny.config.num_heads))
  out = _apply(tiny.config, sinks)({"params": tiny.params}, jnp.asarray(padded), windows)
  return np.asarray(out)[: len(ids_BxT), : ids_BxT.shape[1]]


def in_chunks(model, ids_BxT, chunks, **kwargs) -> tuple[np.ndarray, object]:
  """Logits of a text given piece by piece, and the cache."""
  cache, out, at = None, [], 0
  with torch.no_grad():
    for size in chunks:
      result = model(
        torch.tensor(ids_BxT[:, at : at + size]), cache=cache, use_cache=True, **kwargs
      )
      cache, at = result.cache, at + size
      out.append(result.logits.numpy())
  assert at == ids_BxT.shape[1]
  return np.concatenate(out, axis=1), cache


@pytest.fixture(scope="session", autouse=True)
def module_cache(tmp_path_factory):
  """transformers copies remote code; not into the user's own cache."""
  folder = str(tmp_path_factory.mktemp("hf_modules"))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    patch.syspath_prepend(folder)
    yield


def leaves_equal(a: dict, b: dict) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)
