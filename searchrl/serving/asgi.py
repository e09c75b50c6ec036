# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ASGI applications on uvicorn, in a thread; shared by all our servers.

uvicorn handles HTTP itself. This module limits the size of a request's body,
the time until it has arrived and the number of requests under way. It checks a
token, and it answers all requests before it stops.
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

HUNG_UP = 499  # nginx's status for a request whose client disconnected
_BACKLOG = 2048  # connections that wait to be accepted
_FILES = 2**16  # open files to ask the system for; one per connection
_LENGTHS = {b'content-length', b'transfer-encoding'}
_LINGER_SECS, _LINGER_BYTES = 1.0, 2**24  # for a refused body


@dataclasses.dataclass(frozen=True)
class HttpOptions:
  """Options of the address at which a server listens.

  Attributes:
    host: Address to listen at. Others can connect unless it is loopback.
    port: Port to listen at. 0: any free port.
    token: Bearer token that a request must have. '': none is needed.
    deadline_secs: Time within which a request is answered once its body has
      arrived, waiting included. After that it gets 504.
    idle_secs: Time after which an idle connection is closed. A body that has
      not arrived by then, or by the deadline, gets 408.
    connections: Number of connections that may have a request under way. One
      more gets 503. Idle connections do not count.
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
  """Raises a ValueError unless numbers are positive, or 0 if in `zero`."""
  for name, value in fields.items():
    if not isinstance(value, int | float):
      continue
    if not (value >= 0 if name in zero else value > 0):
      rule = 'at least 0' if name in zero else 'above 0'
      raise ValueError(f'serve.{name} must be {rule}, but is {value}.')


def take_options(serve: Mapping[str, Any]
                 ) -> tuple[HttpOptions, dict[str, Any]]:
  """Returns the options of the address, and the remaining options.

  `token_env` names the environment variable that holds the token.
  """
  rest = dict(serve)
  names = [field.name for field in dataclasses.fields(HttpOptions)]
  fields = {name: rest.pop(name) for name in names if name in rest}
  variable = rest.pop('token_env')
  if variable:
    fields['token'] = wire.secret(variable, 'serve.token_env')
  return HttpOptions(**fields), rest


class Refused(Exception):
  """Exception: a request is refused, in any of the servers.

  Attributes:
    status: HTTP status.
    is_unread: Whether some of the body may still arrive.
  """

  def __init__(self, status: int, why: str, *, is_unread: bool = True):
    super().__init__(why)
    self.status, self.is_unread = status, is_unread


class HttpServer:
  """An application at an address, at which it listens once it is made.

  Args:
    app: Application that answers requests.
    options: Options of the address.

  Raises:
    ValueError: The address is taken, or does not belong to this machine.
  """

  def __init__(self, app: ASGIApp, options: HttpOptions):
    self._app, self._options = app, options
    self._requests = 0  # requests under way
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
    self._thread = threading.Thread(  # in the main one uvicorn handles signals
        target=self._uvicorn.run, kwargs={'sockets': [self._socket]},
        name='http', daemon=True)

  def start(self) -> None:
    """Starts to answer; raises the limit of open files as far as allowed."""
    _allow_files()
    self._thread.start()
    while not self._uvicorn.started:
      if not self._thread.is_alive():
        raise RuntimeError(f'the server at {self.url} did not start.')
      time.sleep(0.001)

  def stop(self) -> None:
    """Accepts no more requests, answers those under way, and closes."""
    self._uvicorn.should_exit = True
    if self._thread.ident is not None:
      self._thread.join()
    self._socket.close()

  async def body(self, request: Request, most: int) -> bytes:
    """Returns the body of a request that may be answered.

    Args:
      request: Request of a client.
      most: Largest number of bytes.

    Raises:
      Refused: The token is missing (401), too many requests are under way
        (503), the body is too large (413), or it did not arrive in time (408).
      ClientDisconnect: The client disconnected.
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
    # h11 accepts both headers, and a proxy in front of it may use the other
    # one. The two would then read the rest differently (RFC 9112, 6.1).
    is_ambiguous = _LENGTHS <= {name for name, _ in scope['headers']}
    app = _AMBIGUOUS if is_ambiguous else self._app
    try:
      await app(scope, receive, send)
    finally:
      self._requests -= 1


def application(routes: Sequence[Route], *, no_page: Handler, fault: Handler
               ) -> Starlette:
  """Makes an application of routes, with our own error responses.

  Args:
    routes: Routes with their handlers.
    no_page: Handler of requests that match no route.
    fault: Handler of requests whose route raised an exception.
  """
  app = Starlette(routes=routes, exception_handlers={
      HTTPException: no_page, Exception: fault})
  app.router.redirect_slashes = False
  return app


class Closing(Response):
  """A response that ends the connection, for a request with an unread body.

  The rest of the body is read for a moment, because a client that still sends
  when the connection is closed would lose the answer.
  """

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the response, and reads what is left of the body."""
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
  """Returns whether the request has the token, or none is needed."""
  scheme, _, given = request.headers.get('authorization', '').partition(' ')
  is_given = hmac.compare_digest(
      given.strip().encode('latin-1', 'replace'), token.encode())
  return not token or (scheme.lower() == 'bearer' and is_given)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
  """Returns the result of `work`, unless the client disconnects first.

  Raises:
    ClientDisconnect: The client disconnected. `work` is cancelled.
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
  """Serves until SIGINT or SIGTERM, then answers the requests under way.

  A second Ctrl-C does not wait for the answers.

  Args:
    server: Server with `start` and `stop`.
    what: Text that says what is served, and where.
    options: Options of the address.
    is_open: Function that returns False to end the server, too.

  Raises:
    KeyboardInterrupt: Ctrl-C was pressed a second time.
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
  """Prints a line on stderr."""
  print(text, file=sys.stderr, flush=True)


async def _read(receive: Receive, most: int, *, keep: bool = True) -> bytes:
  """Reads a body. Without `keep`, drops it and returns b''."""
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
  """Waits until the client has disconnected."""
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
