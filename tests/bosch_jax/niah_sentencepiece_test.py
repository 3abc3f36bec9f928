"""Contexts measured with a SentencePiece tokenizer, which puts a space before every text."""

from bosch_jax.niah import Filler
from tests.models import spm_tokenizer_test as spm


def test_sizes_of_pieces_add_up(tmp_path):
  tokenizer = spm.read(tmp_path, spm.processor(spm.trained(tmp_path)))
  filler = Filler(tokenizer, "noise", 0.0)
  pieces = filler.pieces(60)
  assert sum(filler.sizes(pieces)) == len(tokenizer.encode(" ".join(pieces)))
  units = filler.most_units(500)
  fitting, more = (len(tokenizer.encode(" ".join(filler.pieces(n)))) for n in (units, units + 1))
  assert fitting <= 500 < more
