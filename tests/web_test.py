# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""web: what a service's answers mean, where the key goes, and replays."""

import json
import logging
import resource
import signal
import urllib.parse

import faulty
import pytest
import tiny

from searchrl.search.remote import http_request
from searchrl.search.remote import transport
from searchrl.search.remote import web
from searchrl.search.remote import wire
from searchrl.trajectory import Passage, Query, SearchError

KEY = 'abc123SECRET'
QUICK = dict(deadline_secs=20.0, try_secs=1.0, backoff_secs=0.01,
             failures=100, rest_secs=0.05, pause_secs=5.0)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
  monkeypatch.setenv('KEY_OF_TEST', KEY)


def asked(path):
  return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(path).query))


def found_for(text, count=2):
  return tuple(Passage(f'https://x/{text}/{i}', f'{text} {i}', f'On {text}.')
               for i in range(count))


def body(path, _):
  return json.dumps({'organic_results': [
      {'title': p.title, 'link': p.id, 'snippet': p.text}
      for p in found_for(asked(path)['q'], 5)]}).encode()


def service(faults=()):
  return faulty.Server(faults, body)


def client(server, **options):
  return web.web(key_env='KEY_OF_TEST', url=server.url, **QUICK | options)


def ask(search, *texts, top_k=2):
  return search([Query(text, top_k, tiny.question()) for text in texts])


def test_queries_are_asked_once_each_and_answered_in_order():
  with service() as server:
    assert ask(client(server), 'a', 'b c', '', 'a', 'é&q=x') == [
        found_for('a'), found_for('b c'), (), found_for('a'),
        found_for('é&q=x')]
    sent = [asked(path) for path, _, _ in server.requests]
  assert sorted(s['q'] for s in sent) == ['a', 'b c', 'é&q=x']
  for fields in sent:
    assert fields | {'q': ''} == {
        'engine': 'google', 'q': '', 'num': '2', 'api_key': KEY}


@pytest.mark.parametrize('record, expected', [
    ({}, []),
    ({'error': "Google hasn't returned any results for this query."}, []),
    ({'organic_results': [{}]}, [('No title.', 'No snippet available.')]),
    ({'related_questions': [{'question': 'Who?', 'snippet': 'He.'}],
      'organic_results': [{'title': 'O', 'snippet': 'o'}],
      'answer_box': {'title': 'B', 'answer': '42'}},
     [('B', '42'), ('O', 'o'), ('Who?', 'He.')]),
    ({'organic_results': [{'title': f'a\n {i}', 'snippet': 's'}
                          for i in range(9)]},
     [('a 0', 's'), ('a 1', 's'), ('a 2', 's')]),
])
def test_what_an_answer_means(record, expected):
  passages = web.read_results(json.dumps(record).encode(), 3)
  assert [(p.title, p.text) for p in passages] == expected
  assert len({p.id for p in passages}) == len(passages)


@pytest.mark.parametrize('bytes_', [
    b'', b'[]', b'{"organic_results": {}}', b'{"organic_results": [3]}',
    b'{"organic_results": [{"title": 3}]}', b'{"organic_results": [',
    b'{"answer_box": "x"}'])
def test_what_is_no_answer_is_refused(bytes_):
  with pytest.raises(wire.Malformed):
    web.read_results(bytes_, 3)


@pytest.mark.parametrize('fault, kind, tries', [
    ('500', 'unavailable', 3), ('429', 'unavailable', 3), ('401', 'refused', 1),
    ('never answers', 'timeout', 3), ('closes at once', 'unavailable', 3),
    ('redirects', 'refused', 1), ('not JSON', 'bad_response', 1),
    ('truncated JSON', 'bad_response', 1)])
def test_the_key_is_in_no_error_and_no_log(fault, kind, tries, caplog):
  caplog.set_level(logging.DEBUG)
  with service([fault] * tries) as server:
    search = client(server)
    error, = ask(search, 'a')
    assert error.kind == kind and len(server.requests) == tries
    good, = ask(search, 'b')
  assert good == found_for('b')
  assert KEY not in caplog.text and KEY not in repr(error)
  assert KEY not in repr(vars(search))


def test_a_recorded_run_is_replayed_without_the_service(tmp_path, monkeypatch):
  tape = str(tmp_path / 'd' / 'tape.jsonl')
  with service() as server:
    search = client(server, mode='record', tape=tape)
    first = ask(search, 'a', 'b', '\ud800')
    assert ask(search, 'a', 'c')[0] == first[0]
    assert len(server.requests) == 4
    ask(client(server, mode='record', tape=tape), 'a', 'b', 'c', 'd')
    assert len(server.requests) == 5  # what is recorded is not asked again
  assert KEY not in (tmp_path / 'd' / 'tape.jsonl').read_text()
  monkeypatch.delenv('KEY_OF_TEST')
  replay = web.web(mode='replay', tape=tape, url='http://nowhere.invalid')
  assert ask(replay, 'a', 'b', '\ud800', 'd') == [*first, found_for('d')]
  error, = ask(replay, 'new')
  assert error.kind == 'not_recorded'
  assert ask(replay, 'a', top_k=3)[0].kind == 'not_recorded'
  replay.wait()
  assert replay.pop() == {}


def test_failures_are_not_recorded(tmp_path):
  tape = str(tmp_path / 'tape.jsonl')
  with service(['401']) as server:
    search = client(server, mode='record', tape=tape)
    assert isinstance(ask(search, 'a')[0], SearchError)
    assert ask(search, 'a') == [found_for('a')]


def test_a_torn_last_line_is_left_out_and_written_again(tmp_path):
  tape = tmp_path / 'tape.jsonl'
  with service() as server:
    ask(client(server, mode='record', tape=str(tape)), 'a')
    whole = tape.read_bytes()
    tape.write_bytes(whole + whole[:-9])
    replay = web.web(mode='replay', tape=str(tape))
    assert ask(replay, 'a') == [found_for('a')]
    ask(client(server, mode='record', tape=str(tape)), 'b')
  replay = web.web(mode='replay', tape=str(tape))
  assert ask(replay, 'a', 'b') == [found_for('a'), found_for('b')]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path):
  path = tmp_path / 'tape.jsonl'
  tape = web.Tape(path, repair=True)
  passages = (Passage('p', 'T' * 5000, 'text'),)
  tape.add(('a', 1), passages)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  try:  # as a full disk: a part of the line can be written
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    with pytest.raises(OSError, match='File too large'):
      tape.add(('b', 1), passages)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)
  tape.add(('c', 1), passages)
  assert web.Tape(path).known == {('a', 1): passages, ('c', 1): passages}


@pytest.mark.parametrize('line', [
    '{', '[]', '{"query": "a"}', '{"query": "a", "top_k": 1, "passages": [1]}',
    '[' * 100_000,
    *('{"query": "a", "top_k": 1, "passages": [{"id": "a", "title": %s, '
      '"text": "b", "score": %s}]}' % pair
      for pair in (('null', '0'), ('7', '0'), ('"T"', '"x"')))])
def test_a_broken_tape_is_refused_with_its_line(line, tmp_path):
  tape = tmp_path / 'tape.jsonl'
  tape.write_text('{"query": "a", "top_k": 1, "passages": []}\n' + line + '\n')
  with pytest.raises(ValueError, match='line 2 of .*Remove the line'):
    web.web(mode='replay', tape=str(tape))


@pytest.mark.parametrize('options, message', [
    (dict(mode='cached'), 'mode must be one of'),
    (dict(mode='record'), 'must have search.options.tape'),
    (dict(tape='x'), 'must have search.options.tape'),
    (dict(key_env='NOT_SET_ANYWHERE'), 'NOT_SET_ANYWHERE is not set'),
    (dict(connections=0), 'connections must be'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    web.web(**options)


def test_a_replay_needs_its_tape(tmp_path):
  with pytest.raises(FileNotFoundError, match="Record it with mode='record'"):
    web.web(mode='replay', tape=str(tmp_path / 'no'))


def proxied(monkeypatch, environment, no_proxy='', **options):
  """Asks a host that does not exist; returns what the proxy was asked."""
  for name in ('http_proxy', 'https_proxy', 'no_proxy', 'all_proxy'):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(name.upper(), raising=False)
  monkeypatch.setenv('HTTP_PROXY', environment)
  monkeypatch.setenv('NO_PROXY', no_proxy)
  search = web.web(key_env='KEY_OF_TEST', url='http://search.invalid/s',
                   **QUICK | dict(tries=1) | options)
  return ask(search, 'a')[0]


def test_the_web_is_searched_through_the_proxy(monkeypatch):
  with service() as server:
    proxy = server.url.rpartition('/')[0]
    assert proxied(monkeypatch, proxy) == found_for('a')
    assert proxied(monkeypatch, '', proxy=proxy) == found_for('a')
    assert server.requests[0][0].startswith('http://search.invalid/s?')
    sent = len(server.requests)
    for options in (dict(no_proxy='search.invalid'), dict(no_proxy='*'),
                    dict(proxy='none')):
      failure = proxied(monkeypatch, proxy, **options)
      assert isinstance(failure, SearchError), failure
    assert len(server.requests) == sent
    monkeypatch.delenv('NO_PROXY')
    monkeypatch.setenv('HTTP_PROXY', 'http://127.0.0.1:9')
    plain = transport.Transport(
        (server.url,), transport.RetryPolicy(**QUICK), response_bytes=2**20,
        headers={})  # as /retrieve: no proxy, whatever the environment has
    assert plain.call(lambda body: body, fields={'q': 'a'})
  monkeypatch.setenv('ALL_PROXY', 'all:2')
  assert [http_request.environment_proxy(f'{scheme}://a.invalid')
          for scheme in ('http', 'https')] == [
              'http://127.0.0.1:9', 'http://all:2']


def test_a_proxy_of_another_kind_is_refused(monkeypatch):
  with pytest.raises(ValueError, match="proxy, .* but its scheme is 'socks5'"):
    web.web(key_env='KEY_OF_TEST', proxy='socks5://me:secret@host:1')
