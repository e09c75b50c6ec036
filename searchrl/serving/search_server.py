# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP server of a search engine: `/retrieve`, `/health` and `/metrics`.

The protocol is in `wire`. An error has a status: 400 (malformed request), 401
(no token), 404 (no such page), 408 (slow sender), 413 (above a limit), 429 (too
many queries waiting, retry later), 500 (a fault of the server), 503 (the engine
fails, or too many requests are under way), 504 (too late). Its text never shows
internals.
"""

import asyncio
from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import time
from typing import Any

from prometheus_client import exposition
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from searchrl.search.remote import wire
from searchrl.serving import asgi
from searchrl.serving import batcher as batchers
from searchrl.serving import prometheus
from searchrl.trajectory import (Passages, Query, Question, SearchError,
                                 SearchFn)


_NOBODY = Question('', '', ())  # placeholder: queries here have no question
_PROBE = wire.Request(('test',), 1, False)
_FRESH_SECS = 10.0  # time for which an answer proves that the engine works
_WATCHED_BYTES = 2**14  # bytes of a body above which its client is watched
_LARGE = 2048  # number of passages above which a thread writes the response


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a search server."""

  http: asgi.HttpOptions = asgi.HttpOptions()
  top_k: int = 3  # default number of passages per query
  limits: wire.Limits = wire.Limits()
  batch_queries: int = 512  # largest number of queries per call of the engine
  gather_secs: float = 0.002  # time that an idle engine waits for more queries
  waiting_queries: int = 16_384  # most that may wait; above, a request gets 429

  def __post_init__(self):
    asgi.check_positive(self, zero=('gather_secs',))
    asgi.check_positive(self.limits, 'limits.')
    if self.top_k > self.limits.top_k:
      raise ValueError(
          f'serve.top_k must be at most limits.top_k={self.limits.top_k}, but '
          f'is {self.top_k}.')
    if self.waiting_queries < self.limits.queries:
      raise ValueError(
          'serve.waiting_queries must hold one request of limits.queries='
          f'{self.limits.queries}, but is {self.waiting_queries}.')


def is_answer(result: Passages | SearchError) -> bool:
  """Returns whether a result shows that its engine works.

  An error 'not_recorded' shows that, too: a replayed recording works, but lacks
  the query.
  """
  return not isinstance(result, SearchError) or result.kind == 'not_recorded'


class Server:
  """A server that listens once it is made, and answers after `start`.

  Attributes:
    address: URL of the server, without a path.
    start: Function that starts to answer; see `asgi.HttpServer.start`.

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
    self._last_error: SearchError | None = None  # that `warn` received
    self._stopping, self._answered = False, -_FRESH_SECS
    self._http = asgi.HttpServer(self._app(), options.http)
    self.address, self.start = self._http.url, self._http.start
    self.metrics = prometheus.Metrics(lambda: self.batcher.waiting)
    self.batcher = batchers.Batcher(
        search, batch_queries=options.batch_queries,
        gather_secs=options.gather_secs, on_call=self.metrics.add_call,
        waiting_queries=options.waiting_queries)

  def stop(self) -> None:
    """Accepts no more requests, answers the present ones, and closes."""
    self._stopping = True
    self._http.stop()
    self.batcher.close(self.options.http.deadline_secs)

  def _app(self) -> Starlette:
    return asgi.application(
        [Route('/retrieve', self._retrieve, methods=['POST']),
         Route('/health', self._health),
         Route('/metrics', self._show_metrics)],
        write=self._write_refusal, warn=self._warn)

  def _write_refusal(self, request: Request, refusal: asgi.Refused) -> str:
    """Counts a refusal, and returns the body of its response."""
    if request.method == 'POST':
      self.metrics.requests.labels(str(refusal.status)).inc()
    if refusal.status == 500:
      self.metrics.failures.inc()
    return json.dumps({'error': str(refusal)})

  async def _health(self, request: Request) -> Response:
    del request
    status = 'stopping' if self._stopping else (
        'ok' if await self._is_answering() else 'failing')
    return asgi.json_response({'status': status, **self._about},
                              200 if status == 'ok' else 503)

  async def _is_answering(self) -> bool:
    """Returns whether the search engine works.

    The engine works if it has answered recently or answers a test query now. It
    also counts as working if it refuses the test query because too many others
    are waiting.
    """
    if not self._has_answered():
      try:
        await self._search(_PROBE)
      except asgi.Refused as refusal:
        return refusal.status == 429 or self._has_answered()
    return True

  def _has_answered(self) -> bool:
    return time.monotonic() - self._answered < _FRESH_SECS

  async def _show_metrics(self, request: Request) -> Response:
    write, kind = exposition.choose_encoder(request.headers.get('accept', ''))
    return Response(write(self.metrics.registry), media_type=kind)

  async def _retrieve(self, request: Request) -> Response:
    metrics = self.metrics
    with metrics.active.track_inprogress(), metrics.request_secs.time():
      body = await self._read(request)
      answer = self._answer(body)
      response = await (asgi.unless_gone(request, answer)
                        if self._is_costly(body) else answer)
    metrics.requests.labels('200').inc()
    return response

  async def _read(self, request: Request) -> bytes:
    try:
      return await self._http.body(request, self.options.limits.body_bytes)
    except asgi.Refused as refusal:
      if refusal.status == 503:
        self.metrics.refused_connections.inc()
      raise

  def _is_costly(self, body: bytes) -> bool:
    """Returns whether a request is worth cancelling if its client disconnects.

    A client that has waited too long disconnects and asks again. If its first
    request were still searched for, a slow engine would never catch up. But it
    costs time to watch for this, so small requests at low load are not watched.
    """
    return (len(body) > _WATCHED_BYTES or
            self.batcher.waiting >= self.options.batch_queries)

  async def _answer(self, body: bytes) -> Response:
    if self._stopping:
      raise asgi.Refused(503, 'stopping')
    try:
      request = wire.read_request(body, limits=self.options.limits,
                                  default_top_k=self.options.top_k)
    except (wire.Malformed, wire.TooLarge) as error:
      status = 400 if isinstance(error, wire.Malformed) else 413
      raise asgi.Refused(status, str(error)) from error
    self.metrics.cut_queries.inc(request.cut)
    return await self._search(request)

  async def _search(self, request: wire.Request) -> Response:
    deadline_secs = self.options.http.deadline_secs
    queries = [Query(text, request.top_k, _NOBODY) for text in request.queries]
    try:
      calls = self.batcher.submit(queries, time.monotonic() + deadline_secs)
      async with asyncio.timeout(deadline_secs):
        parts = await asyncio.gather(*map(asyncio.wrap_future, calls))
    except batchers.Full:
      raise asgi.Refused(429, 'too many queries are waiting') from None
    except TimeoutError:
      raise asgi.Refused(504, 'no results in time') from None
    results = [result for part in parts for result in part]
    if queries and all(map(is_answer, results)):  # else it was not asked
      self._answered = time.monotonic()
    passages = [r for r in results if not isinstance(r, SearchError)]
    errors = [r for r in results if isinstance(r, SearchError)]
    if errors:
      self._warn_once(errors[0])
      is_late = all(error.kind == 'timeout' for error in errors)
      raise asgi.Refused(504 if is_late else 503, 'the search failed')
    write = functools.partial(wire.write_response, passages,
                              return_scores=request.return_scores)
    is_large = len(passages) * request.top_k > _LARGE
    return Response(await asyncio.to_thread(write) if is_large else write(),
                    media_type='application/json')

  def _warn_once(self, error: SearchError) -> None:
    """Prints why searches fail, unless the reason was just printed."""
    if error != self._last_error:
      self._last_error = error
      self._warn(f'Warning: a search failed with {error.kind}: {error.detail}')
