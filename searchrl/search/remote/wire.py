# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Search-R1's `/retrieve` protocol: queries and passages to bytes, and back.

  {"queries": ["..."], "topk": 3, "return_scores": true}  ->
  {"result": [[{"document": {"id": "7", "contents": "\"Title\"\ntext"},
                "score": 0.8}, ...], ...]}

The result has one list per query, best first. If scores are not requested, the
lists contain the documents only. A message that breaks the protocol is refused.

Source: Jin et al. 2025, Search-R1, arXiv:2503.09516, and its server's API.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import math
import os
import reprlib
from typing import Any

import orjson

from searchrl.search import corpus
from searchrl.trajectory import Passage, Passages


_SLOW_BYTES = 2**20  # largest body that json may read; it blocks threads


class Malformed(ValueError):
  """A message that breaks the protocol; the text names the field."""


class TooLarge(ValueError):
  """A message that follows the protocol but exceeds a limit."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """The largest request that a server answers."""

  body_bytes: int = 2**24  # enough for all queries at full length, in ASCII
  queries: int = 4096  # Search-R1 sends a turn of all its rollouts at once
  query_chars: int = 2000  # length to which each longer query is cut
  top_k: int = 100


@dataclasses.dataclass(frozen=True)
class Request:
  """A client's queries and options."""

  queries: tuple[str, ...]
  top_k: int  # passages per query
  return_scores: bool
  cut: int = 0  # number of queries that were cut to the limit


def write_request(queries: Sequence[str], top_k: int) -> bytes:
  """Returns the JSON of a request for passages with scores."""
  record = {'queries': list(queries), 'topk': top_k, 'return_scores': True}
  return _written(record)


def read_request(body: bytes, *, limits: Limits, default_top_k: int) -> Request:
  """Returns the request that a client's JSON body contains, after a check.

  Queries that are too long are cut and counted.

  Args:
    body: Body of the request.
    limits: Largest numbers that are accepted, and the length of a query.
    default_top_k: Passages per query if the body's topk is absent, null or 0.

  Raises:
    Malformed: The body is not such a request.
    TooLarge: There are more queries, or more passages per query, than `limits`
      permit. The size of the body is not checked.
  """
  is_short = len(body) <= _SLOW_BYTES
  record = read_object(body, 'the body', _read if is_short else orjson.loads)
  queries, top_k, scored = (
      record.get(name) for name in ('queries', 'topk', 'return_scores'))
  if not isinstance(queries, list) or not all(
      isinstance(query, str) for query in queries):
    raise Malformed(
        f'queries must be a list of strings, but is {reprlib.repr(queries)}.')
  if isinstance(top_k, bool) or not isinstance(top_k, int | None) or (
      top_k is not None and top_k < 0):
    raise Malformed('topk must be a whole number from 0, or null, but is '
                    f'{reprlib.repr(top_k)}.')
  if not isinstance(scored, bool | None):
    raise Malformed('return_scores must be true or false, but is '
                    f'{reprlib.repr(scored)}.')
  for name, value, limit in (('queries', len(queries), limits.queries),
                             ('topk', top_k or 0, limits.top_k)):
    if value > limit:
      raise TooLarge(f'{name} must be at most {limit}, but {value} came.')
  length = limits.query_chars
  return Request(tuple(query[:length] for query in queries),
                 top_k or default_top_k, bool(scored),
                 cut=sum(len(query) > length for query in queries))


def write_response(results: Sequence[Passages], *, return_scores: bool
                  ) -> bytes:
  """Returns the JSON of the passages of each query, with or without scores."""
  items = lambda passage: {'document': _document(passage),
                           'score': passage.score}
  return _written({'result': [
      [*map(items if return_scores else _document, passages)]
      for passages in results]})


def read_response(body: bytes, *, queries: int, top_k: int) -> list[Passages]:
  """Returns the passages of each query, at most top_k of them.

  Servers of web searches send more passages than were requested, and no scores.
  The first top_k passages are used, and missing scores are 0.

  Raises:
    Malformed: The body is not an answer to this number of queries.
  """
  lists = read_object(body, 'the response', _read).get('result')
  if not isinstance(lists, list) or len(lists) != queries:
    content = len(lists) if isinstance(lists, list) else type(lists).__name__
    raise Malformed(f'result must be {queries} lists, but is {content}.')
  for number, items in enumerate(lists):
    if not isinstance(items, list):
      raise Malformed(f'result {number} must be a list, but is '
                      f'{type(items).__name__}.')
  return [tuple(_passage(item, f'result {number}') for item in items)[:top_k]
          for number, items in enumerate(lists)]


def _passage(item: Any, place: str) -> Passage:
  """Returns the passage of {"document", "score"}, or of a document alone.

  A missing score is 0, and a missing id is a hash. `place` is the name of the
  item in errors (Malformed).
  """
  score = 0.0
  document = item
  if isinstance(item, dict) and 'document' in item:
    document, score = item['document'], item.get('score', 0.0)
  if isinstance(score, bool) or not isinstance(score, int | float) or (
      not -math.inf < score < math.inf):
    raise Malformed(f'score in {place} must be a finite number.')
  if not isinstance(document, dict):
    raise Malformed(f'document in {place} must be an object, but is '
                    f'{type(document).__name__}.')
  title, text = _title_and_text(document, place)
  uid = document.get('id')
  if uid is None:  # web search and Lucene's raw documents have no ids
    uid = hashlib.sha256(
        f'{title}\n{text}'.encode('utf-8', 'replace')).hexdigest()[:16]
  if isinstance(uid, bool) or not isinstance(uid, str | int):
    raise Malformed(f'id in {place} must be a string or an integer.')
  try:
    return Passage(str(uid), title, text, float(score))
  except (OverflowError, ValueError) as error:  # numbers of thousands of digits
    raise Malformed(f'a number in {place} is too large.') from error


def _title_and_text(document: dict[str, Any], place: str) -> tuple[str, str]:
  """Returns a document's title and text, read like a line of a corpus.

  A title of several lines, such as a web page's, becomes one line.
  """
  parts = corpus.title_and_text(document)
  if parts is None:
    raise Malformed(f'document in {place} must have contents, a string.')
  title, text = parts
  return (' '.join(title.split()) if '\n' in title else title), text


def _written(record: dict[str, Any]) -> bytes:
  """Returns a record as JSON in UTF-8. Lone surrogates become question marks.
  """
  try:
    return orjson.dumps(record)  # takes a thirtieth of json's time
  except TypeError:  # orjson accepts no lone surrogates
    return json.dumps(record, ensure_ascii=False).encode('utf-8', 'replace')


def _document(passage: Passage) -> dict[str, str]:
  return {'id': passage.id, 'contents': f'"{passage.title}"\n{passage.text}'}


def _read(body: bytes) -> Any:
  """Reads JSON. Integers of more than 64 bits may become floats."""
  try:
    return orjson.loads(body)
  except orjson.JSONDecodeError:  # a lone surrogate, or a number like NaN
    return json.loads(body)


def read_object(
    body: bytes, what: str, read: Callable[[bytes], Any] = json.loads,
) -> dict[str, Any]:
  """Returns the JSON object that a body contains, parsed by `read`.

  If there is none, it raises Malformed, whose text calls the body `what`.
  """
  try:
    record = read(body)
  except (ValueError, RecursionError) as error:
    raise Malformed(f'{what} must be JSON: {type(error).__name__}.') from error
  if not isinstance(record, dict):
    raise Malformed(f'{what} must be a JSON object.')
  return record


def secret(variable: str, field: str) -> str:
  """Returns the value of an environment variable, without spaces at its ends.

  `field` is the config field that names the variable, for errors.

  Raises:
    ValueError: The variable is not set, or is not printable ASCII. The message
      does not show its value.
  """
  text = os.environ.get(variable, '').strip()
  if not text:
    raise ValueError(
        f'{field} must name a variable of the environment, but '
        f'{variable} is not set. Set it where the run starts, or name another.')
  if not (text.isascii() and text.isprintable()):
    raise ValueError(
        f'{variable} must hold printable ASCII, but holds other characters. '
        'Copy it again.')
  return text
