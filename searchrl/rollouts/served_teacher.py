# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A teacher behind OpenAI's chat API, which writes turns of demonstrations.

The teacher's server has its own chat template and tokenizer. It is therefore
sent the texts of the conversation, and its reply is encoded by the policy's
tokenizer.
"""

from collections.abc import Sequence
import dataclasses
import json
import re
import threading
from typing import Any

from searchrl.agent import formats
from searchrl.agent import tag_parser
from searchrl.agent.dialogue import Dialogue
from searchrl.runtime import processes
from searchrl.search.remote import http_request
from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.search.remote.wire import Malformed
from searchrl.trajectory import Action, Request, SearchError, Turn

_RESPONSE_BYTES = 2**22
# Statuses that refuse one conversation; others refuse all, such as a wrong key.
_REFUSED = re.compile(r'status (400|413|422)\b')
_ENDLESS = 10**9  # no circuit opens, so an error names its own cause
_HINT = ('Each of your messages ends with one search or with the answer. A '
         'search has this form:\n{search}\nThe answer has this form:\n{answer}')


class Teacher:
  """A function that asks a served model for the next turn of a conversation.

  Its arguments are a request and the turns so far; it returns a text.

  Args:
    dialogue: Protocol of the conversation. A system message shows the form of
      its searches and answers.
    tokenizer: Tokenizer of the policy, which was also used to cut passages.
    url: Complete address, such as 'http://127.0.0.1:8001/v1/chat/completions'.
      One that begins with https is called through the environment's proxy.
    model: Name of the model on the server.
    temperature: Sampling temperature.
    max_tokens: Largest number of the teacher's tokens per turn.
    token_env: Name of the environment variable whose value is sent as a bearer
      token; '': none is sent.
    wiring: Arguments `clock`, `sleep` and `warn` of `transport.Transport`,
      which tests replace.
    **retries: Fields of `transport.RetryPolicy`.

  Raises:
    ValueError: An option is out of range, or the variable is not set.
  """

  def __init__(self, dialogue: Dialogue, tokenizer: Any, *, url: str, model: str,
               temperature: float, max_tokens: int, token_env: str = '',
               wiring: dict[str, Any] | None = None, **retries: Any):
    self._dialogue, self._tokenizer = dialogue, tokenizer
    self._fields = dict(model=model, temperature=temperature, n=1,
                        max_tokens=max_tokens, stop=list(dialogue.stop_strings))
    self._refused: set[str] = set()  # ids of questions, each said once
    self._lock = threading.Lock()
    self._calls = connection(
        url, 'teacher.url', token_env=token_env, wiring=wiring,
        **({'failures': _ENDLESS} | retries))

  def __call__(self, request: Request, turns: Sequence[Turn]) -> str:
    """Returns the text of the next turn, up to the tag that ends it.

    It is '' if the server refuses the conversation, for instance because it is
    too long.

    Raises:
      ConnectionError: The server does not answer within the deadline, or fails,
        as for a wrong key.
    """
    body = self._fields | {
        'messages': self.messages(request, turns),
        'seed': 1000 * request.sample + len(turns)}
    turn = self._calls.call(read_turn, body=json.dumps(body).encode())
    if isinstance(turn, SearchError) and _REFUSED.search(turn.detail):
      self._say_refused(request.question.uid, turn.detail)
      return ''  # no action, so that the trajectory is left out
    if isinstance(turn, SearchError):
      raise ConnectionError(
          f'the server at teacher.url must answer, but failed with {turn.kind} '
          f'({turn.detail}). Start it or correct teacher.url, and run the same '
          'command to go on.')
    text, is_cut = turn
    text = formats.continued(text.lstrip(), self._dialogue.after if turns
                             else self._dialogue.tail)
    return text if is_cut else close(text, self._dialogue)

  def messages(self, request: Request, turns: Sequence[Turn]
              ) -> list[dict[str, str]]:
    """Returns the conversation so far as messages of the chat API."""
    write = self._dialogue.write
    hint = _HINT.format(search=write('...', Action('search', ('...',))),
                        answer=write('...', Action('answer', ('...',))))
    messages = [
        {'role': 'system', 'content': hint},
        {'role': 'user', 'content': self._dialogue.prompt(
            request.question.text).strip()}]
    for turn in turns:
      messages += [{'role': 'assistant', 'content': turn.text},
                   {'role': 'user', 'content': self._observed(turn)}]
    return messages

  def _say_refused(self, uid: str, detail: str) -> None:
    """Says once that the server refuses a question."""
    with self._lock:
      if uid not in self._refused:
        self._refused.add(uid)
        processes.say(
            f'Warning: the server at teacher.url refuses question {uid!r} '
            f'({detail}), which is left out.')

  def _observed(self, turn: Turn) -> str:
    """Returns the text that the policy reads after a turn, such as passages.

    The markup of the policy's chat template around this text is removed.
    """
    before, after = (
        self._tokenizer.decode(self._tokenizer.encode(text))
        for text in (self._dialogue.before, self._dialogue.after))
    if not self._dialogue.json_levels:
      return turn.observation.strip()
    text = turn.observation.partition(before)[2].rpartition(after)[0]
    for _ in range(self._dialogue.json_levels):
      text = json.loads(f'"{text}"')
    return text


def connection(url: str, field: str, *, token_env: str,
               wiring: dict[str, Any] | None = None, **retries: Any
              ) -> transport.Transport:
  """Returns a connection to a server with OpenAI's chat API.

  Args:
    url: Complete address. One that begins with https is called through the
      environment's proxy.
    field: Config field that has the address, for errors.
    token_env: Name of the environment variable whose value is sent as a bearer
      token; '': none is sent.
    wiring: Arguments `clock`, `sleep` and `warn` of `transport.Transport`.
    **retries: Fields of `transport.RetryPolicy`.

  Raises:
    ValueError: An option is out of range, or the variable is not set.
  """
  if not url.startswith(('http://', 'https://')):
    raise ValueError(
        f'{field} must be the address of a chat API, such as '
        f"'http://127.0.0.1:8001/v1/chat/completions', but is {url!r}.")
  group = field.rpartition('.')[0]
  names = {each.name for each in dataclasses.fields(transport.RetryPolicy)}
  for name in sorted({*retries} - (names - {'group'})):
    raise ValueError(f'{group} has no option {name!r}. Remove it.')
  return transport.posting_json(
      (url,), token_env=token_env, response_bytes=_RESPONSE_BYTES,
      wiring=wiring, group=group, proxy=http_request.environment_proxy(url)
      if url.startswith('https:') else '', **retries)


def close(text: str, dialogue: Dialogue) -> str:
  """Returns the text of a turn with the stop string that a server leaves out.

  The first stop string with which the dialogue can parse the text is added. If
  there is none, the text is returned unchanged. If the text already has a stop
  string, nothing is added, and the text after that string is cut.
  """
  if any(stop in text for stop in dialogue.stop_strings):
    return tag_parser.until_stop(text, dialogue.stop_strings)
  for stop in dialogue.stop_strings:
    if dialogue.parse(text + stop).kind != 'invalid':
      return text + stop
  return text


def read_text(body: bytes) -> str:
  """Returns the text in a chat completion; see `read_turn`."""
  return read_turn(body)[0]


def read_turn(body: bytes) -> tuple[str, bool]:
  """Returns the text in a chat completion, and True if it was cut.

  A text that reached `max_tokens` was cut. If the text is null, because the
  model only thought, refused or called a tool, the result is ('', True).

  Args:
    body: Body of the server's response.

  Raises:
    Malformed: The body is not a chat completion.
  """
  match wire.read_object(body, 'the response'):
    case {'choices': [{'message': {'content': str(text)}, **choice}, *_]}:
      return text, choice.get('finish_reason') == 'length'
    # Models that only thought, refused or called a tool.
    case {'choices': [{'message': {'content': None}}, *_]}:
      return '', True
  raise Malformed('choices[0].message.content must be a text or null.')
