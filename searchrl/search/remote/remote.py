# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Search by HTTP servers of Search-R1's `/retrieve` protocol.

Search-R1's servers implement it, and ours (`searchrl.jobs.serve_search`). All
servers must have the same index: a call goes to any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
from typing import Any

from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.trajectory import Passages, Query, SearchError

_BODY_BYTES = 2**20 - 1024  # of a request; our servers take more


class Remote:
  """A SearchFn over HTTP, with `pop` and `wait`; see `remote`."""

  def __init__(self, calls: transport.Transport, limits: wire.Limits,
               connections: int):
    self._calls, self._limits = calls, limits
    self._threads = futures.ThreadPoolExecutor(
        connections, thread_name_prefix='remote-search')

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Sends equal queries once; blank ones find nothing and are not sent.

    A request that fails gives its SearchError to all its queries.
    """
    texts_of = {}  # top_k -> texts, in order
    for query in queries:
      if query.text.strip() and query.top_k > 0:
        texts_of.setdefault(query.top_k, {})[self._sent(query)] = None
    requests = [(top_k, texts) for top_k, unique in texts_of.items()
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
    """The metrics since the last call."""
    return self._calls.pop()

  def wait(self) -> None:
    """Waits while no server answers.

    Raises:
      ConnectionError: no server answered for `pause_secs`.
    """
    self._calls.wait(lambda: self._post(('test',), 1))

  def _sent(self, query: Query) -> str:
    """The text that is sent: a server rejects one above its limit."""
    return query.text[:self._limits.query_chars]

  def _chunks(self, texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts of each request, as many as the limits allow."""
    chunk, size = [], 0
    for text in texts:
      text_bytes = len(wire.write_request([text], 1))
      if chunk and (len(chunk) == self._limits.queries or
                    size + text_bytes > self._limits.body_bytes):
        yield chunk
        chunk, size = [], 0
      chunk.append(text)
      size += text_bytes
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
    **retries: float,
) -> Remote:
  """A search that asks servers.

  Args:
    urls: whole addresses, such as 'http://127.0.0.1:8000/retrieve'.
    batch: queries per request, at most.
    query_chars: longer queries are cut, since a server would reject them.
    response_bytes: a longer response is an error.
    connections: requests of one call at a time.
    token_env: the environment variable whose value is sent as a bearer token;
      '': none is sent.
    wiring: clock, sleep and warn of `transport.Transport`; for tests.
    **retries: fields of `transport.RetryPolicy`.

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
  calls = transport.posting_json(
      urls, token_env=token_env, response_bytes=response_bytes, wiring=wiring,
      **retries)
  limits = dataclasses.replace(
      wire.Limits(), queries=batch, query_chars=query_chars,
      body_bytes=_BODY_BYTES)
  return Remote(calls, limits, connections)
