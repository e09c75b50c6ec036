# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""remote: what good servers find; what becomes of every fault of bad ones."""

import contextlib
import json
import threading
import time

import faulty
import pytest
import servers
import tiny

from searchrl.search.remote import remote
from searchrl.search.remote import wire
from searchrl.trajectory import Passage, Query, SearchError

QUICK = dict(deadline_secs=20.0, try_secs=1.0, tries=3, backoff_secs=0.01,
             failures=100, rest_secs=0.05, pause_secs=5.0)


def query(text='river', top_k=2):
  return Query(text, top_k, tiny.question())


def client(*urls, **options):
  return remote.remote(urls=urls, **QUICK | options)


def good(text, top_k=2):
  return tuple(Passage(f'{text}-{i}', f'Title {i}', f'On {text}.', 1 / (i + 1))
               for i in range(top_k))


def test_results_come_in_the_order_of_the_queries():
  with faulty.Server() as server:
    search = client(server.url)
    queries = [query('a', 3), query('b', 1), query('a', 1), query('c', 3)]
    assert search(queries) == [good('a', 3), good('b', 1), good('a', 1),
                               good('c', 3)]
    assert search([]) == []


def test_the_request_is_that_of_search_r1():
  with faulty.Server() as server:
    client(server.url)([query('a'), query('é')])
    (path, headers, body), = server.requests
  assert path == '/retrieve' and headers['Content-Type'] == 'application/json'
  assert json.loads(body) == {
      'queries': ['a', 'é'], 'topk': 2, 'return_scores': True}


def test_blank_queries_are_not_sent_and_equal_ones_once():
  with faulty.Server() as server:
    found = client(server.url)(
        [query(' \n'), query('a'), query('b', 0), query('a')])
    assert found == [(), good('a'), (), good('a')]
    assert server.queries == ['a']


def test_many_queries_are_split_and_long_ones_cut():
  with faulty.Server() as server:
    texts = [f'q{i}' for i in range(7)]
    found = client(server.url, batch=3)([query(t) for t in texts])
    assert found == [good(t) for t in texts]
    sizes = [len(json.loads(body)['queries'])
             for _, _, body in server.requests]
    assert sorted(sizes) == [1, 3, 3] and sorted(server.queries) == texts
    search = client(server.url, query_chars=5)
    assert search([query('abcdefgh'), query('abcde'), query('abcdeX')]) == [
        good('abcde')] * 3
    assert search.pop()['search/remote/cut_queries'] == 2
    assert search.pop()['search/remote/cut_queries'] == 0


def test_no_request_is_larger_than_a_server_takes():
  with faulty.Server() as server:
    texts = [f'{i:03d}' + '\u6771' * 1990 for i in range(400)]  # 2.3 MB
    search = client(server.url, try_secs=20.0)  # none is asked again
    assert len(search([query(t, 1) for t in texts])) == 400
    sizes = [len(body) for _, _, body in server.requests]
    assert len(sizes) == 3 and max(sizes) <= wire.Limits().body_bytes


@pytest.mark.parametrize('text', ['\x00', '\ud800', '"\\', '😀', '</search>'])
def test_no_text_is_too_strange(text):
  with faulty.Server() as server:
    found, = client(server.url)([query(text)])
  assert len(found) == 2


@pytest.mark.parametrize('lists, expected', [
    ([[{'document': {'contents': '"T"\nx'}, 'score': 2}]], [('T', 'x', 2.0)]),
    ([[{'document': {'id': 7, 'title': 'U', 'text': 'x', 'contents': 'U\ny'},
        'score': 0.5}]], [('U', 'y', 0.5)]),  # Lucene's raw documents
    ([[{'document': {'contents': f'"{i}"\nx'}} for i in range(5)]],
     [('0', 'x', 0.0), ('1', 'x', 0.0)]),  # web: no scores, and too many
    ([[{'id': 'a', 'contents': 'only'}]], [('only', '', 0.0)]),  # bare
    ([[]], []),
])
def test_dialects_of_other_servers(lists, expected):
  body = lambda path, asked: json.dumps({'result': lists}).encode()
  with faulty.Server(body=body) as server:
    found, = client(server.url)([query()])
  assert [(p.title, p.text, p.score) for p in found] == expected
  assert len({p.id for p in found}) == len(found)


@pytest.mark.parametrize('fault', [*faulty.BODIES, *faulty.RAW])
def test_a_malformed_answer_is_refused_whole_and_not_asked_again(fault):
  with faulty.Server([fault]) as server:
    search = client(server.url)
    found = search([query('a'), query('b')])
    assert [error.kind for error in found] == ['bad_response'] * 2
    assert len(server.requests) == 1
    assert search([query('a')]) == [good('a')]  # and the client goes on


@pytest.mark.parametrize('fault', [
    '500', '503', '504', '408', 'busy', 'closes early', 'closes at once',
    'never answers', 'drips', 'drips headers'])
def test_what_may_pass_is_tried_again(fault):
  with faulty.Server([fault]) as server:
    search = client(server.url)
    assert search([query('a')]) == [good('a')]
    assert len(server.requests) == 2
    assert search.pop()['search/remote/retries'] == 1


@pytest.mark.parametrize('fault, kind', [
    ('500', 'unavailable'), ('429', 'unavailable'),
    ('closes early', 'unavailable'), ('closes at once', 'unavailable'),
    ('408', 'timeout'), ('504', 'timeout'),
    ('never answers', 'timeout'), ('drips', 'timeout')])
def test_what_does_not_pass_is_typed_after_all_tries(fault, kind):
  with faulty.Server([fault] * 3) as server:
    search = client(server.url)
    error, = search([query('a')])
    assert isinstance(error, SearchError) and error.kind == kind
    assert len(server.requests) == 3
  assert search.pop() == {
      'search/remote/tries': 1, 'search/remote/retries': 2,
      'search/remote/failed_calls': 1, 'search/remote/pauses': 0,
      'search/remote/servers_out': 0, 'search/remote/cut_queries': 0,
      'search/remote/request_queries': 512}


def test_a_closed_port():
  error, = client(faulty.unused_url())([query()])
  assert error.kind == 'unavailable'


@pytest.mark.parametrize('fault', [
    'redirects', '400', '401', '404', '413', '302'])
def test_what_is_refused_is_not_asked_again_and_no_redirect_followed(fault):
  with faulty.Server([fault]) as server:
    error, = client(server.url)([query()])
    assert error.kind == 'refused' and len(server.requests) == 1


def test_an_endless_answer_is_cut_off():
  with faulty.Server(['talks for ever']) as server:
    error, = client(server.url, response_bytes=10_000, try_secs=5.0)([query()])
    assert error == SearchError(
        'bad_response', error.detail) and '10000 bytes' in error.detail


def test_the_deadline_holds_over_all_tries():
  clock = Clock()
  with faulty.Server(['busy'] * 9) as server:  # asks for a second each time
    search = client(server.url, tries=9, deadline_secs=3.5, wiring=dict(
        clock=clock, sleep=clock.sleep))
    error, = search([query()])
    assert error.kind == 'unavailable' and clock.now <= 3.5
    assert len(server.requests) == 4


def test_a_deadline_covers_headers_and_frees_the_connection():
  with faulty.Server(['drips headers'] * 9) as server:
    found = []
    search = client(server.url, tries=1, try_secs=0.2, deadline_secs=0.3)
    asking = threading.Thread(
        target=lambda: found.extend(search([query()])), daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive(), 'it is held for ever'
    assert [error.kind for error in found] == ['timeout']
    assert server.hung_up.wait(20)


class Clock:
  """Seconds that pass only in `sleep`."""

  def __init__(self):
    self.now, self.slept, self.then = 0.0, [], lambda: None

  def __call__(self):
    return self.now

  def sleep(self, secs):
    self.now += secs
    self.slept.append(secs)
    self.then()


def test_waits_between_tries_double_and_jitter():
  firsts, seconds = [], []
  for _ in range(20):
    clock = Clock()
    with faulty.Server(['500'] * 3) as server:
      client(server.url, backoff_secs=0.2, wiring=dict(
          clock=clock, sleep=clock.sleep))([query()])
    first, second = clock.slept
    firsts.append(first)
    seconds.append(second)
  assert all(0.1 <= x <= 0.3 for x in firsts) and len(set(firsts)) == 20
  assert all(0.2 <= x <= 0.6 for x in seconds)


def test_requests_go_to_all_servers_and_retries_to_another():
  with faulty.Server() as one, faulty.Server() as two:
    search = client(one.url, two.url)
    for _ in range(6):
      search([query()])
    assert len(one.requests) == len(two.requests) == 3
  with faulty.Server(['500'] * 9) as bad, faulty.Server() as fine:
    search = client(bad.url, fine.url)
    assert [search([query('a')]) for _ in range(4)] == [[good('a')]] * 4
    assert len(fine.requests) == 4


def test_connections_are_used_again():
  with faulty.Server() as server:
    search = client(server.url)
    ports = set()
    original = server.body
    server.body = lambda path, body: (
        ports.add(threading.get_ident()), original(path, body))[1]
    for _ in range(5):
      search([query()])
  assert len(ports) == 1  # the server has a thread for each connection


class TestReplicas:

  def asked(self, *abouts):
    with contextlib.ExitStack() as stack:
      all_of_them = [stack.enter_context(faulty.Server()) for _ in abouts]
      for server, about in zip(all_of_them, abouts):
        server.about = about
      return client(*(server.url for server in all_of_them))(
          [query('a')] * 3)

  @pytest.mark.parametrize('fact', ['corpus', 'index'])
  def test_servers_of_different_digests_are_refused_at_the_start(self, fact):
    same = {'status': 'ok', 'corpus': 'c' * 64, 'index': 'i' * 64}
    with pytest.raises(ValueError, match=(
        f'search the same, but the {fact} of 127.0.0.1:.* is {fact[0] * 16}, '
        'and that of 127.0.0.1:.* is ddd')):
      self.asked(same, same, same | {fact: 'd' * 64})

  @pytest.mark.parametrize('other', [
      {'corpus': 'c' * 64}, {'status': 'ok'}, None, [], 'x', {'corpus': 3},
      {'corpus': 'c' * 64, 'engine': 'other', 'passages': 3}])
  def test_others_are_asked(self, other):
    assert self.asked({'corpus': 'c' * 64}, other, None) == [good('a')] * 3

  def test_one_that_is_not_up_is_none_to_compare(self):
    with faulty.Server() as server:
      found = client(server.url, faulty.unused_url())([query('a')])
      assert found == [good('a')]

  def test_our_own_servers_show_what_is_compared(self):
    with (servers.serving(about={'corpus': 'a' * 64}) as one,
          servers.serving(about={'corpus': 'b' * 64}) as two):
      with pytest.raises(ValueError, match='the corpus of 127.0.0.1'):
        client(*(f'{server.address}/retrieve' for server in (one, two)))


class TestBreaker:

  def broken(self, server, clock, **options):
    warnings = []
    search = client(server.url, tries=1, failures=3, rest_secs=10.0,
                    pause_secs=100.0, wiring=dict(
                        clock=clock, sleep=clock.sleep, warn=warnings.append),
                    **options)
    return search, warnings

  def test_calls_fail_fast_until_the_server_has_rested(self):
    clock = Clock()
    with faulty.Server(['500'] * 4) as server:
      search, _ = self.broken(server, clock)
      kinds = [search([query()])[0].kind for _ in range(5)]
      assert kinds == ['unavailable'] * 3 + ['circuit_open'] * 2
      assert len(server.requests) == 3
      assert search.pop()['search/remote/servers_out'] == 1
      clock.now += 10.5  # one call tries it; it fails again
      kinds = [search([query()])[0].kind for _ in range(2)]
      assert kinds == ['unavailable', 'circuit_open']
      clock.now += 10.5
      assert search([query('a')]) == [good('a')]
      assert search([query('b')]) == [good('b')]
      assert search.pop()['search/remote/servers_out'] == 0

  def test_a_success_resets_the_failures(self):
    with faulty.Server(['500', '500', 'ok', '500', '500', 'ok']) as server:
      search, _ = self.broken(server, Clock())
      assert [isinstance(search([query()])[0], SearchError)
              for _ in range(6)] == [True, True, False] * 2

  def test_a_broken_server_is_left_out_where_another_answers(self):
    clock = Clock()
    with faulty.Server(['500'] * 99) as bad, faulty.Server() as fine:
      search = client(bad.url, fine.url, tries=2, failures=2, rest_secs=10.0,
                      wiring=dict(clock=clock, sleep=clock.sleep))
      for _ in range(12):
        assert search([query('a')]) == [good('a')]
      assert len(bad.requests) == 2
      search.wait()  # not paused: no call has failed
      assert search.pop()['search/remote/pauses'] == 0

  def test_wait_returns_at_once_where_all_is_well(self):
    clock = Clock()
    with faulty.Server(['ok', '500', 'ok', 'ok']) as server:
      search, warnings = self.broken(server, clock)
      search([query()])
      search.wait()
      assert len(server.requests) == 1
      search([query()])
      search.wait()  # asks whether it works again: it does
      search.wait()
      assert not warnings and not clock.slept and len(server.requests) == 3

  def test_wait_pauses_until_a_server_is_back(self):
    clock = Clock()
    with faulty.Server(['500'] * 6) as server:
      search, warnings = self.broken(server, clock)
      for _ in range(3):
        search([query()])
      search.wait()  # three more failures, after 1, 2 and 4 seconds
      assert clock.slept == [1, 2, 4] and len(server.requests) == 7
      paused, resumed = warnings
      assert 'paused' in paused and 'after 7 s' in resumed
      assert search([query('a')]) == [good('a')]
      assert search.pop()['search/remote/pauses'] == 1

  def test_wait_ends_with_an_error_that_names_a_remedy(self):
    clock = Clock()
    with faulty.Server(['500'] * 99) as server:
      search, warnings = self.broken(server, clock)
      for _ in range(3):
        search([query()])
      with pytest.raises(ConnectionError, match='pause_secs=100 s.*Start its'):
        search.wait()
      assert clock.now == 100 and max(clock.slept) == 30 and len(warnings) == 1

  def test_what_no_wait_mends_ends_at_once(self):
    clock = Clock()
    with faulty.Server(['401'] * 9) as server:
      search, warnings = self.broken(server, clock)
      search([query()])
      with pytest.raises(ConnectionError, match='status 401.*Correct search'):
        search.wait()
      assert not clock.slept and not warnings


def answers(asked):
  return json.dumps({'result': faulty.answer(
      asked['queries'], asked['topk'])}).encode()


class Busy:
  """Answers one request after the other, each query of it in `secs`."""

  def __init__(self, secs):
    self.secs, self.lock = secs, threading.Lock()

  def __call__(self, path, body):
    asked = json.loads(body)
    with self.lock:
      time.sleep(self.secs * len(asked['queries']))
    return answers(asked)


class Slow:
  """Answers 'test' at once, other queries after `secs`."""

  def __init__(self, secs):
    self.secs = secs

  def __call__(self, path, body):
    asked = json.loads(body)
    time.sleep(self.secs * (asked['queries'] != ['test']))
    return answers(asked)


class TestATurnOfManyQueries:
  TEXTS = [f'q{i}' for i in range(320)]

  def turn(self):
    return [query(text) for text in self.TEXTS]

  def test_requests_that_fail_together_open_no_circuit(self):
    with faulty.Server(['never answers'] * 5) as server:
      search = client(server.url, batch=64, failures=2, try_secs=0.5)
      assert search(self.turn()) == [good(text) for text in self.TEXTS]
      assert len(server.requests) == 15  # five, and the halves of each
      metrics = search.pop()
      assert metrics['search/remote/tries'] == 5
      assert metrics['search/remote/retries'] == 10
      assert metrics['search/remote/failed_calls'] == 0

  def test_a_server_too_slow_for_it_gets_smaller_requests_until_all_is_there(
      self):
    slow = Busy(0.003)  # a request of 64 alone would be in time
    with faulty.Server(body=slow) as server:
      search = client(server.url, batch=64, failures=5, try_secs=0.4)
      assert search(self.turn()) == [good(text) for text in self.TEXTS]
      metrics = search.pop()
      assert metrics['search/remote/retries'] > 0
      assert metrics['search/remote/request_queries'] < 64
      assert search(self.turn()) == [good(text) for text in self.TEXTS]
      search.wait()  # at once

  def test_requests_grow_again_once_answers_are_quick(self):
    with faulty.Server(['never answers'] * 5) as server:
      search = client(server.url, batch=64, try_secs=0.5)
      search(self.turn())
      search(self.turn())
      search(self.turn())
      assert search.pop()['search/remote/request_queries'] == 64

  def test_one_query_that_breaks_the_server_costs_itself_alone(self):
    def body(path, asked):
      if b'"q100"' in asked:
        raise ValueError
      return answers(json.loads(asked))

    with faulty.Server(body=body) as server:
      server.fails = '500'
      search = client(server.url, batch=64, failures=5, tries=2)
      found = search(self.turn())
      failed, = [i for i, one in enumerate(found)
                 if isinstance(one, SearchError)]
      assert failed == 100 and found[100].detail.endswith('status 500')
      search.wait()  # and the run goes on

  def test_a_server_that_takes_fewer_queries_gets_fewer(self):
    def body(path, asked):
      if len(json.loads(asked)['queries']) > 20:
        raise ValueError
      return answers(json.loads(asked))

    with faulty.Server(body=body) as server:
      server.fails = '413'
      assert client(server.url, batch=64)(self.turn()) == [
          good(text) for text in self.TEXTS]

  def paused(self, server, clock, **options):
    warnings = []
    search = client(
        server.url, batch=64, **dict(tries=1, try_secs=0.1, pause_secs=5.0)
        | options, wiring=dict(
            clock=clock, sleep=clock.sleep, warn=warnings.append))
    return search, warnings

  def test_a_run_is_not_resumed_because_one_query_is_answered(self):
    slow, clock = Slow(0.5), Clock()
    with faulty.Server(body=slow) as server:
      search, warnings = self.paused(server, clock, failures=3)
      search([query('test')])
      assert {error.kind for error in search(self.turn())} <= {
          'timeout', 'circuit_open'}
      with pytest.raises(ConnectionError, match=(
          r'pause_secs=5 s, but failed last with .*lower rollout.max_num_seqs')):
        search.wait()

  def test_a_run_is_resumed_once_as_much_is_answered_as_failed(self):
    slow, clock = Slow(0.5), Clock()
    clock.then = lambda: len(clock.slept) == 3 and setattr(slow, 'secs', 0.0)
    with faulty.Server(body=slow) as server:
      search, warnings = self.paused(server, clock, failures=3, pause_secs=99.0)
      search(self.turn())
      search.wait()
      paused, resumed = warnings
      assert 'paused' in paused and 'goes on' in resumed
      assert search(self.turn()) == [good(text) for text in self.TEXTS]

  def test_after_a_pause_all_servers_are_asked_again(self):
    clock = Clock()
    with faulty.Server(['500'] * 8) as one, faulty.Server(['500'] * 8) as two:
      search = client(one.url, two.url, batch=64, tries=1, failures=2,
                      try_secs=20.0, rest_secs=9.0, pause_secs=99.0,
                      wiring=dict(clock=clock, sleep=clock.sleep,
                                  warn=lambda text: None))
      search(self.turn())
      one.faults.clear()
      two.faults.clear()
      search.wait()
      before = [len(one.requests), len(two.requests)]
      assert search(self.turn()) == [good(text) for text in self.TEXTS]
      assert len(one.requests) > before[0] and len(two.requests) > before[1]
      assert search.pop()['search/remote/servers_out'] == 0

  def test_what_a_server_refuses_in_this_size_alone_ends_the_run(self):
    def body(path, asked):
      if b'test' not in asked:
        raise ValueError
      return answers(json.loads(asked))

    clock = Clock()
    with faulty.Server(body=body) as server:
      server.fails = '403'
      search, warnings = self.paused(server, clock)
      search(self.turn())
      with pytest.raises(ConnectionError, match=(
          r'refuses it \(320 of 320 at a time failed.*status 403')):
        search.wait()


def test_the_token_is_sent_and_never_shown(monkeypatch):
  monkeypatch.setenv('TOKEN_OF_TEST', 'very secret')
  with faulty.Server(['ok', '401']) as server:
    search = client(server.url, token_env='TOKEN_OF_TEST')
    search([query()])
    assert server.requests[0][1]['Authorization'] == 'Bearer very secret'
    error, = search([query()])
  assert 'secret' not in repr(error) + repr(vars(search))
  monkeypatch.setenv('TOKEN_OF_TEST', 'secret\nX: 1')
  with pytest.raises(ValueError, match='printable ASCII') as refused:
    client(server.url, token_env='TOKEN_OF_TEST')
  assert 'secret' not in str(refused.value)


@pytest.mark.parametrize('options, message', [
    (dict(urls=()), 'tuple of addresses'),
    (dict(urls='http://a/retrieve'), 'tuple of addresses'),
    (dict(urls=('ftp://a/b',)), 'http or https'),
    (dict(urls=('http://me:pw@a/b',)), 'without a user or password'),
    (dict(urls=('http://a:x/b',)), 'http or https'),
    (dict(urls=('http://a',), batch=0), 'batch must be at least 1'),
    (dict(urls=('http://a',), tries=0), 'tries must be at least 1'),
    (dict(urls=('http://a',), deadline_secs=0), 'deadline_secs must be above'),
    (dict(urls=('http://a',), try_secs=float('nan')), 'try_secs must be above'),
    (dict(urls=('http://a',), token_env='NOT_SET_ANYWHERE'), 'is not set'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    remote.remote(**options)
