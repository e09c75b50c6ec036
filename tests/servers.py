# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Servers under test, engines for them, jobs that serve, and clients."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import uvicorn.server

from searchrl.serving import asgi
from searchrl.serving import search_server
from searchrl.trajectory import Passage

# uvicorn looks every 0.1 s whether it is to stop, and waits as long again. Here
# both take 0.01 s, as hundreds of servers are stopped.
uvicorn.server.asyncio = types.SimpleNamespace(
    **vars(asyncio) | {'sleep': lambda secs: asyncio.sleep(secs / 10)})


def http_options(options):
  """The options of an address, at a free port, and those that remain."""
  names = [field.name for field in dataclasses.fields(asgi.HttpOptions)]
  own = {name: options.pop(name) for name in names if name in options}
  return asgi.HttpOptions(port=0, **own), options


def echo(queries):
  """An engine that finds each query's text as an id."""
  return [(Passage(query.text, 'T', 'x'),) for query in queries]


class Held:
  """An engine that answers when it is let, and shows what it was asked."""

  def __init__(self):
    self.asked, self.go, self.batches = threading.Event(), threading.Event(), []

  def __call__(self, queries):
    self.batches.append([query.text for query in queries])
    self.asked.set()
    assert self.go.wait(20)
    return echo(queries)


@contextlib.contextmanager
def serving(search=echo, warn=print, about=None, **options):
  http_part, rest = http_options(options)
  server = search_server.Server(
      search, search_server.Options(http_part, **rest), about=about, warn=warn)
  server.start()
  try:
    yield server
  finally:
    server.stop()


def until(condition):
  """Returns when it is so; gives up after a while."""
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end, 'it never came about'
    time.sleep(0.001)


def place(server):
  host, _, port = server.address.removeprefix('http://').rpartition(':')
  return host, int(port)


def connect(server):
  return socket.create_connection(place(server), timeout=60)


def ask(server, path='/retrieve', method='POST', headers=(), **record):
  """Status, headers and record of one request."""
  connection = http.client.HTTPConnection(*place(server), timeout=60)
  body = record.pop('body', None)
  body = json.dumps(record).encode() if body is None else body
  connection.request(method, path, body if method == 'POST' else None,
                     dict(headers))
  response = connection.getresponse()
  text = response.read()
  connection.close()
  found = text.decode()
  if response.headers['Content-Type'] == 'application/json' and text:
    found = json.loads(found)
  return response.status, response.headers, found


def refuses(server):
  """Returns whether a server takes no connections any more."""
  try:
    connect(server).close()
  except (ConnectionRefusedError, ConnectionResetError):  # reset: just closed
    return True
  return False


def read_until_closed(line):
  answer = b''
  while piece := line.recv(65536):
    answer += piece
  return answer


def read_until(line, end):
  answer = b''
  while not answer.endswith(end):
    piece = line.recv(65536)
    assert piece, answer
    answer += piece
  return answer


def send(server, lines):
  """All that comes back until the server closes the connection."""
  with connect(server) as line:
    line.sendall(lines)
    return read_until_closed(line)


def post(body, *headers, path=b'/retrieve'):
  """The bytes of a request; without a Content-Length unless it is a header."""
  lines = [b'POST %s HTTP/1.1' % path, b'Host: here', *headers, b'', body]
  return b'\r\n'.join(lines)


@contextlib.contextmanager
def served(config, *flags):
  """A config's job as a command: its line when it serves; then it is ended."""
  command = [sys.executable, '-m', 'searchrl.main', f'--config={config}',
             '--config.serve.port=0', *flags]
  with subprocess.Popen(
      command, cwd=pathlib.Path(__file__).parents[1], stderr=subprocess.PIPE,
      text=True) as process:
    line = ''
    while 'Serving' not in line:
      line = process.stderr.readline()
      assert line, 'it ended'
    yield line
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert 'Stopping; requests under way' in process.stderr.read()
