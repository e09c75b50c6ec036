# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Search by HTTP servers of Search-R1's `/retrieve` protocol.

Search-R1's servers implement it, as does ours (`searchrl.jobs.serve_search`).
All servers must have the same index, since a call goes to any of them. Servers
that publish what they search are compared at the start (`replicas`).
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from searchrl.runtime import option_rules
from searchrl.search import engine_wrappers
from searchrl.search.remote import http_request
from searchrl.search.remote import recovery_probe
from searchrl.search.remote import replicas
from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.trajectory import Passages, Query, SearchError

_BODY_BYTES = 2**20 - 1024  # largest body of a request; our servers accept more
_Key = tuple[int, str]  # top_k, text


class Remote:
  """A SearchFn over HTTP, with `pop` and `wait`; see `remote`.

  If a server fails on a request, or is too slow for it, the request is sent
  again in halves, one after the other. After a timeout, later requests have at
  most half as many queries. They grow again while answers are quick.
  """

  def __init__(self, calls: transport.Transport, limits: wire.Limits,
               connections: int):
    self._calls, self._limits = calls, limits
    self._rehearsal = recovery_probe.Rehearsal()
    self._size = limits.queries  # queries per request at present
    self._counts = engine_wrappers.Counts()
    self._threads = futures.ThreadPoolExecutor(
        connections, thread_name_prefix='remote-search')

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Returns a result for each query, and sends equal queries only once.

    A query that is blank or has top_k 0 finds nothing and is not sent. A text
    of more than `query_chars` characters is cut. A request that fails may be
    sent again in halves. Only the queries of parts that cannot be answered get
    a SearchError.
    """
    keys = [(query.top_k, query.text[:self._limits.query_chars])
            for query in queries]
    self._counts.add(cut=sum(
        len(query.text) > self._limits.query_chars for query in queries))
    distinct = [*dict.fromkeys(
        key for key in keys if key[1].strip() and key[0] > 0)]
    results = dict(zip(
        distinct, self._rehearsal.watch(self._answers, distinct)))
    return [results.get(key, ()) for key in keys]

  def pop(self) -> dict[str, float]:
    """Returns the metrics since the last `pop`, by name."""
    return self._calls.pop() | {
        'search/remote/cut_queries': self._counts.pop()['cut'],
        'search/remote/request_queries': self._size}

  def wait(self) -> None:
    """Waits until a server answers one query, and then many.

    The many are the largest number of queries that failed together. It returns
    at once if no call has failed since the last wait.

    Raises:
      ConnectionError: No server answered within `pause_secs`, or a server
        refused the request.
    """
    ping = lambda: self._calls.call(
        lambda body: wire.read_response(body, queries=1, top_k=1),
        body=wire.write_request(('test',), 1))
    self._calls.wait(lambda: self._rehearsal.probe(ping, self._answers))

  def _answers(self, keys: Sequence[_Key]) -> list[Passages | SearchError]:
    """Returns the results of distinct queries, from parallel requests."""
    deadline = self._calls.deadline()
    texts_of = collections.defaultdict(list)
    for top_k, text in keys:
      texts_of[top_k].append(text)
    chunks = [(top_k, chunk) for top_k, texts in texts_of.items()
              for chunk in self._chunks(texts)]
    ask = lambda chunk: self._ask(chunk[0], chunk[1], deadline)
    answers = [*map(ask, chunks)] if len(chunks) == 1 else [
        *self._threads.map(ask, chunks)]
    results = dict(collections.ChainMap(*answers))
    return [results[key] for key in keys]

  def _chunks(self, texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts of one request after another, as many as may be sent."""
    chunk: list[str] = []
    size = 0
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

  def _ask(self, top_k: int, texts: list[str], deadline: float
           ) -> dict[_Key, Passages | SearchError]:
    """Returns the result of each text, from one request or several smaller."""
    answers: dict[_Key, Passages | SearchError] = {}
    left = collections.deque([(texts, False)])
    while left:
      part, is_half = left.popleft()
      if len(part) > self._size:
        left.appendleft((part[self._size:], is_half))
        part = part[:self._size]
      results: Sequence[Passages | SearchError]
      try:
        results = self._post(top_k, part, deadline, is_half)
      except http_request.Failure as failure:
        middle = len(part) // 2
        if failure.smaller and middle:  # the other parts, which may work, first
          left += [(part[:middle], True), (part[middle:], True)]
          continue
        results = [self._calls.give_up(failure)] * len(part)
      answers.update(zip(((top_k, text) for text in part), results))
    return answers

  def _post(self, top_k: int, texts: list[str], deadline: float, is_half: bool
           ) -> list[Passages]:
    """Makes one request for some queries, and returns the passages of each.

    The duration decides how many queries later requests may have. A half of a
    failed request (`is_half`) is tried only once. If no try succeeds, it raises
    a Failure.
    """
    start, count = self._calls.clock(), len(texts)
    try:
      results = self._calls.ask(
          lambda body: wire.read_response(body, queries=count, top_k=top_k),
          deadline, body=wire.write_request(texts, top_k), again=is_half,
          smaller=count > 1)
    except http_request.Failure as failure:
      had_time = deadline - start >= self._calls.try_secs / 2
      if failure.kind == 'timeout' and had_time and count > 1:
        self._size = min(self._size, count // 2)
      raise
    quick = self._calls.clock() - start < self._calls.try_secs / 4
    if quick and count >= self._size:
      self._size = min(2 * self._size, self._limits.queries)
    return results


def remote(
    *,
    urls: Sequence[str],
    batch: int = 512,
    query_chars: int = 2000,
    response_bytes: int = 2**26,
    connections: int = 8,
    token_env: str = '',
    wiring: dict[str, Callable[..., Any]] | None = None,
    **retries: Any,
) -> Remote:
  """Returns a search that asks servers.

  Args:
    urls: Complete addresses, such as 'http://127.0.0.1:8000/retrieve'. Each
      request goes to the server with the fewest requests in flight.
    batch: Largest number of queries per request.
    query_chars: Number of characters to which longer queries are cut, since a
      server might reject them.
    response_bytes: Largest size of a response; a longer one is an error.
    connections: Largest number of simultaneous requests of one call.
    token_env: Name of the environment variable whose value is sent as a bearer
      token; '': none is sent.
    wiring: Arguments `clock`, `sleep` and `warn` of `transport.Transport`,
      which tests replace.
    **retries: Fields of `transport.RetryPolicy`.

  Raises:
    ValueError: An option is out of range, the variable is not set, or two
      servers search different corpora; see `replicas`.
    TypeError: An option of `retries` is not a field of `RetryPolicy`.
  """
  option_rules.at_least(
      1, 'search.options.', batch=batch, query_chars=query_chars,
      response_bytes=response_bytes, connections=connections)
  calls = transport.posting_json(
      urls, token_env=token_env, response_bytes=response_bytes, wiring=wiring,
      **retries)
  if len(urls) > 1:
    replicas.check(urls, calls.headers)
  limits = wire.Limits(
      body_bytes=_BODY_BYTES, queries=batch, query_chars=query_chars)
  return Remote(calls, limits, connections)
