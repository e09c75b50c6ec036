# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Dialogues: text protocols between a policy and its environment.

A turn only appends text. Actions are parsed only from the tokens that the
policy sampled in its turn, and only up to the first stop string
(`tag_parser.until_stop`). Text from a tool is data, so the protocol's own tags
are broken in it before it is shown. This module has the tag protocol, and
`agent.tools` the tool protocol. `agent.chat` frames both by a chat template.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import importlib.resources
import itertools
import json
from typing import NamedTuple

from searchrl.agent.markup import neutralise, shows_tag
from searchrl.agent.tag_parser import TAG, parse_tags, tag_example, tag_stops
from searchrl.agent.tokenizer import plain_start
from searchrl.trajectory import Action, Passage, Passages, Tool, ToolResult

SEARCH = Tool(
    'search', 'Searches for passages that help to answer the question.',
    {'type': 'object', 'required': ['query_list'], 'properties': {
        'query_list': {'type': 'array', 'items': {'type': 'string'}}}})
SUMMARY_REQUEST = (
    'There is little room left. Write notes for yourself: what was found, and '
    'what is still missing. You will read nothing else of what came before.')
_TAIL = 32  # tokens; long enough to hold the beginning of a tag

LAPTOP_TEMPLATE = 'Search, then answer: {question}\n'
ANSWER_TEMPLATE = 'Answer: {question}\n'
READ_TEMPLATE = 'Read, then answer: {question}\n'
FROM_MEMORY = ('Answer the question from what you know, as briefly as you can, '
               'between <answer> and </answer>.\nQuestion: {question}\n')
FROM_DOCUMENTS = ('Below are documents and, in the last line, a question. '
                  'Answer it by the documents alone, as briefly as you can, '
                  'between <answer> and </answer>.\n{question}\n')
WITH_TOOLS = ('Answer the question below. First think, between <think> and '
              '</think>. If something is missing, call one of these tools, read '
              'what it returns between <information> and </information>, and '
              'think again; do so as often as you need.\n{tools}\nIn the end, '
              'write the answer alone, as briefly as you can, between <answer> '
              'and </answer>.\nQuestion: {question}\n')


def tag_passage(number: int, passage: Passage) -> str:
  """Returns a passage's text in Search-R1's form: Doc 1(Title: "A title") Text.

  `number` counts from 1. Tags in the passage are broken (`markup.neutralise`).
  """
  title, text = neutralise(passage.title), neutralise(passage.text)
  return f'Doc {number}(Title: "{title}") {text}'


def tag_turn(thought: str, action: Action) -> str:
  """Writes a thought and an action as a turn's text, with the action in tags.

  `parse_tags` reads the text as this action.
  """
  kind, text = action.kind, ' '.join(action.texts)
  return f'<think> {thought} </think>\n<{kind}> {text} </{kind}>'


def in_a_row(write: Callable[[int, Passage], str],
             results: Sequence[Passages]) -> list[str]:
  """Returns one text per passage, with a line break after all but the last.

  The passages are numbered from 1 over all queries. `write` makes the text of a
  passage from its number and the passage.
  """
  passages = itertools.chain.from_iterable(results)
  lines = [write(n, p) for n, p in enumerate(passages, start=1)]
  return [line + '\n' for line in lines[:-1]] + lines[-1:]


@dataclasses.dataclass(frozen=True)
class Dialogue:
  """A protocol: the environment's texts around the turns of the policy.

  Special tokens in the texts around a message become their ids. The message
  itself, with the question, is data, and so are passages: special tokens in
  data are encoded as plain text.
  """

  template: str  # the first message; '{question}' is replaced
  parse: Callable[[str], Action]  # reads a turn's text, cut by `until_stop`
  stop_strings: tuple[str, ...]  # texts that end a turn once they are complete
  before: str  # text that opens an observation
  after: str  # text that closes an observation, even if passages were cut
  invalid: str  # the whole observation after an invalid action
  passage: Callable[[int, Passage], str] = tag_passage  # makes a passage's text
  arrange: Callable[..., list[str]] = in_a_row  # (passage, results) -> texts
  head: str = ''  # text before the first message
  tail: str = ''  # text after the first message
  turn_end: str = ''  # text that ends a turn that the policy did not end itself
  end_ids: tuple[int, ...] = ()  # ids that end a turn, besides chat.ends
  json_levels: int = 0  # JSON strings that are nested around passages; 0: none
  is_framed: bool = False  # True: a chat template writes the prompt's start
  # (thought, action) -> a turn's text that `parse` reads; for demonstrations
  write: Callable[[str, Action], str] = tag_turn
  tools: tuple[Tool, ...] = (SEARCH,)  # tools that the policy may call
  tag_names: tuple[str, ...] = ()  # tool tags to break, besides markup's own
  # The whole text that asks for a summary when the context is full.
  summary_request: str = ''

  def prompt(self, question: str) -> str:
    """Returns the first message, with the question in its place."""
    return self.template.replace('{question}', question)


def tags(template: str = LAPTOP_TEMPLATE,
         tools: Sequence[Tool] = (SEARCH,)) -> Dialogue:
  """Returns the tag protocol of Search-R1 and ZeroSearch.

  The policy writes <think>, <search> and <answer>, the environment
  <information>. The first closing tag of a search or an answer ends the turn.
  Any other tool has tags with its name, whose closing tag ends the turn, too.

  Args:
    template: The prompt, which has '{question}' once.
    tools: Tools that the policy may call.

  Raises:
    ValueError: The template has no place for the question, or several.
  """
  if template.count('{question}') != 1:
    have = [tool.name for tool in tools if '{question}' in tool.description]
    raise ValueError(
        "dialogue.template must have '{question}' once, but has it "
        f"{template.count('{question}')} times: {template[:80]!r}."
        + f' The description of the tool {", ".join(have)} has it.' * any(have))
  tools, names = tuple(tools), tuple(tool.name for tool in tools)
  searches_alone = names == ('search',)
  call = 'a search' if searches_alone else 'a call of a tool'
  return Dialogue(
      template=template,
      parse=parse_tags if searches_alone else functools.partial(
          parse_tags, tools=tools),
      stop_strings=tag_stops(names),
      before='\n\n<information>',
      after='</information>\n\n',
      invalid=f'\nThat was neither {call} nor an answer. Try again.\n',
      tools=tools, tag_names=tuple(n for n in names if n != 'search'),
      passage=passage_writer(tag_passage, tools),
      summary_request=f'\n{SUMMARY_REQUEST}\n',
  )


def passage_writer(write: Callable[[int, Passage], str], tools: Sequence[Tool]
                  ) -> Callable[[int, Passage], str]:
  """Returns the function that writes a passage as text, given its number.

  The function is `write`, unless one of the tools is 'open', which needs ids.
  Then the text begins with the passage's id in brackets.
  """
  if not any(tool.name == 'open' for tool in tools):
    return write
  return lambda number, passage: (
      f'[{neutralise(passage.id)}] {write(number, passage)}')


def laptop(tokenizer, tools: Sequence[Tool] = (SEARCH,)) -> Dialogue:
  """Returns the tag protocol with the prompt of the shipped tiny base model.

  The prompt is "Search, then answer: <question>".
  """
  return tags(tokenizer.leading_space + LAPTOP_TEMPLATE, tools)


def laptop_answer(tokenizer) -> Dialogue:
  """Returns the tiny base model's dialogue for an answer from memory.

  The prompt is "Answer: <question>".
  """
  return tags(tokenizer.leading_space + ANSWER_TEMPLATE)


def laptop_read(tokenizer) -> Dialogue:
  """Returns the tiny base model's dialogue for an answer from given passages.

  The prompt is "Read, then answer: <question>". The text that is given as the
  question must have the passages, one per line, above the question itself.
  """
  return tags(tokenizer.leading_space + READ_TEMPLATE)


def search_r1(tokenizer) -> Dialogue:
  """Returns the tag protocol with Search-R1's prompt and error message.

  These are the published texts, in the folder third_party.
  """
  return dataclasses.replace(
      tags(tokenizer.leading_space + verbatim('search_r1_prompt.txt')),
      invalid=verbatim('search_r1_invalid_action.txt'))


def r1(tokenizer) -> Dialogue:
  """Returns the tag protocol with Search-R1's prompt that mentions no search.

  The prompt is the published text, in the folder third_party.
  """
  return tags(tokenizer.leading_space + verbatim('search_r1_without.txt'))


def from_memory(tokenizer) -> Dialogue:
  """Returns a dialogue in which the model answers at once, without a search.

  The wording of its prompt is our own, and no paper's.
  """
  return tags(tokenizer.leading_space + FROM_MEMORY)


def from_documents(tokenizer) -> Dialogue:
  """Returns a dialogue in which the model answers from given documents.

  The wording of its prompt is our own. The text that is given as the question
  must have the documents above the question itself.
  """
  return tags(tokenizer.leading_space + FROM_DOCUMENTS)


def with_tools(tokenizer, tools: Sequence[Tool] = (SEARCH,)) -> Dialogue:
  """Returns the tag protocol with a prompt that describes each tool's tag."""
  calls = '\n'.join(
      f'<{tool.name}> {tag_example(tool)} </{tool.name}>: {tool.description}'
      for tool in tools)
  return tags(tokenizer.leading_space + WITH_TOOLS.replace(
      '{tools}', calls), tools)


def continuation(tokenizer) -> Dialogue:
  """Returns a dialogue without tags: the whole text of a turn is the answer.

  The prompt is the question alone. A blank turn is an invalid action.
  """
  return Dialogue(
      template=tokenizer.leading_space + '{question}', parse=_whole,
      stop_strings=(), before='', after='', invalid='')


def _whole(text: str) -> Action:
  return Action('answer', (text,)) if text.strip() else Action('invalid')


def verbatim(name: str) -> str:
  """Loads a file of the folder third_party as text, without any change."""
  folder = importlib.resources.files('searchrl') / 'third_party'
  return (folder / name).read_text(encoding='utf-8')


def opening(dialogue: Dialogue, question: str, tokenizer) -> tuple[int, ...]:
  """Returns ids of the prompt: all text before the policy's first turn.

  The tokenizer's own start of a sequence (BOS) comes first. In a chat, it is
  there only if the chat template writes it, as in transformers and vLLM.
  """
  plain = plain_start(dialogue.tail, tokenizer)
  ids = (*tokenizer.encode(dialogue.head),
         *tokenizer.encode_data(dialogue.prompt(question) + plain),
         *tokenizer.encode(dialogue.tail[len(plain):]))
  return ids if dialogue.is_framed else tokenizer.with_start(ids)


def retry(dialogue: Dialogue, tokenizer,
          action_tokens: Sequence[int]) -> tuple[int, ...]:
  """Returns the ids that the policy reads after an invalid action.

  They are the end of the policy's turn, unless its last token already ended it,
  and the text that says that the action was invalid.
  """
  return (*_ending(dialogue, tokenizer, action_tokens),
          *tokenizer.encode(dialogue.invalid))


def ask_for_summary(dialogue: Dialogue, tokenizer,
                    action_tokens: Sequence[int]) -> tuple[int, ...]:
  """Returns the ids to append after an action to ask for a summary.

  They begin with the end of the policy's turn, unless its last token ended it.
  """
  return (*_ending(dialogue, tokenizer, action_tokens),
          *tokenizer.encode(dialogue.summary_request))


Outcome = Sequence[Passages] | ToolResult  # passages of each query, or a result


class Observation(NamedTuple):
  """The text that the policy reads after a call of a tool, as ids."""

  tokens: tuple[int, ...]  # ids of the text, closed even if passages were cut
  passages_cut: int  # number of passages or results that were too long


def observation(
    dialogue: Dialogue,
    results: Outcome,
    tokenizer,
    *,
    passage_tokens: int,
    action_tokens: Sequence[int] = (),
) -> Observation:
  """Returns what the policy reads after a call: passages or a tool's result.

  Args:
    dialogue: The protocol.
    results: Passages of each query, best first, or the result of another tool.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    passage_tokens: Maximum number of tokens of each passage, or of the result.
      Longer ones are cut.
    action_tokens: Ids of the policy's turn that made the call.
  """
  return observations(dialogue, [(results, action_tokens)], tokenizer,
                      passage_tokens=passage_tokens)[0]


def observations(
    dialogue: Dialogue,
    searches: Sequence[tuple[Outcome, Sequence[int]]],
    tokenizer,
    *,
    passage_tokens: int,
    result_tokens: int = 0,
) -> list[Observation]:
  """Returns what the policy reads after each of several calls, in their order.

  All texts are encoded in one batch.

  Args:
    dialogue: The protocol.
    searches: Pair for each call: what it returned (the passages of each query,
      best first, or the result of another tool), and the ids of the policy's
      turn that made the call.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    passage_tokens: Maximum number of tokens of a passage; longer ones are cut.
    result_tokens: Maximum number of tokens of the result of a tool other than a
      search; 0: passage_tokens.
  """
  pieces = [[in_json(piece, dialogue.json_levels)
             for piece in _pieces(dialogue, outcome)]
            for outcome, _ in searches]
  passages = iter(tokenizer.encode_passages([*itertools.chain(*pieces)]))
  written = []
  for of_one, (outcome, action_tokens) in zip(pieces, searches):
    ids, cut = list(_ending(dialogue, tokenizer, action_tokens)), 0
    ids += tokenizer.encode(dialogue.before)
    limit = passage_tokens
    if isinstance(outcome, ToolResult):
      limit = result_tokens or passage_tokens
    for passage in itertools.islice(passages, len(of_one)):
      if len(passage) > limit:
        passage = _cut(dialogue, passage, tokenizer, limit)
        cut += 1
      ids += passage
    ids += tokenizer.encode(dialogue.after)
    written.append(Observation(tuple(ids), cut))
  return written


def _pieces(dialogue: Dialogue, outcome: Outcome) -> list[str]:
  """Returns the texts of passages or of a result, without working tags.

  The tags of all tools are broken in them; see `markup.neutralise`.
  """
  if isinstance(outcome, ToolResult):
    return [neutralise(outcome.text, dialogue.tag_names)]
  pieces = dialogue.arrange(dialogue.passage, outcome)
  if not dialogue.tag_names:
    return pieces  # a passage's writer has broken all tags
  return [neutralise(piece, dialogue.tag_names) for piece in pieces]


def _ending(dialogue: Dialogue, tokenizer,
            action_tokens: Sequence[int]) -> tuple[int, ...]:
  """Returns the ids that must still be added to end the policy's turn."""
  last = action_tokens[-1:]
  if not dialogue.turn_end or last and last[0] in dialogue.end_ids:
    return ()
  return tokenizer.encode(dialogue.turn_end)


def in_json(text: str, levels: int) -> str:
  """Returns a text escaped for a place within nested JSON strings.

  `levels` is the depth: 1 for a JSON string, and 2 for a JSON string that is
  within another. 0 leaves the text unchanged.
  """
  for _ in range(levels):
    text = json.dumps(text, ensure_ascii=False)[1:-1]
  return text


def _cut(dialogue: Dialogue, ids: Sequence[int], tokenizer,
         limit: int) -> Sequence[int]:
  """Returns the first ids of a text: at most `limit`, and with a clean end.

  Further ids are dropped if the cut text would have a new tag at its end, as
  '<search' from '<searching', or would end in the middle of a JSON escape.
  """
  ids = ids[:limit]
  while shows_tag(tokenizer.decode(ids[-_TAIL:]), dialogue.tag_names):
    ids = ids[:-1]
  while dialogue.json_levels and not _is_whole(
      tokenizer.decode(ids), dialogue.json_levels):
    ids = ids[:-1]
  return ids


def _is_whole(text: str, levels: int) -> bool:
  """Returns whether a text is valid as the whole content of a JSON string.

  It is decoded `levels` times, and must be valid each time.
  """
  try:
    for _ in range(levels):
      text = json.loads(f'"{text}"')
  except ValueError:
    return False
  return True


def check_writable(dialogue: Dialogue, tokenizer) -> None:
  """Raises a ValueError if a tag does not survive encoding and decoding.

  It checks the tags that end a turn and the tags in the dialogue's own texts.
  """
  stops = dialogue.stop_strings
  tags = [tag for stop in stops for tag in (stop, stop.replace('</', '<'))]
  tags += TAG.findall(dialogue.template + dialogue.before + dialogue.after)
  for tag in dict.fromkeys(tags):
    ids = tokenizer.encode(tag)
    text = tokenizer.decode(ids)
    if tag in text:
      continue
    reason = (f'decodes its ids to {text!r}. Use the tokenizer that belongs to '
              'the model.')
    if tokenizer.special_ids.intersection(ids):
      reason = (
          'has it as a special token, which is left out of every decoded text. '
          'In a copy of the model folder, set its "special" to false in '
          'tokenizer.json and tokenizer_config.json, and remove it from lists '
          'of special tokens such as additional_special_tokens; its id and the '
          'weights stay as they are.')
    kind = 'stop string' if tag in stops else 'tag'
    raise ValueError(f'the tokenizer must be able to write the {kind} {tag!r}, '
                     f'but {reason}')
