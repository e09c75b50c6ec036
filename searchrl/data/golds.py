# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Gold answers and passages: reads the ways in which data sets write them.

A value that cannot be a gold answer raises an error.
"""

import ast
from collections.abc import Iterator, Mapping
import contextlib
import decimal
import io
import json
import math
import re
import tokenize
from typing import Any

import numpy as np

from searchrl.texts import normalise

# Keys that hold the answers of a mapping: Search-R1's target (verl's
# ground_truth), TriviaQA's value and aliases, SQuAD's text, KILT's answer.
_KEYS = ('ground_truth', 'target', 'value', 'aliases', 'text', 'answer')
_NUMBERS = int | float | decimal.Decimal
# Texts that programs write for a missing value. "None" and "null" are not among
# them, because they are words that a question may ask for.
_MISSING = ('nan', 'NaN', 'NaT', '<NA>', '<unk>')
_YEAR = re.compile(r'([1-9]\d{3,})\.0')  # a whole number that pandas wrote
_WRITTEN = re.compile(  # a list, a bytes literal or an array, as a text
    r'(?:array\()?(\[.*\]|\(.*\)|{.*}|b(["\']).*\2)'
    r'(?:,\s*dtype=[\w<>]+)?\)?', re.DOTALL)


def read(value: Any, *, are_needed: bool = True) -> tuple[str, ...]:
  """Returns the gold answers in a value of a data set, as texts.

  The value is a text, a number, a list of both, or a mapping with such values,
  as Search-R1's {"target": ...}. It may also be such a list written as a text.
  Both the number 1994.0 and the text '1994.0' give '1994'.

  Args:
    value: Value of a column of gold answers.
    are_needed: True if an answer is scored against them. If False, there may be
      none, and those that are null or blank are left out.

  Raises:
    TypeError, ValueError: The value has parts of other types. Or answers are
      needed, but one is null or blank, or none can be matched by any answer.
  """
  answers = [text(answer) for answer in _answers(_unpacked(value))]
  if are_needed and not all(map(str.strip, answers)):
    raise ValueError(f'one of the golden answers {value!r:.60} is null or '
                     'blank, which no answer can match')
  if are_needed and answers and not any(map(normalise, answers)):
    raise ValueError(
        f'the golden answers {value!r:.60} are only articles and punctuation, '
        'which the comparison leaves out; write them in other words')
  if are_needed and answers and {*answers} <= {*_MISSING}:
    raise ValueError(
        f'the golden answers {value!r:.60} are what programs write for a '
        'missing value; leave the question out, or write them in other words')
  return tuple(filter(str.strip, answers))


def passages(record: Mapping[str, Any], metadata: Mapping[str, Any]
            ) -> tuple[str, ...]:
  """Returns the ids or titles of the passages that have the answer's facts.

  They are the metadata's `passages`, and the titles in `supporting_facts`. This
  field has pairs (title, sentence) in HotpotQA, the JSON text of such pairs in
  2Wiki, and the form {"title": [...], ...} in FlashRAG's metadata.

  Args:
    record: Row of a file of questions.
    metadata: Metadata of the row.

  Raises:
    TypeError, ValueError, LookupError: One of these fields has another form.
  """
  facts = metadata.get('supporting_facts') or record.get(
      'supporting_facts') or ()
  facts = json.loads(facts) if isinstance(facts, str) else facts
  titles = facts['title'] or () if isinstance(facts, Mapping) else [
      fact['title'] if isinstance(fact, Mapping) else _listed(fact)[0]
      for fact in _listed(facts)]
  passages = _listed(metadata.get('passages') or ())
  return tuple(dict.fromkeys(
      text(name) for name in (*passages, *_listed(titles)) if name))


def _listed(values: Any) -> Any:
  """Returns the values unchanged.

  Raises:
    TypeError: They are one text, whose characters would be taken for values.
  """
  if isinstance(values, str):
    raise TypeError(f'a list is {values!r:.60}')
  return values


def text(value: Any) -> str:
  """Returns a value unchanged if it is a text that UTF-8 can encode.

  Raises:
    TypeError: The value is not a text.
    UnicodeEncodeError: The text has half a surrogate pair.
  """
  if not isinstance(value, str):
    raise TypeError(f'a text is {value!r:.60}')
  value.encode()
  return value


def number(value: _NUMBERS) -> str:
  """Returns a number in digits, such as '1994' for 1994.0; '' for NaN.

  Raises:
    ValueError: The number is infinite.
  """
  if isinstance(value, int):
    return str(value)
  if math.isnan(value):
    return ''
  if math.isinf(value):
    raise ValueError(f'{value} is no answer; write it as a text')
  digits = str(value)
  if len(digits) > 14 and isinstance(value, float):
    single = np.float32(value)  # 0.1 in single precision has many digits
    digits = str(single) if float(single) == value else digits
  digits = format(decimal.Decimal(digits), 'f')
  if '.' in digits:
    digits = digits.rstrip('0').rstrip('.')
  return '0' if digits == '-0' else digits


def _answers(value: Any) -> Iterator[str]:
  """Yields the answers in a text, number, list or mapping, as texts."""
  if isinstance(value, str):
    yield _YEAR.sub(r'\1', value) if _YEAR.fullmatch(value) else value
  elif isinstance(value, _NUMBERS) and not isinstance(value, bool):
    yield number(value)
  elif isinstance(value, Mapping) and {*_KEYS} & {*value}:
    parts = [value[key] for key in _KEYS if key in value]
    several = len(parts) > 1
    yield from dict.fromkeys(
        answer for part in parts for answer in _answers(_unpacked(part))
        if answer or not several)
  elif isinstance(value, list | tuple):
    for part in value:
      answer = _unpacked(part, in_list=True)
      if answer is None:
        yield ''
      elif isinstance(answer, list) and not isinstance(part, str):
        raise TypeError(f'a golden answer is {answer!r:.60}, a list in a list; '
                        'write one flat list')
      else:
        yield from _answers(answer)
  else:
    remedy = 'write "yes" or "no"' if isinstance(value, bool) else (
        'write it as a text')
    raise TypeError(f'a golden answer is {value!r:.60}, neither text nor '
                    f'number; {remedy}')


def _unpacked(value: Any, *, in_list: bool = False) -> Any:
  """Returns a value as plain Python.

  Arrays, sets and tuples become lists, and bytes become texts. A text that
  writes a list becomes this list, such as "['a', 'b']". Other values are
  returned unchanged. A text with numbers in round brackets stays a text: the
  point '(3, 4)'. If the value is itself in a list (`in_list`), so does a text
  with numbers in square brackets: the interval '[0, 1]'.
  """
  if isinstance(value, np.ndarray | np.generic):
    value = value.tolist()
  if isinstance(value, bytes):
    value = value.decode()
  if isinstance(value, set | tuple):
    value = list(value)
  match = _WRITTEN.fullmatch(value.strip()) if isinstance(value, str) else None
  if match:
    written = _literal(match[1])
    is_list = isinstance(written, list) and (
        match[1].startswith('[') and not in_list
        or all(isinstance(part, str) for part in written))
    if is_list or isinstance(written, bytes | Mapping):
      return _unpacked(written)
  return value


def _literal(written: str) -> Any:
  """Returns the value of a JSON or Python literal, or None.

  numpy writes a list without commas, ['a' 'b']. Python would read it as ['ab'];
  here it gives ['a', 'b'].
  """
  with contextlib.suppress(ValueError, RecursionError):
    return json.loads(written)
  with contextlib.suppress(ValueError, SyntaxError, RecursionError,
                           MemoryError, TypeError, tokenize.TokenError):
    value = ast.literal_eval(written)
    if not isinstance(value, list | tuple | set):
      return value
    value = list(value)
    tokens = [token for token in tokenize.generate_tokens(
        io.StringIO(written).readline) if token.type == tokenize.STRING]
    texts = [ast.literal_eval(token.string) for token in tokens]
    are_texts = all(isinstance(part, str) for part in value)
    return texts if are_texts and len(texts) > len(value) else value
  return None
