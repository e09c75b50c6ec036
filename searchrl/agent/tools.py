# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tool protocol: a dialogue whose actions are tool calls in JSON.

For a search, the policy writes <tool_call>{"name": "search", "arguments":
{"query_list": ["..."]}}</tool_call>, with one or more queries per call. The
passages come back as a tool's answer, which the tokenizer's chat template
frames. Dr. Zero (arXiv:2601.07055) and DSPO (arXiv:2510.09255) use this
protocol. A call of any other tool has the tool's name and its own arguments.

The chat templates of Llama 3 write a call without tags, {"name": "search",
"parameters": {...}}. With such a template, this form is a call, too.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import re
from typing import Any

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import strict_json
from searchrl.agent import tag_parser
from searchrl.agent.dialogue import SEARCH, Dialogue
from searchrl.agent.markup import neutralise
from searchrl.trajectory import Action, Passage, Passages, Tool, is_search

MAX_QUERIES = 8  # queries per call
_ARGUMENTS = ('arguments', 'parameters')  # Hermes and Qwen, Llama
TOOL_STOPS = ('</tool_call>', '</answer>')
# A turn of Llama that is one JSON object, after a thought or none.
_BARE = re.compile(r'(\s*(?:<think>(?:(?!</?think>).)*</think>\s*)?)'
                   r'(?:<\|python_tag\|>\s*)?(\{(?:(?!<tool_call>).)*\})\s*',
                   re.DOTALL)
_INVALID = ('Error: this was neither a call of the tool nor an answer. To call '
            'the tool, write a JSON object with its name and its arguments '
            'between the tool_call tags. To answer, write the answer between '
            'the answer tags.')
_CALL = Action('search', ('QueryStandsHere',))  # which a template may write
_NOTHING = 'No search results found.'
_NATIVE = ('Answer the question below. First think, between <think> and '
           '</think>. If something is missing, call one of your tools with a '
           'JSON object between <tool_call> and </tool_call>, read what it '
           'returns, and think again; do so as often as you need. In the end, '
           'write the answer alone, as briefly as you can, between <answer> and '
           '</answer>.\nQuestion: {question}\n')


def dr_zero(tokenizer) -> Dialogue:
  """Returns the tool protocol with the prompt of Dr. Zero's solver.

  The system message is left to the chat template.
  """
  return make(tokenizer, template=solver_template())


def dspo(tokenizer) -> Dialogue:
  """Returns the tool protocol with DSPO's prompt and its system message.

  Both are from verl's search example.
  """
  return make(tokenizer, template=solver_template(),
              system='You are a helpful and harmless assistant.')


def native(tokenizer, tools: Sequence[Tool] = (SEARCH,)) -> Dialogue:
  """Returns the tool protocol with a prompt of our own, for any tools.

  The chat template lists the tools.
  """
  return make(tokenizer, template=_NATIVE, tools=tools)


def solver_template() -> str:
  """Returns Search-R1's prompt with other tags: Dr. Zero's and DSPO's prompt.

  <tool_call> replaces <search>, and <tool_response> replaces <information>.
  """
  text = dialogues.verbatim('search_r1_prompt.txt').removesuffix('\n')
  for old, new in (('search', 'tool_call'), ('information', 'tool_response')):
    text = text.replace(f'<{old}>', f'<{new}>').replace(
        f'</{old}>', f'</{new}>')
  return text


def make(tokenizer, *, template: str, system: str | None = None,
         max_queries: int = MAX_QUERIES,
         tools: Sequence[Tool] = (SEARCH,)) -> Dialogue:
  """Makes the tool protocol's dialogue, framed by a tokenizer's chat template.

  Args:
    tokenizer: Tokenizer with a chat template that writes tools; see
      `agent.tokenizer`.
    template: The user's message, which has '{question}' once.
    system: The system message; None leaves it to the template.
    max_queries: Maximum number of queries; a call with more is invalid.
    tools: Tools that the policy may call.

  Raises:
    ValueError: There is no chat template, or it does not write the tools,
      changes a message, changes earlier text when a message is added, or writes
      calls in a form that `parse` does not read.
  """
  tools = tuple(tools)
  render = functools.partial(tokenizer.render, tools=[*map(schema, tools)])
  own_call = _own_call(tokenizer, render)
  bare = in_tags(own_call) != own_call and parse(own_call, bare=True) == _CALL
  plain = dataclasses.replace(
      dialogues.tags(template),  # checks the template, too
      parse=functools.partial(parse, max_queries=max_queries, bare=bare,
                              names=tuple(tool.name for tool in tools)),
      stop_strings=TOOL_STOPS, arrange=by_query, write=tool_turn, tools=tools,
      passage=dialogues.passage_writer(tool_passage, tools))
  framed = chat.frame_question(plain, render, system)
  for tool in tools:
    for word in (tool.first_parameter, tool.name):
      if word not in framed.head + framed.tail:
        raise ValueError(
            'the chat template must write the tools, but writes nothing of '
            f'{word}: {framed.head!r}. Choose a dialogue without tools, such '
            'as searchrl.agent.chat:search_r1, or put a chat_template.jinja '
            'beside tokenizer.json that does.')
  exchange = chat.frame_exchange(plain, tokenizer, render, system)
  for tool in tools:
    if tool.name != 'search' and exchange != chat.frame_exchange(
        plain, tokenizer, render, system, tool.name):
      raise ValueError(
          "the chat template must write every tool's answer alike, but that of "
          f'{tool.name} differs from that of search. Choose the tags of '
          'searchrl.agent.chat:with_tools.')
  if own_call and parse(own_call, bare=bare) != _CALL:
    raise ValueError(
        'the chat template must write a call as a JSON object with a name and '
        f'arguments, but writes {own_call!r}. Choose the tags of '
        'searchrl.agent.chat:with_tools.')
  inner, levels = exchange.json_levels, 1 + exchange.json_levels
  before = exchange.before + dialogues.in_json('{"result": "', inner)
  after = dialogues.in_json('"}', inner) + exchange.after
  return dataclasses.replace(
      framed, before=before, after=after, json_levels=levels,
      invalid=before + dialogues.in_json(_INVALID, levels) + after,
      summary_request=before + dialogues.in_json(
          dialogues.SUMMARY_REQUEST, levels) + after,
      turn_end=exchange.turn_end,
      end_ids=chat.end_ids(tokenizer, exchange.turn_end))


def _own_call(tokenizer, render: chat.Render) -> str:
  """Returns a call as the chat template writes it, without special tokens.

  It is '' if the template refuses a call or does not write its query.
  """
  user = {'role': 'user', 'content': 'QuestionStandsHere'}
  turn = {'role': 'assistant', 'content': '', 'tool_calls': [
      {'type': 'function', 'function': {
          'name': 'search', 'arguments': {'query_list': [*_CALL.texts]}}}]}
  try:
    start, text = render([user]), render([user, turn])
  except ValueError:
    return ''
  written = text.removeprefix(start) if text.startswith(start) else (
      text.rpartition(user['content'])[2])
  written = tokenizer.decode(tokenizer.encode(written))
  return written if _CALL.texts[0] in written else ''


def schema(tool: Tool = SEARCH) -> dict[str, Any]:
  """Returns a tool's description in OpenAI's form, for the chat template."""
  published = json.loads(dialogues.verbatim('search_tool.json'))
  if tool.name == 'search':
    return published
  parameters = tool.parameters
  if is_search(tool.name):
    parameters = published['function']['parameters']
  return {'type': 'function', 'function': {
      'name': tool.name, 'description': tool.description,
      'parameters': parameters}}


def parse(text: str, *, max_queries: int = MAX_QUERIES, bare: bool = False,
          names: Sequence[str] = ('search',)) -> Action:
  """Returns the action in a turn's text: a tool's call, an answer or 'invalid'.

  The turn is read up to the first </tool_call> or </answer>. A call is the
  block that </tool_call> closes, if the block is one JSON object whose only
  keys are "name" and "arguments". As Llama's chat template writes it,
  "parameters" may stand for "arguments", and there may be "type": "function".
  A string in the block may have the text <tool_call>. The only argument of a
  search is query_list, with 1 to `max_queries` non-empty strings. The arguments
  of any other tool are an object, which the tool checks. An answer is the block
  that </answer> closes. Everything else is invalid.

  Args:
    text: The turn's text.
    max_queries: Maximum number of queries.
    bare: True if a JSON object without tags is a call, too. A thought may
      precede the object, and so may <|python_tag|>.
    names: Names of the tools.
  """
  text = tag_parser.until_stop(text, TOOL_STOPS)
  if bare:
    text = in_tags(text)
  if not text.endswith('</tool_call>'):
    action = tag_parser.closing_block(text)
    return action if action.kind == 'answer' else Action('invalid')
  call = text.removesuffix('</tool_call>')
  for opening in reversed([*re.finditer('<tool_call>', call)]):
    action = _action(call[opening.end():], names, max_queries)
    if action.kind != 'invalid':
      return action
  return Action('invalid')


def _action(call: str, names: Sequence[str], max_queries: int) -> Action:
  """Returns the action of a call in JSON, or an invalid action."""
  name, arguments = _read_call(call)
  if name not in names:
    return Action('invalid')
  if not is_search(name):
    return Action(name, (json.dumps(arguments, ensure_ascii=False),), arguments)
  queries = _queries(arguments)
  if not 1 <= len(queries) <= max_queries:
    return Action('invalid')
  return Action(name, queries)


def in_tags(text: str) -> str:
  """Returns a turn's text, with tags added around a call that lacks them.

  Such a call is a JSON object at the end of the turn. Other texts are returned
  unchanged.
  """
  match = _BARE.fullmatch(tag_parser.without_turn_end(text))
  return f'{match[1]}<tool_call>{match[2]}</tool_call>' if match else text


def _read_call(call: str) -> tuple[str, dict[str, Any]]:
  """Returns the name and the arguments of a call; ('', {}) if invalid."""
  try:
    body = strict_json.loads(call)
    if body.get('type') == 'function':  # which Llama 3.1 writes
      del body['type']
    key, = body.keys() - {'name'}
    name, arguments = body['name'], body[key]
  except (ValueError, KeyError, AttributeError):
    return '', {}
  is_call = (key in _ARGUMENTS and isinstance(name, str)
             and isinstance(arguments, dict))
  return (name, arguments) if is_call else ('', {})


def _queries(arguments: dict[str, Any]) -> tuple[str, ...]:
  """Returns the queries of a search's arguments; () if they are invalid."""
  queries = arguments.get('query_list')
  if arguments.keys() != {'query_list'} or not isinstance(queries, list) or (
      not all(isinstance(query, str) for query in queries)):
    return ()
  queries = tuple(query.strip() for query in queries)
  return queries if all(queries) else ()


def tool_turn(thought: str, action: Action) -> str:
  """Writes a thought and an action as a turn's text, with a JSON call.

  `parse` reads the text as this action.
  """
  thoughts = f'<think>\n{thought}\n</think>\n\n'
  if action.kind == 'answer':
    return f'{thoughts}<answer> {action.texts[0]} </answer>'
  arguments = {'query_list': list(action.texts)} if action.is_search else (
      dict(action.arguments))
  call = json.dumps({'name': action.kind, 'arguments': arguments},
                    ensure_ascii=False)
  return f'{thoughts}<tool_call>\n{call}\n</tool_call>'


def tool_passage(number: int, passage: Passage) -> str:
  """Returns a passage's text: Doc 1 (Title: "A title"), a line break, the text.

  `number` counts from 1. Tags in the passage are broken (`markup.neutralise`).
  """
  title, text = neutralise(passage.title), neutralise(passage.text)
  return f'Doc {number} (Title: "{title}")\n{text}'


def by_query(write: Callable[[int, Passage], str],
             results: Sequence[Passages]) -> list[str]:
  """Returns the texts of all passages, numbered from 1 for each query.

  A line '---' separates queries. A query without passages has a text that says
  so. `write` makes the text of a passage from its number and the passage.
  """
  pieces: list[str] = []
  for passages in results:
    texts = [write(n, p) for n, p in enumerate(passages, start=1)] or [_NOTHING]
    texts[0] = ('\n---\n' if pieces else '') + texts[0]
    pieces += [texts[0], *('\n\n' + text for text in texts[1:])]
  return pieces
