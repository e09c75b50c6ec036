# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Config fields with a range, which is declared beside the default.

  config.rollout = dict(temperature=field(1.0, above=0))

The range stays with the field, whatever sets it later. `fields` finds it.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

from ml_collections import config_dict

_SEEDS = 2**63


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule for the value of a config field, and its words."""

  is_legal: Callable[[Any], bool]
  must_be: str


class Field(config_dict.FieldReference):
  """A value in a config, with its rule."""

  def __init__(self, default: Any, rule: Rule):
    super().__init__(default)
    self.rule = rule

  def __setstate__(self, state: dict[str, Any]) -> None:  # for deepcopy
    super().__setstate__(state)
    self.rule = state['rule']


def field(
    default: Any,
    is_legal: Callable[[Any], bool] | None = None,
    must_be: str = '',
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    one_of: Sequence[str] = (),
    some_of: Sequence[str] = (),
    whole: bool = False,
    zero: str = '',
) -> Any:
  """Returns a value for a config that keeps a rule.

  Args:
    default: Value of the field. The bounds of a tuple are those of each number.
    is_legal: Function that returns whether a value is legal, for other rules.
    must_be: Words of that rule, which follow 'must be'.
    at_least: Smallest legal number.
    above: Number that is too small, as are all smaller ones.
    at_most: Largest legal number.
    below: Number that is too large, as are all larger ones.
    one_of: Legal values.
    some_of: Legal entries of a tuple, which has none of them twice.
    whole: Whether the numbers of a tuple are whole ones.
    zero: Meaning of 0, which is legal then. Without bounds no number below it
      is.
  """
  if zero and at_least is None:
    at_least = 0
  bounds = [(words, bound, test) for words, bound, test in (
      ('at least', at_least, lambda x, bound: x >= bound),
      ('above', above, lambda x, bound: x > bound),
      ('at most', at_most, lambda x, bound: x <= bound),
      ('below', below, lambda x, bound: x < bound)) if bound is not None]
  if is_legal is not None:
    rule = Rule(is_legal, must_be)
  elif one_of:
    rule = Rule(lambda value: value in one_of,
                f'one of {", ".join(map(repr, one_of))}')
  elif some_of:
    rule = Rule(lambda values: {*values} <= {*some_of} and len(
        {*values}) == len(values), f'some of {", ".join(some_of)}')
  else:
    text = ' and '.join(f'{words} {bound:g}' for words, bound, _ in bounds)
    if isinstance(default, tuple):
      text = f'{"whole " if whole else ""}numbers of {text}'

    def keeps(value: Any) -> bool:
      numbers = value if isinstance(value, tuple) else (value,)
      return bool(zero) and value == 0 or all(
          test(x, bound) and (isinstance(x, int) or not whole)
          for x in numbers for _, bound, test in bounds)

    rule = Rule(keeps, f'{text} (0: {zero})' if zero else text)
  return Field(default, rule)


def seed(default: int) -> Any:
  """Returns a random seed for a config, a number of 63 bits."""
  return field(default, lambda value: 0 <= value < _SEEDS,
               'from 0 to 2^63 - 1')


def fields(config: config_dict.ConfigDict, group: str = ''
          ) -> Iterator[tuple[str, Any, Rule | None]]:
  """Yields (dotted name, value, rule) of each field; None if it has no rule."""
  for name, value in config.items(preserve_field_references=True):
    if isinstance(value, config_dict.ConfigDict):
      yield from fields(value, f'{group}{name}.')
    elif isinstance(value, config_dict.FieldReference):
      yield group + name, value.get(), getattr(value, 'rule', None)
    else:
      yield group + name, value, None
