# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A SearchFn in, an HTTP server out: `/retrieve`, `/health` and `/metrics`.

The protocol is in `wire`. A client learns its mistakes by status: 400 (no such
request), 401 (no token), 408 (a slow sender), 413 (above a limit), 429 (too
much waits: come again), 503 (the engine fails), 504 (too late); never how the
inside looks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import dataclasses
import json
import sys
import threading
import time

from searchrl.search.remote import wire
from searchrl.serving import batcher as batchers
from searchrl.serving import listener
from searchrl.serving import prometheus
from searchrl.trajectory import Query, Question, SearchError, SearchFn


_NOBODY = Question('', '', ())  # asks here


@dataclasses.dataclass(frozen=True)
class Options:
  """How a server serves.

  Attributes:
    host: the address to listen at; anything but loopback opens it to others.
    port: 0 takes a free one.
    top_k: passages a query, where a request does not say.
    limits: what a request may hold.
    batch_queries: of a call of the engine.
    gather_secs: that an idle engine waits for company.
    waiting_queries: above these a request gets 429.
    deadline_secs: of a request, its waiting included; then it gets 504.
    idle_secs: after which a silent connection is closed.
    connections: at a time; more are closed at once.
    token: a request must bear it; '': none.
  """

  host: str = '127.0.0.1'
  port: int = 8000
  top_k: int = 3
  limits: wire.Limits = wire.Limits()
  batch_queries: int = 512
  gather_secs: float = 0.002
  waiting_queries: int = 4096
  deadline_secs: float = 30.0
  idle_secs: float = 60.0
  connections: int = 1024
  token: str = dataclasses.field(default='', repr=False)

  def __post_init__(self):
    numbers = dataclasses.asdict(self)
    numbers |= {f'limits.{k}': v for k, v in numbers.pop('limits').items()}
    for name, value in numbers.items():
      least = 0 if name in ('port', 'gather_secs') else 1e-9
      if isinstance(value, int | float) and not value >= least:
        rule = 'above 0' if least else 'at least 0'
        raise ValueError(f'serve.{name} must be {rule}, but is {value}.')
    if self.port > 65535:
      raise ValueError(f'serve.port must be at most 65535, but is {self.port}.')
    if self.top_k > self.limits.top_k:
      raise ValueError(
          f'serve.top_k must be at most limits.top_k={self.limits.top_k}, but '
          f'is {self.top_k}.')
    if self.waiting_queries < self.limits.queries:
      raise ValueError(
          'serve.waiting_queries must hold one request of limits.queries='
          f'{self.limits.queries}, but is {self.waiting_queries}.')


class Server:
  """Listens once it is made; `start` answers, `stop` ends it in order.

  Args:
    search: what is served.
    options: how.
    warn: told why searches fail, which clients are not.

  Raises:
    OSError: the address is taken, or not of this machine.
  """

  def __init__(self, search: SearchFn, options: Options,
               warn: Callable[[str], None] = lambda text: None):
    self.options, self._warn, self._told = options, warn, None
    self.gauges = prometheus.Gauges()
    self.draining = False
    self.batcher = batchers.Batcher(
        search, batch_queries=options.batch_queries,
        gather_secs=options.gather_secs, on_call=self.gauges.called,
        waiting_queries=options.waiting_queries)
    try:
      self._http = _Http(options.host, options.port, _Handler, owner=self,
                         connections=options.connections)
    except OSError:
      self.batcher.close()
      raise
    self._thread = threading.Thread(
        target=self._http.serve_forever, args=(0.05,), name='accept',
        daemon=True)

  @property
  def address(self) -> str:
    return self._http.url

  def start(self) -> None:
    self._thread.start()

  def tell(self, error: SearchError) -> None:
    """Says on this side why searches fail, once for each reason in a row."""
    if error != self._told:
      self._told = error
      self._warn(f'Warning: a search failed with {error.kind}: {error.detail}')

  def stop(self) -> None:
    """Takes no more requests, answers those it has, and closes."""
    self.draining = True
    self._http.shutdown()
    self._thread.join()
    self.batcher.close()
    self.gauges.wait_until_idle(self.options.deadline_secs)
    self._http.server_close()


class _Http(listener.Listener):

  def turned_away(self) -> None:
    self.owner.gauges.refused_connection()

  def handle_error(self, request, client_address):
    del request, client_address
    if not isinstance(sys.exc_info()[1], OSError):  # a client that hung up
      self.owner.gauges.failed()


class _Handler(listener.Handler):
  """One connection."""

  wbufsize = -1  # a response leaves in one piece

  def handle_expect_100(self):
    answered = super().handle_expect_100()
    self.wfile.flush()  # the client waits for it
    return answered

  def no_http(self, status: int) -> None:
    self._send(status, _error('no such request'))

  def do_GET(self):
    owner = self.server.owner
    path = self.path.partition('?')[0]
    if path == '/health':
      self._send(503 if owner.draining else 200, json.dumps({
          'status': 'stopping' if owner.draining else 'ok'}).encode())
    elif path == '/metrics':
      text = owner.gauges.text(waiting=owner.batcher.waiting)
      self._send(200, text.encode(), 'text/plain; version=0.0.4')
    else:
      self._refuse(405 if path == '/retrieve' else 404, 'no such page')

  def do_POST(self):
    with self.server.owner.gauges.request() as record:
      record.status, body = self._retrieve()
      headers = {'Retry-After': '1'} if record.status == 429 else {}
      self._send(record.status, body, **headers)
    if self.close_connection:
      self.discard()

  def _retrieve(self) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    owner, options = self.server.owner, self.server.owner.options
    closing = self.close_connection
    self.close_connection = True  # until the body is out of the way
    length = self.headers.get('Content-Length', '')
    if self.path.partition('?')[0] != '/retrieve':
      return 404, _error('no such page; POST to /retrieve')
    if not self.is_allowed():
      return 401, _error('a bearer token is needed')
    if not (length.isascii() and length.isdecimal()):
      return 411, _error('a Content-Length is needed')
    if int(length[:12]) > options.limits.body_bytes:
      return 413, _error(f'at most {options.limits.body_bytes} bytes')
    body = self._body(int(length), time.monotonic() + options.deadline_secs)
    if body is None:
      return 408, _error('the body came too late')
    if owner.draining:
      return 503, _error('stopping')
    self.close_connection = closing
    try:
      asked = wire.read_request(
          body, limits=options.limits, default_top_k=options.top_k)
    except wire.Malformed as error:
      return 400, _error(str(error))
    except wire.TooLarge as error:
      return 413, _error(str(error))
    return self._search(asked)

  def _body(self, length: int, end: float) -> bytes | None:
    """The body, or what came of it; None if it drips past its time."""
    pieces = []
    while length and (piece := self.rfile.read1(min(length, 2**16))):
      if time.monotonic() > end:
        return None
      pieces.append(piece)
      length -= len(piece)
    return b''.join(pieces)

  def _search(self, asked: wire.Request) -> tuple[int, bytes]:
    options = self.server.owner.options
    queries = [Query(text, asked.top_k, _NOBODY) for text in asked.queries]
    try:
      results = self.server.owner.batcher.submit(
          queries, time.monotonic() + options.deadline_secs).result(
              timeout=options.deadline_secs)
    except batchers.Full:
      return 429, _error('too many queries are waiting')
    except futures.TimeoutError:
      return 504, _error('no results in time')
    errors = [r for r in results if isinstance(r, SearchError)]
    if errors:
      self.server.owner.tell(errors[0])
      late = all(error.kind == 'timeout' for error in errors)
      return (504 if late else 503), _error('the search failed')
    return 200, wire.write_response(results, return_scores=asked.return_scores)

  def _refuse(self, status: int, why: str) -> None:
    self._send(status, _error(why))

  def _send(self, status: int, body: bytes, kind: str = 'application/json',
            **headers: str) -> None:
    self.head(status, {'Content-Type': kind,
                       'Content-Length': str(len(body)), **headers})
    if self.command != 'HEAD':
      self.wfile.write(body)
    self.wfile.flush()


def _error(why: str) -> bytes:
  return json.dumps({'error': why}).encode()
