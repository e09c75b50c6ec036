# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""conversations: the three forms of a line, and what is wrong with others."""

import json

import pytest

from searchrl.data import conversations
from searchrl.texts import Segment

USER = {'role': 'user', 'content': 'Hi.'}
SAID = {'role': 'assistant', 'content': 'Hello.'}


def written(tmp_path, *lines):
  file = tmp_path / 'my.jsonl'
  file.write_text('\n'.join(
      line if isinstance(line, str) else json.dumps(line) for line in lines))
  return str(file)


def test_the_three_forms_are_read_in_one_file(tmp_path):
  pieces = [{'text': 'Ask: ', 'trained': False}, {'text': 'x', 'trained': True}]
  path = written(
      tmp_path, {'prompt': 'one', 'completion': ' two', 'id': 3}, '',
      {'messages': [USER, SAID]}, {'segments': pieces})
  pair, chat, raw = conversations.read(path)
  assert pair.segments == (Segment('one', False), Segment(' two', True))
  assert pair.ends and not raw.ends
  assert chat.messages == (USER, SAID) and not chat.segments
  assert raw.segments == (Segment('Ask: ', False), Segment('x', True))
  assert raw.place == f'{path}, line 4'


def test_what_is_written_is_read_again(tmp_path):
  rows = [[Segment('é\n', False), Segment('b', True)], [Segment('c', True)],
          [Segment('<s>', True, special=False), Segment('', False, ids=(4, 2))]]
  conversations.write(tmp_path / 'rows.jsonl', rows)
  found = conversations.read(str(tmp_path / 'rows.jsonl'))
  assert [list(x.segments) for x in found] == rows
  assert [file.name for file in tmp_path.iterdir()] == ['rows.jsonl']


@pytest.mark.parametrize('arguments', [{'q': 'é'}, '{"q": "\u00e9"}'])
def test_tool_calls_are_read_as_openai_writes_them(arguments, tmp_path):
  call = {'id': '1', 'type': 'function', 'function': {
      'name': 'find', 'arguments': arguments}}
  calls = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
  found = {'role': 'tool', 'tool_call_id': '1', 'content': 'it', }
  said = SAID | {'tool_calls': None}  # as rows of one schema have it
  chat, plain = conversations.read(written(
      tmp_path, {'messages': [USER, calls, found, said], 'tools': [{'a': 1}]},
      {'messages': [USER, said], 'tools': None}))
  read = call | {'function': {'name': 'find', 'arguments': {'q': 'é'}}}
  assert chat.messages == (
      USER, calls | {'content': '', 'tool_calls': [read]}, found, SAID)
  assert chat.tools == ({'a': 1},) and plain.tools is None
  assert plain.messages == (USER, SAID)


@pytest.mark.parametrize('line, message', [
    ({'messages': [USER, SAID | {'tool_calls': [{'name': 'x'}]}]},
     'tool_calls must be {"function": .* but message 2 of .*, line 2 has .*x'),
    ({'messages': [USER, SAID | {'tool_calls': [{'function': {
        'name': 'x', 'arguments': '[1]'}}]}]}, 'tool_calls must be {"function'),
    ({'messages': [USER, SAID | {'tool_calls': 'x'}]},
     "tool_calls must be a list of objects, but message 2 .* has 'x'"),
    ('{"prompt": ', ', line 2 must be a JSON object, but .* is not: '),
    ([1], 'must have one of "prompt" .* but .*, line 2 has none'),
    ({'text': 'x'}, 'has none: .*text'),
    ({'prompt': 'x', 'messages': []}, 'has prompt and messages'),
    ({'prompt': 'x'}, "completion must be a text, but .*, line 2 has 'None'"),
    ({'prompt': 'x', 'completion': ''}, 'completion must not be empty, but'),
    ({'prompt': 3, 'completion': 'x'}, "prompt must be a text, but .* has '3'"),
    ({'messages': 'x'}, "messages must be a list of objects, .* has 'x'"),
    ({'messages': []}, "messages must be a list of objects, .* has '\\[\\]'"),
    ({'messages': [USER]}, 'a turn of role "assistant" after .* has user'),
    ({'messages': [SAID, USER]}, 'after another, .* has assistant, user'),
    ({'messages': [USER, SAID | {'weight': 0}]}, 'after another, .* has user'),
    ({'messages': [USER, SAID | {'weight': 0.5}]},
     'weight must be 0 or 1, but message 2 of .* has 0.5'),
    ({'messages': [USER, {'role': 'assistant', 'content': '',
                          'function_call': {'name': 'search'}}]},
     'calls must be in "tool_calls", but those of message 2 of .* are in "fun'),
    ({'messages': [USER, {'role': 'assistant', 'content': None}]},
     "content must be a text, but message 2 of .*, line 2 has 'None'"),
    ({'messages': [{'content': ''}, SAID]}, 'role must be a text, but message'),
    ({'segments': [{'text': 'x', 'trained': 1}]},
     'trained must be true or false, but segment 1 of .*, line 2 has 1'),
    ({'segments': [{'text': 'x', 'trained': False}]}, 'one to train on'),
    ({'segments': [{'text': 'x', 'trained': True, 'special': 'no'}]},
     "special must be true or false, but segment 1 .* has 'no'"),
    ({'segments': [{'text': '', 'trained': True, 'ids': [1, -2]}]},
     r'ids must be a list of whole numbers .* segment 1 .* has .\[1, -2'),
    ({'segments': [{'trained': True}]}, 'text must be a text, but segment 1'),
])
def test_a_line_of_no_form_is_named(line, message, tmp_path):
  path = written(tmp_path, {'prompt': 'x', 'completion': 'y'}, line)
  with pytest.raises(ValueError, match=message):
    conversations.read(path)


def test_a_missing_and_an_empty_file_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='data.validation must be a js'):
    conversations.read(str(tmp_path / 'none'), field='data.validation')
  with pytest.raises(ValueError, match='data.train must hold a conv.* is empty'):
    conversations.read(written(tmp_path, '', ''))


def test_an_error_about_roles_is_one_short_line(tmp_path):
  odd = [USER, {'role': 'x\ny' * 999, 'content': ''}]
  path = written(tmp_path, {'messages': odd})
  with pytest.raises(ValueError, match='line 1 has user, x yx y') as caught:
    conversations.read(path)
  message = str(caught.value)
  assert '\n' not in message and len(message) < 300 + len(path)
