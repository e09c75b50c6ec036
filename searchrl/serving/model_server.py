# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A Generator and a tokenizer in, an HTTP server of OpenAI's completions API out.

The bodies are in `completions`. A client learns its mistakes by status and the
field's name: 400, 401 (no token), 404, 413, 429 (too much waits: come again),
503 (ending, or failed), 504 (too late); never how the inside looks.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import json
import secrets
import sys
import threading
import time
from typing import Any

from searchrl.models.inference import engine as engines
from searchrl.rollouts import generation
from searchrl.serving import listener
from searchrl.serving import openai_api

_ROUTES = {'/v1/completions': False, '/v1/chat/completions': True}  # is a chat


@dataclasses.dataclass(frozen=True)
class Options:
  """How a server serves.

  Attributes:
    host: the address to listen at; anything but loopback opens it to others.
    port: 0 takes a free one.
    name: that requests call the model.
    limits: what a request may hold.
    waiting: choices without a slot; above these a request gets 429.
    deadline_secs: of a request, its waiting included; then it gets 504.
    idle_secs: after which a silent connection is closed.
    connections: at a time; more are closed at once.
    token: a request must bear it; '': none.
  """

  name: str
  host: str = '127.0.0.1'
  port: int = 8001
  limits: openai_api.Limits = openai_api.Limits()
  waiting: int = 256
  deadline_secs: float = 600.0
  idle_secs: float = 60.0
  connections: int = 1024
  token: str = dataclasses.field(default='', repr=False)

  def __post_init__(self):
    numbers = dataclasses.asdict(self)
    numbers |= {f'limits.{k}': v for k, v in numbers.pop('limits').items()}
    for name, value in numbers.items():
      if isinstance(value, int | float) and name != 'port' and not value > 0:
        raise ValueError(f'serve.{name} must be above 0, but is {value}.')
    if self.waiting < self.limits.choices:
      raise ValueError(
          'serve.waiting must hold one request of limits.choices='
          f'{self.limits.choices}, but is {self.waiting}.')


class Server:
  """Listens once it is made; `start` answers, `stop` ends it in order.

  Args:
    generator: what continues prompts; `stop` closes it.
    tokenizer: see `agent.tokenizer`.
    length: tokens that a prompt and its continuation may have.
    options: see there.

  Raises:
    OSError: the address is taken, or not of this machine.
  """

  def __init__(self, generator: generation.Generator, tokenizer: Any,
               length: int, options: Options):
    self.options, self.generator = options, generator
    self.created = int(time.time())
    self._tokenizer, self._length = tokenizer, length
    self._one = threading.Lock()  # tokenizers bear one thread at a time
    self._busy, self._idle = 0, threading.Condition()
    self._http = listener.Listener(
        options.host, options.port, _Handler, owner=self,
        connections=options.connections)
    self._thread = threading.Thread(
        target=self._http.serve_forever, args=(0.05,), name='accept',
        daemon=True)

  @property
  def address(self) -> str:
    return self._http.url

  def start(self) -> None:
    self._thread.start()

  def stop(self) -> None:
    """Takes no more requests, answers those it has, and closes."""
    self._http.shutdown()
    self._thread.join()
    self.generator.close(self.options.deadline_secs)
    with self._idle:
      self._idle.wait_for(lambda: not self._busy, self.options.deadline_secs)
    self._http.server_close()

  def __enter__(self) -> None:
    with self._idle:
      self._busy += 1

  def __exit__(self, *_) -> None:
    with self._idle:
      self._busy -= 1
      self._idle.notify_all()

  def answer(self, body: bytes, is_chat: bool) -> bytes | Iterator[bytes]:
    """The answer to a body, or its events.

    Raises:
      Refused: there is none.
    """
    with self._one:
      asked = openai_api.read(
          body, is_chat=is_chat, name=self.options.name, length=self._length,
          tokenizer=self._tokenizer, limits=self.options.limits)
    try:
      stream = self.generator.submit(choices(asked))
    except generation.Full:
      raise openai_api.Refused(
          'too much is waiting; come again.', status=429,
          kind='rate_limit_error', code='rate_limit_exceeded') from None
    except generation.Closed:
      raise _closed() from None
    made = openai_api.Answer(
        asked, uid=secrets.token_hex(12), created=int(time.time()),
        name=self.options.name, token_bytes=self._tokenizer.token_bytes)
    pieces = _told(stream, time.monotonic() + self.options.deadline_secs)
    return made.events(pieces) if asked.stream else made.whole(pieces)


def choices(asked: openai_api.Request) -> list[generation.Choice]:
  """What a request asks for; equal seeds give equal randomness.

  The seed and a choice's number name it, and neither the prompt nor the rest.
  """
  uid = secrets.token_hex(16) if asked.seed is None else f'seed {asked.seed}'
  wanted = [(prompt, budget) for prompt, budget in zip(
      asked.prompts, asked.budgets) for _ in range(asked.n)]
  return [generation.Choice(
      prompt, budget, engines.row_ids(0, uid, number, 0), asked.draw,
      tuple(stop.encode() for stop in asked.stops))
          for number, (prompt, budget) in enumerate(wanted)]


def _closed() -> openai_api.Refused:
  return openai_api.Refused('the server is ending.', status=503,
                             kind='server_error')


def _told(stream: generation.Stream, deadline: float):
  """The pieces; what goes wrong, as a client is told; cancelled if left."""
  try:
    yield from stream.pieces(deadline)
  except TimeoutError:
    raise openai_api.Refused('not finished in time.', status=504,
                              kind='server_error', code='timeout') from None
  except generation.Closed:
    raise _closed() from None
  finally:
    stream.cancel()


class _Handler(listener.Handler):
  """One connection."""

  def no_http(self, status: int) -> None:
    self._refuse(openai_api.Refused('no such request.', status=status))

  def do_GET(self):
    owner, path = self.server.owner, self.path.partition('?')[0]
    name, created = owner.options.name, owner.created
    is_open = owner.generator.is_open
    if path == '/health':
      self._send(200 if is_open else 503, json.dumps({
          'status': 'ok' if is_open else 'stopping',
          'waiting': owner.generator.waiting,
          'speaking': owner.generator.speaking}).encode())
    elif not self.is_allowed():
      self._refuse(_NO_TOKEN)
    elif path == '/v1/models':
      self._send(200, openai_api.models(name, created))
    elif path == f'/v1/models/{name}':
      self._send(200, openai_api.model(name, created))
    else:
      self._refuse(openai_api.Refused(
          'no such page.', status=405 if path in _ROUTES else 404))

  def do_POST(self):
    closing, self.close_connection = self.close_connection, True
    with self.server.owner:
      try:
        body = self._body()
        self.close_connection = closing
        found = self._found(body, _ROUTES[self.path.partition('?')[0]])
        if isinstance(found, bytes):
          self._send(200, found)
        else:
          self._send_events(found)
      except openai_api.Refused as error:
        self._refuse(error)
        if self.close_connection:
          self.discard()

  def _found(self, body: bytes, is_chat: bool) -> bytes | Iterator[bytes]:
    try:
      return self.server.owner.answer(body, is_chat)
    except openai_api.Refused:
      raise
    except Exception as error:  # whatever it is, the client gets an answer
      print(f'Warning: a request failed: {type(error).__name__}: {error}',
            file=sys.stderr, flush=True)
      raise openai_api.Refused(
          'this request failed.', status=500, kind='server_error') from error

  def _body(self) -> bytes:
    """What was posted; raises Refused before it is read, if it can."""
    limit = self.server.owner.options.limits.body_bytes
    length = self.headers.get('Content-Length', '')
    if self.path.partition('?')[0] not in _ROUTES:
      raise openai_api.Refused(
          f'no such page; POST to {" or ".join(_ROUTES)}.', status=404)
    if not self.is_allowed():
      raise _NO_TOKEN
    if not (length.isascii() and length.isdecimal()):
      raise openai_api.Refused('a Content-Length is needed.', status=411)
    if int(length[:12]) > limit:
      raise openai_api.Refused(f'at most {limit} bytes.', status=413)
    return self.rfile.read(int(length))

  def _send_events(self, events: Iterator[bytes]) -> None:
    self.close_connection = True  # that is how a client sees the end
    begun = False
    try:
      for event in events:
        if not begun:
          self.head(200, {'Content-Type': 'text/event-stream',
                           'Cache-Control': 'no-cache'})
          begun = True
        self.wfile.write(event)
    except openai_api.Refused as error:
      if not begun:
        raise
      self.wfile.write(openai_api.event(error.body()))
    finally:
      events.close()  # also if the client has hung up

  def _refuse(self, error: openai_api.Refused) -> None:
    extra = {'Retry-After': '1'} if error.status == 429 else {}
    self._send(error.status, error.body(), extra)

  def _send(self, status: int, body: bytes, extra=()) -> None:
    self.head(status, {'Content-Type': 'application/json',
                        'Content-Length': str(len(body)), **dict(extra)})
    if self.command != 'HEAD':
      self.wfile.write(body)


_NO_TOKEN = openai_api.Refused(
    'a bearer token is needed.', status=401, kind='authentication_error',
    code='invalid_api_key')
