# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP request that returns a good body or a typed failure in time.

The requests of all threads run on one event loop, in a thread of its own. A
request ends at its deadline, whether an address lookup, a handshake or a slow
body delays it. Its connection is then closed. Messages name only hosts and
kinds of errors, because an address or an error's text may contain a key.
"""

import asyncio
from collections.abc import Callable, Mapping
import dataclasses
import functools
import threading
import urllib.parse
import urllib.request
import weakref

import aiohttp

_SLOW = (408, 504)  # statuses: the request, or its results, came too late
_LARGE = (*_SLOW, 413, 429)  # a smaller request may succeed, as for status 500+


class Failure(Exception):
  """A failed request. It says whether a retry or a smaller one may succeed."""

  def __init__(self, kind: str, detail: str, *, again: bool,
               smaller: bool = False, after_secs: float = 0.0):
    super().__init__(detail)
    self.kind, self.detail = kind, detail  # fields of the SearchError
    self.again = again  # whether another try may succeed
    self.smaller = smaller  # whether a request that asks for less may succeed
    self.after_secs = after_secs  # seconds to wait, as the server asks


@dataclasses.dataclass(frozen=True)
class Request:
  """The address and content of a POST or, without a body, of a GET request."""

  url: str
  body: bytes | None = None
  fields: Mapping[str, str] | None = None  # parameters of the query string

  @property
  def host(self) -> str:
    """Host and port of the URL."""
    return urllib.parse.urlsplit(self.url).netloc


class Client:
  """A client that sends requests and reuses their connections.

  Args:
    response_bytes: Largest size of a response; a longer one is an error.
    headers: Headers of every request.
    clock: Monotonic clock, in seconds.
    proxy: Address of the proxy; '' for none.
  """

  def __init__(self, *, response_bytes: int, headers: Mapping[str, str],
               clock: Callable[[], float], proxy: str = ''):
    self._response_bytes, self._clock = response_bytes, clock
    self._proxy = proxy or None
    self._loop = _loop()
    self._session = asyncio.run_coroutine_threadsafe(
        _session(headers), self._loop).result()
    weakref.finalize(self, _close, self._session, self._loop)

  def body(self, request: Request, end: float) -> bytes:
    """Returns the body of a response with status 200.

    Args:
      request: Request that changes nothing, since it may be repeated.
      end: Time, by the clock, at which the request is given up.

    Raises:
      Failure: No response with status 200 came in time, or its body is longer
        than `response_bytes`.
    """
    return asyncio.run_coroutine_threadsafe(
        self._body(request, end), self._loop).result()

  async def _body(self, request: Request, end: float) -> bytes:
    host = request.host
    try:
      async with asyncio.timeout(max(end - self._clock(), 1e-3)):
        async with self._session.request(
            'GET' if request.body is None else 'POST', request.url,
            data=request.body, params=request.fields, allow_redirects=False,
            proxy=self._proxy
        ) as response:
          _check_status(host, response)
          return await self._read(host, response)
    except TimeoutError:
      raise Failure('timeout', f'{host}: no whole answer in time', again=True,
                    smaller=True) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
      raise Failure('unavailable', f'{host}: {type(error).__name__}',
                    again=True) from None

  async def _read(self, host: str, response: aiohttp.ClientResponse) -> bytes:
    """Returns the body; raises a Failure if it is too long."""
    body = bytearray()
    async for piece in response.content.iter_any():
      body += piece
      if len(body) > self._response_bytes:
        raise Failure(
            'bad_response', f'{host}: more than {self._response_bytes} bytes',
            again=False, smaller=True)
    return bytes(body)


def environment_proxy(url: str) -> str:
  """Returns the address of the proxy that the environment names for a URL.

  It is in HTTPS_PROXY, HTTP_PROXY or ALL_PROXY. The result is '' if there is no
  proxy, or NO_PROXY has the host.
  """
  parts = urllib.parse.urlsplit(url)
  if urllib.request.proxy_bypass(parts.netloc.rpartition('@')[2]):
    return ''
  proxies = urllib.request.getproxies()
  proxy = proxies.get(parts.scheme) or proxies.get('all', '')
  return f'http://{proxy}' if proxy and '://' not in proxy else proxy


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  loop = asyncio.new_event_loop()
  threading.Thread(
      target=loop.run_forever, daemon=True, name='http-requests').start()
  return loop


async def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
  return aiohttp.ClientSession(
      headers={'Accept-Encoding': 'identity', **headers},
      timeout=aiohttp.ClientTimeout(),  # none besides the request's deadline
      connector=aiohttp.TCPConnector(limit=0), auto_decompress=False,
      cookie_jar=aiohttp.DummyCookieJar(), middlewares=[_send_once])


async def _send_once(request: aiohttp.ClientRequest,
                     handler: aiohttp.ClientHandlerType
                     ) -> aiohttp.ClientResponse:
  """Hides a broken connection from aiohttp, which would send a GET again."""
  try:
    return await handler(request)
  except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
    raise ConnectionError(str(error)) from error


def _close(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop
          ) -> None:
  closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
  if threading.current_thread() is threading.main_thread():
    closing.result(5)  # the program may end now


def _check_status(host: str, response: aiohttp.ClientResponse) -> None:
  """Raises a Failure unless the status is 200."""
  status = response.status
  if status == 200:
    return
  pause = response.headers.get('Retry-After', '')
  failed = functools.partial(
      Failure, detail=f'{host}: status {status}' + (
          ', which asks for fewer passages (top_k, depth or candidates) or '
          'queries') * (status == 413),
      smaller=status in _LARGE or status >= 500,
      after_secs=float(pause) if pause.isdecimal() else 0.0)
  if status in _SLOW:
    raise failed('timeout', again=True)
  if status == 429 or status >= 500:
    raise failed('unavailable', again=True)
  raise failed('refused', again=False)  # also for a redirect
