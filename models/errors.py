"""The one kind of error a user is meant to read."""


def flag(field: str) -> str:
  """A field of the settings as people spell it: "max_tokens" is "--max-tokens"."""
  return "--" + field.replace("_", "-")


class InputError(Exception):
  """Bad input: one sentence that names the field, the value and the remedy.

  `run.py` prints it without a traceback and exits with code 2.

  Args:
    field: what the user set, as they spell it, e.g. "--ratio" or "config.json: rope_scaling".
    value: the value refused.
    remedy: what is wrong and what to do instead.
  """

  def __init__(self, field: str, value: object, remedy: str):
    self.field, self.value, self.remedy = field, value, remedy
    super().__init__(f"{field} {value!s}".rstrip() + f": {remedy}")
