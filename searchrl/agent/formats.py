# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Format checks: a response must have its blocks in the right order.

    think -> (search -> information -> think)* -> answer

The block of any other tool that is called takes the place of the search block.
In the tool protocol, <tool_call> takes the place of <search>. Only white space
may be between blocks and after the last block. The format is from
arXiv:2505.15117 (the Study), Appendix C. Four rules are ours:

- No markers of a chat template are required, because only the response is
  judged.
- A <think> that the prompt leaves open counts as part of the response
  (R1-Distill).
- Tokens that end a turn are removed before the check.
- The token that closes a search or an answer may contain further characters,
  such as the full stop of `>.`. They are not read (`tag_parser.until_stop`).
"""

from collections.abc import Sequence
import re
from typing import NamedTuple

from searchrl.agent import tag_parser
from searchrl.agent import tools
from searchrl.trajectory import Trajectory, Turn

# Text that shares a token with the closing tag before it: up to a white space,
# a tag or the end of the turn. One token has no more.
_SAME_TOKEN = re.compile(r'(?:(?!</?\w+>|<[|｜])\S)*')


class Blocks(NamedTuple):
  """Names of a protocol's tags, besides think and answer."""

  search: str = 'search'
  observation: str = 'information'
  stops: tuple[str, ...] = tag_parser.TAG_STOPS  # texts that end a turn


TAGS = Blocks()
TOOLS = Blocks('tool_call', 'tool_response', tools.TOOL_STOPS)


def is_valid(response: str, *, prompt: str = '', blocks: Blocks = TAGS,
             needs_search: bool = False, tools: Sequence[str] = ()) -> bool:
  """Returns whether a response consists of complete blocks in the right order.

  Args:
    response: Text after the prompt.
    prompt: Text of the prompt. If it ends with an open <think>, this counts as
      a part of the response.
    blocks: Names of the tags; other tags are plain text.
    needs_search: True if a response without a search is invalid.
    tools: Names of tools other than the search that have tags.
  """
  text = tag_parser.without_turn_end(response)
  if opens_thought(prompt):
    text = '<think>' + text
  searched = f'<{blocks.search}>' in text or not needs_search
  calls = (blocks.search, *tools)
  return searched and _is_in_order(text, {
      '': ('think',), 'think': (*calls, 'answer'),
      **{call: (blocks.observation,) for call in calls},
      blocks.observation: ('think',), 'answer': ()}, (*calls, 'answer'))


def _is_in_order(text: str, next_of: dict[str, tuple[str, ...]],
                 actions: tuple[str, ...]) -> bool:
  """Returns whether a text is a valid sequence of blocks up to an answer.

  Args:
    text: Text to check, which consists of blocks <name>...</name>.
    next_of: For the name of each block, the names of the blocks that may follow
      it. The key '' stands for the start of the text.
    actions: Names of the blocks with which a turn ends. The token that ends the
      closing tag may have further characters, which are ignored.
  """
  names = '|'.join(filter(None, next_of))
  pieces = re.split(rf'<(/?)({names})>', text)
  last, is_open = '', False  # name of the latest block, and if it is open
  for between, slash, name in zip(pieces[::3], pieces[1::3], pieces[2::3]):
    if last in actions:
      between = _SAME_TOKEN.sub('', between, count=1)
    if bool(slash) != is_open or not is_open and between.strip():
      return False
    if name not in ((last,) if is_open else next_of[last]):
      return False
    last, is_open = name, not is_open
  rest = _SAME_TOKEN.sub('', pieces[-1], count=1)
  return last == 'answer' and not is_open and not rest.strip()


def opens_thought(prompt: str) -> bool:
  """Returns whether a prompt ends with <think>, and perhaps white space."""
  return prompt.rstrip().endswith('<think>')


def continued(turn: str, before: str) -> str:
  """Returns a turn without the <think> that the text before it has opened."""
  if not opens_thought(before):
    return turn
  return turn.removeprefix('<think>').lstrip()


def is_well_formed(trajectory: Trajectory, *, needs_search: bool = False
                  ) -> bool:
  """Returns whether a trajectory's response is valid, in tags or tool calls.

  An invalid action makes the response invalid, and so does the lack of a search
  if `needs_search` is True. Any search engine counts, but no other tool. Calls
  must be in one form: in tags if their results are between <information> and
  </information>, otherwise in JSON.

  Raises:
    ValueError: The trajectory comes from an old record, which has no texts.
  """
  if trajectory.turns and not trajectory.prompt:
    raise ValueError(
        'a trajectory must have its texts for a score of its format, but that '
        f'of question {trajectory.question.uid!r}, sample {trajectory.sample}, '
        'has none, because an older version recorded it. Sample it again.')
  actions = [turn.action for turn in trajectory.turns]
  if any(action.kind == 'invalid' for action in actions) or needs_search and (
      not any(action.is_search for action in actions)):
    return False
  called = {action.kind for action in actions
            if action.is_call and action.kind != 'search'}
  tags = TAGS._replace(
      stops=(*(f'</{name}>' for name in sorted(called)), *TAGS.stops))
  in_tags = {f'<{TAGS.observation}>' in turn.observation
             for turn in trajectory.turns
             if turn.action.is_call and turn.observation}
  return any(
      is_valid(''.join(_read(turn, blocks) for turn in trajectory.turns),
               prompt=trajectory.prompt, blocks=blocks,
               tools=() if blocks is TOOLS else sorted(called))
      for blocks in ((tags,) if True in in_tags else
                     (TOOLS,) if False in in_tags else (tags, TOOLS)))


def _read(turn: Turn, blocks: Blocks) -> str:
  """Returns the text of a turn and its observation, for the check of a format.

  In a dialogue with tool calls, the text of a tool's answer, which chat
  templates frame in many ways, is replaced by an empty block. A <think> with
  which the template opens the next thought is kept, and a call without tags
  gets tags.
  """
  if turn.action.kind == 'summary':  # is no part of the protocol
    return ''
  text = tag_parser.until_stop(turn.text, blocks.stops)
  if blocks is not TOOLS or not (turn.observation and turn.action.is_call):
    return text + turn.observation
  observation = f'<{TOOLS.observation}></{TOOLS.observation}>'
  text = tools.in_tags(tag_parser.without_turn_end(text))
  return text + observation + (
      '<think>' if opens_thought(turn.observation) else '')
