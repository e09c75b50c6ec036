# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of options: the first one that is broken is named in an error."""

from typing import Any


def check(place: str, *rules: tuple[str, Any, Any, str]) -> None:
  """Raises a ValueError for the first option that breaks its rule.

  Args:
    place: Text before the names of options in the error, such as 'rollout.'.
    *rules: For each option its name, its value, whether the value is legal, and
      the rule in words.
  """
  for name, value, is_legal, rule in rules:
    if not is_legal:
      raise ValueError(f'{place}{name} must be {rule}, but is {value!r}.')


def at_least(least: int, place: str, **options: float) -> None:
  """Raises a ValueError if an option is below `least`, or not a number."""
  check(place, *((name, value, value >= least, f'at least {least}')
                 for name, value in options.items()))


def on_this_machine(name: str, path: Any) -> None:
  """Raises a ValueError if a path is the address of an object store."""
  if '://' in str(path):
    raise ValueError(f'{name} must be a path on this machine, but is '
                     f'{str(path)!r}. Copy it here first.')
