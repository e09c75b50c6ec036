# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates: writes a dialogue in the form of a tokenizer's template.

The frame of a message is the text that the template writes around it. The
template is rendered only at start-up, with placeholders for texts that are not
known yet, and the frames are kept. A conversation is never rendered again.
Therefore a template that would later change earlier text is refused here.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import re
from typing import Any, NamedTuple

from searchrl.agent import dialogue as dialogues
from searchrl.agent.dialogue import Dialogue
from searchrl.trajectory import Tool

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

_QUESTION = 'QuestionStandsHere'
_ODD = '{{ 7 * 7 }} "a" \\n <b> & é {% if %}\n\'#'  # text that must not change
_THINKING = ('<think>\nThought#\n</think>\n\n<tool_call>\n{"name": "search", '
             '"arguments": {"query_list": ["Query#"]}}\n</tool_call>')
_QUIET = _THINKING.partition('</think>\n\n')[2]  # a turn without thoughts
_WORDS = {'Thought': "the assistant's thinking in turn",
          'Query': "the assistant's call in turn",
          'Result': "the tool's answer", _QUESTION: "the user's message"}
_WORD = re.compile(rf'({"|".join(_WORDS)})(\d*)')
_WAY_OUT = ('Choose another dialogue, or put a chat_template.jinja beside '
            'tokenizer.json that')


def brief(tokenizer) -> Dialogue:
  """Returns the tag protocol with a prompt of one line, in the chat template.

  The prompt is "Search, then answer: <question>". This dialogue is for models
  that were tuned on demonstrations and need no instructions.
  """
  return in_one_turn(dialogues.laptop(tokenizer), tokenizer)


def with_tools(tokenizer, tools: Sequence[Tool] = (dialogues.SEARCH,)
              ) -> Dialogue:
  """Returns the tag protocol in the chat template, for any tools.

  The prompt describes the tag of each tool.
  """
  return in_one_turn(dialogues.with_tools(tokenizer, tools), tokenizer)


def search_r1(tokenizer) -> Dialogue:
  """Returns Search-R1's dialogue in the chat template, for instruct models."""
  return in_one_turn(dialogues.search_r1(tokenizer), tokenizer)


def r1(tokenizer) -> Dialogue:
  """Returns Search-R1's dialogue without search, in the chat template."""
  return in_one_turn(dialogues.r1(tokenizer), tokenizer)


def from_memory(tokenizer) -> Dialogue:
  """Returns a chat dialogue: the model answers at once, from memory."""
  return in_one_turn(dialogues.from_memory(tokenizer), tokenizer)


def from_documents(tokenizer) -> Dialogue:
  """Returns a chat dialogue in which the model answers from given documents.

  The model answers at once. The text that is given as the question must have
  the documents above the question itself.
  """
  return in_one_turn(dialogues.from_documents(tokenizer), tokenizer)


def in_one_turn(plain: Dialogue, tokenizer, system: str | None = None
               ) -> Dialogue:
  """Returns a dialogue framed by the chat template as one assistant's turn.

  The prompt is a user's message. All turns of the policy and all passages are
  in the assistant's one turn after it, as in Search-R1.

  Args:
    plain: The dialogue without a template.
    tokenizer: The tokenizer; see `agent.tokenizer`.
    system: The system message; None uses the template's default.

  Raises:
    ValueError: There is no chat template, or it cannot frame a question.
  """
  plain = dataclasses.replace(
      plain, template=plain.template.removeprefix(tokenizer.leading_space))
  framed = frame_question(plain, tokenizer.render, system)
  end = turn_end(tokenizer, tokenizer.render, [
      *first_messages(plain, _QUESTION, system),
      {'role': 'assistant', 'content': 'AnswerStandsHere'}])
  return dataclasses.replace(framed, end_ids=end_ids(tokenizer, end))


def frame_question(dialogue: Dialogue, render: Render,
                   system: str | None = None) -> Dialogue:
  """Returns the dialogue with the template's text around its first message.

  Args:
    dialogue: The dialogue without a frame.
    render: Function from messages to the text that the chat template writes,
      such as `Tokenizer.render`.
    system: The system message; None uses the template's default.

  Raises:
    ValueError: The template changes the message, or does not write it exactly
      once.
  """
  text = render(first_messages(dialogue, _QUESTION, system))
  if text.count(_QUESTION) != 1:
    raise ValueError(
        "the chat template must write a user's message once, but writes it "
        f'{text.count(_QUESTION)} times. {_WAY_OUT} does.')
  head, tail = text.split(_QUESTION)
  before, after = dialogue.template.split('{question}')
  # Many templates strip a message.
  starts = [b for b in (before, before.lstrip()) if head.endswith(b)]
  ends = [a for a in (after, after.rstrip()) if tail.startswith(a)]
  if starts and ends:
    before, after = starts[0], ends[0]
    head, tail = head[:len(head) - len(before)], tail[len(after):]
    space = head[len(head.rstrip(' ')):]  # belongs to the first word
    framed = dataclasses.replace(
        dialogue, template=f'{space}{before}{{question}}{after}',
        head=head.removesuffix(space), tail=tail, is_framed=True)
    if render(first_messages(dialogue, _ODD, system)) == (
        framed.head + framed.prompt(_ODD) + framed.tail):
      return framed
  raise ValueError(
      "the chat template must write a user's message as it is, but changes it: "
      f'{text[-200:]!r}. {_WAY_OUT} does not.')


def first_messages(dialogue: Dialogue, question: str,
                   system: str | None = None) -> list[Message]:
  """Returns the prompt as messages: the system's, if any, and the user's."""
  user = {'role': 'user', 'content': dialogue.prompt(question)}
  return [user] if system is None else [
      {'role': 'system', 'content': system}, user]


def turn_end(tokenizer, render: Render, messages: Sequence[Message]) -> str:
  """Returns the text with which the chat template ends the last message.

  The text goes from the end of the message's content to the first special
  token, inclusive. It is '' if no special token follows.
  """
  _, content, text = render(messages).rpartition(messages[-1]['content'])
  for id_ in tokenizer.encode(text) if content else ():
    token = tokenizer.token(id_)
    if id_ in tokenizer.special_ids and token in text:  # not the unknown token
      return text[:text.index(token) + len(token)]
  return ''


def end_ids(tokenizer, end: str) -> tuple[int, ...]:
  """Returns (id,) of the special token that ends a turn; () if `end` is ''.

  `end` is the text from `turn_end`, whose last token is the special token.
  """
  return tokenizer.encode(end)[-1:]


def turn_ends(tokenizer) -> tuple[int, ...]:
  """Returns (id,) of the token by which the template ends an assistant's turn.

  Returns () if there is no template, if the template refuses a question and an
  answer, or if it ends the answer without a special token.
  """
  if not tokenizer.has_chat_template:
    return ()
  messages = [{'role': 'user', 'content': _QUESTION},
              {'role': 'assistant', 'content': 'AnswerStandsHere'}]
  try:
    return end_ids(tokenizer, turn_end(tokenizer, tokenizer.render, messages))
  except ValueError:
    return ()


def ends(tokenizer) -> tuple[int, ...]:
  """Returns the ids that end a sequence or a turn, each once.

  The ids that the model's files name come first, and then the chat template's.
  A rollout stops at each of them, and an exported model names them all.
  """
  return tuple(dict.fromkeys((*tokenizer.eos_ids, *turn_ends(tokenizer))))


def last_id(tokenizer) -> int:
  """Returns the id that is written after a finished text of the policy.

  It belongs to the token by which the chat template ends an assistant's turn.
  Without one, it is the first id by which the model's files end a sequence.
  """
  return (*turn_ends(tokenizer), *tokenizer.eos_ids)[0]


class Exchange(NamedTuple):
  """The frame of a tool's answer: the template's text around it."""

  turn_end: str  # text that ends the assistant's turn
  before: str  # text from the end of that turn to the tool's answer
  after: str  # text from the answer to the assistant's next turn
  json_levels: int  # number of JSON strings nested around the answer; 0: none


def frame_exchange(dialogue: Dialogue, tokenizer, render: Render,
                   system: str | None = None, tool: str = 'search'
                  ) -> Exchange:
  """Returns the text that the template writes around the answer of a tool.

  Args:
    dialogue: Dialogue whose prompt begins the conversation.
    tokenizer: Tokenizer that has the special token at the end of a turn.
    render: Function from messages to text.
    system: System message. None: the template's default.
    tool: Name of the tool that answers.

  Raises:
    ValueError: The template changes a message, changes earlier text when a
      message is added, frames two answers differently, or does not end a turn
      with a special token.
  """
  opening = first_messages(dialogue, _QUESTION, system)
  forms = [_THINKING, _QUIET]
  if render(opening).rstrip().endswith('<think>'):  # it opens every thought
    forms = [_THINKING.removeprefix('<think>\n')]
  messages = [*opening, *_exchanges(forms[0], 2, tool), _turn(forms[0], 2)]
  counts = range(len(opening), len(messages) + 1)
  check_append_only(render, messages, counts)
  for form in forms:
    conversation = [*opening, *_exchanges(form, 2, tool)]
    check_append_only(render, conversation, counts[::2])  # at each prompt
    _check_start(render, conversation[:counts[2]])
  first, second = (_around(render(messages[:n]), messages[n - 2:n])
                   for n in (counts[2], counts[4]))
  if first != second:
    raise ValueError(
        "the chat template must write every tool's answer alike, but writes "
        f'{first} around the first and {second} around the second. {_WAY_OUT} '
        'does.')
  before, after = first
  end = turn_end(tokenizer, render, messages[:counts[1]])
  if not end or end_ids(tokenizer, end) != tokenizer.encode(end.strip()):
    raise ValueError(
        "the chat template must end an assistant's turn with a special token, "
        f'but writes {before!r} before the answer of a tool. {_WAY_OUT} does.')
  text = render([*messages[:counts[1]], tool_message(0, _ODD, tool)])
  return Exchange(end, before.removeprefix(end), after,
                  _json_levels(text, before, after))


def _json_levels(text: str, before: str, after: str) -> int:
  """Returns 1 if the template writes a tool's answer as a JSON string, else 0.

  The answer in `text` is the constant _ODD. `before` and `after` are the texts
  around it.

  Raises:
    ValueError: The template writes the answer in neither form.
  """
  for levels in (0, 1):
    if text.endswith(before + dialogues.in_json(_ODD, levels) + after):
      return levels
  raise ValueError(
      "the chat template must write a tool's answer as it is or as a JSON "
      f'string, but changes it: {text[-200:]!r}. {_WAY_OUT} does not.')


def tool_message(number: int, content: str, tool: str = 'search') -> Message:
  """Returns a tool's answer as a message, with an id made of `number`."""
  return {'role': 'tool', 'name': tool, 'content': content,
          'tool_call_id': f'search{number:03}'}


def check_append_only(render: Render, messages: Sequence[Message],
                      counts: Sequence[int]) -> None:
  """Checks that a chat template only adds text as a conversation grows.

  Args:
    render: Function from messages to text, which applies the template.
    messages: All messages of a conversation.
    counts: Ascending numbers of messages. For each number n, the text of the
      first n messages must include the contents of all n, and be a prefix of
      the text for the next number.

  Raises:
    ValueError: A text is not such a prefix, or lacks the content of a message.
      The error names the change.
  """
  earlier = ''
  for count in counts:
    text = render(messages[:count])
    # Many templates strip a message.
    contents = [m['content'].strip() for m in messages[:count]]
    whole = all(any(dialogues.in_json(content, n) in text for n in (0, 1))
                for content in contents)
    if not text.startswith(earlier) or not whole:
      before, after = difference(earlier, text)
      change = _change(earlier + contents[-1], text) or (
          f'writes {after!r} where {before!r} stood')
      raise ValueError(
          'the chat template must only add to a conversation, but after '
          f'message {count}, of role {messages[count - 1]["role"]}, it '
          f'{change}. {_WAY_OUT} keeps the text.')
    earlier = text


def _check_start(render: Render, messages: Sequence[Message]) -> None:
  """Raises a ValueError unless a turn directly follows the generation prompt.

  The last two messages are the assistant's turn and the answer of a tool.
  """
  text, prompt = render(messages), render(messages[:-2])
  between = text[len(prompt):text.rindex(messages[-2]['content'])]
  if between.strip():
    raise ValueError(
        'the chat template must write what the assistant says where the '
        f'generation prompt ends, but writes {between!r} before it. {_WAY_OUT} '
        'does.')


def _change(earlier: str, text: str) -> str:
  """Returns a text about a part of `earlier` that `text` lacks; '' if none.

  For example, it is "drops the tool's answer 2" if `text` has no Result1.
  """
  for word, number in _WORD.findall(earlier):
    if word + number not in text:
      return f'drops {_WORDS[word]}' + (number and f' {int(number) + 1}')
  return ''


def difference(text: str, other: str) -> tuple[str, str]:
  """Returns both texts near the position where they begin to differ."""
  same = len(os.path.commonprefix([text, other]))
  near = slice(max(same - 20, 0), same + 40)
  return text[near], other[near]


def _turn(form: str, number: int) -> Message:
  """Returns an assistant's message: `form` with `number` in place of each #."""
  return {'role': 'assistant', 'content': form.replace('#', str(number))}


def _exchanges(form: str, count: int, tool: str) -> list[Message]:
  """Returns `count` turns of the assistant, each before a tool's answer."""
  return [message for n in range(count) for message in (
      _turn(form, n), tool_message(n, f'{{"result": "Result{n}"}}', tool))]


def _around(text: str, last: Sequence[Message]) -> tuple[str, str]:
  """Returns the template's text before and after a tool's answer.

  `last` has the last two messages of the conversation `text`: an assistant's
  turn and the tool's answer. The text before the answer begins where the turn's
  content ends.
  """
  turn, answer = (message['content'] for message in last)
  rest = text.rpartition(turn)[2]
  written = next(written for n in (0, 1)
                 if (written := dialogues.in_json(answer, n)) in rest)
  before, _, after = rest.partition(written)
  return before, after
