# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""wire: what is written is read again; what comes is read or refused."""

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from searchrl.search.remote import wire
from searchrl.trajectory import Passage

TEXTS = st.text(st.characters(exclude_categories=('Cs',)))
TITLES = TEXTS.filter(lambda text: '\n' not in text)
SCORES = st.floats(allow_nan=False, allow_infinity=False)
PASSAGES = st.builds(Passage, TEXTS, TITLES, TEXTS, SCORES)
RESULTS = st.lists(st.lists(PASSAGES, max_size=4).map(tuple), max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(
        st.sampled_from(['result', 'document', 'contents', 'score', 'id',
                         'queries', 'topk', 'return_scores', 'x']),
        inside, max_size=4), max_leaves=12)


@given(RESULTS)
def test_results_come_back(results):
  body = wire.write_response(results, return_scores=True)
  assert wire.read_response(body, queries=len(results), top_k=4) == results


@given(RESULTS)
def test_results_without_scores_come_back_with_zeros(results):
  body = wire.write_response(results, return_scores=False)
  found = wire.read_response(body, queries=len(results), top_k=4)
  plain = lambda lists: [[(p.id, p.title, p.text) for p in passages]
                         for passages in lists]
  assert plain(found) == plain(results)
  assert all(p.score == 0 for passages in found for p in passages)


@given(st.lists(TEXTS, max_size=4), st.integers(1, 100))
def test_requests_come_back(texts, top_k):
  request = wire.read_request(wire.write_request(texts, top_k),
                              limits=wire.Limits(), default_top_k=3)
  assert request == wire.Request(tuple(texts), top_k, True)


@settings(max_examples=300)
@given(JSON | JSON.map(lambda item: {'result': [[{'document': item}]]}) |
       JSON.map(lambda item: {'result': [[item]]}))
def test_any_json_is_read_or_refused(record):
  body = json.dumps(record).encode()
  try:
    passages, = wire.read_response(body, queries=1, top_k=3)
  except wire.Malformed:
    pass
  else:
    for p in passages:
      assert isinstance(p.id + p.title + p.text, str) and '\n' not in p.title
      assert isinstance(p.score, float) and abs(p.score) < float('inf')
  try:
    request = wire.read_request(body, limits=wire.Limits(), default_top_k=3)
  except (wire.Malformed, wire.TooLarge):
    return
  assert 1 <= request.top_k <= 100
  assert all(isinstance(query, str) for query in request.queries)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(body):
  with pytest.raises(wire.Malformed):
    wire.read_response(body, queries=1, top_k=3)


def test_numbers_of_thousands_of_digits_are_refused():
  for number in ('1' * 400, '1' * 5000, '-' + '1' * 400, '1e999'):
    body = ('{"result": [[{"document": {"contents": "x"}, "score": %s}]]}'
            % number).encode()
    with pytest.raises(wire.Malformed):
      wire.read_response(body, queries=1, top_k=1)


def test_a_long_query_is_cut_and_half_a_character_is_read():
  read = lambda body: wire.read_request(
      body, limits=wire.Limits(query_chars=3), default_top_k=3).queries
  assert read(b'{"queries": ["abcd", "ab", ""]}') == ('abc', 'ab', '')
  assert read(b'{"queries": ["\\ud83d"]}') == ('\ud83d',)


@pytest.mark.parametrize('strange', [b'NaN', b'"\\ud83d"'])
def test_a_large_request_is_read_by_the_fast_reader_alone(strange):
  body = b'{"queries": ["a"], "x": %s, "y": "%s"}' % (strange, b'y' * 2**20)
  with pytest.raises(wire.Malformed, match='must be JSON: JSONDecodeError'):
    wire.read_request(body, limits=wire.Limits(), default_top_k=3)
  wire.read_request(body.replace(b'y' * 2**20, b''), limits=wire.Limits(),
                    default_top_k=3)
