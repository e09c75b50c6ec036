# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads JSON that a policy wrote, if all programs would read it alike."""

from collections.abc import Sequence
import json
from typing import Any

_LEVELS = 64  # maximum number of arrays and objects inside one another


def loads(text: str) -> Any:
  """Returns the value of a JSON text.

  Raises:
    ValueError: The text is not JSON, or programs read it in different ways: an
      object has a key twice, a number is NaN or infinite, as 1e999 is, a string
      has half a surrogate pair, or there are more than 64 levels.
  """
  try:
    value = json.loads(text, object_pairs_hook=_unique)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
  except RecursionError as error:
    raise ValueError('there are too many levels') from error
  if not _is_within(_LEVELS, value):
    raise ValueError(f'there are more than {_LEVELS} levels')
  return value


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
  """Returns a JSON object's pairs as a dict.

  Raises:
    ValueError: A key occurs twice.
  """
  if len(dict(pairs)) < len(pairs):
    raise ValueError('a key occurs twice')
  return dict(pairs)


def _is_within(levels: int, value: Any) -> bool:
  """Returns whether a value has at most `levels` arrays and objects."""
  if not isinstance(value, (dict, list)):
    return True
  inner = value.values() if isinstance(value, dict) else value
  return levels > 0 and all(_is_within(levels - 1, each) for each in inner)
