# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""One HTTP request: the body of a good response, or a typed failure, in time.

A request runs in a thread of its own and is given up at its deadline, whatever
holds it up: an address that is looked up, a handshake, headers that drip. Its
connection is closed then, so that the thread ends, too; it is a daemon and
does not keep a program alive. Messages name only hosts and kinds of errors,
since an address or an error's text may have a key.
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

_SLOW = (408, 504)  # the whole request, or its results, came too late
_LARGE = (*_SLOW, 413, 429)  # a smaller request may succeed; and above 499


class Failure(Exception):
  """A request that failed."""

  def __init__(self, kind: str, detail: str, *, again: bool,
               smaller: bool = False, after_secs: float = 0.0):
    super().__init__(detail)
    self.kind, self.detail = kind, detail  # of the SearchError
    self.again = again  # whether another try may succeed
    self.smaller = smaller  # whether one that asks for less may
    self.after_secs = after_secs  # the wait that the server asks for


@dataclasses.dataclass(frozen=True)
class Request:
  """What is sent."""

  method: str
  url: str
  body: bytes | None = None
  fields: Mapping[str, str] | None = None  # of the query string

  @property
  def host(self) -> str:
    return urllib.parse.urlsplit(self.url).netloc


class Client:
  """Sends requests; connections are used again.

  Args:
    hosts: how many are asked.
    response_bytes: a longer response is an error.
    headers: of every request.
    clock: a monotonic clock, in seconds.
  """

  def __init__(self, *, hosts: int, response_bytes: int,
               headers: Mapping[str, str], clock: Callable[[], float]):
    self._response_bytes, self._headers = response_bytes, dict(headers)
    self._clock = clock
    self._pool = urllib3.PoolManager(num_pools=hosts, maxsize=256)
    self._pool.pool_classes_by_scheme = {'http': _Pool, 'https': _SafePool}

  def body(self, request: Request, end: float) -> bytes:
    """The body of a response with status 200.

    Args:
      request: may be repeated, so it must not change anything.
      end: by the clock; it is given up then.

    Raises:
      Failure: there is none.
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
    except Exception as error:  # for the thread that waits, whatever it is
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
      with contextlib.closing(response):  # one read to its end is kept alive
        _check_status(host, response)
        return self._read(host, response, end)
    except (urllib3.exceptions.HTTPError, OSError) as error:
      timed_out = isinstance(error, urllib3.exceptions.TimeoutError)
      if timed_out and not isinstance(  # whose port is closed
          error, urllib3.exceptions.NewConnectionError):
        raise _late(host) from None
      raise Failure('unavailable', f'{host}: {type(error).__name__}',
                    again=True) from None

  def _read(self, host: str, response, end: float) -> bytes:
    """The body, which may be neither too long nor too slow."""
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


_own = threading.local()  # .line: where a thread's request shows its connection


def _shown(kind: type) -> type:
  """A kind of connection whose waits for a response can be cut short."""

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
  """Ends the wait of another thread for a response."""
  with contextlib.suppress(OSError, AttributeError):  # it has just ended
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
  raise failed('refused', again=False)  # a redirect, too
