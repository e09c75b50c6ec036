# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Parser of the tag protocol: finds the action at the end of a turn's text.

A turn is read up to its first stop string (`until_stop`), because a token such
as `>.` may have further characters after it.
"""

from collections.abc import Collection, Sequence
import dataclasses
import functools
import re
from typing import Any

from searchrl.agent import strict_json
from searchrl.trajectory import Action, Tool

TAGS = 'think|search|information|answer|question|tool_call|tool_response'
TAG = re.compile(rf'</?(?:{TAGS})>')
TAG_STOPS = ('</search>', '</answer>')
TURN_ENDS = (  # end tokens of Qwen, Llama, Mistral, DeepSeek and Gemma
    '<|im_end|>', '<|endoftext|>', '<|eot_id|>', '<|eom_id|>',
    '<|end_of_text|>', '</s>', '<｜end▁of▁sentence｜>', '<end_of_turn>',
    '<eos>')


def tag_stops(names: Sequence[str]) -> tuple[str, ...]:
  """Returns the texts that end a turn: closing tags of tools and the answer."""
  return (*(f'</{name}>' for name in names), '</answer>')


def until_stop(text: str, stop_strings: Sequence[str]) -> str:
  """Returns a turn's text up to the end of its first stop string.

  All readers of a turn read this part only. The token that completes a stop
  string may have more characters (`>.`, `></`), which stay in the context and
  in the training data but are not read. This is the text that vLLM returns with
  its stop strings, and that Search-R1 keeps of a turn. Without a stop string it
  is the whole text.
  """
  ends = [text.index(stop) + len(stop) for stop in stop_strings if stop in text]
  return text[:min(ends, default=len(text))]


def without_turn_end(text: str) -> str:
  """Returns the text without white space and turn-end tokens at its end."""
  end = len(text)
  while end:
    if text[end - 1].isspace():
      end -= 1
    elif token := next(
        (token for token in TURN_ENDS if text.endswith(token, 0, end)), ''):
      end -= len(token)
    else:
      break
  return text[:end]


def parse_tags(text: str, tools: Sequence[Tool] = ()) -> Action:
  """Returns the action in a turn's text: a tool's call, an answer or 'invalid'.

  The turn is read up to the first closing tag of a tool or of an answer. The
  action is the block that this tag closes, if the block is not empty and has no
  other tag inside. The block of a tool without parameters may be empty.
  Everything else is invalid. A block inside <think> counts, because the engine
  stops at its closing tag. Search-R1 counts it, too.

  Args:
    text: Text of the turn.
    tools: Tools that the policy may call; (): the search only.
  """
  names = tuple(tool.name for tool in tools) or ('search',)
  action = closing_block(
      until_stop(text, tag_stops(names)), names,
      {tool.name for tool in tools if not tool.first_parameter})
  if not action.is_call or action.is_search:
    return action
  tool = next(tool for tool in tools if tool.name == action.kind)
  return dataclasses.replace(
      action, arguments=_arguments(tool, action.texts[0]))


def tag_example(tool: Tool) -> str:
  """Returns the arguments that a prompt shows as an example in a tool's tags.

  For a search, it is 'query'; for several arguments, '{"a": ..., "b": ...}'.
  """
  required = tool.parameters.get('required', ())
  if {*required} <= {tool.first_parameter}:
    return tool.first_parameter.removesuffix('_list')
  return '{' + ', '.join(f'"{name}": ...' for name in required) + '}'


def _arguments(tool: Tool, text: str) -> dict[str, Any]:
  """Returns the arguments between a tool's tags.

  A JSON object gives them by name. Any other text is the first argument, and is
  read as JSON if this argument cannot be the text itself. No text gives no
  argument. JSON that programs read in different ways is a text.
  """
  try:
    value = strict_json.loads(text)
  except ValueError:
    value = text
  if isinstance(value, dict):
    return value
  first = tool.parameters.get('properties', {}).get(tool.first_parameter)
  value = text if _takes(first, text) else value
  return {tool.first_parameter: value} if text else {}


def _takes(schema: Any, text: str) -> bool:
  """Returns whether a text may be a value of a schema.

  It goes by the type, the listed values or the alternatives. A schema that has
  none of them, such as a reference, takes any text.
  """
  if not isinstance(schema, dict):
    return True
  for key in ('anyOf', 'oneOf'):
    if key in schema:
      return any(_takes(each, text) for each in schema[key])
  if 'const' in schema:
    return text == schema['const']
  return 'string' in schema.get('type', 'string') and (
      text in schema.get('enum', (text,)))


def closing_block(text: str, names: tuple[str, ...] = ('search',),
                  without_text: Collection[str] = ()) -> Action:
  """Returns the action whose block ends a text, or an invalid action.

  Args:
    text: Text of a turn, as `until_stop` cuts it.
    names: Names of the tools that have tags.
    without_text: Names of the tools whose block may be empty.
  """
  match = _action_pattern(names).search(text)
  if match is None or not match[2].strip() and match[1] not in without_text:
    return Action('invalid')
  return Action(match[1], (match[2].strip(),))


@functools.cache
def _action_pattern(names: tuple[str, ...]) -> re.Pattern:
  """Returns the pattern of a block that ends a turn and has no tag inside."""
  actions = '|'.join([*map(re.escape, names), 'answer'])
  return re.compile(
      rf'<({actions})>((?:(?!</?(?:{TAGS}|{actions})>).)*)</\1>\Z', re.DOTALL)
