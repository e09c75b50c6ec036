# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The protocol between policy and environment, as text: prompt, actions, observations.

A turn only ever appends. Actions are read from what the policy sampled in its
turn and from nothing else; text from an engine is data, so the protocol's own
tags are broken in it before it is shown.
"""

from collections.abc import Callable, Sequence
import dataclasses
import importlib.resources
import re
from typing import NamedTuple
import unicodedata

from searchrl.trajectory import Action, Passage

_TAGS = 'think|search|information|answer|question|tool_call|tool_response'
_BRACKET = re.compile(rf'[<＜﹤](?=[\s/／]*(?:{_TAGS})\b)', re.IGNORECASE)
_ACTION = re.compile(
    rf'<(search|answer)>((?:(?!</?(?:{_TAGS})>).)*)</\1>\s*\Z', re.DOTALL)

LAPTOP_TEMPLATE = 'Search, then answer: {question}\n'


@dataclasses.dataclass(frozen=True)
class Dialogue:
  """One protocol: what is said around what the policy says."""

  template: str  # the prompt; '{question}' is replaced
  parse: Callable[[str], Action]  # the text of one turn's sampled tokens
  stop_strings: tuple[str, ...]  # a turn ends with the token completing one
  before: str  # opens an observation
  after: str  # closes it, whatever was cut
  invalid: str  # what a policy reads after an action of no kind

  def prompt(self, question: str) -> str:
    """The text before the first turn."""
    return self.template.replace('{question}', question)

  def passage(self, number: int, passage: Passage) -> str:
    """One passage as the policy reads it; `number` counts from 1."""
    title, text = neutralise(passage.title), neutralise(passage.text)
    return f'Doc {number}(Title: "{title}") {text}'


def tags(template: str = LAPTOP_TEMPLATE) -> Dialogue:
  """The tag protocol of Search-R1 and ZeroSearch.

  <think>, <search>, <answer> from the policy; <information> from the
  environment. The first closing tag of a search or an answer ends the turn.

  Args:
    template: the prompt; must hold '{question}' once.

  Raises:
    ValueError: the template has no place for the question.
  """
  if template.count('{question}') != 1:
    raise ValueError(
        "dialogue.template must hold '{question}' once, but it stands there "
        f"{template.count('{question}')} times: {template[:80]!r}.")
  return Dialogue(
      template=template,
      parse=parse_tags,
      stop_strings=('</search>', '</answer>'),
      before='\n\n<information>',
      after='</information>\n\n',
      invalid='\nThat was neither a search nor an answer. Try again.\n',
  )


def search_r1() -> Dialogue:
  """Search-R1's prompt and retry sentence, word for word (third_party)."""
  return dataclasses.replace(
      tags(_verbatim('search_r1_prompt.txt')),
      invalid=_verbatim('search_r1_invalid_action.txt'))


def laptop() -> Dialogue:
  """The short prompt that the tiny base model was made for."""
  return tags()


def _verbatim(name: str) -> str:
  folder = importlib.resources.files('searchrl') / 'third_party'
  return (folder / name).read_text(encoding='utf-8')


def parse_tags(text: str) -> Action:
  """Reads one turn; strict.

  An action is a block that ends the text, has no other tag inside, and is not
  empty. Everything else is invalid.
  """
  match = _ACTION.search(text)
  if match is None or not match[2].strip():
    return Action('invalid')
  return Action(match[1], (match[2].strip(),))


def neutralise(text: str) -> str:
  """Text from outside with the protocol's tags broken; idempotent.

  Invisible and control characters go, so that no tag hides behind them, and
  the bracket before a tag's name becomes one that no parser knows.
  """
  text = ''.join(c for c in text if c in '\n\t' or
                 unicodedata.category(c) not in ('Cc', 'Cf'))
  text = unicodedata.normalize('NFC', text)  # after: a joiner keeps parts apart
  return _BRACKET.sub('‹', text)


class Observation(NamedTuple):
  """What the policy reads after a search."""

  tokens: tuple[int, ...]  # the block is closed whatever was cut
  passages_cut: int  # passages that were longer than their budget


def observation(
    dialogue: Dialogue,
    passages: Sequence[Passage],
    tokenizer,
    *,
    passage_tokens: int,
) -> Observation:
  """Passages as the policy reads them, each cut to its budget.

  Args:
    dialogue: the protocol.
    passages: best first; none gives an empty block.
    tokenizer: see `agent.tokenizer`.
    passage_tokens: each passage is cut to this many tokens.

  Returns:
    The ids of the block, and how many passages were cut.
  """
  ids, cut = list(tokenizer.encode(dialogue.before)), 0
  for number, passage in enumerate(passages, start=1):
    text = dialogue.passage(number, passage)
    if number < len(passages):
      text += '\n'
    shown = tokenizer.encode_data(text)
    ids += shown[:passage_tokens]
    cut += len(shown) > passage_tokens
  return Observation((*ids, *tokenizer.encode(dialogue.after)), cut)


def check_append_only(dialogue: Dialogue, tokenizer) -> None:
  """Refuses a tokenizer that cannot write the protocol.

  Raises:
    ValueError: a stop string does not survive encoding and decoding.
  """
  for stop in dialogue.stop_strings:
    if stop not in tokenizer.decode(tokenizer.encode(stop)):
      raise ValueError(
          f'the tokenizer must be able to write the stop string {stop!r}, but '
          f'decodes its ids to {tokenizer.decode(tokenizer.encode(stop))!r}. '
          'Use the tokenizer that belongs to the model.')
