# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of a search engine: `/retrieve`, `/health` and `/metrics`.

The protocol is in `wire`. An error has a status: 400 (malformed request), 401
(no token), 408 (slow sender), 413 (above a limit), 429 (too many queries
waiting, retry later), 503 (the engine fails, or too many requests are under
way), 504 (too late). It never shows internals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
import dataclasses
import json
import time
from typing import Any

from prometheus_client import exposition
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from searchrl.search.remote import wire
from searchrl.serving import asgi
from searchrl.serving import batcher as batchers
from searchrl.serving import prometheus
from searchrl.trajectory import Query, Question, SearchError, SearchFn


_NOBODY = Question('', '', ())  # placeholder: queries here have no question
_PROBE = wire.Request(('test',), 1, False)
_FRESH_SECS = 10.0  # time for which an answer proves that the engine works
_WATCHED_BYTES = 2**14  # size above which a request's client is watched
_LARGE = 2048  # number of passages above which a thread writes the response


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a search server.

  Attributes:
    http: Options of the address.
    top_k: Default number of passages per query.
    limits: Limits of a request.
    batch_queries: Largest number of queries in a call of the engine.
    gather_secs: Time for which an idle engine waits for more queries.
    waiting_queries: Largest number of waiting queries. Above it, a request gets
      429.
  """

  http: asgi.HttpOptions = asgi.HttpOptions()
  top_k: int = 3
  limits: wire.Limits = wire.Limits()
  batch_queries: int = 512
  gather_secs: float = 0.002
  waiting_queries: int = 16_384

  def __post_init__(self):
    asgi.check_positive(vars(self) | {
        f'limits.{name}': value for name, value in vars(self.limits).items()},
                        zero=('gather_secs',))
    if self.top_k > self.limits.top_k:
      raise ValueError(
          f'serve.top_k must be at most limits.top_k={self.limits.top_k}, but '
          f'is {self.top_k}.')
    if self.waiting_queries < self.limits.queries:
      raise ValueError(
          'serve.waiting_queries must hold one request of limits.queries='
          f'{self.limits.queries}, but is {self.waiting_queries}.')


class Server:
  """A server that listens once it is made, and answers after `start`.

  Args:
    search: Search engine.
    options: Options of the server.
    about: Facts about the engine that `/health` shows, such as its corpus's
      digest.
    warn: Function that receives the reasons of failed searches, which clients
      do not see.

  Raises:
    ValueError: The address is taken, or does not belong to this machine.
  """

  def __init__(self, search: SearchFn, options: Options, *,
               about: Mapping[str, Any] | None = None,
               warn: Callable[[str], None] = lambda text: None):
    self.options, self._about, self._warn = options, dict(about or {}), warn
    self._warned = None  # the last failure that `warn` received
    self._stopping, self._answered = False, -_FRESH_SECS
    self._http = asgi.HttpServer(self._app(), options.http)
    self.metrics = prometheus.Metrics(lambda: self.batcher.waiting)
    self.batcher = batchers.Batcher(
        search, batch_queries=options.batch_queries,
        gather_secs=options.gather_secs, on_call=self.metrics.add_call,
        waiting_queries=options.waiting_queries)

  @property
  def address(self) -> str:
    """URL of the server."""
    return self._http.url

  def start(self) -> None:
    """Starts to answer requests."""
    self._http.start()

  def stop(self) -> None:
    """Accepts no more requests, answers those under way, and closes."""
    self._stopping = True
    self._http.stop()
    self.batcher.close(self.options.http.deadline_secs)

  def _app(self) -> Starlette:
    return asgi.application(
        [Route('/retrieve', self._retrieve, methods=['POST']),
         Route('/health', self._health),
         Route('/metrics', self._show_metrics)],
        no_page=self._no_page, fault=self._fault)

  async def _health(self, request: Request) -> Response:
    del request
    status = 'stopping' if self._stopping else (
        'ok' if await self._is_answering() else 'failing')
    return _json(200 if status == 'ok' else 503,
                 json.dumps({'status': status, **self._about}).encode())

  async def _is_answering(self) -> bool:
    """Returns whether the engine works; probes it without a recent answer."""
    if time.monotonic() - self._answered < _FRESH_SECS:
      return True
    return (await self._search(_PROBE)).status_code in (200, 429)

  async def _show_metrics(self, request: Request) -> Response:
    write, kind = exposition.choose_encoder(request.headers.get('accept', ''))
    return Response(write(self.metrics.registry), media_type=kind)

  async def _retrieve(self, request: Request) -> Response:
    with self.metrics.request() as record:
      try:
        body = await self._http.body(request, self.options.limits.body_bytes)
        answer = self._answer(body)
        response = await (asgi.unless_gone(request, answer)
                          if self._is_costly(body) else answer)
      except ClientDisconnect:
        response = Response(status_code=asgi.HUNG_UP)
      except asgi.Refused as refused:
        response = self._refuse(refused)
      record.status = response.status_code
    return response

  def _is_costly(self, body: bytes) -> bool:
    """Returns whether to watch for the client's disconnection and then drop it.

    Watching has a cost, so small requests are not watched at low load. A client
    that has waited too long asks again. If its first request were searched all
    the same, a slow engine would never catch up.
    """
    return (len(body) > _WATCHED_BYTES or
            self.batcher.waiting >= self.options.batch_queries)

  def _refuse(self, refused: asgi.Refused) -> Response:
    if refused.status == 503:
      self.metrics.add_refused()
    return _error(refused.status, str(refused), is_unread=refused.is_unread)

  async def _answer(self, body: bytes) -> Response:
    if self._stopping:
      return _error(503, 'stopping')
    try:
      asked = wire.read_request(body, limits=self.options.limits,
                                default_top_k=self.options.top_k)
      self.metrics.add_cut(asked.cut)
      return await self._search(asked)
    except wire.Malformed as error:
      return _error(400, str(error))
    except wire.TooLarge as error:
      return _error(413, str(error))

  async def _search(self, asked: wire.Request) -> Response:
    deadline_secs = self.options.http.deadline_secs
    queries = [Query(text, asked.top_k, _NOBODY) for text in asked.queries]
    try:
      calls = self.batcher.submit(queries, time.monotonic() + deadline_secs)
      async with asyncio.timeout(deadline_secs):
        parts = await asyncio.gather(*map(asyncio.wrap_future, calls))
    except batchers.Full:
      return _error(429, 'too many queries are waiting')
    except TimeoutError:
      return _error(504, 'no results in time')
    results = [result for part in parts for result in part]
    errors = [r for r in results if isinstance(r, SearchError)]
    if errors:
      self._warn_once(errors[0])
      late = all(error.kind == 'timeout' for error in errors)
      return _error(504 if late else 503, 'the search failed')
    self._answered = time.monotonic()
    write = lambda: wire.write_response(
        results, return_scores=asked.return_scores)
    large = len(results) * asked.top_k > _LARGE
    return _json(200, await asyncio.to_thread(write) if large else write())

  def _warn_once(self, error: SearchError) -> None:
    """Warns on the server why searches fail; omits an immediate repetition."""
    if error != self._warned:
      self._warned = error
      self._warn(f'Warning: a search failed with {error.kind}: {error.detail}')

  async def _no_page(self, request: Request, error: HTTPException) -> Response:
    if request.method != 'POST':
      return _error(error.status_code, 'no such page', error.headers)
    with self.metrics.request() as record:
      record.status = 404
    return _error(404, 'no such page; POST to /retrieve', is_unread=True)

  async def _fault(self, request: Request, error: Exception) -> Response:
    """Answers a request that raised an unexpected exception."""
    del request
    self.metrics.add_failure()
    self._warn(f'Warning: a request failed: {type(error).__name__}: {error}')
    return _error(500, 'this request failed')


def _error(status: int, why: str, headers: Mapping[str, str] | None = None, *,
           is_unread: bool = False) -> Response:
  return _json(status, json.dumps({'error': why}).encode(), headers,
               is_unread=is_unread)


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None,
          *, is_unread: bool = False) -> Response:
  """Returns a JSON response; with `is_unread`, one that ends the connection."""
  headers = dict(headers or {})
  if status == 429:
    headers['retry-after'] = '1'
  kind = asgi.Closing if is_unread else Response
  return kind(body, status, headers, 'application/json')
