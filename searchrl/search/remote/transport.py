# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP requests with deadlines, retries and a circuit breaker per server.

A call has a deadline and a few tries. If a server keeps failing, its circuit
opens: the server is not asked for a while. While all circuits are open, calls
fail at once, and a run can wait until a server answers. Requests that fail at
the same time count as one failure, so that a single turn with many requests
does not open a circuit.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import random
import threading
import time
from typing import Any, TypeVar
import urllib.parse

from searchrl.runtime import log
from searchrl.search import engine_wrappers
from searchrl.search.remote import http_request
from searchrl.search.remote import wire
from searchrl.search.remote.http_request import Failure
from searchrl.search.remote.wire import Malformed
from searchrl.trajectory import SearchError

T = TypeVar('T')

_REMEDIES = collections.defaultdict(
    lambda: 'Start its server', timeout='Start its server; if it is too slow, '
    'raise search.options.deadline_secs or lower rollout.max_num_seqs')


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
  """Timeouts, retries and the circuit breaker.

  Attributes:
    deadline_secs: Time limit, in seconds, of a call with all its tries and
      waits. It must be less than rollout.search_timeout_secs, because a call
      that reaches that later limit fails without naming a cause.
    try_secs: Timeout of one try, in seconds.
    tries: Number of tries of a request, at least 1. If a request has failed and
      is sent again in parts, each part has only one try.
    backoff_secs: Mean wait before the second try, in seconds. The wait doubles
      with each further try.
    failures: Number of failures in a row that open a server's circuit. Failures
      of requests that were in flight at the same time count as one.
    rest_secs: Seconds for which a circuit stays open. After this time, one call
      at a time may try the server.
    pause_secs: Longest time, in seconds, that `Transport.wait` waits for a
      server. The time limit of the run's watchdog must be longer.
    group: Group of the config that has these fields, for errors.

  Raises:
    ValueError: A value is not a number, or is out of range.
  """

  deadline_secs: float = 30.0
  try_secs: float = 10.0
  tries: int = 3
  backoff_secs: float = 0.25
  failures: int = 5
  rest_secs: float = 5.0
  pause_secs: float = 3600.0
  group: str = 'search.options'

  def __post_init__(self):
    for field in dataclasses.fields(self)[:-1]:
      value = getattr(self, field.name)
      least = 1 if field.name in ('tries', 'failures') else 0
      is_number = isinstance(value, int | float)
      if not is_number or not value >= least or (value == 0 and field.name in (
          'deadline_secs', 'try_secs')):
        rule = 'at least 1' if least else 'above 0'
        raise ValueError(
            f'{self.group}.{field.name} must be '
            f'{rule if is_number else "a number"}, but is {value!r}. '
            f'{field.default} is the usual.')


@dataclasses.dataclass
class _Server:
  """The state of one server: its load, its failures and its circuit."""

  url: str
  busy: int = 0  # requests in flight
  failures: int = 0  # number of failures in a row
  open_until: float | None = None  # time by the clock; None: circuit is closed
  last: int = 0  # number of the newest request that this server received
  # Number of the newest request, to any server, at the last success or failure
  # that `settle` counted.
  settled: int = 0

  def settle(self, number: int, newest: int, *, failed: bool) -> None:
    """Records the outcome of a request to this server.

    Failures of requests that were in flight together count once: a failure is
    ignored if its request began before the last counted success or failure.

    Args:
      number: Number of the request. All servers' requests are numbered together
        as they begin.
      newest: Number of the newest request to any server.
      failed: True if the request failed.
    """
    self.busy -= 1
    if not failed:
      self.failures, self.open_until, self.settled = 0, None, newest
    elif number > self.settled:
      self.failures, self.settled = self.failures + 1, newest


class Transport:
  """A client of one or several servers that all give the same answers.

  Attributes:
    clock: Clock of the deadlines, in seconds.
    headers: Headers of every request.
    try_secs: Seconds that one try may take.

  Args:
    urls: Addresses of the servers.
    policy: Timeouts, retries and the circuit breaker.
    response_bytes: Largest size of a response; a longer one is an error.
    headers: Headers of every request.
    proxy: Address of the proxy; '' for none, whatever the environment has.
    clock: Monotonic clock, in seconds.
    sleep: Function that sleeps for a number of seconds.
    warn: Function that receives a line of text when a run is paused and when it
      continues.

  Raises:
    ValueError: There is no address, or one is not HTTP or has a user.
  """

  def __init__(
      self, urls: Sequence[str], policy: RetryPolicy, *,
      response_bytes: int, headers: Mapping[str, str], proxy: str = '',
      clock: Callable[[], float] = time.monotonic,
      sleep: Callable[[float], None] = time.sleep,
      warn: Callable[[str], None] = log.say):
    _check_urls(urls)
    self._servers = [_Server(url) for url in urls]
    self._policy, self._sleep, self._warn = policy, sleep, warn
    self.clock, self.try_secs = clock, policy.try_secs
    self.headers = dict(headers)
    self._client = http_request.Client(
        response_bytes=response_bytes, headers=headers, clock=clock,
        proxy=proxy)
    self._lock = threading.Lock()
    self._requests = 0  # number of requests sent to all servers
    self._failed = False  # whether a call has failed since the last `wait`
    self._counts = engine_wrappers.Counts()

  def deadline(self) -> float:
    """Returns the time, in seconds by `clock`, at which a new call must end."""
    return self.clock() + self._policy.deadline_secs

  def call(self, read: Callable[[bytes], T], *, body: bytes | None = None,
           fields: Mapping[str, str] | None = None) -> T | SearchError:
    """Returns the result of `read` on a server's response, or a SearchError.

    Args:
      read: Function that parses the body of a response; raises Malformed.
      body: Body of the request, which must not change anything, since it may be
        repeated.
      fields: Parameters of the request's query string.
    """
    try:
      return self.ask(read, self.deadline(), body=body, fields=fields)
    except Failure as failure:
      return self.give_up(failure)

  def ask(self, read: Callable[[bytes], T], deadline: float, *,
          body: bytes | None = None, fields: Mapping[str, str] | None = None,
          again: bool = False, smaller: bool = False) -> T:
    """Sends a request, with retries; returns the parsed response of a server.

    If all tries fail, it raises a Failure. The caller must then send a smaller
    request or call `give_up`.

    Args:
      read: Function that parses the body of a response; raises Malformed.
      deadline: Time, by `clock`, at which the call ends.
      body: Body of the request, which may be sent several times.
      fields: Parameters of the request's query string.
      again: True for a part of a request that failed; it is tried only once.
      smaller: True if the caller can ask for less. A request that times out is
        then not tried again unchanged.

    Raises:
      Failure: The last try failed, all circuits are open, or the deadline has
        passed.
    """
    failure = Failure(
        'timeout', f'not asked within {self._policy.group}.deadline_secs='
        f'{self._policy.deadline_secs:g}', again=False)
    for attempt in range(1 if again else self._policy.tries):
      if attempt and not self._back_off(attempt, failure, deadline) or (
          self.clock() >= deadline):
        break
      server = self._pick_server()
      if server is None:
        if not attempt:
          failure = Failure('circuit_open', 'every server has failed '
                            f'{self._policy.failures} times in a row',
                            again=False)
        break
      self._counts.add(**{'retries' if attempt or again else 'tries': 1})
      try:
        return self._try(*server, http_request.Request(
            server[0].url, body, fields), read, deadline)
      except Failure as error:
        failure = error
      if not failure.again or smaller and failure.kind == 'timeout':
        break
    raise failure

  def give_up(self, failure: Failure) -> SearchError:
    """Records that a call has failed, and returns its failure as a SearchError.

    After this, `wait` waits until a server answers.
    """
    self._counts.add(failed_calls=1)
    self._failed = True
    return SearchError(failure.kind, failure.detail)

  def wait(self, probe: Callable[[], Any]) -> None:
    """Waits until a server answers, if a call has failed since the last wait.

    Args:
      probe: Function that makes a call and returns a SearchError if it fails.

    Raises:
      ConnectionError: No server has answered within `pause_secs` of waiting, or
        one answered that it does not accept the call, as with a wrong key.
    """
    if not self._failed:
      return
    start, pause, paused = self.clock(), 1.0, False
    while isinstance(error := self._probe(probe), SearchError):
      left = start + self._policy.pause_secs - self.clock()
      if error.kind == 'refused':  # a wrong address or key: waiting cannot help
        raise ConnectionError(
            f'the search must take a query, but refuses it ({error.detail}). '
            'Correct search.options and run the same command to go on from the '
            'last checkpoint.')
      if left <= 0:
        raise ConnectionError(
            f'the search at {self._hosts} must answer within search.options.'
            f'pause_secs={self._policy.pause_secs:g} s, but failed last with '
            f'{error.kind} ({error.detail}). {_REMEDIES[error.kind]} and run '
            'the same command to go on from the last checkpoint.')
      if not paused:
        self._warn(
            f'Warning: the search at {self._hosts} fails with {error.kind} '
            f'({error.detail}), so the run is paused, up to '
            f'{self._policy.pause_secs:g} s. {_REMEDIES[error.kind]}, and the '
            'run goes on. If the address is wrong, stop the run, correct '
            'search.options and add --allow_changes.')
        self._counts.add(pauses=1)
        paused = True
      self._sleep(min(pause, left))
      pause = min(2 * pause, 30.0)
    self._failed = False
    if paused:
      self._warn(f'The search answers again after {self.clock() - start:.0f} '
                 's; the run goes on.')

  def _probe(self, probe: Callable[[], Any]) -> Any:
    """Closes all open circuits, and returns the result of `probe()`.

    The next failure of a server whose circuit was open opens it again.
    """
    with self._lock:
      for server in self._servers:
        if server.open_until is not None:
          server.open_until = None
          server.failures = self._policy.failures - 1
    return probe()

  @property
  def _hosts(self) -> str:
    return ', '.join(http_request.Request(server.url).host
                     for server in self._servers)

  def pop(self) -> dict[str, float]:
    """Returns counts since the last `pop`, and the number of open circuits."""
    counts = self._counts.pop()
    with self._lock:
      counts['servers_out'] = sum(
          server.open_until is not None for server in self._servers)
    return {f'search/remote/{name}': counts[name] for name in (
        'tries', 'retries', 'failed_calls', 'pauses', 'servers_out')}

  def _back_off(self, attempt: int, failure: Failure, deadline: float) -> bool:
    """Waits before another try.

    Returns:
      True after waiting; False at once if the deadline would pass meanwhile.
    """
    pause = self._policy.backoff_secs * 2**(attempt - 1)
    pause = max(pause * random.uniform(0.5, 1.5), failure.after_secs)
    if self.clock() + pause >= deadline:
      return False
    self._sleep(pause)
    return True

  def _pick_server(self) -> tuple[_Server, int] | None:
    """Returns the least busy server, and the number of the new request.

    The result is None if each server has an open circuit that is not yet due
    for another try.
    """
    with self._lock:
      now = self.clock()
      able = [s for s in self._servers if s.open_until is None] or [
          s for s in self._servers if s.open_until and s.open_until <= now]
      if not able:
        return None
      server = min(able, key=lambda s: (s.busy, s.last))
      if server.open_until is not None:  # one call at a time tries this server
        server.open_until = now + self._policy.rest_secs
      self._requests += 1
      server.last, server.busy = self._requests, server.busy + 1
      return server, self._requests

  def _try(self, server: _Server, number: int, request: http_request.Request,
           read: Callable[[bytes], T], deadline: float) -> T:
    """Returns the parsed response to one request; updates the server's state.

    It raises a Failure if the request fails or `read` raises Malformed.
    """
    failed = True
    end = min(deadline, self.clock() + self._policy.try_secs)
    try:
      result = read(self._client.body(request, end))
      failed = False
      return result
    except Malformed as error:
      raise Failure('bad_response', f'{request.host}: {error}',
                    again=False) from None
    finally:
      with self._lock:
        server.settle(number, self._requests, failed=failed)
        if failed and server.failures >= self._policy.failures:
          server.open_until = self.clock() + self._policy.rest_secs


def posting_json(urls: Sequence[str], *, token_env: str, response_bytes: int,
                 wiring: Mapping[str, Any] | None, proxy: str = '',
                 group: str = 'search.options', **retries: Any) -> Transport:
  """Returns a Transport that sends JSON.

  Args:
    urls: Complete addresses of the servers. Each request goes to the server
      with the fewest requests in flight.
    token_env: Name of the environment variable whose value is sent as a bearer
      token; '': none is sent.
    response_bytes: Largest size of a response; a longer one is an error.
    wiring: Arguments `clock`, `sleep` and `warn` of `Transport`, which tests
      replace.
    proxy: Address of the proxy; '' for none.
    group: Group of the config that has these options, for errors.
    **retries: Fields of `RetryPolicy`.

  Raises:
    ValueError: An option is out of range, or the variable is not set.
    TypeError: An option of `retries` is not a field of `RetryPolicy`.
  """
  headers = {'Content-Type': 'application/json', 'User-Agent': 'searchrl'}
  if token_env:
    token = wire.secret(token_env, f'{group}.token_env')
    headers['Authorization'] = f'Bearer {token}'
  return Transport(
      urls, RetryPolicy(group=group, **retries), response_bytes=response_bytes,
      headers=headers, proxy=proxy, **(wiring or {}))


def _check_urls(urls: Sequence[str]) -> None:
  """Raises a ValueError if no address is given, or if one is not HTTP.

  An address with a user or password is an error, too.
  """
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
