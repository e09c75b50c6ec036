# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Finished conversations as ids, with which of them are trained on.

They are encoded piece by piece, as a rollout would: what the policy says is a
piece of its own, so that its ids are some that it could have sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Any, NamedTuple

from searchrl.agent import dialogue as dialogues


class Transcript(NamedTuple):
  """A conversation as a model reads it."""

  ids: tuple[int, ...]
  trained: tuple[bool, ...]  # one an id


def of_segments(segments: Iterable[tuple[str, bool]], tokenizer,
                ends: bool = False) -> Transcript:
  """Encodes texts one by one; special tokens in them become their ids.

  Args:
    segments: texts, and whether each is trained on.
    tokenizer: of the model.
    ends: the token that ends a turn follows, and is trained on.
  """
  pieces = [(tokenizer.encode(text), trained) for text, trained in segments]
  return _joined([*pieces, (tokenizer.eos_ids[:1], True)] if ends else pieces)


def of_messages(messages: Sequence[Mapping[str, Any]], tokenizer,
                place: str = 'a conversation') -> Transcript:
  """Encodes messages in the frame of the tokenizer's chat template.

  Trained on are the assistant's turns, from the end of their generation prompt
  to the token that ends them. What stands after the last one is left out.
  Special tokens in the messages of others are data, as in a rollout.

  Args:
    messages: dicts of role and content; one of role 'assistant' is not first.
    tokenizer: of the model.
    place: where they stand, for the error.

  Raises:
    ValueError: there is no template, it refuses the messages, it changes what
      it has written before, or a message that holds a special token.
  """
  pieces, written, first = [], '', 0
  for number, message in enumerate(messages):
    if message['role'] != 'assistant' or not number:
      continue
    prompt = tokenizer.render(messages[:number])
    text = tokenizer.render(messages[:number + 1])
    for earlier, later in ((written, prompt), (prompt, text)):
      if not later.startswith(earlier):
        raise ValueError(_changed(earlier, later, number, place))
    pieces += _framed(prompt[len(written):], len(written), messages[:number],
                      first, tokenizer, place)
    said = _until_end(text[len(prompt):], tokenizer)
    pieces.append((tokenizer.encode(said), True))
    written, first = prompt + said, number + 1
  return _joined(pieces)


def _until_end(said: str, tokenizer) -> str:
  """A turn up to the special token that ends it, or all of it."""
  for id_ in reversed(tokenizer.encode(said)):
    token = tokenizer.token(id_)
    if id_ in tokenizer.special_ids and token in said:  # no unknown token
      return said[:said.rindex(token) + len(token)]
  return said


def _framed(text: str, start: int, messages: Sequence[Mapping[str, Any]],
            first: int, tokenizer, place: str
           ) -> list[tuple[tuple[int, ...], bool]]:
  """The template's text, and the messages in it as data.

  Where they stand is seen by writing others in their place: what a message says
  may stand in the template's own text, too.

  Args:
    text: what the template writes of the messages from `first` on.
    start: characters that it writes before it.
    messages: up to the assistant's turn.
    first: of those that the text is about.
    tokenizer: of the model.
    place: where the messages stand, for the error.
  """
  name = 'MessageStandsHere'
  while name in text:
    name += 'Too'
  marked = tokenizer.render([*messages[:first], *(
      {**message, 'content': f'{name}{number}.'}
      for number, message in enumerate(messages[first:], start=first))])
  frame, *rest = re.split(rf'{name}([0-9]+)\.', marked[start:])
  pieces, at = [], 0
  for number, after in zip(map(int, rest[::2]), rest[1::2], strict=True):
    content = messages[number]['content']
    shown = next((form for form in (
        content, content.strip(), dialogues.in_json(content, 1))
                  if text.startswith(frame + form + after, at)), None)
    if shown is None:
      break
    space = frame[len(frame.rstrip(' ')):]  # belongs to the first word
    pieces += [(tokenizer.encode(frame.removesuffix(space)), False),
               (tokenizer.encode_data(space + shown), False)]
    at, frame = at + len(frame) + len(shown), after
  if text[at:] == frame:
    return [*pieces, (tokenizer.encode(frame), False)]
  for number, message in enumerate(messages[first:], start=first + 1):
    _check_plain(message['content'], tokenizer, f'message {number} of {place}')
  return [(tokenizer.encode(text), False)]


def _check_plain(content: str, tokenizer, place: str) -> None:
  """Raises a ValueError if encoding a message would give a special token."""
  special = tokenizer.special_ids.intersection(
      tokenizer.encode(content)).difference(tokenizer.encode_data(content))
  if special:
    raise ValueError(
        f'{place} must be written as it is, but the chat template changes it, '
        f'and it holds the special token {tokenizer.token(min(special))!r}. '
        'Leave it out, or put another chat_template.jinja beside '
        'tokenizer.json.')


def _changed(earlier: str, later: str, number: int, place: str) -> str:
  same = next((i for i, (a, b) in enumerate(zip(earlier, later)) if a != b),
              min(len(earlier), len(later)))
  near = slice(max(same - 20, 0), same + 40)
  return (
      'the chat template must only add to a conversation, but for message '
      f'{number + 1} of {place} it writes {later[near]!r} where '
      f'{earlier[near]!r} stood. Give such conversations as "segments", or put '
      'another chat_template.jinja beside tokenizer.json.')


def _joined(pieces: Iterable[tuple[Sequence[int], bool]]) -> Transcript:
  ids, trained = [], []
  for piece, learned in pieces:
    ids += piece
    trained += [learned] * len(piece)
  return Transcript(tuple(ids), tuple(trained))
