# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Requests in, bodies or SearchErrors out: HTTP that ends in time, or gives up.

A call has a deadline and a few tries; a server that keeps failing is left
alone for a while; while all of them are, calls fail at once, and a run can
wait for one to come back. Messages name hosts and kinds of errors alone: an
address or an error's text may hold a key.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import random
import sys
import threading
import time
from typing import Any, TypeVar
import urllib.parse

import urllib3

from searchrl.search.remote.wire import Malformed
from searchrl.trajectory import SearchError

T = TypeVar('T')


class Failure(Exception):
  """A try that came to nothing."""

  def __init__(self, kind: str, detail: str, *, again: bool,
               after_secs: float = 0.0):
    super().__init__(detail)
    self.kind, self.detail = kind, detail  # of the SearchError
    self.again = again  # another try may do better
    self.after_secs = after_secs  # as the server asks


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long is waited for what.

  Attributes:
    deadline_secs: of a call, its tries and what lies between them together;
      less than rollout.search_timeout_secs, which knows no reason.
    try_secs: of one try.
    tries: of a call; at least 1.
    backoff_secs: before the second try, on average; doubles from then on.
    failures: of a server in a row, until it is left alone.
    rest_secs: for which it is left alone; then one call tries it.
    pause_secs: that `Transport.wait` waits for a server, in all; a watchdog of
      the run needs to be more patient.
  """

  deadline_secs: float = 30.0
  try_secs: float = 10.0
  tries: int = 3
  backoff_secs: float = 0.25
  failures: int = 5
  rest_secs: float = 5.0
  pause_secs: float = 3600.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 1 if field.name in ('tries', 'failures') else 0
      if not value >= least or (value == 0 and field.name in (
          'deadline_secs', 'try_secs')):
        raise ValueError(
            f'search.options.{field.name} must be '
            f'{"at least 1" if least else "above 0"}, but is {value}. '
            f'{field.default} is the usual.')


@dataclasses.dataclass
class _Server:
  """What is known of one address."""

  url: str
  busy: int = 0  # calls that wait for it
  failures: int = 0  # in a row
  closed_until: float | None = None  # left alone, by the clock
  last: int = 0  # number of the call that took it last

  @property
  def host(self) -> str:
    return urllib.parse.urlsplit(self.url).netloc


class Transport:
  """Calls to one of several servers that answer alike.

  Args:
    urls: of the servers.
    patience: how long is waited for what.
    response_bytes: a longer response is refused.
    headers: of every request.
    clock: seconds that only grow.
    sleep: waits so many seconds.
    warn: told when a run is paused, and when it goes on.
  """

  def __init__(
      self, urls: tuple[str, ...], patience: Patience, *, response_bytes: int,
      headers: Mapping[str, str], clock: Callable[[], float] = time.monotonic,
      sleep: Callable[[float], None] = time.sleep,
      warn: Callable[[str], None] = lambda text: print(
          text, file=sys.stderr, flush=True)):
    _check_urls(urls)
    self._servers = [_Server(url) for url in urls]
    self._patience, self._most = patience, response_bytes
    self._headers, self._clock, self._sleep = dict(headers), clock, sleep
    self._warn = warn
    self._pool = urllib3.PoolManager(num_pools=len(urls), maxsize=256)
    self._lock = threading.Lock()
    self._calls = 0
    self._doubt = False  # a call has failed since `wait` last found all well
    self._counts = collections.Counter()

  def call(self, method: str, read: Callable[[bytes], T], *,
           body: bytes | None = None, fields: Mapping[str, str] | None = None,
           ) -> T | SearchError:
    """What `read` makes of a server's answer, or why there is none.

    Args:
      method: of HTTP; a call may be repeated, so it must change nothing.
      read: the body of a response -> its meaning; raises Malformed.
      body: of the request.
      fields: of its query string.
    """
    deadline = self._clock() + self._patience.deadline_secs
    failure = None
    for attempt in range(self._patience.tries):
      if attempt and not self._back_off(attempt, failure, deadline):
        break
      server = self._take()
      if server is None:
        failure = failure or Failure(
            'circuit_open', 'every server has failed '
            f'{self._patience.failures} times in a row', again=False)
        break
      self._count('tries' if attempt == 0 else 'retries')
      try:
        return self._try(server, method, read, body, fields, deadline)
      except Failure as error:
        failure = error
      if not failure.again:
        break
    self._count('failed_calls')
    self._doubt = True
    return SearchError(failure.kind, failure.detail)

  def wait(self, probe: Callable[[], Any]) -> None:
    """Returns at once if no call has failed since; else once a server answers.

    Args:
      probe: makes a call; a SearchError says that it failed.

    Raises:
      ConnectionError: none was back after `pause_secs`, or one refuses.
    """
    if not self._doubt:
      return
    start, pause, paused = self._clock(), 1.0, False
    while isinstance(found := self._probe(probe), SearchError):
      left = start + self._patience.pause_secs - self._clock()
      if found.kind == 'refused':  # a wrong address or key; no wait mends it
        raise ConnectionError(
            f'the search must take a query, but refuses it ({found.detail}). '
            'Correct search.options and run the same command to go on from the '
            'last checkpoint.')
      if left <= 0:
        raise ConnectionError(
            f'the search at {self._hosts} must answer within search.options.'
            f'pause_secs={self._patience.pause_secs:g} s, but failed last with '
            f'{found.kind} ({found.detail}). Start its server and run the same '
            'command to go on from the last checkpoint.')
      if not paused:
        self._warn(f'Warning: the search at {self._hosts} fails, so the run is '
                   f'paused, up to {self._patience.pause_secs:g} s.')
        self._count('pauses')
        paused = True
      self._sleep(min(pause, left))
      pause = min(2 * pause, 30.0)
    self._doubt = False
    if paused:
      self._warn(f'The search answers again after {self._clock() - start:.0f} '
                 's; the run goes on.')

  def _probe(self, probe: Callable[[], Any]) -> Any:
    """One call, to which servers that are left alone count, too."""
    with self._lock:
      for server in self._servers:
        if server.closed_until is not None:
          server.closed_until = self._clock()
    return probe()

  @property
  def _hosts(self) -> str:
    return ', '.join(server.host for server in self._servers)

  def pop(self) -> dict[str, float]:
    """Counts since the last `pop`, as metrics, and the breaker's state."""
    with self._lock:
      counts, self._counts = self._counts, collections.Counter()
      resting = sum(s.closed_until is not None for s in self._servers)
    return {f'search/remote/{name}': counts[name] for name in (
        'tries', 'retries', 'failed_calls', 'pauses')} | {
            'search/remote/servers_out': resting}

  def _back_off(self, attempt: int, failure: Failure, deadline: float) -> bool:
    """Waits before another try; False if the deadline would pass."""
    pause = self._patience.backoff_secs * 2**(attempt - 1)
    pause = max(pause * random.uniform(0.5, 1.5), failure.after_secs)
    if self._clock() + pause >= deadline:
      return False
    self._sleep(pause)
    return True

  def _take(self) -> _Server | None:
    """The server that is least busy, or one to be tried after its rest."""
    with self._lock:
      now = self._clock()
      able = [s for s in self._servers if s.closed_until is None] or [
          s for s in self._servers if s.closed_until <= now]
      if not able:
        return None
      server = min(able, key=lambda s: (s.busy, s.last))
      if server.closed_until is not None:  # others leave it alone meanwhile
        server.closed_until = now + self._patience.rest_secs
      self._calls += 1
      server.last, server.busy = self._calls, server.busy + 1
      return server

  def _try(self, server, method, read, body, fields, deadline):
    """One request; keeps book of the server."""
    failed = True
    end = min(deadline, self._clock() + self._patience.try_secs)
    try:
      result = read(self._body(server, method, body, fields, end))
      failed = False
      return result
    except Malformed as error:
      raise Failure('bad_response', f'{server.host}: {error}',
                    again=False) from None
    finally:
      with self._lock:
        server.busy -= 1
        server.failures = server.failures + 1 if failed else 0
        if not failed:
          server.closed_until = None
        elif server.failures >= self._patience.failures:
          server.closed_until = self._clock() + self._patience.rest_secs

  def _body(self, server, method, body, fields, end: float) -> bytes:
    """The body of a response with status 200."""
    left = max(end - self._clock(), 1e-3)
    try:
      response = self._pool.request(
          method, server.url, body=body, fields=fields, headers=self._headers,
          timeout=urllib3.Timeout(connect=left, read=left), retries=False,
          redirect=False, preload_content=False, decode_content=False)
      with contextlib.closing(response):  # a connection read to its end is kept
        _check_status(server.host, response)
        return self._read(server.host, response, end)
    except (urllib3.exceptions.HTTPError, OSError) as error:
      late = urllib3.exceptions.TimeoutError
      if isinstance(error, late) and not isinstance(
          error, urllib3.exceptions.NewConnectionError):  # nobody listens
        raise Failure('timeout', f'{server.host}: no answer in time',
                      again=True) from None
      raise Failure('unavailable', f'{server.host}: {type(error).__name__}',
                    again=True) from None

  def _read(self, host: str, response, end: float) -> bytes:
    pieces, size = [], 0
    while piece := response.read1(2**16):
      pieces.append(piece)
      size += len(piece)
      if size > self._most:
        raise Failure(
            'bad_response', f'{host}: more than {self._most} bytes',
            again=False)
      if self._clock() > end:  # it drips
        raise Failure('timeout', f'{host}: no whole answer in time', again=True)
    return b''.join(pieces)

  def _count(self, name: str) -> None:
    with self._lock:
      self._counts[name] += 1


def _check_status(host: str, response) -> None:
  """Raises a Failure unless the status is 200."""
  status = response.status
  if status == 200:
    return
  detail = f'{host}: status {status}'
  if status == 429 or status >= 500:
    asked = response.headers.get('Retry-After', '')
    raise Failure('unavailable', detail, again=True,
                  after_secs=float(asked) if asked.isdecimal() else 0.0)
  raise Failure('refused', detail, again=False)  # redirects, too


def _check_urls(urls: tuple[str, ...]) -> None:
  """Raises a ValueError unless these are addresses, without passwords."""
  if not urls or isinstance(urls, str):
    raise ValueError(
        f'search.options.urls must be a tuple of addresses, but is {urls!r}. '
        "Write urls=('http://127.0.0.1:8000/retrieve',).")
  for url in urls:
    try:
      parts = urllib.parse.urlsplit(url)
      legal = parts.scheme in ('http', 'https') and parts.hostname and (
          parts.port != 0)
    except ValueError:
      legal = False
    if not legal or '@' in url:
      raise ValueError(
          'search.options.urls must be http or https addresses without a '
          f'user or password, but one begins with {url[:12]!r}. Write for '
          "instance 'http://127.0.0.1:8000/retrieve'.")
