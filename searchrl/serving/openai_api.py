# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's completions API: reads request bodies and writes answers.

It covers /v1/completions and /v1/chat/completions, as JSON and as server-sent
events. An unknown field is refused by name, and none is silently ignored.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
import dataclasses
import json
import math
from typing import Any

from searchrl.models.inference import sampling
from searchrl.search.remote import wire

_IGNORED = ('user', 'metadata', 'store', 'safety_identifier',
            'prompt_cache_key', 'service_tier')  # do not affect the answer
_NEUTRAL = {  # fields that are legal with their neutral value only
    'echo': False, 'suffix': '', 'best_of': 1, 'frequency_penalty': 0,
    'presence_penalty': 0, 'logit_bias': {}, 'tools': [], 'functions': [],
    'tool_choice': 'none', 'parallel_tool_calls': True, 'top_logprobs': 0,
    'response_format': {'type': 'text'}, 'modalities': ['text']}
_COMMON = ('model', 'n', 'max_tokens', 'temperature', 'top_p', 'top_k', 'min_p',
           'stop', 'seed', 'logprobs', 'stream', 'stream_options')
_ROLES = ('system', 'user', 'assistant')
_SEED = 2 ** 63
_COLD = 1e-3  # below it, float32 overflows


class Refused(ValueError):
  """Exception: a request is refused; the message is for the client."""

  def __init__(self, message: str, param: str | None = None, *,
               status: int = 400, kind: str = 'invalid_request_error',
               code: str | None = None):
    super().__init__(message)
    self.status, self.param, self.kind, self.code = status, param, kind, code

  def body(self) -> bytes:
    """Returns the body of the error response, JSON."""
    return _json({'error': {'message': str(self), 'type': self.kind,
                            'param': self.param, 'code': self.code}})


@dataclasses.dataclass(frozen=True)
class Limits:
  """The largest request that a server answers."""

  body_bytes: int = 2**20
  choices: int = 64  # prompts times n
  stops: int = 16  # stop strings
  stop_chars: int = 200  # characters per stop string


@dataclasses.dataclass(frozen=True)
class Request:
  """A request for completions, checked."""

  is_chat: bool
  prompts: tuple[tuple[int, ...], ...]
  budgets: tuple[int, ...]  # tokens to sample for each prompt, at most
  n: int
  draw: sampling.Draw
  stops: tuple[str, ...]
  seed: int | None
  logprobs: bool
  stream: bool
  include_usage: bool  # whether a stream ends with the usage


def read(body: bytes, *, is_chat: bool, name: str, tokenizer: Any, length: int,
         limits: Limits) -> Request:
  """Reads a request.

  Args:
    body: Body of the request, JSON.
    is_chat: Whether it is for /v1/chat/completions, not /v1/completions.
    name: Name of the model that is served.
    tokenizer: Tokenizer; see `agent.tokenizer`. It is not thread-safe.
    length: Largest number of tokens of a prompt and its continuation.
    limits: Limits of the request.

  Raises:
    Refused: The request is malformed, or asks for what is not supported.
  """
  try:
    record = wire.read_object(body, 'the body')
  except wire.Malformed as error:
    raise Refused(str(error)) from error
  record = {key: value for key, value in record.items() if value is not None}
  _check_names(record, is_chat)
  if record.get('model') != name:
    raise Refused(f'model must be {name!r}, the one that is served here.',
                  'model', status=404, code='model_not_found')
  where = 'messages' if is_chat else 'prompt'
  prompts = ((_chat(record, tokenizer),) if is_chat else
             _prompts(record, tokenizer))
  n = _number(record, 'n', 1, 1, limits.choices, int)
  if len(prompts) * n > limits.choices:
    raise Refused(f'{where} times n must be at most {limits.choices}, but is '
                  f'{len(prompts) * n}.', 'n')
  options = _object(record, 'stream_options')
  return Request(
      is_chat, prompts, _budgets(record, prompts, length, is_chat, where), n,
      _draw(record), _stops(record, limits),
      _number(record, 'seed', None, -_SEED, _SEED - 1, int),
      _logprobs(record, is_chat), _flag(record, 'stream'),
      _flag(options, 'include_usage', 'stream_options.'))


def _check_names(record: Mapping[str, Any], is_chat: bool) -> None:
  own = ('messages', 'max_completion_tokens') if is_chat else ('prompt',)
  for name, value in record.items():
    if name in _NEUTRAL and value != _NEUTRAL[name]:
      raise Refused(f'{name} is not supported here. Leave it out.', name,
                    code='unsupported_parameter')
    if name not in (*_COMMON, *own, *_IGNORED, *_NEUTRAL):
      raise Refused(f'{name[:80]} is no field that is known here. Leave it '
                    'out.', name[:80], code='unknown_parameter')


def _draw(record) -> sampling.Draw:
  temperature = _number(record, 'temperature', 1.0, 0, 100, float)
  if 0 < temperature < _COLD:
    raise Refused(f'temperature must be 0 or at least {_COLD}.', 'temperature')
  return sampling.Draw(
      temperature,
      sampling.Truncation(
          _number(record, 'top_k', 0, -1, 2**31 - 1, int, clip=0),
          _number(record, 'top_p', 1.0, math.ulp(0.0), 1, float),
          _number(record, 'min_p', 0.0, 0, 1, float)))


def _number(record, name: str, default, low, high, kind: type, clip=None):
  """Returns a number in a range, or `clip`, if given, for smaller numbers."""
  value = record.get(name, default)
  if value is default:
    return value
  is_kind = isinstance(value, int if kind is int else int | float)
  if isinstance(value, bool) or not is_kind or not low <= value <= high:
    what = 'a whole number' if kind is int else 'a number'
    least = 'above 0' if low == math.ulp(0.0) else f'from {low}'
    raise Refused(f'{name} must be {what} {least} to {high}, but is '
                  f'{_shown(value)}.', name)
  return kind(value) if clip is None else max(value, clip)


def _shown(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 80 else text[:80] + '...'


def _flag(record, name: str, of: str = '') -> bool:
  value = record.get(name, False)
  if not isinstance(value, bool):
    raise Refused(f'{of}{name} must be true or false.', of + name)
  return value


def _object(record, name: str) -> Mapping[str, Any]:
  value = record.get(name, {})
  if not isinstance(value, dict) or set(value) - {'include_usage'}:
    raise Refused(f'{name} must be an object with include_usage alone.', name)
  return value


def _logprobs(record, is_chat: bool) -> bool:
  """Returns whether log-probs are requested: by true in a chat, else by 0."""
  value = record.get('logprobs', False)
  if is_chat:
    return _flag(record, 'logprobs')
  if value is False:
    return False
  if isinstance(value, bool) or value != 0:
    raise Refused('logprobs must be 0: those of the sampled tokens, without '
                  'alternatives.', 'logprobs')
  return True


def _stops(record, limits: Limits) -> tuple[str, ...]:
  value = record.get('stop', [])
  stops = [value] if isinstance(value, str) else value
  if not isinstance(stops, list) or not all(
      isinstance(s, str) and s and _is_text(s) for s in stops):
    raise Refused('stop must be a string or a list of strings, none empty.',
                  'stop')
  if len(stops) > limits.stops or any(
      len(stop) > limits.stop_chars for stop in stops):
    raise Refused(f'stop may hold {limits.stops} strings of '
                  f'{limits.stop_chars} characters each.', 'stop')
  return tuple(stops)


def _is_text(text: str) -> bool:
  """Returns False for a lone surrogate, which JSON has and UTF-8 has not."""
  return not any('\ud800' <= c <= '\udfff' for c in text)


def _prompts(record, tokenizer) -> tuple[tuple[int, ...], ...]:
  """Returns the prompts given as a text, ids, or a list of either."""
  value = record.get('prompt')
  if isinstance(value, str) or _are_ids(value):
    value = [value]
  if not isinstance(value, list) or not value or not all(
      (isinstance(one, str) and _is_text(one)) or _are_ids(one)
      for one in value):
    raise Refused('prompt must be a string, a list of token ids, or a list of '
                  'either.', 'prompt')
  prompts = tuple(tokenizer.encode(one) if isinstance(one, str) else tuple(one)
                  for one in value)
  if not all(prompts):
    raise Refused('prompt must hold one token at least.', 'prompt')
  if any(not 0 <= id_ < tokenizer.vocab_size for ids in prompts for id_ in ids):
    raise Refused('prompt must hold ids from 0 to '
                  f'{tokenizer.vocab_size - 1}.', 'prompt')
  return prompts


def _are_ids(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(
      type(id_) is int for id_ in value)


def _chat(record, tokenizer) -> tuple[int, ...]:
  """Returns the ids of a conversation, as the model's template writes it."""
  messages = record.get('messages')
  if not isinstance(messages, list) or not messages:
    raise Refused('messages must be a list of one message at least.',
                  'messages')
  messages = [_message(m, f'messages[{i}]', tokenizer)
              for i, m in enumerate(messages)]
  if messages[-1]['role'] == 'assistant':
    raise Refused("the last of messages must not be the assistant's: it is the "
                  "one to come.", 'messages')
  try:
    return tokenizer.encode(tokenizer.render(messages))
  except ValueError as error:
    raise Refused(
        "messages must be what the model's chat template can write, roles in "
        'the order that it wants; a model without one has /v1/completions '
        'alone.', 'messages') from error


def _message(message: Any, place: str, tokenizer) -> dict[str, str]:
  if not isinstance(message, dict) or message.get('role') not in _ROLES:
    raise Refused(f'{place}.role must be one of {", ".join(_ROLES)}.',
                  f'{place}.role')
  other = sorted(name for name, value in message.items()
                 if name not in ('role', 'content', 'name') and value)
  if other:
    raise Refused(f'{place} may hold role, content and name alone.',
                  f'{place}.{other[0][:80]}')
  content = message.get('content')
  if isinstance(content, list) and all(
      isinstance(part, dict) and part.get('type') == 'text'
      and isinstance(part.get('text'), str) for part in content):
    content = ''.join(part['text'] for part in content)
  if not isinstance(content, str) or not _is_text(content):
    raise Refused(f'{place}.content must be a text.', f'{place}.content')
  special = tokenizer.special_ids.intersection(
      tokenizer.encode(content)).difference(tokenizer.encode_data(content))
  if special:  # the message could imitate another role
    raise Refused(f'{place}.content must be text alone, but holds the special '
                  f'token {tokenizer.token(min(special))!r}.',
                  f'{place}.content')
  return {'role': message['role'], 'content': content}


def _budgets(record, prompts, length: int, is_chat: bool, where: str
            ) -> tuple[int, ...]:
  """Returns the tokens per prompt; by default 16, or in a chat all the rest."""
  room = length - max(map(len, prompts))
  if room < 1:
    raise Refused(f'{where} may have {length - 1} tokens, but has '
                  f'{length - room}.', where, code='context_length_exceeded')
  name = 'max_tokens'
  if 'max_completion_tokens' in record:
    name = 'max_completion_tokens'
    if 'max_tokens' in record:
      raise Refused('max_tokens and max_completion_tokens are one; give '
                    'either.', 'max_tokens')
  asked = _number(record, name, None, 1, 2**31 - 1, int)
  if asked is None:
    return tuple(length - len(ids) if is_chat else min(16, room)
                 for ids in prompts)
  if asked > room:
    raise Refused(f'{where} and {name} may have {length} tokens together, but '
                  f'have {length - room} and {asked}.', name,
                  code='context_length_exceeded')
  return (asked,) * len(prompts)


@dataclasses.dataclass
class _Completion:
  """One choice, as its pieces are collected."""

  text: str = ''
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  finish: str | None = None

  def add(self, piece: Any) -> None:
    self.text += piece.text
    self.tokens += piece.tokens
    self.logprobs += piece.logprobs
    self.finish = piece.finish


class Answer:
  """A writer of the answer to one request.

  Args:
    request: Request of the client.
    uid: Unique id of the answer.
    created: Time in seconds since 1970.
    name: Name of the model.
    token_bytes: Bytes of each token; see `Tokenizer.token_bytes`.
  """

  def __init__(self, request: Request, *, uid: str, created: int, name: str,
               token_bytes: Sequence[bytes]):
    self._request, self._token_bytes = request, token_bytes
    prefix = 'chatcmpl-' if request.is_chat else 'cmpl-'
    self._head = {'id': prefix + uid, 'created': created, 'model': name}

  async def whole(self, pieces: AsyncIterator[Any]) -> bytes:
    """Returns one body, after all pieces have arrived."""
    count = len(self._request.prompts) * self._request.n
    choices = [_Completion() for _ in range(count)]
    async for piece in pieces:
      choices[piece.choice].add(piece)
    word = ('chat.completion' if self._request.is_chat else
            'text_completion')
    return _json({
        **self._head, 'object': word,
        'choices': [self._choice(number, choice, 'message')
                    for number, choice in enumerate(choices)],
        'usage': self._usage(sum(len(choice.tokens) for choice in choices))})

  async def events(self, pieces: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Yields server-sent events, one for each piece."""
    word = ('chat.completion.chunk' if self._request.is_chat else
            'text_completion')
    head, count = {**self._head, 'object': word}, 0
    begun = set()
    async for piece in pieces:
      count += len(piece.tokens)
      choice = self._choice(piece.choice, piece, 'delta')
      if self._request.is_chat and piece.choice in begun:
        del choice['delta']['role']  # the first event has it
      begun.add(piece.choice)
      yield event(_json({**head, 'choices': [choice]}))
    if self._request.include_usage:
      yield event(_json({**head, 'choices': [], 'usage': self._usage(count)}))
    yield event(b'[DONE]')

  def _choice(self, number: int, part: Any, form: str) -> dict[str, Any]:
    logprobs = self._logprobs(part) if self._request.logprobs else None
    rest = {'index': number, 'logprobs': logprobs, 'finish_reason': part.finish}
    if not self._request.is_chat:
      return {'text': part.text, **rest}
    return {form: {'role': 'assistant', 'content': part.text}, **rest}

  def _logprobs(self, part: Any) -> dict[str, Any]:
    pieces = [self._token_bytes[token] for token in part.tokens]
    texts = [piece.decode(errors='replace') for piece in pieces]
    if not self._request.is_chat:
      return {'tokens': texts, 'token_logprobs': list(part.logprobs),
              'top_logprobs': None, 'text_offset': None}
    return {'content': [
        {'token': text, 'logprob': logprob, 'bytes': list(piece),
         'top_logprobs': []}
        for text, piece, logprob in zip(texts, pieces, part.logprobs)]}

  def _usage(self, sampled: int) -> dict[str, int]:
    prompts = sum(map(len, self._request.prompts))
    return {'prompt_tokens': prompts, 'completion_tokens': sampled,
            'total_tokens': prompts + sampled}


def event(data: bytes) -> bytes:
  """Returns a server-sent event that holds the data."""
  return b'data: ' + data + b'\n\n'


def models(name: str, created: int) -> bytes:
  """Returns the list of models, which holds the one that is served."""
  return _json({'object': 'list', 'data': [_model(name, created)]})


def model(name: str, created: int) -> bytes:
  """Returns the description of one model."""
  return _json(_model(name, created))


def _model(name: str, created: int) -> dict[str, Any]:
  return {'id': name, 'object': 'model', 'created': created,
          'owned_by': 'searchrl'}


def _json(record: Any) -> bytes:
  return json.dumps(record).encode()
