# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's completions API: reads request bodies and writes answers.

It covers /v1/completions and /v1/chat/completions, as JSON and as server-sent
events. An unknown field is refused by name, and none is silently ignored.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import json
import math
from typing import Any

from searchrl.models.inference import sampling
from searchrl.rollouts.generation import Piece
from searchrl.search.remote import wire
from searchrl.serving import asgi

_IGNORED = ('user', 'metadata', 'store', 'safety_identifier',
            'prompt_cache_key', 'service_tier')  # do not affect the answer
_NEUTRAL = {  # fields that are legal with their neutral value only
    'echo': False, 'suffix': '', 'best_of': 1, 'frequency_penalty': 0,
    'presence_penalty': 0, 'logit_bias': {}, 'tools': [], 'functions': [],
    'tool_choice': 'none', 'parallel_tool_calls': True, 'top_logprobs': 0,
    'response_format': {'type': 'text'}, 'modalities': ['text']}
_COMMON = ('model', 'n', 'max_tokens', 'temperature', 'top_p', 'top_k', 'min_p',
           'stop', 'seed', 'logprobs', 'stream', 'stream_options')
_ERRORS = {  # status: type and code of the error; any other: a bad request
    401: ('authentication_error', 'invalid_api_key'),
    429: ('rate_limit_error', 'rate_limit_exceeded'),
    500: ('server_error', None), 503: ('server_error', None),
    504: ('server_error', 'timeout')}
_Record = Mapping[str, Any]  # the body of a request
_ROLES = ('system', 'user', 'assistant')
_SEED = 2 ** 63
_COLD = 1e-3  # below it, float32 overflows


class Refused(asgi.Refused):
  """Exception: the field `param`, or the body if it is None, breaks a rule."""

  def __init__(self, param: str | None, rule: str, *, status: int = 400,
               code: str | None = None):
    super().__init__(status, f'{param} {rule}' if param else rule)
    self.param, self.code = param, code


def write_error(refusal: asgi.Refused) -> str:
  """Returns the JSON body of an error response."""
  kind, code = _ERRORS.get(refusal.status, ('invalid_request_error', None))
  return json.dumps({'error': {
      'message': str(refusal).removesuffix('.') + '.', 'type': kind,
      'param': getattr(refusal, 'param', None),
      'code': getattr(refusal, 'code', code)}})


@dataclasses.dataclass(frozen=True)
class Limits:
  """The largest request that a server answers."""

  body_bytes: int = 2**20
  choices: int = 64  # prompts times n
  stops: int = 16  # stop strings
  stop_chars: int = 200  # characters per stop string


@dataclasses.dataclass(frozen=True)
class Request:
  """A request for completions that has been checked."""

  is_chat: bool
  prompts: tuple[tuple[int, ...], ...]
  budgets: tuple[int, ...]  # tokens to sample for each prompt, at most
  n: int  # choices per prompt
  draw: sampling.Draw
  stops: tuple[str, ...]
  seed: int | None
  logprobs: bool
  stream: bool
  include_usage: bool  # True: a stream ends with the numbers of tokens


def read(body: bytes, *, is_chat: bool, name: str, tokenizer: Any, length: int,
         limits: Limits) -> Request:
  """Returns the request that a JSON body contains, after a check.

  Args:
    body: Body of the request.
    is_chat: True for /v1/chat/completions, False for /v1/completions.
    name: Name of the model that is served.
    tokenizer: Tokenizer; see `agent.tokenizer`. It is not thread-safe.
    length: Largest number of tokens of a prompt and its continuation.
    limits: Limits of the request.

  Raises:
    Refused: The request is malformed, or needs an unsupported feature.
  """
  try:
    record = wire.read_object(body, 'the body')
  except wire.Malformed as error:
    raise Refused(None, str(error)) from error
  record = {key: value for key, value in record.items() if value is not None}
  _check_names(record, is_chat)
  if _short(record.get('model')) != _short(name):
    raise Refused('model', f'must be {name!r}, the one that is served here.',
                  status=404, code='model_not_found')
  where = 'messages' if is_chat else 'prompt'
  prompts = (_chat if is_chat else _prompts)(record, tokenizer)
  n = _number(record, 'n', 1, 1, limits.choices)
  if len(prompts) * n > limits.choices:
    raise Refused('n', f'times the number of prompts must be at most '
                  f'{limits.choices}, but is {len(prompts) * n}.')
  options = record.get('stream_options', {})
  if not isinstance(options, dict) or set(options) - {'include_usage'}:
    raise Refused('stream_options', 'may hold only include_usage.')
  return Request(
      is_chat, prompts, _budgets(record, prompts, length, is_chat, where), n,
      _draw(record), _stops(record, limits),
      _number(record, 'seed', None, -_SEED, _SEED - 1),
      _logprobs(record, is_chat), _flag(record, 'stream'),
      _flag(options, 'include_usage', 'stream_options.'))


def _short(name: Any) -> str:
  """Returns a model's name without its owner or folders, in lower case."""
  return str(name).rstrip('/').rpartition('/')[2].lower()


def _check_names(record: _Record, is_chat: bool) -> None:
  names = {*_COMMON, *_IGNORED, *_NEUTRAL, *(
      ('messages', 'max_completion_tokens') if is_chat else ('prompt',))}
  for name, value in record.items():
    if name in _NEUTRAL and value != _NEUTRAL[name]:
      raise Refused(name, 'is not supported here. Leave it out.',
                    code='unsupported_parameter')
    if name not in names:
      raise Refused(name[:80], 'is not a known field. Leave it out.',
                    code='unknown_parameter')


def _draw(record: _Record) -> sampling.Draw:
  temperature = _number(record, 'temperature', 1.0, 0, 100)
  if 0 < temperature < _COLD:
    raise Refused('temperature', f'must be 0 or at least {_COLD}.')
  return sampling.Draw(temperature, sampling.Truncation(
      max(_number(record, 'top_k', 0, -1, 2**31 - 1), 0),
      _number(record, 'top_p', 1.0, math.ulp(0.0), 1),
      _number(record, 'min_p', 0.0, 0, 1)))


def _number(record: _Record, name: str, default: Any, low: float, high: float
            ) -> Any:
  """Returns the field `name` of a request, or the default if it is missing.

  The number is a float if the default is a float, and else an int.

  Raises:
    Refused: The field is not such a number, or is not from `low` to `high`.
  """
  value = record.get(name, default)
  if value is default:
    return value
  kind = float if isinstance(default, float) else int
  if isinstance(value, bool) or not isinstance(value, int | kind) or (
      not low <= value <= high):
    what = 'a whole number' if kind is int else 'a number'
    least = 'above 0' if low == math.ulp(0.0) else f'from {low}'
    text = json.dumps(value)[:80]
    raise Refused(name, f'must be {what} {least} to {high}, but is {text}.')
  return kind(value)


def _flag(record: _Record, name: str, parent: str = '') -> bool:
  value = record.get(name, False)
  if not isinstance(value, bool):
    raise Refused(parent + name, 'must be true or false.')
  return value


def _logprobs(record: _Record, is_chat: bool) -> bool:
  """Returns whether log-probs are requested.

  A chat requests them by true, a completion by 0.
  """
  value = record.get('logprobs', False)
  if is_chat or value is False:
    return _flag(record, 'logprobs')
  if isinstance(value, bool) or value != 0:
    raise Refused('logprobs', 'must be 0: only the sampled tokens have '
                  'log-probs, not their alternatives.')
  return True


def _stops(record: _Record, limits: Limits) -> tuple[str, ...]:
  value = record.get('stop', [])
  stops = [value] if isinstance(value, str) else value
  if not isinstance(stops, list) or not all(
      isinstance(s, str) and s and _is_text(s) for s in stops):
    raise Refused('stop', 'must be a string or a list of strings, none empty.')
  if len(stops) > limits.stops or max(map(len, stops), default=0) > (
      limits.stop_chars):
    raise Refused('stop', f'may hold {limits.stops} strings of '
                  f'{limits.stop_chars} characters each.')
  return tuple(stops)


def _is_text(text: str) -> bool:
  """Returns False for a lone surrogate, which UTF-8 cannot encode."""
  return not any('\ud800' <= c <= '\udfff' for c in text)


def _prompts(record: _Record, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
  """Returns the token ids of each prompt.

  The field `prompt` is a text, a list of ids, or a list of such prompts.
  """
  value = record.get('prompt')
  texts = [value] if isinstance(value, str) or _are_ids(value) else value
  if not isinstance(texts, list) or not texts or not all(
      (isinstance(text, str) and _is_text(text)) or _are_ids(text)
      for text in texts):
    raise Refused('prompt', 'must be a string, a list of token ids, or a list '
                  'of either.')
  prompts = tuple(
      tokenizer.encode_first(text) if isinstance(text, str) else tuple(text)
      for text in texts)
  if not all(prompts):
    raise Refused('prompt', 'must hold at least one token.')
  if any(not 0 <= id_ < tokenizer.vocab_size for ids in prompts for id_ in ids):
    raise Refused('prompt',
                  f'must hold ids from 0 to {tokenizer.vocab_size - 1}.')
  return prompts


def _are_ids(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(
      type(id_) is int for id_ in value)


def _chat(record: _Record, tokenizer: Any) -> tuple[tuple[int, ...]]:
  """Returns the token ids of the only prompt: a conversation.

  The model's chat template writes it.
  """
  messages = record.get('messages')
  if not isinstance(messages, list) or not messages:
    raise Refused('messages', 'must be a list of at least one message.')
  messages = [_message(message, f'messages[{i}]', tokenizer)
              for i, message in enumerate(messages)]
  if messages[-1]['role'] == 'assistant':
    raise Refused('messages', "must not end with the assistant's answer.")
  try:
    return tokenizer.encode(tokenizer.render(messages)),
  except ValueError as error:
    raise Refused(
        'messages', "must be what the model's chat template can write, with "
        'roles in the order that it needs. A model without a template serves '
        '/v1/completions only.') from error


def _message(message: Any, place: str, tokenizer: Any) -> dict[str, str]:
  if not isinstance(message, dict) or message.get('role') not in _ROLES:
    raise Refused(f'{place}.role', f'must be one of {", ".join(_ROLES)}.')
  other = sorted(name for name, value in message.items()
                 if name not in ('role', 'content', 'name') and value)
  if other:
    raise Refused(f'{place}.{other[0][:80]}', 'is not supported; a message '
                  'may hold only role, content and name.')
  content = message.get('content')
  if isinstance(content, list) and all(
      isinstance(part, dict) and part.get('type') == 'text'
      and isinstance(part.get('text'), str) for part in content):
    content = ''.join(part['text'] for part in content)
  if not isinstance(content, str) or not _is_text(content):
    raise Refused(f'{place}.content', 'must be a text.')
  special = tokenizer.special_ids.intersection(
      tokenizer.encode(content)).difference(tokenizer.encode_data(content))
  if special:  # the message could imitate another role
    raise Refused(f'{place}.content', 'must be plain text, but has the special '
                  f'token {tokenizer.token(min(special))!r}.')
  return {'role': message['role'], 'content': content}


def _budgets(record: _Record, prompts: Sequence[Sequence[int]], length: int,
             is_chat: bool, where: str) -> tuple[int, ...]:
  """Returns the maximum number of new tokens for each prompt.

  The default is 16, or in a chat as many as fit `length` with the prompt.
  `where` is the field of the prompts, for errors.
  """
  room = length - max(map(len, prompts))
  if room < 1:
    raise Refused(where, f'may have {length - 1} tokens, but has '
                  f'{length - room}.', code='context_length_exceeded')
  name = 'max_tokens'
  if 'max_completion_tokens' in record:
    name = 'max_completion_tokens'
    if 'max_tokens' in record:
      raise Refused('max_tokens', 'means the same as max_completion_tokens. '
                    'Give only one.')
  budget = _number(record, name, None, 1, 2**31 - 1)
  if budget is None:
    budget = room if is_chat else min(16, room)
  elif budget > room:
    raise Refused(name, f'and {where} may have {length} tokens together, but '
                  f'have {budget} and {length - room}.',
                  code='context_length_exceeded')
  return (budget,) * len(prompts)


class Answer:
  """A writer of the answer to one request.

  Args:
    request: The request.
    uid: Unique part of the answer's id.
    created: Time of the request, in seconds since 1970.
    name: Name of the model.
    token_bytes: Bytes of each token id, as a sequence.
  """

  def __init__(self, request: Request, *, uid: str, created: int, name: str,
               token_bytes: Sequence[bytes]):
    self._request, self._token_bytes = request, token_bytes
    prefix, self._kind = (('chatcmpl-', 'chat.completion') if request.is_chat
                          else ('cmpl-', 'text_completion'))
    self._head = {'id': prefix + uid, 'created': created, 'model': name}

  async def whole(self, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
    """Returns the body of a single response, after all pieces have arrived."""
    count = len(self._request.prompts) * self._request.n
    parts: list[list[Piece]] = [[] for _ in range(count)]
    async with contextlib.aclosing(pieces):
      async for piece in pieces:
        parts[piece.choice].append(piece)
    choices = [_joined(pieces) for pieces in parts]
    return {
        **self._head, 'object': self._kind,
        'choices': [self._choice(choice, 'message') for choice in choices],
        'usage': self._usage(sum(len(choice.tokens) for choice in choices))}

  async def events(self, pieces: AsyncGenerator[Piece, None]
                   ) -> AsyncGenerator[bytes, None]:
    """Yields the answer as server-sent events: one for each sampled piece.

    An event with the numbers of tokens follows, if it is requested, and then
    the event [DONE].
    """
    request = self._request
    head = {**self._head,
            'object': self._kind + ('.chunk' if request.is_chat else '')}
    count, begun = 0, set()
    async with contextlib.aclosing(pieces):
      async for piece in pieces:
        count += len(piece.tokens)
        choice = self._choice(piece, 'delta')
        if request.is_chat and piece.choice in begun:
          del choice['delta']['role']  # the first event has it
        begun.add(piece.choice)
        yield event(json.dumps({**head, 'choices': [choice]}))
    if request.include_usage:
      usage = self._usage(count)
      yield event(json.dumps({**head, 'choices': [], 'usage': usage}))
    yield event('[DONE]')

  def _choice(self, piece: Piece, form: str) -> dict[str, Any]:
    logprobs = self._logprobs(piece) if self._request.logprobs else None
    rest = {'index': piece.choice, 'logprobs': logprobs,
            'finish_reason': piece.finish}
    if not self._request.is_chat:
      return {'text': piece.text, **rest}
    return {form: {'role': 'assistant', 'content': piece.text}, **rest}

  def _logprobs(self, piece: Piece) -> dict[str, Any]:
    tokens = [self._token_bytes[token] for token in piece.tokens]
    texts = [token.decode(errors='replace') for token in tokens]
    if not self._request.is_chat:
      return {'tokens': texts, 'token_logprobs': list(piece.logprobs),
              'top_logprobs': None, 'text_offset': None}
    return {'content': [
        {'token': text, 'logprob': logprob, 'bytes': list(token),
         'top_logprobs': []}
        for text, token, logprob in zip(texts, tokens, piece.logprobs)]}

  def _usage(self, sampled: int) -> dict[str, int]:
    prompts = sum(map(len, self._request.prompts))
    return {'prompt_tokens': prompts, 'completion_tokens': sampled,
            'total_tokens': prompts + sampled}


def event(data: str) -> bytes:
  """Returns a server-sent event that contains the data."""
  return f'data: {data}\n\n'.encode()


def _joined(pieces: Sequence[Piece]) -> Piece:
  """Returns the pieces of one choice as one piece."""
  chain = itertools.chain.from_iterable
  return Piece(pieces[0].choice, ''.join(piece.text for piece in pieces),
               tuple(chain(piece.tokens for piece in pieces)),
               tuple(chain(piece.logprobs for piece in pieces)),
               pieces[-1].finish)
