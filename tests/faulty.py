# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Faults by name in, a `/retrieve` server that shows them, one a request, out.

    with faulty.Server(['500', 'ok']) as server:
      ... server.url, server.requests

After the last fault it goes on with 'ok': passages as `answer` makes them.
"""

from __future__ import annotations

import http.server
import json
import threading


def answer(queries, top_k):
  """Returns what a good server finds for each query."""
  return [[{'document': {'id': f'{query}-{i}',
                         'contents': f'"Title {i}"\nOn {query}.'},
            'score': 1 / (i + 1)} for i in range(top_k)] for query in queries]


def _one_changed(**fields):
  def change(lists):
    lists[0][0] |= fields
    return lists
  return change


BODIES = {  # fault: the good lists -> other ones
    'fewer lists': lambda lists: lists[:-1],
    'more lists': lambda lists: [*lists, []],
    'no lists': lambda lists: {'a': 1},
    'a list is null': lambda lists: [None, *lists[1:]],
    'document is a string': _one_changed(document='"T"\ntext'),
    'contents is a number': _one_changed(document={'id': '1', 'contents': 3}),
    'score is NaN': _one_changed(score=float('nan')),
    'score is infinite': _one_changed(score=float('inf')),
    'score is huge': _one_changed(score=10**400),
    'score is a string': _one_changed(score='0.5'),
    'score is true': _one_changed(score=True),
    'id is a list': _one_changed(document={'id': [], 'contents': 'x'}),
}
RAW = {  # fault: the whole body
    'not JSON': b'<html>Internal error</html>',
    'empty': b'',
    'deep': b'[' * 100_000,
    'a list': b'[1, 2]',
    'not UTF-8': b'{"result": "\xff"}',
    'truncated JSON': None,
}


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'

  def log_message(self, *args):
    del args

  def do_GET(self):
    if self.path == '/health':  # not asked for passages
      about = self.server.owner.about
      self._send(404 if about is None else 200, json.dumps(about).encode())
    else:
      self._serve()

  def do_POST(self):
    self._serve()

  def _serve(self):
    body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
    owner = self.server.owner
    with owner.lock:
      fault = owner.faults.pop(0) if owner.faults else 'ok'
      owner.requests.append((self.path, dict(self.headers), body))
    try:
      good = owner.body(self.path, body)
    except ValueError:
      fault = owner.fails
    if fault == 'ok':
      self._send(200, good)
    elif fault in BODIES:
      lists = json.loads(good)['result']
      self._send(200, json.dumps({'result': BODIES[fault](lists)}).encode())
    elif fault in RAW:
      raw = RAW[fault]
      self._send(200, good[:-7] if raw is None else raw)
    elif fault.isdecimal():
      self._send(int(fault), b'{"error": "no"}')
    else:
      getattr(self, fault.replace(' ', '_'))(good)

  def _send(self, status, body, **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def closes_early(self, good):
    self.send_response(200)
    self.send_header('Content-Length', str(len(good)))
    self.end_headers()
    self.wfile.write(good[:len(good) // 2])
    self.close_connection = True

  def closes_at_once(self, good):
    del good
    self.close_connection = True

  def never_answers(self, good):
    del good
    self.server.owner.over.wait(20)
    self.close_connection = True

  def drips(self, good):
    self.send_response(200)
    self.send_header('Content-Length', str(len(good)))
    self.end_headers()
    for byte in good:
      if self.server.owner.over.wait(0.05):
        break
      self.wfile.write(bytes([byte]))
    self.close_connection = True

  def drips_headers(self, good):
    del good
    try:
      self.wfile.write(b'HTTP/1.1 200 OK\r\nX-Slow: ')
      while not self.server.owner.over.wait(0.02):
        self.wfile.write(b'x')
    except OSError:
      self.server.owner.hung_up.set()
    self.close_connection = True

  def redirects(self, good):
    del good
    self._send(307, b'', Location=self.server.owner.url)

  def busy(self, good):
    del good
    self._send(429, b'', Retry_After='1')

  def talks_for_ever(self, good):
    self.send_response(200)
    self.end_headers()
    try:
      while not self.server.owner.over.is_set():
        self.wfile.write(good * 100)
    except OSError:
      pass
    self.close_connection = True


class Server:
  """A server in threads of this process; `body` makes a good response."""

  def __init__(self, faults=(), body=None):
    self.faults, self.requests = list(faults), []
    self.lock, self.over = threading.Lock(), threading.Event()
    self.hung_up = threading.Event()  # a client, while it was dripped at
    self.body = body or self._retrieve
    self.fails = '500'  # the fault where `body` raises
    self.about = None  # what /health shows
    self._server = http.server.ThreadingHTTPServer(
        ('127.0.0.1', 0), _Handler)
    self._server.handle_error = lambda *args: None  # clients that hung up
    self._server.owner = self
    self.url = f'http://127.0.0.1:{self._server.server_port}/retrieve'
    self._thread = threading.Thread(
        target=self._server.serve_forever, args=(0.01,), daemon=True)

  def _retrieve(self, path, body):
    del path
    asked = json.loads(body)
    return json.dumps({'result': answer(
        asked['queries'], asked['topk'])}).encode()

  @property
  def queries(self):
    """The queries of all requests, in order."""
    return [q for _, _, body in self.requests
            for q in json.loads(body)['queries']]

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self.over.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join(10)


def unused_url():
  """An address whose port is closed."""
  with Server() as server:
    return server.url
