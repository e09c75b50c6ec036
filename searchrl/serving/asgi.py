# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ASGI applications on uvicorn, in a thread; shared by all our servers.

uvicorn handles HTTP itself. This module limits the size of a request's body,
the time until it has arrived and the number of requests under way. It checks a
token, and it answers all requests before it stops.
"""

import asyncio
from collections.abc import (AsyncIterator, Callable, Coroutine, Mapping,
                             Sequence)
import contextlib
import dataclasses
import errno
import hmac
import json
import math
import resource
import socket
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

from searchrl.runtime import option_rules
from searchrl.runtime import processes
from searchrl.runtime import signals
from searchrl.search.remote import wire

T = TypeVar('T')

NO_TOKEN = 'a bearer token is needed'
HUNG_UP = 499  # nginx's status for a request whose client disconnected
_BACKLOG = 2048  # connections that wait to be accepted
_LOOPBACK = ('127.', 'localhost', '::1')
_LENGTHS = {b'content-length', b'transfer-encoding'}
_LINGER_SECS, _LINGER_BYTES = 1.0, 2**24  # for a refused body


@dataclasses.dataclass(frozen=True)
class HttpOptions:
  """Options of the address at which a server listens.

  A request whose body has arrived is answered within `deadline_secs`, or gets
  status 504. An idle connection is closed after `idle_secs`. A body that has
  not arrived after the shorter of the two times gets 408.
  """

  host: str = '127.0.0.1'  # other machines can connect unless it is loopback
  port: int = 8000  # 0: any free port
  token: str = dataclasses.field(default='', repr=False)  # '': none is needed
  deadline_secs: float = 30.0
  idle_secs: float = 60.0
  connections: int = 1024  # most requests in progress; one more gets 503

  def __post_init__(self):
    check_positive(self, zero=('port',))
    if self.port > 65535:
      raise ValueError(f'serve.port must be at most 65535, but is {self.port}.')


def check_positive(options: Any, prefix: str = '', zero: Sequence[str] = ()
                   ) -> None:
  """Raises a ValueError unless all numbers in a dataclass are positive.

  Fields in `zero` may be 0. The message names a field as serve.<prefix><name>.
  """
  option_rules.check(f'serve.{prefix}', *(
      (name, value, value >= 0, 'at least 0') if name in zero else
      (name, value, value > 0, 'above 0')
      for name, value in vars(options).items()
      if isinstance(value, int | float)))


def take_options(serve: Mapping[str, Any]
                 ) -> tuple[HttpOptions, dict[str, Any]]:
  """Splits a server's config into HttpOptions and a dict of all other options.

  The option `token_env` names the environment variable that holds the bearer
  token; '': no token is needed.

  Raises:
    ValueError: The variable is not set, or an option is out of range.
  """
  rest = dict(serve)
  names = [field.name for field in dataclasses.fields(HttpOptions)]
  fields = {name: rest.pop(name) for name in names if name in rest}
  variable = rest.pop('token_env')
  if variable:
    fields['token'] = wire.secret(variable, 'serve.token_env')
  return HttpOptions(**fields), rest


class Refused(Exception):
  """Exception of a handler that refuses a request; `why` is the message.

  Attributes:
    status: HTTP status.
    is_unread: True if a part of the body may still arrive.
    headers: Further headers of the response.
  """

  def __init__(self, status: int, why: str, *, is_unread: bool = False,
               headers: Mapping[str, str] | None = None):
    super().__init__(why)
    self.status, self.is_unread, self.headers = status, is_unread, headers


class HttpServer:
  """A server of an application, which listens at its address once it is made.

  Attributes:
    url: URL of the server, without a path.

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
        timeout_keep_alive=options.idle_secs,  # type: ignore[arg-type]
        timeout_graceful_shutdown=math.ceil(options.deadline_secs) + 1))
    self._thread = threading.Thread(  # in the main one uvicorn handles signals
        target=self._uvicorn.run, kwargs={'sockets': [self._socket]},
        name='http', daemon=True)

  def start(self) -> None:
    """Starts to answer, and lets the process open as many files as it may.

    Raises:
      RuntimeError: The thread that answers has ended.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    self._thread.start()
    while not self._uvicorn.started:
      if not self._thread.is_alive():
        raise RuntimeError(
            f'the server must start at {self.url}, but its thread ended. Take '
            'another port, and look at what was printed before.')
      time.sleep(0.001)

  def stop(self) -> None:
    """Accepts no more requests, answers the present ones, and closes."""
    self._uvicorn.should_exit = True
    if self._thread.ident is not None:
      self._thread.join()
    self._socket.close()

  async def body(self, request: Request, max_bytes: int) -> bytes:
    """Returns the body of a request, if it has at most `max_bytes` bytes.

    Raises:
      Refused: The token is missing (401), too many requests are open (503), the
        body is too large (413), or it did not arrive in time (408).
      ClientDisconnect: The client disconnected.
    """
    options = self._options
    if not is_allowed(request, options.token):
      raise Refused(401, NO_TOKEN, is_unread=True)
    if self._requests > options.connections:
      raise Refused(503, 'too many requests are under way', is_unread=True)
    announced = request.headers.get('content-length', '').lstrip('0')
    if len(announced) > 18 or int(announced or 0) > max_bytes:
      raise Refused(413, f'at most {max_bytes} bytes', is_unread=True)
    try:
      async with asyncio.timeout(min(options.idle_secs, options.deadline_secs)):
        return b''.join(
            [piece async for piece in _pieces(request.receive, max_bytes)])
    except TimeoutError:
      raise Refused(408, 'the body came too late', is_unread=True) from None

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


def application(routes: Sequence[Route], *,
                write: Callable[[Request, Refused], str],
                warn: Callable[[str], None], token: str = '') -> Starlette:
  """Returns an application; its handlers refuse a request by raising `Refused`.

  Args:
    routes: Routes with their handlers.
    write: Function that returns the JSON body of a refusal.
    warn: Function that receives the reasons of faults, which clients do not
      see.
    token: Bearer token. A GET of a missing page without it gets 401, not 404.
      '': no token is needed.
  """
  posts = ' or '.join(
      route.path for route in routes if 'POST' in (route.methods or ()))

  async def refuse(request: Request, error: Any) -> Response:
    headers = {'retry-after': '1'} if error.status == 429 else error.headers
    kind = Closing if error.is_unread else Response
    return kind(write(request, error), error.status, headers,
                'application/json')

  async def no_page(request: Request, error: Any) -> Response:
    refusal = Refused(error.status_code, 'no such page', headers=error.headers)
    if request.method == 'POST':
      refusal = Refused(404, f'no such page; POST to {posts}', is_unread=True)
    elif not is_allowed(request, token):
      refusal = Refused(401, NO_TOKEN)
    return await refuse(request, refusal)

  async def disconnected(request: Request, error: Exception) -> Response:
    del error
    return await refuse(request, Refused(HUNG_UP, 'the client disconnected'))

  async def fault(request: Request, error: Exception) -> Response:
    warn(f'Warning: a request failed: {type(error).__name__}: {error}')
    return await refuse(request, Refused(500, 'this request failed'))

  app = Starlette(routes=routes, exception_handlers={
      Refused: refuse, HTTPException: no_page, ClientDisconnect: disconnected,
      Exception: fault})
  app.router.redirect_slashes = False
  return app


def json_response(record: Any, status: int = 200) -> Response:
  """Returns a response with a record in JSON."""
  return Response(json.dumps(record).encode(), status,
                  media_type='application/json')


class Closing(Response):
  """A response that ends the connection, for a request with an unread body.

  The rest of the body is read for a moment. Otherwise a client that still sends
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
        async for _ in _pieces(receive, _LINGER_BYTES):
          pass
    await send({'type': 'http.response.body', 'body': b''})


_AMBIGUOUS = Closing('a body must have one length', 400)


def is_allowed(request: Request, token: str) -> bool:
  """Returns whether the request has the token, or no token is needed."""
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
  gone = asyncio.ensure_future(_until_disconnected(request.receive))
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
  """Serves until SIGINT or SIGTERM, then answers the present requests.

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
    processes.say(f'Serving {what}; Ctrl-C ends it.')
    if not options.token and not options.host.startswith(_LOOPBACK):
      processes.say(
          f'Warning: anyone who can reach {options.host} can send requests. '
          'Set serve.token_env to the name of a variable that holds a token.')
    while is_open() and not stop.wait(0.5):
      pass
    processes.say('Stopping; requests under way are answered first.')
    server.stop()


async def _pieces(receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
  """Yields the pieces of a body of at most `max_bytes` bytes.

  Raises:
    Refused: The body is larger (413).
    ClientDisconnect: The client disconnected.
  """
  size, is_unread = 0, True
  while is_unread:
    message = await receive()
    if message['type'] == 'http.disconnect':
      raise ClientDisconnect
    is_unread = message.get('more_body', False)
    piece = message.get('body', b'')
    size += len(piece)
    if size > max_bytes:
      raise Refused(413, f'at most {max_bytes} bytes', is_unread=is_unread)
    yield piece


async def _until_disconnected(receive: Receive) -> None:
  while (await receive())['type'] != 'http.disconnect':
    pass


def _listen(host: str, port: int) -> socket.socket:
  is_ipv6 = ':' in host
  try:
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
  except OSError as error:
    is_unknown = (error.errno or 0) < 0  # an error of getaddrinfo
    if is_unknown or error.errno == errno.EADDRNOTAVAIL:
      raise ValueError(
          'serve.host must be a name or address of this machine, but is '
          f'{host!r}: {error.strerror}. Use 127.0.0.1, or 0.0.0.0 for all its '
          'networks.') from error
    raise ValueError(
        f'serve.host and serve.port must be free, but: {error.strerror}. '
        'Choose another port, or end the process that uses this one.'
    ) from error
  # Connections inherit it; asyncio does not set it for such a socket.
  listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return listener
