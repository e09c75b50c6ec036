# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP request that returns a good body or a typed failure in time.

A request runs in its own thread and is given up at its deadline, whatever
delays it: an address lookup, a handshake, or headers that arrive slowly. Its
connection is then closed, so that the thread ends, too. The thread is a daemon
and does not keep a program alive. Messages name only hosts and kinds of errors,
because an address or an error's text may contain a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import queue
import socket
import threading
import urllib.parse

import urllib3

_SLOW = (408, 504)  # statuses: the request, or its results, came too late
_LARGE = (*_SLOW, 413, 429)  # a smaller request may succeed, as for status 500+


class Failure(Exception):
  """A failed request, and whether another try or a smaller one may succeed."""

  def __init__(self, kind: str, detail: str, *, again: bool,
               smaller: bool = False, after_secs: float = 0.0):
    super().__init__(detail)
    self.kind, self.detail = kind, detail  # fields of the SearchError
    self.again = again  # whether another try may succeed
    self.smaller = smaller  # whether a request that asks for less may succeed
    self.after_secs = after_secs  # seconds to wait, as the server asks


@dataclasses.dataclass(frozen=True)
class Request:
  """The method, address and content of an HTTP request."""

  method: str
  url: str
  body: bytes | None = None
  fields: Mapping[str, str] | None = None  # parameters of the query string

  @property
  def host(self) -> str:
    """Host and port of the URL."""
    return urllib.parse.urlsplit(self.url).netloc


class Client:
  """Sends requests and reuses their connections.

  Args:
    hosts: Number of hosts that receive requests.
    response_bytes: Largest size of a response; a longer one is an error.
    headers: Headers of every request.
    clock: Monotonic clock, in seconds.
  """

  def __init__(self, *, hosts: int, response_bytes: int,
               headers: Mapping[str, str], clock: Callable[[], float]):
    self._response_bytes, self._headers = response_bytes, dict(headers)
    self._clock = clock
    self._pool = urllib3.PoolManager(num_pools=hosts, maxsize=256)
    self._pool.pool_classes_by_scheme = {'http': _Pool, 'https': _SafePool}

  def body(self, request: Request, end: float) -> bytes:
    """Returns the body of a response with status 200.

    Args:
      request: Request that changes nothing, since it may be repeated.
      end: Time, by the clock, at which the request is given up.

    Raises:
      Failure: There is no such response.
    """
    done, line = queue.SimpleQueue(), []
    threading.Thread(
        target=self._send, args=(request, end, line, done), daemon=True,
        name='http-request').start()
    try:
      found = done.get(timeout=self._left(end))
    except queue.Empty:
      for connection in [*line]:
        _cut(connection)
      raise _late(request.host) from None
    if isinstance(found, Exception):
      raise found
    return found

  def _left(self, end: float) -> float:
    return max(end - self._clock(), 1e-3)

  def _send(self, request: Request, end: float, line: list,
            done: queue.SimpleQueue) -> None:
    _own.line = line
    try:
      found = self._answer(request, end)
    except Exception as error:  # any error is raised in the waiting thread
      found = error
    line.clear()
    done.put(found)

  def _answer(self, request: Request, end: float) -> bytes:
    left, host = self._left(end), request.host
    try:
      response = self._pool.request(
          request.method, request.url, body=request.body,
          fields=request.fields, headers=self._headers,
          timeout=urllib3.Timeout(connect=left, read=left), retries=False,
          redirect=False, preload_content=False, decode_content=False)
      with contextlib.closing(response):  # a fully read connection stays open
        _check_status(host, response)
        return self._read(host, response, end)
    except (urllib3.exceptions.HTTPError, OSError) as error:
      timed_out = isinstance(error, urllib3.exceptions.TimeoutError)
      if timed_out and not isinstance(  # a closed port, which is not slow
          error, urllib3.exceptions.NewConnectionError):
        raise _late(host) from None
      raise Failure('unavailable', f'{host}: {type(error).__name__}',
                    again=True) from None

  def _read(self, host: str, response, end: float) -> bytes:
    """Returns the body; raises a Failure if it is too long or too slow."""
    pieces, size = [], 0
    while piece := response.read1(2**16):
      pieces.append(piece)
      size += len(piece)
      if size > self._response_bytes:
        raise Failure(
            'bad_response', f'{host}: more than {self._response_bytes} bytes',
            again=False, smaller=True)
      if self._clock() > end:
        raise _late(host)
    return b''.join(pieces)


_own = threading.local()  # .line: list to which a thread adds its connection


def _shown(kind: type) -> type:
  """Returns a connection class whose wait for a response can be cut short."""

  class Shown(kind):

    def getresponse(self):
      _own.line.append(self)
      return super().getresponse()

  return Shown


class _Pool(urllib3.HTTPConnectionPool):
  ConnectionCls = _shown(urllib3.connection.HTTPConnection)


class _SafePool(urllib3.HTTPSConnectionPool):
  ConnectionCls = _shown(urllib3.connection.HTTPSConnection)


def _cut(connection) -> None:
  """Ends another thread's wait for a response."""
  with contextlib.suppress(OSError, AttributeError):  # the wait has just ended
    connection.sock.shutdown(socket.SHUT_RDWR)


def _late(host: str) -> Failure:
  return Failure('timeout', f'{host}: no whole answer in time', again=True,
                 smaller=True)


def _check_status(host: str, response) -> None:
  """Raises a Failure unless the status is 200."""
  status = response.status
  if status == 200:
    return
  asked = response.headers.get('Retry-After', '')
  failed = functools.partial(
      Failure, detail=f'{host}: status {status}',
      smaller=status in _LARGE or status >= 500,
      after_secs=float(asked) if asked.isdecimal() else 0.0)
  if status in _SLOW:
    raise failed('timeout', again=True)
  if status == 429 or status >= 500:
    raise failed('unavailable', again=True)
  raise failed('refused', again=False)  # also for a redirect
