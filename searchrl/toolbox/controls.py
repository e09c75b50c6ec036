# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tools for control experiments, with random outputs or with calls that fail.

Every output depends only on the call and on its question, step, sample and
turn, so that a resumed run has the same outputs.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
from typing import Any

import numpy as np

from searchrl.toolbox import calculator
from searchrl.toolbox import documents
from searchrl.toolbox import toolbox
from searchrl.trajectory import SearchError, Tool, ToolCall, ToolResult


def _rng(call: ToolCall, seed: int) -> np.random.Generator:
  """Returns a random generator that is seeded by a call and by `seed`.

  It depends only on the seed and on the question, step, sample and turn index
  of the call.
  """
  text = f'{seed}/{call.question.uid}/{call.step}/{call.sample}/{call.turn}'
  return np.random.default_rng(
      int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))


def random_document(window_tokens: int = 0) -> Tool:
  """Returns a tool `open` that shows random documents.

  Whatever the policy asks for, it gets the first page of the document of a
  random passage.

  Args:
    window_tokens: Tokens per page; 0: as many as a result may have.

  Raises:
    ValueError: `window_tokens` is below 0.
  """
  tool = documents.make(window_tokens)

  def bind(corpus: Any, tokenizer: Any, result_tokens: int, seed: int):
    assert tool.bind is not None
    read = tool.bind(corpus=corpus, tokenizer=tokenizer,
                     result_tokens=result_tokens)

    def open_random(calls: Sequence[ToolCall]) -> Sequence[Any]:
      return read([dataclasses.replace(call, turns=(), arguments={
          'id': corpus[int(_rng(call, seed).integers(len(corpus)))].id,
          'page': 1}) for call in calls])

    return open_random

  return dataclasses.replace(tool, bind=bind)


def random_number(most: int = 2000) -> Tool:
  """Returns a control: the tool `calculate` with random results.

  They are integers from 0 to `most` - 1. Only the question, step, sample and
  turn determine them, whatever is to be calculated.
  """
  def calculate(calls: Sequence[ToolCall]) -> list[ToolResult]:
    return [ToolResult(str(_rng(call, 0).integers(most))) for call in calls]

  return dataclasses.replace(calculator.make(), call=calculate)


def failing(of: str, share: float = 0.25,
            options: Mapping[str, Any] | None = None) -> Tool:
  """Returns a built-in tool whose calls fail with a given probability.

  A failed call gets SearchError('unavailable').

  Args:
    of: Name of the built-in tool, a key of `toolbox.TOOLS`.
    share: Probability that a call fails, from 0 to 1.
    options: Options of the built-in tool.

  Raises:
    ValueError: `share` is outside [0, 1], or the tool cannot be made.
  """
  if not 0 <= share <= 1:
    raise ValueError(f'share must be from 0 to 1, but is {share}. 0.25 is the '
                     'usual.')
  tool = toolbox.built_in(of, options or {})

  def wrap(function: Any, seed: int):
    def call(calls: Sequence[ToolCall]) -> list[ToolResult | SearchError]:
      fails = [_rng(one, seed).random() < share for one in calls]
      results = iter(function([
          one for one, is_failed in zip(calls, fails) if not is_failed]))
      return [SearchError('unavailable', 'as the control has it')
              if is_failed else next(results) for is_failed in fails]
    return call

  if tool.bind is None:
    return dataclasses.replace(tool, call=wrap(tool.call, 0))

  def bind(corpus: Any, tokenizer: Any, result_tokens: int, seed: int):
    assert tool.bind is not None
    return wrap(tool.bind(corpus=corpus, tokenizer=tokenizer,
                          result_tokens=result_tokens), seed)

  return dataclasses.replace(tool, bind=bind)
