# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ASGI applications on uvicorn, in a thread: what our servers share.

HTTP itself is uvicorn's. Ours is what a request may cost: the bytes of its
body, the time until it is there, the requests under way; a token; and a stop
that answers first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
import contextlib
import dataclasses
import hmac
import math
import resource
import socket
import sys
import threading
import time
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
import uvicorn

from searchrl.runtime import signals
from searchrl.search.remote import wire

T = TypeVar('T')
Handler = Callable[[Request, Any], Awaitable[Response]]

HUNG_UP = 499  # nginx's status of a request whose client went away
_BACKLOG = 2048  # connections that wait to be accepted
_FILES = 2**16  # a connection each; no more are asked of the system
_LENGTHS = {b'content-length', b'transfer-encoding'}
_LINGER_SECS, _LINGER_BYTES = 1.0, 2**24  # of a body that is refused


@dataclasses.dataclass(frozen=True)
class HttpOptions:
  """How an address is served.

  Attributes:
    host: the address to listen at; anything but loopback opens it to others.
    port: 0 takes a free one.
    token: a request must bear it; '': none.
    deadline_secs: of a request whose body is there, its waiting included; then
      it gets 504.
    idle_secs: after which a connection that was answered and asks nothing more
      is closed. A body that is not there by then, or by the deadline, gets 408.
    connections: that may have a request under way; one more gets 503. Idle
      connections do not count.
  """

  host: str = '127.0.0.1'
  port: int = 8000
  token: str = dataclasses.field(default='', repr=False)
  deadline_secs: float = 30.0
  idle_secs: float = 60.0
  connections: int = 1024

  def __post_init__(self):
    check_positive(dataclasses.asdict(self), zero=('port',))
    if self.port > 65535:
      raise ValueError(f'serve.port must be at most 65535, but is {self.port}.')


def check_positive(fields: Mapping[str, Any], zero: tuple[str, ...] = ()
                   ) -> None:
  """Raises a ValueError unless numbers are above 0, or 0 where they may be."""
  for name, value in fields.items():
    if not isinstance(value, int | float):
      continue
    if not (value >= 0 if name in zero else value > 0):
      rule = 'at least 0' if name in zero else 'above 0'
      raise ValueError(f'serve.{name} must be {rule}, but is {value}.')


def take_options(serve: Mapping[str, Any]
                 ) -> tuple[HttpOptions, dict[str, Any]]:
  """The options of the address, and those that remain.

  `token_env` names the variable of the environment that holds the token.
  """
  rest = dict(serve)
  names = [field.name for field in dataclasses.fields(HttpOptions)]
  fields = {name: rest.pop(name) for name in names if name in rest}
  variable = rest.pop('token_env')
  if variable:
    fields['token'] = wire.secret(variable, 'serve.token_env')
  return HttpOptions(**fields), rest


class Refused(Exception):
  """A request that is not carried out, whoever it is for.

  Attributes:
    status: of HTTP.
    is_unread: whether some of the body may still come.
  """

  def __init__(self, status: int, why: str, *, is_unread: bool = True):
    super().__init__(why)
    self.status, self.is_unread = status, is_unread


class HttpServer:
  """An application at an address; listens once it is made.

  Args:
    app: answers requests.
    options: see there.

  Raises:
    ValueError: the address is taken, or is not of this machine.
  """

  def __init__(self, app: ASGIApp, options: HttpOptions):
    self._app, self._options = app, options
    self._requests = 0  # under way
    self._socket = _listen(options.host, options.port)
    host = f'[{options.host}]' if ':' in options.host else options.host
    self.url = f'http://{host}:{self._socket.getsockname()[1]}'
    self._uvicorn = uvicorn.Server(uvicorn.Config(
        self._count, interface='asgi3', http='auto', ws='none', lifespan='off',
        log_config=None, log_level='critical', access_log=False,
        proxy_headers=False, server_header=False,
        headers=[('server', 'searchrl')], backlog=_BACKLOG,
        timeout_keep_alive=options.idle_secs,
        timeout_graceful_shutdown=math.ceil(options.deadline_secs) + 1))
    self._thread = threading.Thread(  # uvicorn minds signals in the main one
        target=self._uvicorn.run, kwargs={'sockets': [self._socket]},
        name='http', daemon=True)

  def start(self) -> None:
    """Answers; raises the process's limit of open files, as far as it may."""
    _allow_files()
    self._thread.start()
    while not self._uvicorn.started:
      if not self._thread.is_alive():
        raise RuntimeError(f'the server at {self.url} did not start.')
      time.sleep(0.001)

  def stop(self) -> None:
    """Takes no more requests, answers those under way, and closes."""
    self._uvicorn.should_exit = True
    if self._thread.ident is not None:
      self._thread.join()
    self._socket.close()

  async def body(self, request: Request, most: int) -> bytes:
    """What was posted, if it may be answered.

    Args:
      request: of a client.
      most: bytes.

    Raises:
      Refused: there is no token (401), too many requests are under way (503),
        more bytes are announced or come (413), or not all in time (408).
      ClientDisconnect: the client hung up.
    """
    options = self._options
    if not is_allowed(request, options.token):
      raise Refused(401, 'a bearer token is needed')
    if self._requests > options.connections:
      raise Refused(503, 'too many requests are under way')
    announced = request.headers.get('content-length', '').lstrip('0')
    if len(announced) > 18 or int(announced or 0) > most:
      raise Refused(413, f'at most {most} bytes')
    try:
      async with asyncio.timeout(min(options.idle_secs, options.deadline_secs)):
        return await _read(request.receive, most)
    except TimeoutError:
      raise Refused(408, 'the body came too late') from None

  async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
    self._requests += 1
    # h11 takes both, and a proxy before it the other one: two readings of what
    # follows (RFC 9112, 6.1).
    is_ambiguous = _LENGTHS <= {name for name, _ in scope['headers']}
    app = _AMBIGUOUS if is_ambiguous else self._app
    try:
      await app(scope, receive, send)
    finally:
      self._requests -= 1


def application(routes: Sequence[Route], *, no_page: Handler, fault: Handler
               ) -> Starlette:
  """Routes as an application, whose other answers are ours, too.

  Args:
    routes: and what they mean.
    no_page: answers what no route takes.
    fault: answers where a route raised.
  """
  app = Starlette(routes=routes, exception_handlers={
      HTTPException: no_page, Exception: fault})
  app.router.redirect_slashes = False
  return app


class Closing(Response):
  """A response to a request whose body is not wanted; ends the connection.

  What is left of the body is read for a moment: a client that still sends when
  the connection is closed would lose the answer.
  """

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    self.headers['connection'] = 'close'
    await send({'type': 'http.response.start', 'status': self.status_code,
                'headers': self.raw_headers})
    await send({'type': 'http.response.body', 'body': self.body,
                'more_body': True})
    with contextlib.suppress(TimeoutError, ClientDisconnect, Refused):
      async with asyncio.timeout(_LINGER_SECS):
        await _read(receive, _LINGER_BYTES, keep=False)
    await send({'type': 'http.response.body', 'body': b''})


_AMBIGUOUS = Closing('a body must have one length', 400)


def is_allowed(request: Request, token: str) -> bool:
  """Whether the request bears the token, if one is asked for."""
  scheme, _, given = request.headers.get('authorization', '').partition(' ')
  is_given = hmac.compare_digest(
      given.strip().encode('latin-1', 'replace'), token.encode())
  return not token or (scheme.lower() == 'bearer' and is_given)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
  """What `work` returns.

  Raises:
    ClientDisconnect: the client hung up before; `work` is cancelled.
  """
  task = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_hang_up(request.receive))
  try:
    await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise ClientDisconnect
    return task.result()
  finally:
    gone.cancel()
    task.cancel()


def serve(server: Any, what: str, options: HttpOptions, *,
          is_open: Callable[[], bool] = lambda: True) -> None:
  """Serves until SIGINT or SIGTERM, then answers what was asked.

  A second Ctrl-C does not wait for the answers.

  Args:
    server: has `start` and `stop`.
    what: is served, and where.
    options: of the address.
    is_open: False ends it, too.

  Raises:
    KeyboardInterrupt: at the second Ctrl-C.
  """
  with signals.StopRequest() as stop:
    server.start()
    say(f'Serving {what}; Ctrl-C ends it.')
    if not options.token and not _is_loopback(options.host):
      say(f'Warning: whoever reaches {options.host} may ask. Name a variable '
          'in serve.token_env that holds a token.')
    while is_open() and not stop.wait(0.5):
      pass
    say('Stopping; what was asked is answered first.')
    server.stop()


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


async def _read(receive: Receive, most: int, *, keep: bool = True) -> bytes:
  """A body as it comes."""
  pieces, size, is_unread = [], 0, True
  while is_unread:
    message = await receive()
    if message['type'] == 'http.disconnect':
      raise ClientDisconnect
    is_unread = message.get('more_body', False)
    piece = message.get('body', b'')
    size += len(piece)
    if size > most:
      raise Refused(413, f'at most {most} bytes', is_unread=is_unread)
    if keep:
      pieces.append(piece)
  return b''.join(pieces)


async def _hang_up(receive: Receive) -> None:
  """Returns when the client has hung up."""
  while (await receive())['type'] != 'http.disconnect':
    pass


def _listen(host: str, port: int) -> socket.socket:
  listener = socket.socket(  # asyncio disables Nagle's delay for TCP by name
      socket.AF_INET6 if ':' in host else socket.AF_INET, socket.SOCK_STREAM,
      socket.IPPROTO_TCP)
  try:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(_BACKLOG)
  except OSError as error:
    listener.close()
    raise ValueError(
        f'serve.host and serve.port must be free, but {host}, port {port}, '
        f'cannot be had: {error.strerror}. Choose another port, or end what '
        'listens there.') from error
  return listener


def _allow_files() -> None:
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
  if soft != resource.RLIM_INFINITY and soft < most:
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_loopback(host: str) -> bool:
  return host in ('localhost', '::1') or host.startswith('127.')
