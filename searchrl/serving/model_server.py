# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of a policy, with OpenAI's completions API.

`openai_api` reads and writes the bodies. An error has a status and the field's
name: 400, 401 (no token), 404, 408 (slow sender), 413 (too large), 429 (too
many choices waiting, retry later), 503 (ending, failed, or too many requests
under way), 504 (too late). It never shows internals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from searchrl.models.inference import engine as engines
from searchrl.rollouts import generation
from searchrl.serving import asgi
from searchrl.serving import openai_api

_IS_CHAT = {'/v1/completions': False, '/v1/chat/completions': True}
_ERRORS = {  # status -> fields of an OpenAI error
    401: dict(kind='authentication_error', code='invalid_api_key'),
    429: dict(kind='rate_limit_error', code='rate_limit_exceeded'),
    500: dict(kind='server_error'), 503: dict(kind='server_error'),
    504: dict(kind='server_error', code='timeout')}


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a model server.

  Attributes:
    name: Name of the model in requests.
    http: Options of the address.
    limits: Limits of a request.
    waiting: Number of choices that may wait for a slot. Above it, a request
      gets 429.
  """

  name: str
  http: asgi.HttpOptions = asgi.HttpOptions(port=8001, deadline_secs=600.0)
  limits: openai_api.Limits = openai_api.Limits()
  waiting: int = 256

  def __post_init__(self):
    asgi.check_positive(vars(self) | {
        f'limits.{name}': value for name, value in vars(self.limits).items()})
    if self.waiting < self.limits.choices:
      raise ValueError(
          'serve.waiting must hold one request of limits.choices='
          f'{self.limits.choices}, but is {self.waiting}.')


class Server:
  """A server that listens once it is made, and answers after `start`.

  Args:
    generator: Generator that continues prompts. `stop` closes it.
    tokenizer: Tokenizer; see `agent.tokenizer`.
    length: Largest number of tokens of a prompt and its continuation.
    options: Options of the server.

  Raises:
    ValueError: The address is taken, or does not belong to this machine.
  """

  def __init__(self, generator: generation.Generator, tokenizer: Any,
               length: int, options: Options):
    self.options, self.generator = options, generator
    self._created = int(time.time())
    self._tokenizer, self._length = tokenizer, length
    self._reader = futures.ThreadPoolExecutor(  # one thread, because tokenizers
        1, thread_name_prefix='tokenize')  # are not thread-safe
    self._http = asgi.HttpServer(self._app(), options.http)

  @property
  def address(self) -> str:
    """URL of the server."""
    return self._http.url

  def start(self) -> None:
    """Starts to answer requests."""
    self._http.start()

  def stop(self) -> None:
    """Accepts no more requests, answers those under way, and closes."""
    self._http.stop()
    self.generator.close(self.options.http.deadline_secs)
    self._reader.shutdown()

  def _app(self) -> Starlette:
    complete = [
        Route(path, functools.partial(self._complete, is_chat=is_chat),
              methods=['POST']) for path, is_chat in _IS_CHAT.items()]
    return asgi.application(
        [*complete, Route('/v1/models', self._show_models),
         Route('/v1/models/{name:path}', self._show_models),
         Route('/health', self._health)],
        no_page=self._no_page, fault=self._fault)

  async def _health(self, request: Request) -> Response:
    del request
    is_open = self.generator.is_open
    return _json(200 if is_open else 503, json.dumps({
        'status': 'ok' if is_open else 'stopping',
        'waiting': self.generator.waiting,
        'speaking': self.generator.running}).encode())

  async def _show_models(self, request: Request) -> Response:
    name = self.options.name
    if not asgi.is_allowed(request, self.options.http.token):
      return _no_token()
    if 'name' not in request.path_params:
      return _json(200, openai_api.models(name, self._created))
    if request.path_params['name'] == name:
      return _json(200, openai_api.model(name, self._created))
    return _refusal(404, 'no such page.')

  async def _no_page(self, request: Request, error: HTTPException) -> Response:
    if request.method == 'POST':
      return _refusal(404, f'no such page; POST to {" or ".join(_IS_CHAT)}.',
                      is_unread=True)
    if not asgi.is_allowed(request, self.options.http.token):
      return _no_token()
    return _refusal(error.status_code, 'no such page.', headers=error.headers)

  async def _fault(self, request: Request, error: Exception) -> Response:
    """Answers a request that raised an unexpected exception."""
    del request
    asgi.say(f'Warning: a request failed: {type(error).__name__}: {error}')
    return _refusal(500, 'this request failed.')

  async def _complete(self, request: Request, is_chat: bool) -> Response:
    try:
      body = await self._http.body(request, self.options.limits.body_bytes)
      return await asgi.unless_gone(request, self._answer(body, is_chat))
    except ClientDisconnect:
      return Response(status_code=asgi.HUNG_UP)
    except asgi.Refused as refused:
      return _refusal(refused.status, f'{refused}.',
                      is_unread=refused.is_unread)
    except openai_api.Refused as error:
      return _json(error.status, error.body())

  async def _answer(self, body: bytes, is_chat: bool) -> Response:
    """Returns the response to a body.

    Raises:
      Refused: The request cannot be answered.
    """
    asked = await asyncio.get_running_loop().run_in_executor(
        self._reader, functools.partial(
            openai_api.read, body, is_chat=is_chat, name=self.options.name,
            length=self._length, tokenizer=self._tokenizer,
            limits=self.options.limits))
    answer = openai_api.Answer(
        asked, uid=secrets.token_hex(12), created=int(time.time()),
        name=self.options.name, token_bytes=self._tokenizer.token_bytes)
    pieces = _pieces(self.generator, choices(asked),
                     time.monotonic() + self.options.http.deadline_secs)
    if not asked.stream:
      async with contextlib.aclosing(pieces):
        return _json(200, await answer.whole(pieces))
    events = answer.events(pieces)
    first = await anext(events)  # an earlier failure gets an HTTP status
    return _EventStream(_from(first, events), pieces)


class _EventStream(StreamingResponse):
  """A stream of server-sent events that frees its slots at its end.

  It ends early if the client disconnects.
  """

  def __init__(self, events: AsyncIterator[bytes], pieces: Any):
    super().__init__(events, headers={'cache-control': 'no-cache',
                                      'content-type': 'text/event-stream'})
    self._pieces = pieces

  async def __call__(self, scope, receive, send) -> None:
    async with contextlib.aclosing(self._pieces):
      async with contextlib.aclosing(self.body_iterator):
        await super().__call__(scope, receive, send)


async def _from(first: bytes, events: AsyncIterator[bytes]
                ) -> AsyncIterator[bytes]:
  """Yields all events, and an error event if they end too early."""
  async with contextlib.aclosing(events):
    yield first
    try:
      async for event in events:
        yield event
    except openai_api.Refused as error:
      yield openai_api.event(error.body())


async def _pieces(generator: generation.Generator,
                  asked: list[generation.Choice], deadline: float
                  ) -> AsyncIterator[generation.Piece]:
  """Yields the pieces from the generator's thread until all choices finish.

  It cancels the choices if it is closed earlier.

  Raises:
    Refused: Too many choices wait, the deadline has passed, or the generator
      has ended.
  """
  loop, queue = asyncio.get_running_loop(), asyncio.Queue()

  def put(piece: generation.Piece | None) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended
      loop.call_soon_threadsafe(queue.put_nowait, piece)

  stream = _submit(generator, asked, put)
  left = len(asked)
  try:
    while left:
      async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
        piece = await queue.get()
      if piece is None:
        raise _refused(503, 'the server is ending.')
      left -= piece.finish is not None
      yield piece
  except TimeoutError:
    raise _refused(504, 'not finished in time.') from None
  finally:
    stream.cancel()


def _submit(generator, asked, put) -> generation.Stream:
  try:
    return generator.submit(asked, put)
  except generation.Full:
    raise _refused(429, 'too much is waiting; come again.') from None
  except generation.Closed:
    raise _refused(503, 'the server is ending.') from None


def choices(asked: openai_api.Request) -> list[generation.Choice]:
  """Returns the choices of a request; equal seeds give equal randomness.

  Randomness depends on the seed and the choice's number only, not on the prompt
  or any other field.
  """
  uid = secrets.token_hex(16) if asked.seed is None else f'seed {asked.seed}'
  wanted = [(prompt, budget) for prompt, budget in zip(
      asked.prompts, asked.budgets) for _ in range(asked.n)]
  return [generation.Choice(
      prompt, budget, engines.row_ids(0, uid, number, 0), asked.draw,
      tuple(stop.encode() for stop in asked.stops))
          for number, (prompt, budget) in enumerate(wanted)]


def _refused(status: int, why: str) -> openai_api.Refused:
  return openai_api.Refused(why, status=status, **_ERRORS.get(status, {}))


def _refusal(status: int, why: str, *, headers: Mapping[str, str] | None = None,
             is_unread: bool = False) -> Response:
  return _json(status, _refused(status, why).body(), headers,
               is_unread=is_unread)


def _no_token() -> Response:
  return _refusal(401, 'a bearer token is needed.')


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None,
          *, is_unread: bool = False) -> Response:
  """Returns a JSON response; with `is_unread`, one that ends the connection."""
  headers = dict(headers or {})
  if status == 429:
    headers['retry-after'] = '1'
  kind = asgi.Closing if is_unread else Response
  return kind(body, status, headers, 'application/json')
