# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Encodes finished conversations as ids, with a mask of the trained ids.

They are encoded piece by piece, as in a rollout. Each text of the policy is a
separate piece, so that the policy could have sampled its ids.
"""

from collections.abc import Iterable, Mapping, Sequence
import collections
import functools
import itertools
import re
from typing import Any, NamedTuple

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent.tokenizer import plain_start
from searchrl.texts import Segment


class Transcript(NamedTuple):
  """A conversation as token ids, with a mask of the trained ids."""

  ids: tuple[int, ...]
  trained: tuple[bool, ...]  # one entry per id; True: trained on


def of_segments(segments: Iterable[Segment | tuple[str, bool]], tokenizer,
                ends: bool = False) -> Transcript:
  """Encodes segments one by one.

  The first segment begins a sequence and therefore has one BOS before it, if
  the tokenizer has a BOS.

  Args:
    segments: Segments, or pairs of a text and True if it is trained on.
    tokenizer: The model's tokenizer.
    ends: True to add the token that ends a turn, unless the last text ends with
      such a token. The added token is trained on. If a trained text other than
      the first ends with such a token and white space, this space is left out.
  """
  pieces: list[tuple[tuple[int, ...], bool]] = []
  end_ids = {*chat.ends(tokenizer)} if ends else set()
  for segment in itertools.starmap(Segment, segments):
    if not pieces and not segment.ids:
      ids = encode(segment, tokenizer, first=True)
      start = len(tokenizer.start_ids)
      pieces = [(ids[:start], False), (ids[start:], segment.trained)]
      continue
    ids = encode(segment, tokenizer)
    if segment.trained and end_ids:
      stripped = encode(segment._replace(text=segment.text.rstrip()), tokenizer)
      ids = stripped if end_ids & {*stripped[-1:]} else ids
    pieces.append((ids, segment.trained))
  last = [id_ for ids, _ in pieces for id_ in ids][-1:]
  if ends and not end_ids & {*last}:
    pieces.append(((chat.last_id(tokenizer),), True))
  return _joined(pieces)


def encode(segment: Segment, tokenizer, *, first: bool = False
          ) -> tuple[int, ...]:
  """Returns the ids of a segment; `first` says that it begins a sequence."""
  if segment.ids:
    return segment.ids
  if first:
    return tokenizer.encode_first(segment.text, special=segment.special)
  return (tokenizer.encode if segment.special else tokenizer.encode_data)(
      segment.text)


def of_messages(messages: Sequence[Mapping[str, Any]], tokenizer,
                place: str = 'a conversation',
                tools: Sequence[Mapping[str, Any]] | None = None) -> Transcript:
  """Encodes messages in the frame of the tokenizer's chat template.

  Only the assistant's turns are trained on, except those with the weight 0. A
  turn goes from the generation prompt to the token that ends the turn. If its
  content already ends with this token, the token is not added again. If the
  template ends turns without such a token, only the last turn gets one. Text
  after the assistant's last turn is left out. Special tokens in other messages
  are encoded as plain text, as in a rollout.

  Args:
    messages: Dicts of role and content. At least one message of role
      'assistant' comes after another message.
    tokenizer: The model's tokenizer.
    place: File and line of the conversation, for the error.
    tools: Descriptions of the tools, which the template writes.

  Raises:
    ValueError: There is no template; or it refuses the messages, leaves out
      one, a tool, a tool call or the content beside it, changes text that it
      wrote before, or changes a message that contains a special token.
  """
  render = functools.partial(tokenizer.render, tools=tools)
  ask = functools.partial(render, prompted=True)  # also after a turn of its own
  ends = tuple(map(tokenizer.token, chat.ends(tokenizer)))
  messages = [message if message['role'] != 'assistant' else
              {**message, 'content': _without_end(message['content'], ends)}
              for message in messages]
  pieces, written, first = [], '', 0
  for number, message in enumerate(messages):
    if message['role'] != 'assistant' or not number:
      continue
    prompt, text = ask(messages[:number]), render(messages[:number + 1])
    for earlier, later in ((written, prompt), (prompt, text)):
      if not later.startswith(earlier):
        raise ValueError(_changed(earlier, later, number, place))
    pieces += _framed(prompt[len(written):], len(written), messages[:number],
                      first, tokenizer, ask, place)
    turn = _until_end(text[len(prompt):], message['content'], tokenizer)
    if not _is_whole(message, turn):
      what = ('tool calls and the content beside them' if (
          message.get('tool_calls')) else 'reasoning_content')
      raise ValueError(
          f'the chat template must write {what}, but writes {turn!r} for '
          f'message {number + 1} of {place}. Write them in its content, or put '
          'another chat_template.jinja beside tokenizer.json.')
    pieces.append((tokenizer.encode(turn), bool(message.get('weight', 1))))
    written, first = prompt + turn, number + 1
  if pieces and not {*pieces[-1][0][-1:]} & {*chat.ends(tokenizer)}:
    pieces.append(((chat.last_id(tokenizer),), pieces[-1][1]))
  if tools and render(messages) == tokenizer.render(messages):
    raise ValueError(
        f'the chat template must write tools, but leaves out those of {place}. '
        'Put them into a message, or put another chat_template.jinja beside '
        'tokenizer.json.')
  return _joined(pieces)


def _is_whole(message: Mapping[str, Any], turn: str) -> bool:
  """Returns whether the text of a turn has a message's reasoning and calls.

  With calls, it must also have the content and, outside of the content, the
  name of each tool as often as the tool is called.
  """
  thought = (message.get('reasoning_content') or '').strip()
  calls, content = message.get('tool_calls', ()), message['content'].strip()
  if thought not in turn or calls and content not in turn:
    return False
  others = turn.replace(content, '', 1) if content else turn
  names = collections.Counter(call['function']['name'] for call in calls)
  return all(others.count(name) >= count for name, count in names.items())


def _without_end(text: str, ends: tuple[str, ...]) -> str:
  """Returns a text without the turn-end tokens at its end.

  White space after such a token is removed with the token. A text that does not
  end with such a token keeps its white space. `ends` has the texts of these
  tokens.
  """
  stripped = text.rstrip()
  for end in ends:
    if stripped.endswith(end):
      return _without_end(stripped.removesuffix(end), ends)
  return text


def _until_end(turn: str, content: str, tokenizer) -> str:
  """Returns a turn up to its last special token after the content.

  Without such a token, it is the full turn. The content is found by its text
  after </think>, because a template may rewrite the thoughts.
  """
  said = content.rpartition('</think>')[2].strip()
  rest = turn.rpartition('</think>')[2]
  after = rest[rest.index(said) + len(said):] if said in rest else turn
  for id_ in reversed(tokenizer.encode(after)):
    token = tokenizer.token(id_)
    if id_ in tokenizer.special_ids and token in after:  # not the unknown token
      return turn[:len(turn) - len(after) + after.rindex(token) + len(token)]
  return turn


def _framed(text: str, start: int, messages: Sequence[Mapping[str, Any]],
            first: int, tokenizer, render: chat.Render, place: str
           ) -> list[tuple[tuple[int, ...], bool]]:
  """Encodes the text before an assistant's turn, with messages as plain data.

  The chat template wrote the text, which contains some messages. The text
  begins at character `start` of the conversation, and `first` is the index of
  its first message. The result is a list of pairs (ids, False). False means
  that the ids are not trained on.

  To find the positions of the messages, the conversation is rendered again with
  placeholders instead of messages. The messages themselves cannot be searched
  for, because the template's own text may include the same words.
  """
  name = 'MessageStandsHere'
  while name in text:
    name += 'Too'

  def with_marks(*others: int) -> str:
    return render([*messages[:first], *(
        {**message, 'content': f'{name}{number}.' + 'x' * (number in others)}
        for number, message in enumerate(messages[first:], start=first))])

  marked = with_marks()
  frame, *rest = re.split(rf'{name}([0-9]+)\.', marked[start:])
  for number, message in enumerate(messages[first:], start=first):
    if message['content'].strip() and str(number) not in rest[::2] and (
        with_marks(number) == marked):
      raise ValueError(
          'the chat template must write every message, but leaves out message '
          f'{number + 1} of {place}, of role {message["role"]!r}. Give it '
          'another role, or put another chat_template.jinja beside '
          'tokenizer.json.')
  pieces, end = [], 0
  for number, after in zip(map(int, rest[::2]), rest[1::2], strict=True):
    content = messages[number]['content']
    written = next((form for form in (
        content, content.strip(), dialogues.in_json(content, 1))
                  if text.startswith(frame + form + after, end)), None)
    if written is None:
      break
    space = frame[len(frame.rstrip(' ')):]  # belongs to the first word
    is_last = number == len(messages) - 1
    plain = plain_start(after, tokenizer) if is_last else ''
    pieces += [(tokenizer.encode(frame.removesuffix(space)), False),
               (tokenizer.encode_data(space + written + plain), False)]
    end += len(frame) + len(written) + len(plain)
    frame = after[len(plain):]
  if text[end:] == frame:
    return [*pieces, (tokenizer.encode(frame), False)]
  for number, message in enumerate(messages[first:], start=first + 1):
    _check_plain(message['content'], tokenizer, f'message {number} of {place}')
  return [(tokenizer.encode(text), False)]


def _check_plain(content: str, tokenizer, place: str) -> None:
  """Raises a ValueError if a message has the text of a special token.

  Characters that the tokenizer lacks are allowed. `place` names the message in
  the error.
  """
  special = tokenizer.special_ids.intersection(
      tokenizer.encode(content)).difference(tokenizer.encode_data(content))
  if special:
    raise ValueError(
        f'{place} must be written as it is, but the chat template changes it, '
        f'and it holds the special token {tokenizer.token(min(special))!r}. '
        'Leave it out, or put another chat_template.jinja beside '
        'tokenizer.json.')


def _changed(earlier: str, later: str, number: int, place: str) -> str:
  before, after = chat.difference(earlier, later)
  return (
      'the chat template must only add to a conversation, but for message '
      f'{number + 1} of {place} it writes {after!r} where {before!r} stood. '
      'Give such conversations as "segments", or put another '
      'chat_template.jinja beside tokenizer.json.')


def _joined(pieces: Sequence[tuple[Sequence[int], bool]]) -> Transcript:
  return Transcript(
      tuple(id_ for ids, _ in pieces for id_ in ids),
      tuple(trained for ids, trained in pieces for _ in ids))
