# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tool `calculate`: arithmetic, by the package simpleeval."""

import ast
from collections.abc import Sequence
import math
import re

from searchrl.trajectory import Tool, ToolCall, ToolResult

_MOST_CHARACTERS = 500  # longest expression, in characters
_MOST_BITS = 10_000  # largest whole number; some 3,000 digits


def make() -> Tool:
  """Returns the tool, which evaluates an expression of numbers.

  Raises:
    ValueError: The package simpleeval is missing.
  """
  try:
    import simpleeval
  except ImportError as error:
    raise ValueError('the tool calculate needs the package simpleeval. Install '
                     "it: pip install 'searchrl[tools]'.") from error

  def calculate(calls: Sequence[ToolCall]) -> list[ToolResult]:
    return [evaluate(str(call.arguments['expression'])) for call in calls]

  def evaluate(expression: str) -> ToolResult:
    """Returns the value of an expression, or a message about its error."""
    if len(expression) > _MOST_CHARACTERS:
      return _wrong(f'more than {_MOST_CHARACTERS} characters')
    if re.search('["\']', expression):  # formats of texts could fill the memory
      return _wrong('it has a text')
    if ';' in expression:  # only its first part would be computed
      return _wrong('it has a semicolon')
    evaluator = simpleeval.SimpleEval(
        operators=simpleeval.DEFAULT_OPERATORS | _OPERATORS,
        functions=_FUNCTIONS, names={})
    try:
      value = evaluator.eval(_in_python(expression))
      if not isinstance(value, int | float) or isinstance(value, bool):
        return _wrong('the value is not a number')
      return ToolResult(_written(value))
    except Exception as error:  # any expression of a policy must have a result
      return _wrong(f'{type(error).__name__}: {error}'[:200])

  return Tool(
      'calculate', 'Computes the value of an arithmetic expression.',
      {'type': 'object', 'required': ['expression'], 'properties': {
          'expression': {'type': 'string', 'description':
                         'For instance (1989 - 1931) * 2.'}},
       'additionalProperties': False}, calculate)


def _power(base: float, exponent: float) -> float:
  if isinstance(base, int) and isinstance(exponent, int):
    _limit((base.bit_length() - 1) * abs(exponent))
  return base ** exponent


def _product(first: float, second: float) -> float:
  if isinstance(first, int) and isinstance(second, int):
    _limit(first.bit_length() + second.bit_length())
  return first * second


def _shifted(number: int, bits: int) -> int:
  _limit(number.bit_length() + bits)
  return number << bits


def _rounded(number: float, digits: int = 0) -> float:
  _limit(4 * abs(digits))
  return round(number, digits) if digits else round(number)


def _limit(bits: int) -> None:
  """Refuses whole numbers whose computation would keep all threads waiting.

  Raises:
    ValueError: There are more bits than `_MOST_BITS`.
  """
  if bits > _MOST_BITS:
    raise ValueError('a number is too large')


_FUNCTIONS = {'abs': abs, 'ceil': math.ceil, 'floor': math.floor, 'max': max,
              'min': min, 'round': _rounded, 'sqrt': math.sqrt}
_OPERATORS = {ast.Pow: _power, ast.Mult: _product, ast.LShift: _shifted}


def _in_python(expression: str) -> str:
  """Returns an expression in Python's syntax for powers and large numbers."""
  expression = expression.strip().removesuffix('=').replace('^', '**')
  if any(character.isalpha() for character in expression):
    return expression  # a comma may part a function's arguments
  return re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', expression)


def _written(value: float) -> str:
  """Returns a number with at most 12 significant digits."""
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError('the value is not finite')
  return str(value) if isinstance(value, int) else f'{value:.12g}'


def _wrong(why: str) -> ToolResult:
  return ToolResult(f'Error: this cannot be computed: {why}.', is_error=True)
