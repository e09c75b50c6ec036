# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Config fields with a rule, which is declared beside the default.

  config.rollout = dict(temperature=field(1.0, above=0))

A rule is a range, or a set of legal values. It stays with the field when a
recipe or a flag changes the value. `config_fields.fields` finds it.
"""

from collections.abc import Callable, Iterator, Sequence
import operator
from typing import Any, NamedTuple

from ml_collections import config_dict


class Rule(NamedTuple):
  """A rule for the value of a config field, and its description in words."""

  is_legal: Callable[[Any], Any]  # returns whether a value is legal
  must_be: str  # description, which follows 'must be' in errors
  nests: bool = False  # whether the entries of a tuple may be tuples


class Field(config_dict.FieldReference):
  """A value in a config, with its rule.

  Attributes:
    rule: Rule of the value, if it has one.
    is_set: True if the field was given a value after it was made: by a recipe,
      a size, a setting or a flag.
  """

  def __init__(self, default: Any, rule: Rule | None):
    super().__init__(default)
    self.rule = rule
    self.is_set = False

  def __setstate__(self, state: dict[str, Any]) -> None:  # for deepcopy
    super().__setstate__(state)
    self.rule, self.is_set = state['rule'], state['is_set']

  def set(self, value: Any, type_safe: bool = True) -> None:
    """Sets the value of the field, whose `is_set` is then True."""
    super().set(value, type_safe)
    self.is_set = True


def field(default: Any, is_legal: Callable[[Any], Any] | None = None,
          must_be: str = '', *, one_of: Sequence[str] = (),
          some_of: Sequence[str] = (), whole: bool = False, zero: str = '',
          nests: bool = False, **bounds: float) -> Any:
  """Returns a value for a ConfigDict that has a rule for its legal values.

  Args:
    default: Value of the field. The bounds of a tuple apply to each number.
    is_legal: Function that returns whether a value is legal, for rules that the
      other arguments cannot describe.
    must_be: Description of `is_legal`, which follows 'must be' in errors.
    one_of: Legal values.
    some_of: Legal entries of a tuple, each of which may occur once.
    whole: Whether the numbers of a tuple must be whole numbers.
    zero: Meaning of the number 0, such as 'no limit'. If it is given, the value
      0 is legal whatever the bounds are, and the lower bound is 0 by default.
    nests: Whether the entries of a tuple may be tuples.
    **bounds: Numbers named at_least, above, at_most or below.
  """
  if one_of:
    is_legal = one_of.__contains__
    must_be = f'one of {", ".join(map(repr, one_of))}'
  elif some_of:
    is_legal = lambda values: {*values} <= {*some_of} and (
        len({*values}) == len(values))
    must_be = f'some of {", ".join(some_of)}'
  elif is_legal is None:
    is_legal, must_be, _ = _within(
        {'at_least': 0} | bounds if zero else bounds, whole, zero)
    if isinstance(default, tuple):
      must_be = f'{"whole " * whole}numbers of {must_be}'
  return Field(default, Rule(is_legal, must_be, nests))


_TESTS = {'at_least': operator.ge, 'above': operator.gt,
          'at_most': operator.le, 'below': operator.lt}


def _within(bounds: dict[str, float], whole: bool, zero: str) -> Rule:
  """Returns the rule of a number, or of each number in a tuple."""
  def is_legal(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return bool(zero) and value == 0 or all(
        _TESTS[name](number, bound) and (isinstance(number, int) or not whole)
        for number in numbers for name, bound in bounds.items())

  words = ' and '.join(f'{name.replace("_", " ")} {bound:g}'
                       for name, bound in bounds.items())
  return Rule(is_legal, f'{words} (0: {zero})' if zero else words)


def tracked(default: Any) -> Any:
  """Returns a config field that has no rule, but records if it was set."""
  return Field(default, None)


def unset(config: config_dict.ConfigDict, group: str = ''
         ) -> Iterator[tuple[str, Field]]:
  """Yields (dotted name, field) of each field that still has its default."""
  for name, value in config.items(preserve_field_references=True):
    if isinstance(value, config_dict.ConfigDict):
      yield from unset(value, f'{group}{name}.')
    elif isinstance(value, Field) and not value.is_set:
      yield group + name, value


def get(tree: Any, name: str) -> Any:
  """Returns the value of a dotted name in nested dicts, or None."""
  for part in name.split('.'):
    tree = tree.get(part) if hasattr(tree, 'get') else None
  return tree


def seed(default: int) -> Any:
  """Returns a config field for a random seed, a number of 63 bits."""
  return field(default, lambda value: 0 <= value < 2**63, 'from 0 to 2^63 - 1')
