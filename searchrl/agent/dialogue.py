# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dialogues: the protocol of policy and environment, as text, and its parser.

A turn only ever appends. Actions are parsed from what the policy sampled in its
turn and from nothing else; text from an engine is data, so the protocol's own
tags are broken in it before it is shown. Here is the tag protocol; `agent.chat`
puts a dialogue into a chat template, `agent.tools` has the tool protocol.
"""

from collections.abc import Callable, Sequence
import dataclasses
import importlib.resources
import json
import re
from typing import NamedTuple

from searchrl.agent import proposals
from searchrl.agent.markup import neutralise, shows_tag
from searchrl.trajectory import Action, Passage, Passages

_TAGS = 'think|search|information|answer|question|tool_call|tool_response'
_ACTION = re.compile(
    rf'<(search|answer)>((?:(?!</?(?:{_TAGS})>).)*)</\1>\s*\Z', re.DOTALL)

_TAIL = 32  # tokens, in which the beginning of a tag has room

LAPTOP_TEMPLATE = 'Search, then answer: {question}\n'
ANSWER_TEMPLATE = 'Answer: {question}\n'
READ_TEMPLATE = 'Read, then answer: {question}\n'
FROM_MEMORY = ('Answer the question from what you know, as briefly as you can, '
               'between <answer> and </answer>.\nQuestion: {question}\n')
FROM_DOCUMENTS = ('Below are documents and, in the last line, a question. Answer it '
                  'by the documents alone, as briefly as you can, between '
                  '<answer> and </answer>.\n{question}\n')
PROPOSE_TEMPLATE = 'Write a question. {question}\n'


def tag_passage(number: int, passage: Passage) -> str:
  """One passage as Search-R1 writes it; `number` counts from 1."""
  title, text = neutralise(passage.title), neutralise(passage.text)
  return f'Doc {number}(Title: "{title}") {text}'


def document(number: int, passage: Passage) -> str:
  """One passage as ZeroSearch writes it: a title only where the text lacks it.
  """
  title = '' if passage.title in passage.text else f'{passage.title} '
  return f'Doc {number}: {neutralise(title + passage.text)}'


def in_a_row(write: Callable[[int, Passage], str],
             results: Sequence[Passages]) -> list[str]:
  """The passages of all queries, a line each, numbered from 1 to the last."""
  passages = [p for of_query in results for p in of_query]
  lines = [write(n, p) for n, p in enumerate(passages, start=1)]
  return [line + '\n' for line in lines[:-1]] + lines[-1:]


@dataclasses.dataclass(frozen=True)
class Dialogue:
  """One protocol: the environment's text around the turns of the policy.

  The texts around a message may hold special tokens, which become their ids.
  The message itself, question included, is data, and so are passages.
  """

  template: str  # the first message; '{question}' is replaced
  parse: Callable[[str], Action]  # reads the text of one turn's sampled tokens
  stop_strings: tuple[str, ...]  # a turn ends with the token that completes one
  before: str  # opens an observation
  after: str  # closes it, whatever was cut
  invalid: str  # the whole observation after an invalid action
  passage: Callable[[int, Passage], str] = tag_passage  # writes one, from 1 on
  arrange: Callable[..., list[str]] = in_a_row  # (passage, results) -> pieces
  head: str = ''  # stands before the first message
  tail: str = ''  # stands after it
  turn_end: str = ''  # ends a turn that the policy did not end itself
  end_ids: tuple[int, ...] = ()  # end a turn, besides the tokenizer's eos_ids
  json_levels: int = 0  # JSON strings, one in another, that hold passages

  def prompt(self, question: str) -> str:
    """The first message, with the question in its place."""
    return self.template.replace('{question}', question)


def tags(template: str = LAPTOP_TEMPLATE) -> Dialogue:
  """The tag protocol of Search-R1 and ZeroSearch.

  The policy writes <think>, <search> and <answer>, the environment
  <information>. The first closing tag of a search or an answer ends the turn.

  Args:
    template: the prompt; must hold '{question}' once.

  Raises:
    ValueError: the template has no place for the question, or several.
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


def laptop(tokenizer) -> Dialogue:
  """The short prompt that the tiny base model was trained on."""
  return tags(tokenizer.leading_space + LAPTOP_TEMPLATE)


def laptop_answer(tokenizer) -> Dialogue:
  """The tiny base model's prompt for an answer from memory."""
  return tags(tokenizer.leading_space + ANSWER_TEMPLATE)


def laptop_read(tokenizer) -> Dialogue:
  """The tiny base model's prompt for a question below passages.

  The question that it is given is `world.lessons.with_passages`.
  """
  return tags(tokenizer.leading_space + READ_TEMPLATE)


def laptop_proposer(tokenizer) -> Dialogue:
  """The tiny proposer's prompt; what it is given is `proposals.ask`.

  A turn searches, or ends with <question> and <answer>.
  """
  return tags(tokenizer.leading_space + PROPOSE_TEMPLATE)


def proposer(tokenizer) -> Dialogue:
  """A proposer's prompt in the tag protocol; see `agent.proposals`."""
  return tags(tokenizer.leading_space + proposals.TAG_TEMPLATE)


def search_r1(tokenizer) -> Dialogue:
  """Search-R1's prompt and retry sentence, word for word (third_party)."""
  return dataclasses.replace(
      tags(tokenizer.leading_space + verbatim('search_r1_prompt.txt')),
      invalid=verbatim('search_r1_invalid_action.txt'))


def r1(tokenizer) -> Dialogue:
  """Search-R1's prompt for an answer without search (third_party)."""
  return tags(tokenizer.leading_space + verbatim('search_r1_without.txt'))


def zerosearch(tokenizer) -> Dialogue:
  """ZeroSearch's: Search-R1's prompt, and passages as `document` writes them."""
  return dataclasses.replace(search_r1(tokenizer), passage=document)


def from_memory(tokenizer) -> Dialogue:
  """A prompt of ours for an answer at once, from memory."""
  return tags(tokenizer.leading_space + FROM_MEMORY)


def from_documents(tokenizer) -> Dialogue:
  """A prompt of ours for an answer at once, to a question below documents."""
  return tags(tokenizer.leading_space + FROM_DOCUMENTS)


def continuation(tokenizer) -> Dialogue:
  """No protocol: the first message, and what follows up to the end of text."""
  return Dialogue(
      template=tokenizer.leading_space + '{question}', parse=_whole,
      stop_strings=(), before='', after='', invalid='')


def _whole(text: str) -> Action:
  return Action('answer', (text,)) if text.strip() else Action('invalid')


def verbatim(name: str) -> str:
  """A text of third_party, character by character."""
  folder = importlib.resources.files('searchrl') / 'third_party'
  return (folder / name).read_text(encoding='utf-8')


def parse_tags(text: str) -> Action:
  """Parses one turn strictly.

  An action is a block that ends the text, has no other tag inside, and is not
  empty. Everything else is invalid.
  """
  match = _ACTION.search(text)
  if match is None or not match[2].strip():
    return Action('invalid')
  return Action(match[1], (match[2].strip(),))


def opening(dialogue: Dialogue, question: str, tokenizer) -> tuple[int, ...]:
  """Ids of the prompt: all before the policy's first turn."""
  return (*tokenizer.encode(dialogue.head),
          *tokenizer.encode_data(dialogue.prompt(question)),
          *tokenizer.encode(dialogue.tail))


def retry(dialogue: Dialogue, tokenizer,
          action_tokens: Sequence[int]) -> tuple[int, ...]:
  """Ids of the observation after an invalid action."""
  return (*_ending(dialogue, tokenizer, action_tokens),
          *tokenizer.encode(dialogue.invalid))


class Observation(NamedTuple):
  """The text that the policy reads after a search, as ids."""

  tokens: tuple[int, ...]  # the block is closed, whatever was cut
  passages_cut: int  # passages that were longer than their budget


def observation(
    dialogue: Dialogue,
    results: Sequence[Passages],
    tokenizer,
    *,
    passage_tokens: int,
    action_tokens: Sequence[int] = (),
) -> Observation:
  """Writes passages as the policy reads them, each cut to its budget.

  Args:
    dialogue: the protocol.
    results: the passages of each query, best first.
    tokenizer: see `agent.tokenizer`.
    passage_tokens: each passage is cut to this many tokens.
    action_tokens: ids of the turn with the queries.

  Returns:
    The ids of the block, and how many passages were cut.
  """
  ids, cut = list(_ending(dialogue, tokenizer, action_tokens)), 0
  ids += tokenizer.encode(dialogue.before)
  for piece in dialogue.arrange(dialogue.passage, results):
    piece = in_json(piece, dialogue.json_levels)
    shown = tokenizer.encode_data(piece)
    if len(shown) > passage_tokens:
      shown = _cut(dialogue, shown, tokenizer, passage_tokens)
      cut += 1
    ids += shown
  return Observation((*ids, *tokenizer.encode(dialogue.after)), cut)


def _ending(dialogue: Dialogue, tokenizer,
            action_tokens: Sequence[int]) -> tuple[int, ...]:
  """Ids that end the policy's turn; () if its last token has ended it."""
  last = action_tokens[-1:]
  if not dialogue.turn_end or last and last[0] in dialogue.end_ids:
    return ()
  return tokenizer.encode(dialogue.turn_end)


def in_json(text: str, levels: int) -> str:
  """Text as JSON writes it in a string, or in a string in a string."""
  for _ in range(levels):
    text = json.dumps(text, ensure_ascii=False)[1:-1]
  return text


def _cut(dialogue: Dialogue, ids: Sequence[int], tokenizer,
         limit: int) -> Sequence[int]:
  """At most `limit` ids, with no half of a JSON escape at the end.

  Nor do they end with '<search' where '<searching' stood, which is no tag.
  """
  ids = ids[:limit]
  while shows_tag(tokenizer.decode(ids[-_TAIL:])):
    ids = ids[:-1]
  while dialogue.json_levels and not _is_whole(
      tokenizer.decode(ids), dialogue.json_levels):
    ids = ids[:-1]
  return ids


def _is_whole(text: str, levels: int) -> bool:
  """Whether a text is the whole inside of a JSON string."""
  try:
    for _ in range(levels):
      text = json.loads(f'"{text}"')
  except ValueError:
    return False
  return True


def check_writable(dialogue: Dialogue, tokenizer) -> None:
  """Refuses a tokenizer that cannot write the protocol.

  Raises:
    ValueError: a tag does not survive encoding and decoding.
  """
  for stop in dialogue.stop_strings:
    for tag in (stop, stop.replace('</', '<')):
      read = tokenizer.decode(tokenizer.encode(tag))
      if tag not in read:
        what = 'stop string' if tag == stop else 'tag'
        raise ValueError(
            f'the tokenizer must be able to write the {what} {tag!r}, but '
            f'decodes its ids to {read!r}. Use the tokenizer that belongs to '
            'the model.')
