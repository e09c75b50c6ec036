# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of a policy, with OpenAI's completions API.

`openai_api` reads and writes the bodies. An error has a status, and the name of
a wrong field: 400 (bad request), 401 (no token), 404 (no such page or model),
408 (slow sender), 413 (too large), 429 (too many choices waiting, retry later),
500 (a fault of the server), 503 (ending, failed, or too many requests under
way), 504 (too late). Its text never shows internals.
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent import futures
import contextlib
import dataclasses
import functools
import secrets
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from searchrl.models.inference import engine as engines
from searchrl.rollouts import generation
from searchrl.runtime import processes
from searchrl.serving import asgi
from searchrl.serving import openai_api

_COMPLETIONS, _CHAT = '/v1/completions', '/v1/chat/completions'


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a model server."""

  name: str  # name by which requests ask for the model
  http: asgi.HttpOptions = asgi.HttpOptions(port=8001, deadline_secs=600.0)
  limits: openai_api.Limits = openai_api.Limits()
  waiting: int = 256  # most choices that may wait; above, a request gets 429

  def __post_init__(self):
    asgi.check_positive(self)
    asgi.check_positive(self.limits, 'limits.')
    if self.waiting < self.limits.choices:
      raise ValueError(
          'serve.waiting must hold one request of limits.choices='
          f'{self.limits.choices}, but is {self.waiting}.')


class Server:
  """A server that listens once it is made, and answers after `start`.

  Attributes:
    address: URL of the server, without a path.
    start: Function that starts to answer; see `asgi.HttpServer.start`.

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
    self.address, self.start = self._http.url, self._http.start

  def stop(self) -> None:
    """Accepts no more requests, answers the present ones, and closes."""
    self._http.stop()
    self.generator.close(self.options.http.deadline_secs)
    self._reader.shutdown()

  def _app(self) -> Starlette:
    return asgi.application(
        [Route(_COMPLETIONS, self._complete, methods=['POST']),
         Route(_CHAT, self._complete, methods=['POST']),
         Route('/v1/models', self._show_models),
         Route('/v1/models/{name:path}', self._show_models),
         Route('/health', self._health)],
        write=lambda request, refusal: openai_api.write_error(refusal),
        warn=processes.say, token=self.options.http.token)

  async def _health(self, request: Request) -> Response:
    del request
    status = ('stopping' if not self.generator.is_open else
              'ok' if self.generator.is_compiled else 'compiling')
    return asgi.json_response({
        'status': status, 'waiting': self.generator.waiting,
        'speaking': self.generator.running}, 200 if status == 'ok' else 503)

  async def _show_models(self, request: Request) -> Response:
    if not asgi.is_allowed(request, self.options.http.token):
      raise asgi.Refused(401, asgi.NO_TOKEN)
    model = {'id': self.options.name, 'object': 'model',
             'created': self._created, 'owned_by': 'searchrl'}
    name = request.path_params.get('name')
    if name is None:
      return asgi.json_response({'object': 'list', 'data': [model]})
    if name != self.options.name:
      raise asgi.Refused(404, 'no such page')
    return asgi.json_response(model)

  async def _complete(self, request: Request) -> Response:
    body = await self._http.body(request, self.options.limits.body_bytes)
    return await asgi.unless_gone(
        request, self._answer(body, is_chat=request.scope['path'] == _CHAT))

  async def _answer(self, body: bytes, is_chat: bool) -> Response:
    """Returns the response to a request's body, or raises a Refused."""
    request = await asyncio.get_running_loop().run_in_executor(
        self._reader, functools.partial(
            openai_api.read, body, is_chat=is_chat, name=self.options.name,
            length=self._length, tokenizer=self._tokenizer,
            limits=self.options.limits))
    answer = openai_api.Answer(
        request, uid=secrets.token_hex(12), created=int(time.time()),
        name=self.options.name, token_bytes=self._tokenizer.token_bytes)
    pieces = _pieces(self.generator, choices(request),
                     time.monotonic() + self.options.http.deadline_secs)
    if not request.stream:
      return asgi.json_response(await answer.whole(pieces))
    events = answer.events(pieces)
    first = await anext(events)  # an earlier failure gets an HTTP status
    return _EventStream(first, events)


class _EventStream(StreamingResponse):
  """A response of server-sent events, which frees its slots when it ends.

  It also ends if the client disconnects.
  """

  def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]):
    super().__init__(_with_error(first, events), headers={
        'cache-control': 'no-cache', 'content-type': 'text/event-stream'})
    self._events = events

  async def __call__(self, scope, receive, send) -> None:
    async with contextlib.aclosing(self._events):
      await super().__call__(scope, receive, send)


async def _with_error(first: bytes, events: AsyncGenerator[bytes, None]
                      ) -> AsyncGenerator[bytes, None]:
  """Yields all events, and an error event if they end too early."""
  yield first
  try:
    async for event in events:
      yield event
  except asgi.Refused as refusal:
    yield openai_api.event(openai_api.write_error(refusal))


async def _pieces(generator: generation.Generator,
                  choices: list[generation.Choice], deadline: float
                  ) -> AsyncGenerator[generation.Piece, None]:
  """Yields the pieces of text of all choices, as the generator samples them.

  If this iterator is closed before the end, the choices are cancelled.

  Raises:
    Refused: Too many choices wait, the deadline has passed, or the generator
      has ended.
  """
  loop = asyncio.get_running_loop()
  queue: asyncio.Queue[generation.Piece | None] = asyncio.Queue()

  def put(piece: generation.Piece | None) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended
      loop.call_soon_threadsafe(queue.put_nowait, piece)

  try:
    stream = generator.submit(choices, put)
  except generation.Full:
    raise asgi.Refused(429, 'too many choices are waiting') from None
  except generation.Closed:
    raise asgi.Refused(503, 'the server is ending') from None
  unfinished = len(choices)
  try:
    while unfinished:
      async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
        piece = await queue.get()
      if piece is None:
        raise asgi.Refused(503, 'the server is ending')
      unfinished -= piece.finish is not None
      yield piece
  except TimeoutError:
    raise asgi.Refused(504, 'not finished in time') from None
  finally:
    stream.cancel()


def choices(request: openai_api.Request) -> list[generation.Choice]:
  """Returns the choices of a request: `n` continuations of each prompt.

  The random numbers of a choice depend only on the request's seed and on the
  number of the choice, not on the prompt or any other field. Without a seed,
  each request has other random numbers.
  """
  uid = (secrets.token_hex(16) if request.seed is None else
         f'seed {request.seed}')
  stops = tuple(stop.encode() for stop in request.stops)
  tasks = [task for task in zip(request.prompts, request.budgets)
           for _ in range(request.n)]
  return [generation.Choice(prompt, budget, engines.row_ids(0, uid, number, 0),
                            request.draw, stops,
                            alike=request.seed is not None)
          for number, (prompt, budget) in enumerate(tasks)]
