# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tool protocol: a dialogue whose searches are tool calls in JSON.

The policy writes <tool_call>{"name": "search", "arguments": {"query_list":
["..."]}}</tool_call>, with one or more queries per call. The passages come back
as the answer of a tool, in the frame of the tokenizer's chat template. Dr. Zero
(arXiv:2601.07055) and DSPO (arXiv:2510.09255) use it.

The chat templates of Llama 3 write a call without tags, {"name": "search",
"parameters": {...}}. With such a template, this form is a call, too.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import re

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent.dialogue import Dialogue
from searchrl.agent.markup import neutralise
from searchrl.trajectory import Action, Passage, Passages

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
_NOTHING = 'No search results found.'


def dr_zero(tokenizer) -> Dialogue:
  """Returns Dr. Zero's solver, which adds no system message to the template's.
  """
  return make(tokenizer, template=solver_template())


def dspo(tokenizer) -> Dialogue:
  """Returns DSPO's dialogue: like verl's search example, with a system message.
  """
  return make(tokenizer, template=solver_template(),
              system='You are a helpful and harmless assistant.')


def solver_template() -> str:
  """Returns Search-R1's prompt with this protocol's tags, as in both papers."""
  text = dialogues.verbatim('search_r1_prompt.txt').removesuffix('\n')
  for old, new in (('search', 'tool_call'), ('information', 'tool_response')):
    text = text.replace(f'<{old}>', f'<{new}>').replace(
        f'</{old}>', f'</{new}>')
  return text


def make(tokenizer, *, template: str, system: str | None = None,
         max_queries: int = MAX_QUERIES) -> Dialogue:
  """Makes the tool protocol in a tokenizer's chat template.

  Args:
    tokenizer: Tokenizer with a chat template that writes tools; see
      `agent.tokenizer`.
    template: The user's message, which has '{question}' once.
    system: The system message; None leaves it to the template.
    max_queries: Maximum number of queries; a call with more is invalid.

  Raises:
    ValueError: There is no chat template, or it does not write the tool, is not
      append-only, or changes a message.
  """
  render = functools.partial(tokenizer.render, tools=[schema()])
  plain = dataclasses.replace(
      dialogues.tags(template),  # checks the template, too
      parse=functools.partial(parse, max_queries=max_queries,
                              bare=_writes_bare_calls(tokenizer, render)),
      stop_strings=TOOL_STOPS,
      passage=tool_passage, arrange=by_query, write=tool_turn)
  framed = chat.frame_question(plain, render, system)
  if 'query_list' not in framed.head + framed.tail:
    raise ValueError(
        'the chat template must write the tools, but writes nothing of '
        f'query_list: {framed.head!r}. Choose a dialogue without tools, such '
        'as searchrl.agent.chat:search_r1, or put a chat_template.jinja beside '
        'tokenizer.json that does.')
  exchange = chat.frame_exchange(plain, tokenizer, render, system)
  inner, levels = exchange.json_levels, 1 + exchange.json_levels
  before = exchange.before + dialogues.in_json('{"result": "', inner)
  after = dialogues.in_json('"}', inner) + exchange.after
  return dataclasses.replace(
      framed, before=before, after=after, json_levels=levels,
      invalid=before + dialogues.in_json(_INVALID, levels) + after,
      turn_end=exchange.turn_end,
      end_ids=chat.end_ids(tokenizer, exchange.turn_end))


def _writes_bare_calls(tokenizer, render: chat.Render) -> bool:
  """Returns whether the chat template writes a call as JSON without tags."""
  user = {'role': 'user', 'content': 'x'}
  turn = {'role': 'assistant', 'content': '', 'tool_calls': [
      {'type': 'function', 'function': {
          'name': 'search', 'arguments': {'query_list': ['x']}}}]}
  try:
    start, text = render([user]), render([user, turn])
  except ValueError:
    return False
  written = tokenizer.decode(tokenizer.encode(text.removeprefix(start)))
  return in_tags(written) != written and parse(
      written, bare=True) == Action('search', ('x',))


def schema() -> dict:
  """Returns the tool's description, which the chat template writes."""
  return json.loads(dialogues.verbatim('search_tool.json'))


def parse(text: str, *, max_queries: int = MAX_QUERIES,
          bare: bool = False) -> Action:
  """Parses one turn strictly.

  The turn is read up to the first </tool_call> or </answer>. A call is the
  block that the first tag closes, if it holds a JSON object with only name and
  arguments, which the chat template of Llama asks for as parameters. These are 1
  to `max_queries` non-empty strings under query_list. An answer is a block as in
  the tag protocol. Everything else is invalid.

  Args:
    text: The turn's text.
    max_queries: Maximum number of queries.
    bare: True if a turn that is nothing but a call's JSON object, after a
      thought or none, is a call as well. <|python_tag|> may precede it.
  """
  text = dialogues.until_stop(text, TOOL_STOPS)
  if bare:
    text = in_tags(text)
  if not text.endswith('</tool_call>'):
    action = dialogues.closing_block(text)
    return action if action.kind == 'answer' else Action('invalid')
  _, opened, call = text.removesuffix('</tool_call>').rpartition('<tool_call>')
  queries = _queries(call) if opened else ()
  if not 1 <= len(queries) <= max_queries:
    return Action('invalid')
  return Action('search', queries)


def in_tags(text: str) -> str:
  """Returns a turn that is a call without tags with tags; others as they are.
  """
  match = _BARE.fullmatch(dialogues.without_turn_end(text))
  return f'{match[1]}<tool_call>{match[2]}</tool_call>' if match else text


def _queries(call: str) -> tuple[str, ...]:
  """Returns the queries of a call; () if the text is not one valid call."""
  try:
    body = json.loads(call, object_pairs_hook=_unique)
    if body.get('type') == 'function':  # which Llama 3.1 writes
      del body['type']
    name, = body.keys() - {'name'}
    if name not in _ARGUMENTS or body['name'] != 'search':
      return ()
    arguments = body[name]
    if arguments.keys() != {'query_list'}:
      return ()
    queries = arguments['query_list']
    if not isinstance(queries, list):
      return ()
    queries = tuple(query.strip() for query in queries)
    ''.join(queries).encode()  # raises for half a surrogate pair
  except (ValueError, KeyError, AttributeError, RecursionError):
    return ()
  return queries if all(queries) else ()


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
  """Makes an object; raises a ValueError if a key occurs twice."""
  if len(dict(pairs)) < len(pairs):
    raise ValueError('a key occurs twice')
  return dict(pairs)


def tool_turn(thought: str, action: Action) -> str:
  """Returns the text of a turn that `parse` reads as the action."""
  thoughts = f'<think>\n{thought}\n</think>\n\n'
  if action.kind == 'answer':
    return f'{thoughts}<answer> {action.texts[0]} </answer>'
  call = json.dumps({'name': 'search', 'arguments': {
      'query_list': list(action.texts)}}, ensure_ascii=False)
  return f'{thoughts}<tool_call>\n{call}\n</tool_call>'


def tool_passage(number: int, passage: Passage) -> str:
  """Returns one passage as the tool writes it; `number` counts from 1."""
  title, text = neutralise(passage.title), neutralise(passage.text)
  return f'Doc {number} (Title: "{title}")\n{text}'


def by_query(write: Callable[[int, Passage], str],
             results: Sequence[Passages]) -> list[str]:
  """Returns each query's passages, numbered from 1; '---' parts the queries."""
  pieces: list[str] = []
  for passages in results:
    texts = [write(n, p) for n, p in enumerate(passages, start=1)] or [_NOTHING]
    texts[0] = ('\n---\n' if pieces else '') + texts[0]
    pieces += [texts[0], *('\n\n' + text for text in texts[1:])]
  return pieces
