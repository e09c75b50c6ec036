# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""wire: what is written is read again; what comes is read or refused."""

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from searchrl.search import corpus as corpora
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


@pytest.mark.parametrize('document', [
    {'contents': '"T"\r\nbody'}, {'contents': ' "T" \nbody'},
    {'contents': '\ufeff"T"\rbody'}, {'contents': 'T\nbody'},
    {'contents': '"T"\nbody', 'title': 'U'}, {'contents': '"T"'},
    {'contents': 'One line of text.', 'title': 'T'},
    {'contents': 'Two lines\nof text.', 'title': 'T\r\n'},
    {'contents': 'One line of text.', 'title': None},
    {'contents': 'A "b"\nx', 'title': 'A "b', 'text': 'x'},
    {'title': ' A  title ', 'text': 'x\r\ny'}], ids=str)
def test_a_document_is_read_as_a_line_of_a_corpus(document):
  document = {'id': '1', **document}
  body = json.dumps({'result': [[{'document': document, 'score': 0}]]}).encode()
  assert wire.read_response(body, queries=1, top_k=1) == [
      (corpora.parse(json.dumps(document).encode(), 'line 1'),)]


def test_a_title_that_search_r1s_server_takes_out_of_contents_stays_one():
  for first in ('"T"', 'T', 'the "T"', '"the "T""', '"T" of'):
    contents = f'{first}\nx\ny'
    document = {'title': contents.split('\n')[0].strip('"'), 'text': 'x\ny',
                'contents': contents}
    body = json.dumps({'result': [[document]]}).encode()
    (found,), = wire.read_response(body, queries=1, top_k=1)
    assert found.text == 'x\ny' and found.title.strip('"') == document['title']


def test_the_lines_of_a_title_from_a_server_are_joined():
  """A line of a corpus is refused, but a server sends what it finds."""
  for own in ({'text': 'x'}, {'contents': 'x'}):
    body = json.dumps({'result': [[{'id': 1, 'title': ' a\n b ', **own}]]})
    assert wire.read_response(body.encode(), queries=1, top_k=1) == [
        (Passage('1', 'a b', 'x'),)]


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
