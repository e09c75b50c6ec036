# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads conversations, on which a language model is trained, from jsonl files.

A line has one of three forms:

  {"prompt": "...", "completion": "..."}
  {"messages": [{"role": "user", "content": "..."}, ...]}
  {"segments": [{"text": "...", "trained": true}, ...]}

Each line is one document. Only a part of it is trained on. In the first form,
this is the completion and the token that ends a turn. In the second form, it is
the assistant's turns, each with that token. In the third form, it is the
segments whose "trained" is true. If a segment has "special": false, special
tokens in its text are encoded as plain text. If a segment has "ids", these ids
of the model's tokenizer are used instead of its text. Messages may have tool
calls in OpenAI's form, and the line may then list "tools". Other keys of a line
are ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from searchrl.data import jsonl
from searchrl.texts import Segment


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A line of a file, in one of the three forms."""

  place: str  # file and line, for error messages
  segments: Sequence[Segment] = ()
  ends: bool = False  # True: adds a trained token that ends the turn
  messages: Sequence[Mapping[str, Any]] = ()  # for the model's chat template
  tools: Sequence[Mapping[str, Any]] | None = None  # tools, for the template


def read(path: str, *, field: str = 'data.train') -> list[Conversation]:
  """Reads and checks a file of conversations.

  Args:
    path: Path of a jsonl file.
    field: Config field that names the file, for error messages.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line has none of the forms or nothing to train on, or the file
      has no line.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
        f'{field} must be a jsonl file of conversations, but {path} is not a '
        'file. Correct the path.')
  conversations = [_parse(line, place) for place, line in jsonl.lines(file)]
  if not conversations:
    raise ValueError(f'{field} must hold a conversation per line, but {path} '
                     'is empty. Name another file, or none by --config.'
                     f"{field}='' if this one is for validation.")
  return conversations


def write(path: str | pathlib.Path, rows: Iterable[Sequence[Segment]]) -> None:
  """Writes rows of segments in the form that `read` reads, atomically."""
  jsonl.write(path, ({'segments': [segment.record for segment in segments]}
                     for segments in rows))


def _parse(line: str, place: str) -> Conversation:
  record = jsonl.loads(line, 'a JSON object', place)
  forms = [form for form in _PARSERS
           if isinstance(record, dict) and form in record]
  if len(forms) != 1:
    raise ValueError(
        'a line must have one of "prompt" (with "completion"), "messages" and '
        f'"segments", but {place} has {" and ".join(forms) or "none"}: '
        f'{line.strip()[:80]!r}.')
  return _PARSERS[forms[0]](record, place)


def _pair(record: Mapping[str, Any], place: str) -> Conversation:
  prompt, completion = (
      _text(record, name, place) for name in ('prompt', 'completion'))
  if not completion:
    raise ValueError(f'completion must not be empty, but that of {place} is.')
  return Conversation(
      place, (Segment(prompt, False), Segment(completion, True)), ends=True)


def _messages(record: Mapping[str, Any], place: str) -> Conversation:
  messages = tuple(_with_calls(message, f'message {number} of {place}')
                   for number, message in enumerate(
                       _objects(record, 'messages', place), start=1))
  if not any(message['role'] == 'assistant' and message.get('weight', 1)
             for message in messages[1:]):
    roles = ', '.join(' '.join(m['role'].split()) for m in messages)
    raise ValueError(
        'messages must have a turn of role "assistant" after another, which is '
        f'trained on, but {place} has {roles[:80]}.')
  return Conversation(place, messages=messages, tools=(
      _objects(record, 'tools', place) if record.get('tools') else None))


def _with_calls(message: Mapping[str, Any], place: str) -> dict[str, Any]:
  """Checks a message, and returns it with the arguments of its calls parsed.

  Raises:
    ValueError: A field is missing or of another type; the error names `place`.
  """
  _text(message, 'role', place)
  if message.get('function_call'):
    raise ValueError('calls must be in "tool_calls", but those of '
                     f'{place} are in "function_call". Rename it.')
  if message.get('weight', 1) not in (0, 1):
    raise ValueError(f'weight must be 0 or 1, but {place} has '
                     f'{message["weight"]!r}.')
  if not message.get('tool_calls'):
    _text(message, 'content', place)
    return {name: value for name, value in message.items()
            if name != 'tool_calls'}
  calls = _objects(message, 'tool_calls', place)
  try:
    parsed = [{**call, 'function': {**call['function'], 'arguments': _arguments(
        call['function']['arguments'])}} for call in calls]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
        'tool_calls must be {"function": {"name": "...", "arguments": {...}}}, '
        f'but {place} has {str(calls)[:80]!r}.') from error
  content = message.get('content')
  return {**message, 'tool_calls': parsed, 'content': (
      '' if content is None else _text(message, 'content', place))}


def _arguments(value: Any) -> dict[str, Any]:
  """Returns the arguments of a call, which OpenAI writes as a JSON text."""
  value = json.loads(value) if isinstance(value, str) else value
  if not isinstance(value, dict):
    raise ValueError('arguments must be an object.')
  return value


def _segments(record: Mapping[str, Any], place: str) -> Conversation:
  segments = []
  for number, item in enumerate(_objects(record, 'segments', place), start=1):
    where = f'segment {number} of {place}'
    for name, value in (('trained', item.get('trained')),
                        ('special', item.get('special', True))):
      if not isinstance(value, bool):
        raise ValueError(f'{name} must be true or false, but {where} has '
                         f'{value!r}.')
    segments.append(Segment(
        _text(item, 'text', where), item['trained'], item.get('special', True),
        _ids(item.get('ids', []), where)))
  if not any(s.text or s.ids for s in segments if s.trained):
    raise ValueError('segments must have one to train on, with "trained": true '
                     f'and a text, but {place} has none.')
  return Conversation(place, tuple(segments))


def _text(record: Mapping[str, Any], name: str, place: str) -> str:
  value = record.get(name)
  if not isinstance(value, str):
    raise ValueError(f'{name} must be a text, but {place} has '
                     f'{str(value)[:40]!r}.')
  return value


def _ids(value: Any, place: str) -> tuple[int, ...]:
  if not isinstance(value, list) or not all(
      type(id_) is int and id_ >= 0 for id_ in value):
    raise ValueError('ids must be a list of whole numbers from 0 on, but '
                     f'{place} has {str(value)[:40]!r}.')
  return tuple(value)


def _objects(record: Mapping[str, Any], name: str, place: str
            ) -> Sequence[Mapping[str, Any]]:
  value = record[name]
  if not isinstance(value, list) or not value or not all(
      isinstance(item, dict) for item in value):
    raise ValueError(f'{name} must be a list of objects, but {place} has '
                     f'{str(value)[:40]!r}.')
  return tuple(value)


_PARSERS = {'prompt': _pair, 'messages': _messages, 'segments': _segments}
