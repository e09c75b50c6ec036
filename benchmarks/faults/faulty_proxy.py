# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A proxy before a search server that shows its faults: mixed, slow, or out."""

from __future__ import annotations

import contextlib
import http.server
import random
import threading
import time
import urllib.request

KINDS = ('500', '429', 'drop', 'cut', 'garbage', 'slow')


class Proxy:
  """Hands POSTs on to a server, but spoils a share of them. It is a context.

  Args:
    upstream: Address to which requests are handed on.
    share: Share of requests that are spoiled, each in one way of KINDS.
    slow_secs: Seconds that every request waits, and a 'slow' one once more.
    out: First and last second, since the first request, between which
      connections are dropped.
    seed: Seed of the choice which requests are spoiled.
  """

  def __init__(self, upstream: str, *, share: float = 0.0,
               slow_secs: float = 0.0, out: tuple[float, float] = (0, 0),
               seed: int = 0):
    self._upstream, self._share, self._slow_secs = upstream, share, slow_secs
    self._out, self._random = out, random.Random(seed)
    self._lock, self._began = threading.Lock(), None
    self.requests = self.spoiled = 0
    proxy = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def log_message(self, *_):
        """Says nothing."""

      def do_POST(self):  # pylint: disable=invalid-name
        with contextlib.suppress(OSError):  # the client hung up
          proxy.answer(self)

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._server.handle_error = lambda *_: None
    self.url = f'http://127.0.0.1:{self._server.server_port}/retrieve'
    self._thread = threading.Thread(
        target=self._server.serve_forever, args=(0.05,), daemon=True)

  def __enter__(self) -> Proxy:
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._server.shutdown()
    self._server.server_close()

  def answer(self, handler) -> None:
    """Answers one request."""
    body = handler.rfile.read(int(handler.headers['content-length']))
    kind = self._kind()
    time.sleep(self._slow_secs + (3.0 if kind == 'slow' else 0.0))
    if kind == 'drop':
      handler.close_connection = True
      return
    if kind in ('500', '429'):
      self._send(handler, int(kind), b'{}')
      return
    found = urllib.request.urlopen(urllib.request.Request(
        self._upstream, body, {'content-type': 'application/json'})).read()
    if kind == 'cut':
      handler.send_response(200)
      handler.send_header('content-length', str(len(found)))
      handler.end_headers()
      handler.wfile.write(found[:len(found) // 2])
      handler.close_connection = True
      return
    self._send(handler, 200, b'<html>' if kind == 'garbage' else found)

  def _kind(self) -> str:
    with self._lock:
      self.requests += 1
      self._began = self._began or time.monotonic()
      spoiled = self._random.random() < self._share
      kind = self._random.choice(KINDS) if spoiled else ''
      if self._out[0] <= time.monotonic() - self._began < self._out[1]:
        kind = 'drop'
      self.spoiled += bool(kind)
      return kind

  def _send(self, handler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header('content-length', str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
