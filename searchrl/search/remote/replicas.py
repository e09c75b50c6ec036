# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A check, at the start, that several search servers search the same files.

Our servers publish at /health, beside /retrieve, the digest of their corpus and
the fingerprint of their vector index. Some servers cannot be compared and are
trusted: servers that publish neither, such as other implementations, and
servers that are not up yet. A server that changes later is not checked again.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import time

from searchrl.search.remote import http_request
from searchrl.search.remote import wire

_SECS = 5.0  # timeout in seconds; a server may have to ask its engine first
_FACTS = ('corpus', 'index')


def check(urls: Sequence[str], headers: Mapping[str, str]) -> None:
  """Raises a ValueError if two servers have different corpora or indexes.

  Args:
    urls: Addresses of /retrieve.
    headers: Headers of the requests.
  """
  client = http_request.Client(
      response_bytes=2**16, headers=headers, clock=time.monotonic)
  with futures.ThreadPoolExecutor(len(urls)) as pool:
    shown = pool.map(lambda url: _about(client, url), urls)
  first: dict[str, tuple[str, str]] = {}  # fact -> (host, digest)
  for url, about in zip(urls, shown):
    host = http_request.Request(url).host
    for fact, digest in about.items():
      other, expected = first.setdefault(fact, (host, digest))
      if digest != expected:
        raise ValueError(
            'search.options.urls must lead to servers that search the same, '
            f'but the {fact} of {other} is {expected[:16]}, and that of {host} '
            f'is {digest[:16]}. Serve the same files everywhere, or leave one '
            'out.')


def _about(client: http_request.Client, url: str) -> dict[str, str]:
  """Returns the digests of 'corpus' and 'index' that a server publishes.

  A digest that the server does not publish is left out. The result is {} for a
  server that does not answer, or whose address does not end in /retrieve.
  """
  root, slash, page = url.rpartition('/')
  if not slash or page != 'retrieve':
    return {}
  try:
    record = wire.read_object(client.body(
        http_request.Request(f'{root}/health'),
        time.monotonic() + _SECS), 'the response')
  except (http_request.Failure, ValueError):
    return {}
  return {fact: record[fact] for fact in _FACTS
          if isinstance(record.get(fact), str)}
