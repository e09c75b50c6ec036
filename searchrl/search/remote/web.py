# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Web search by a service with SerpAPI's interface.

A query is one GET request, and its results are JSON. They can be recorded to a
jsonl file and replayed from it, so that a run can be repeated exactly and
without cost. The key comes from the environment and is sent in the address, as
the service requires. It appears in no config, file, error or log line.

Source: SerpAPI's public documentation; the order of results is Search-R1's:
  the answer box, then the organic results, then related questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import hashlib
import json
import pathlib
import threading
from typing import Any
import urllib.parse

from searchrl.runtime import option_rules
from searchrl.search.remote import http_request
from searchrl.search.remote import transport
from searchrl.search.remote import wire
from searchrl.search.remote.wire import Malformed
from searchrl.trajectory import Passage, Passages, Query, SearchError

MODES = ('live', 'record', 'replay')
_Key = tuple[str, int]  # text, top_k


class Web:
  """A SearchFn over the web, with `pop` and `wait`; see `web`."""

  def __init__(self, ask: Callable[[str, int], Passages | SearchError],
               calls: transport.Transport | None, tape: Tape | None,
               connections: int):
    self._ask, self._calls, self._tape = ask, calls, tape
    self._threads = futures.ThreadPoolExecutor(
        connections, thread_name_prefix='web-search')

  def __call__(
      self, queries: Sequence[Query]) -> list[Passages | SearchError]:
    """Returns a result for each query, and sends equal queries only once.

    A query that is blank or has top_k 0 finds nothing and is not sent.
    """
    keys = list(dict.fromkeys(
        (q.text, q.top_k) for q in queries if q.text.strip() and q.top_k > 0))
    results = dict(zip(keys, self._threads.map(self._answer, keys)))
    return [results.get((query.text, query.top_k), ()) for query in queries]

  def pop(self) -> dict[str, float]:
    """Returns the metrics since the last `pop`, by name; {} in a replay."""
    return self._calls.pop() if self._calls else {}

  def wait(self) -> None:
    """Waits until the service answers, if a search has failed.

    Each try is a search, for which the service charges.

    Raises:
      ConnectionError: The service did not answer for `pause_secs`, or refused.
    """
    if self._calls:
      self._calls.wait(lambda: self._ask('test', 1))

  def _answer(self, key: _Key) -> Passages | SearchError:
    if self._tape and key in self._tape.known:
      return self._tape.known[key]
    result = self._ask(*key)
    if self._tape and not isinstance(result, SearchError):
      self._tape.add(key, result)
    return result


class Tape:
  """Recorded results: a jsonl file of {"query", "top_k", "passages"}.

  A last line without a line break, left by a killed process, is ignored.

  Attributes:
    known: The recorded passages by (query, top_k).

  Args:
    path: Path of the file.
    repair: Flag that removes such a last line, so that lines can be appended.

  Raises:
    ValueError: A line is not such an object.
  """

  def __init__(self, path: pathlib.Path, *, repair: bool = False):
    self._path, self._lock = path, threading.Lock()
    *lines, rest = path.read_bytes().split(b'\n') if path.exists() else [b'']
    self.known = dict(_recorded(line, f'line {number} of {path}')
                      for number, line in enumerate(lines, 1))
    if repair:
      path.parent.mkdir(parents=True, exist_ok=True)
      with path.open('ab') as file:
        file.truncate(file.tell() - len(rest))

  def add(self, key: _Key, passages: Passages) -> None:
    """Appends a result to the file, and to `known`; may raise an OSError."""
    text, top_k = key
    line = json.dumps({'query': text, 'top_k': top_k, 'passages': [
        dataclasses.asdict(passage) for passage in passages]})
    with self._lock, self._path.open('ab', buffering=0) as file:
      end, rest = file.tell(), f'{line}\n'.encode()
      try:
        while rest:
          rest = rest[file.write(rest):]
      except OSError:  # such as a full disk
        file.truncate(end)
        raise
      self.known[key] = passages


def web(
    *,
    key_env: str = 'SERPAPI_API_KEY',
    url: str = 'https://serpapi.com/search.json',
    provider: str = 'google',
    mode: str = 'live',
    tape: str = '',
    connections: int = 8,
    proxy: str = '',
    wiring: dict[str, Callable[..., Any]] | None = None,
    **retries: Any,
) -> Web:
  """Returns a search of the web by a service with SerpAPI's interface.

  Args:
    key_env: Name of the environment variable that has the key.
    url: Address of the service.
    provider: Name of one of the service's engines.
    mode: 'live'; 'record', which also writes results to `tape` and does not
      repeat queries that it has; or 'replay', which sends nothing and returns
      SearchError('not_recorded') for a query that is not in `tape`.
    tape: Path of a jsonl file; '' in live mode.
    connections: Largest number of simultaneous requests.
    proxy: Address of an HTTP proxy; '' for that of the environment
      (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY), 'none' for no proxy.
    wiring: Arguments `clock`, `sleep` and `warn` of `transport.Transport`,
      which tests replace.
    **retries: Fields of `transport.RetryPolicy`.

  Raises:
    FileNotFoundError: There is no file to replay.
    ValueError: An option is out of range, the tape has a line that was not
      recorded, or the variable is not set. A replay needs no variable.
    TypeError: An option of `retries` is not a field of `RetryPolicy`.
  """
  option_rules.at_least(1, 'search.options.', connections=connections)
  if mode not in MODES or (mode == 'live') != (not tape):
    raise ValueError(
        f"search.options.mode must be one of {MODES}, and all but 'live' must "
        'have search.options.tape, the file of recorded searches, but they are '
        f'{mode!r} and {tape!r}. Correct one of them.')
  if mode == 'replay':
    return _replayed(pathlib.Path(tape), connections)
  key = wire.secret(key_env, 'search.options.key_env')
  proxy = '' if proxy == 'none' else (
      proxy or http_request.environment_proxy(url))
  scheme = urllib.parse.urlsplit(proxy).scheme
  if scheme not in ('', 'http', 'https'):
    raise ValueError(
        'search.options.proxy, or HTTPS_PROXY, must be an HTTP proxy, but its '
        f"scheme is {scheme!r}. Write http://HOST:PORT, or 'none'.")
  calls = transport.Transport(
      (url,), transport.RetryPolicy(**retries), response_bytes=2**24,
      headers={'User-Agent': 'searchrl'}, proxy=proxy, **(wiring or {}))

  def ask(text: str, top_k: int) -> Passages | SearchError:
    text = text.encode('utf-8', 'replace').decode()
    return calls.call(lambda body: read_results(body, top_k), fields={
        'engine': provider, 'q': text, 'num': str(top_k), 'api_key': key})

  recorder = Tape(pathlib.Path(tape), repair=True) if tape else None
  return Web(ask, calls, recorder, connections)


def _replayed(tape: pathlib.Path, connections: int) -> Web:
  """Returns a search that finds only recorded results and sends nothing."""
  if not tape.is_file():
    raise FileNotFoundError(
        'search.options.tape must be a file to replay, but there is none at '
        f"{tape}. Record it with mode='record'.")
  missing = SearchError('not_recorded', f'not in {tape}')
  return Web(lambda text, top_k: missing, None, Tape(tape), connections)


def read_results(body: bytes, top_k: int) -> Passages:
  """Returns the passages of SerpAPI's response, at most top_k.

  If the response has the field `error`, nothing was found: the result is ().

  Raises:
    Malformed: The body is not such a response.
  """
  record = wire.read_object(body, 'the response')
  if 'error' in record:
    return ()
  box = record.get('answer_box', {})
  items = [box] if box else []
  for name in ('organic_results', 'related_questions'):
    part = record.get(name, [])
    if not isinstance(part, list):
      raise Malformed(f'{name} must be a list.')
    items += part[:top_k]
  return tuple(_passage(item) for item in items[:top_k])


def _passage(item: Any) -> Passage:
  """Returns the passage of a result, with score 0, or raises Malformed."""
  if not isinstance(item, dict):
    raise Malformed('a result must be an object.')
  title = item.get('title', item.get('question', 'No title.'))
  text = item.get('snippet', item.get('answer', 'No snippet available.'))
  link = item.get('link', '')
  if not (isinstance(title, str) and isinstance(text, str) and
          isinstance(link, str)):
    raise Malformed('title, snippet and link must be strings.')
  title = ' '.join(title.split())
  digest = hashlib.sha256(f'{title}\n{text}'.encode('utf-8', 'replace'))
  return Passage(link or digest.hexdigest()[:16], title, text)


def _recorded(line: bytes, place: str) -> tuple[_Key, Passages]:
  """Returns ((query, top_k), passages) of a recorded line.

  `place` is the name of the line in errors, such as 'line 3 of web.jsonl'.

  Raises:
    ValueError: The line is not such a record.
  """
  try:
    match json.loads(line):
      case {'query': str(text), 'top_k': int(top_k), 'passages': list(items)}:
        passages = tuple(Passage(**item) for item in items)
        if all(isinstance(value, str) for p in passages
               for value in (p.id, p.title, p.text)) and all(
                   isinstance(p.score, int | float) for p in passages):
          return (text, top_k), passages
  except (ValueError, TypeError, RecursionError):
    pass
  raise ValueError(f'search.options.tape must hold what was recorded, but '
                   f'{place} is something else. Remove the line.')
