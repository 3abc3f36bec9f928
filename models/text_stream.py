"""Text of one row as it is generated: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from models.tokenizer import Tokenizer


class TextStream:
  """Turns token ids into text, piece by piece.

  Text that may be the beginning of a stop string is held back until it is clear that it is not.

  Args:
    tokenizer: of the model.
    stops: strings that end the text; they are not part of it.

  Attributes:
    text: all that was given out.
    stopped: the stop string that was met, or None.
  """

  def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
    self._tokenizer, self._stops, self._step = tokenizer, tuple(stops), tokenizer.stream()
    self._ids: list[int] = []
    self._held = ""
    self.text = ""
    self.stopped: str | None = None

  def add(self, token: int) -> str:
    """The text that can be given out once `token` is known."""
    self._ids.append(token)
    return self._give(self._step(token))

  def close(self) -> str:
    """What was held back; a character that was never completed shows as a replacement character."""
    if self.stopped is not None:
      return ""
    seen = len(self.text) + len(self._held)
    rest = self._give(self._tokenizer.decode(self._ids)[seen:])
    if self.stopped is None:
      rest, self.text, self._held = rest + self._held, self.text + self._held, ""
    return rest

  def _give(self, piece: str) -> str:
    text = self._held + piece
    found = [(text.find(stop), stop) for stop in self._stops if stop in text]
    if found:
      end, self.stopped = min(found, key=lambda pair: pair[0])
      keep = end
    else:
      end = len(text)
      keep = end - max((_overlap(text, stop) for stop in self._stops), default=0)
    self._held = text[keep:end]
    self.text += text[:keep]
    return text[:keep]


def _overlap(text: str, stop: str) -> int:
  """Characters at the end of `text` that `stop` begins with."""
  return next(
    (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
  )
