# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""An address in, a thread a connection out: what our HTTP servers share.

The standard library's server, with a bound on connections, silence that ends,
bearer tokens, and refusals that arrive although a body was left unread.
"""

from __future__ import annotations

import hmac
import http.server
import re
import socket
import threading
from typing import Any


_REQUEST = re.compile(r'(\S+) (\S+) (HTTP/(\d+)\.\d+)')
_LINE_BYTES = 65_536  # of a header
_HEADERS = 100  # of a request


class Listener(http.server.ThreadingHTTPServer):
  """Listens once it is made; connections above a number are closed at once.

  Args:
    host, port: port 0 takes a free one.
    handler: of a connection; a `Handler`.
    owner: what handlers ask; has `options`.
    connections: at a time.

  Raises:
    OSError: the address is taken, or not of this machine.
  """

  request_queue_size = 1024
  daemon_threads = True
  block_on_close = False

  def __init__(self, host: str, port: int, handler: type[Handler], *,
               owner: Any, connections: int):
    if ':' in host:
      self.address_family = socket.AF_INET6
    self.owner = owner
    self._room = threading.Semaphore(connections)
    super().__init__((host, port), handler)
    shown = f'[{host}]' if ':' in host else host
    self.url = f'http://{shown}:{self.server_address[1]}'

  def server_bind(self):
    # Without the look-up of the host's name that http.server makes.
    self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    self.socket.bind(self.server_address)
    self.server_address = self.socket.getsockname()
    self.server_name, self.server_port = self.server_address[:2]

  def process_request(self, request, client_address):
    if not self._room.acquire(blocking=False):
      self.turned_away()
      self.shutdown_request(request)
      return
    super().process_request(request, client_address)

  def process_request_thread(self, request, client_address):
    try:
      super().process_request_thread(request, client_address)
    finally:
      self._room.release()

  def turned_away(self) -> None:
    """A connection too many was closed."""

  def handle_error(self, request, client_address):
    del request, client_address  # clients that hung up; the rest is answered


class Handler(http.server.BaseHTTPRequestHandler):
  """One connection.

  The owner's options have `idle_secs`, `token` and `limits.body_bytes`.
  """

  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True

  def setup(self):
    self.timeout = self.server.owner.options.idle_secs
    super().setup()

  def parse_request(self) -> bool:
    """Reads the request line and the headers; refuses what are none.

    As http.server does, without its parser of mail: that costs more than all
    the rest of a small request.
    """
    self.command, self.close_connection = None, True
    self.requestline = str(self.raw_requestline, 'latin-1').strip('\r\n')
    found = _REQUEST.fullmatch(self.requestline)
    status = 400 if found is None else 0 if found[4] == '1' else 505
    if not status:
      self.command, self.path, self.request_version, _ = found.groups()
      status, self.headers = self._read_headers()
    if status:
      self.send_error(status)
      return False
    kept = self.headers.get('Connection', '').lower()
    self.close_connection = kept == 'close' or (
        self.request_version == 'HTTP/1.0' and kept != 'keep-alive')
    waits = self.headers.get('Expect', '').lower() == '100-continue'
    return not waits or self.handle_expect_100()

  def _read_headers(self) -> tuple[int, Headers]:
    """A status if they are none, else 0, and the headers."""
    headers = Headers()
    for _ in range(_HEADERS + 1):
      line = self.rfile.readline(_LINE_BYTES + 1)
      if line in (b'\r\n', b'\n'):
        return 0, headers
      if len(line) > _LINE_BYTES:
        return 431, headers
      name, colon, value = str(line, 'latin-1').partition(':')
      name, value = name.lower(), value.strip()
      if not colon or not name or name.split() != [name] or (
          headers.setdefault(name, value) != value and
          name == 'content-length'):
        return 400, headers
    return 431, headers

  def version_string(self):
    return 'searchrl'

  def log_message(self, *args):
    del args

  def send_error(self, code, message=None, explain=None):
    """What http.server itself refuses: lines that are no HTTP."""
    del message, explain
    self.request_version = self.protocol_version  # else no status is sent
    self.close_connection = True
    self.no_http(code)

  def no_http(self, status: int) -> None:
    """Answers what was no request; without a body unless told otherwise."""
    self.head(status, {'Content-Length': '0'})

  def is_allowed(self) -> bool:
    """Whether the request bears the token, if one is asked for."""
    token = self.server.owner.options.token
    given = self.headers.get('Authorization', '').encode('latin-1', 'replace')
    return not token or hmac.compare_digest(given, f'Bearer {token}'.encode())

  def discard(self) -> None:
    """Reads some of what is left: a socket closed over it loses the answer."""
    self.connection.shutdown(socket.SHUT_WR)
    self.connection.settimeout(1.0)
    left = 4 * self.server.owner.options.limits.body_bytes
    while left > 0 and (piece := self.rfile.read1(2**16)):
      left -= len(piece)

  def head(self, status: int, headers: dict[str, str]) -> None:
    """The status line and the headers."""
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if self.close_connection:
      self.send_header('Connection', 'close')
    self.end_headers()


class Headers(dict):
  """Values by names in lower case; the first of a name's is kept."""

  def get(self, name: str, default: str | None = None) -> str | None:
    return super().get(name.lower(), default)
