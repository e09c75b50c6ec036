# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Addresses in, a SearchFn out that asks servers which speak `/retrieve`.

Search-R1's own servers do, and ours (`searchrl.jobs.serve_search`). All must hold the same
index: a call goes to any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
from typing import Any

from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.trajectory import Passages, Query, SearchError

_BODY_BYTES = wire.Limits().body_bytes - 1024  # room for what is no query


class Remote:
  """A SearchFn over HTTP; see `remote`. Also has `pop` and `wait`."""

  def __init__(self, calls: transport.Transport, limits: wire.Limits,
               connections: int):
    self._calls, self._limits = calls, limits
    self._threads = futures.ThreadPoolExecutor(
        connections, thread_name_prefix='remote-search')

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Equal queries are asked once; blank ones find nothing and are not sent.

    A SearchError is that of a whole request: all its queries get it.
    """
    asked = {}  # top_k -> texts, in order
    for query in queries:
      if query.text.strip() and query.top_k > 0:
        asked.setdefault(query.top_k, {})[self._sent(query)] = None
    requests = [(top_k, texts) for top_k, unique in asked.items()
                for texts in self._chunks(unique)]
    if len(requests) == 1:
      answers = [self._ask(*requests[0])]
    else:
      answers = self._threads.map(lambda request: self._ask(*request), requests)
    found = {}
    for (top_k, texts), answer in zip(requests, answers):
      found |= {(top_k, text): result for text, result in zip(texts, answer)}
    return [found.get((query.top_k, self._sent(query)), ())
            for query in queries]

  def pop(self) -> dict[str, float]:
    """Metrics since the last `pop`."""
    return self._calls.pop()

  def wait(self) -> None:
    """Waits while no server answers.

    Raises:
      ConnectionError: for longer than `pause_secs`.
    """
    self._calls.wait(lambda: self._post(('test',), 1))

  def _sent(self, query: Query) -> str:
    """A server refuses what is longer than its limit."""
    return query.text[:self._limits.query_chars]

  def _chunks(self, texts: Sequence[str]) -> Iterator[list[str]]:
    """As many texts as a request may have."""
    chunk, size = [], 0
    for text in texts:
      bytes_ = len(wire.write_request([text], 1))
      if chunk and (len(chunk) == self._limits.queries or
                    size + bytes_ > self._limits.body_bytes):
        yield chunk
        chunk, size = [], 0
      chunk.append(text)
      size += bytes_
    if chunk:
      yield chunk

  def _ask(self, top_k: int, texts: Sequence[str]
           ) -> Sequence[Passages | SearchError]:
    answer = self._post(texts, top_k)
    return [answer] * len(texts) if isinstance(answer, SearchError) else answer

  def _post(self, texts: Sequence[str], top_k: int
            ) -> list[Passages] | SearchError:
    return self._calls.call(
        'POST', lambda body: wire.read_response(
            body, queries=len(texts), top_k=top_k),
        body=wire.write_request(texts, top_k))


def remote(
    *,
    urls: Sequence[str],
    batch: int = 512,
    query_chars: int = 2000,
    response_bytes: int = 2**26,
    connections: int = 8,
    token_env: str = '',
    wiring: dict[str, Callable[..., Any]] | None = None,
    **patience: float,
) -> Remote:
  """A search that servers answer.

  Args:
    urls: whole addresses, such as 'http://127.0.0.1:8000/retrieve'.
    batch: queries a request, at most.
    query_chars: longer queries are cut, since a server would refuse them.
    response_bytes: a longer response counts as a bad one.
    connections: requests of one call at a time.
    token_env: the environment's variable whose text is sent as a bearer token;
      '': none is sent.
    wiring: clock, sleep and warn of `transport.Transport`; for tests.
    **patience: fields of `transport.Patience`.

  Raises:
    ValueError: an option is out of range, or the variable is not set.
    TypeError: there is no such option.
  """
  for name, value in (('batch', batch), ('query_chars', query_chars),
                      ('response_bytes', response_bytes),
                      ('connections', connections)):
    if value < 1:
      raise ValueError(f'search.options.{name} must be at least 1, but is '
                       f'{value}.')
  headers = {'Content-Type': 'application/json', 'User-Agent': 'searchrl'}
  if token_env:
    token = wire.secret(token_env, 'search.options.token_env')
    headers['Authorization'] = f'Bearer {token}'
  calls = transport.Transport(
      tuple(urls) if not isinstance(urls, str) else urls,
      transport.Patience(**patience), response_bytes=response_bytes,
      headers=headers, **(wiring or {}))
  limits = dataclasses.replace(
      wire.Limits(), queries=batch, query_chars=query_chars,
      body_bytes=_BODY_BYTES)
  return Remote(calls, limits, connections)
