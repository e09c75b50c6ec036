# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""search_server: Search-R1's requests answered, others refused; under load."""

import concurrent.futures
import contextlib
import http.client
import pathlib
import resource
import subprocess
import sys
import threading

import pytest
import servers
from servers import ask
import tiny

from searchrl.search.corpus import Corpus
from searchrl.search import engines
from searchrl.search.remote import remote
from searchrl.search.remote import wire
from searchrl.serving import search_server
from searchrl.trajectory import Passage, Query, SearchError

CORPUS = Corpus(tuple(
    Passage(str(i), f'Place {i}', f'{name} "quoted" <tag> 東 river {i % 7}')
    for i, name in enumerate('Tarn Garonne Lot Aude Agout Viaur'.split() * 5)))
TEXTS = ('Tarn river', 'the Lot', 'nothing of it', '', 'place 7', 'Aude 3')


def engine():
  return engines.make('bm25', CORPUS)


def serving(search=None, warn=print, **options):
  return servers.serving(search or engine(), warn, **options)


def direct(texts, top_k):
  return engine()([Query(t, top_k, tiny.question()) for t in texts])


@pytest.mark.parametrize('count', [1, 2, 3, 6])
@pytest.mark.parametrize('scored', [True, False])
def test_both_forms_of_search_r1s_answer(count, scored):
  # Two queries without scores are where Search-R1's own server mixes lists.
  texts = list(TEXTS[:count])
  with serving() as server:
    status, headers, found = ask(
        server, queries=texts, topk=2, return_scores=scored)
  documents = [[{'id': p.id, 'contents': f'"{p.title}"\n{p.text}'}
                for p in passages] for passages in direct(texts, 2)]
  scores = [[p.score for p in passages] for passages in direct(texts, 2)]
  if scored:
    documents = [[{'document': d, 'score': s} for d, s in zip(*pair)]
                 for pair in zip(documents, scores)]
  assert status == 200 and headers['Content-Type'] == 'application/json'
  assert found == {'result': documents}


@pytest.mark.parametrize('given', [{}, {'topk': None}, {'topk': 0}])
def test_without_topk_the_servers_default_holds(given):
  with serving(top_k=4) as server:
    _, _, found = ask(server, queries=['river'], **given)
  assert len(found['result'][0]) == 4


def test_our_client_finds_what_the_engine_finds():
  queries = [Query(t, k, tiny.question()) for t in TEXTS for k in (1, 3, 0)]
  with serving() as server:
    search = remote.remote(urls=(f'{server.address}/retrieve',))
    assert search(queries) == engine()(queries)


@pytest.mark.parametrize('record, status, message', [
    (dict(body=b'{'), 400, 'JSON'),
    (dict(body=b''), 400, 'JSON'),
    (dict(body=b'[' * 50_000), 400, 'JSON'),
    (dict(body=b'[]'), 400, 'object'),
    (dict(body=b'\xff'), 400, 'JSON'),
    (dict(), 400, 'queries'),
    (dict(queries='river'), 400, 'queries'),
    (dict(queries=['a', 3]), 400, 'queries'),
    (dict(queries=['a'], topk='3'), 400, 'topk'),
    (dict(queries=['a'], topk=-1), 400, 'topk'),
    (dict(queries=['a'], topk=True), 400, 'topk'),
    (dict(queries=['a'], topk=1.5), 400, 'topk'),
    (dict(queries=['a'], return_scores='no'), 400, 'return_scores'),
    (dict(queries=['a'] * 4097), 413, 'at most 4096, but 4097'),
    (dict(queries=['a'], topk=101), 413, 'at most 100, but 101'),
    (dict(body=b' ' * (2**24 + 1)), 413, 'at most 16777216 bytes'),
    (dict(path='/rerank', queries=['a']), 404, '/retrieve'),
    (dict(path='/health', queries=['a']), 404, '/retrieve'),
    (dict(path='/retrieve', method='GET'), 405, 'no such page'),
    (dict(path='/retrieve', method='PUT'), 405, 'no such page'),
    (dict(path='/retrieve', method='OPTIONS'), 405, 'no such page'),
    (dict(path='/', method='GET'), 404, 'no such page'),
    (dict(path='/health/', method='GET'), 404, 'no such page'),
])
def test_what_is_refused(record, status, message):
  with serving() as server:
    got, _, found = ask(server, **record)
    assert got == status and message in found['error']
    assert ask(server, queries=['river'])[0] == 200  # and it goes on


def bodies(*requests):
  with serving() as server:
    return [servers.send(server, servers.post(
        body, b'Content-Length: %d' % len(body), b'Connection: close')
                         ).partition(b'\r\n\r\n')[2] for body in requests]


def test_bodies_to_the_byte():
  assert bodies(
      b'{"queries": ["Lot 2"], "topk": 1}',
      b'{"queries": ["Lot 2", "zzz"], "topk": 1, "return_scores": true}',
      b'{"queries": []}', b'{', b'{"queries": ["a"], "topk": 101}') == [
          b'{"result":[[{"id":"2","contents":"\\"Place 2\\"\\nLot \\"quoted\\"'
          b' <tag> \xe6\x9d\xb1 river 2"}]]}',
          b'{"result":[[{"document":{"id":"2","contents":"\\"Place 2\\"\\nLot '
          b'\\"quoted\\" <tag> \xe6\x9d\xb1 river 2"},"score":%s}],[]]}' % repr(
              direct(['Lot 2'], 1)[0][0].score).encode(),
          b'{"result":[]}',
          b'{"error": "the body must be JSON: JSONDecodeError."}',
          b'{"error": "topk must be at most 100, but 101 came."}']


def test_a_turn_of_all_rollouts_of_search_r1_is_one_request():
  calls = []

  def search(queries):
    calls.append(len(queries))
    return servers.echo(queries)

  texts = [f'query {i} ' + 'of some length ' * 9 for i in range(2560)]
  texts[7] = 'query 7 ' + 'without an end ' * 20_000
  with serving(search) as server:
    status, _, found = ask(server, queries=texts, topk=3)
    text = ask(server, '/metrics', 'GET')[2]
  assert status == 200
  assert [item['id'] for item, in found['result']] == [
      text[:2000] for text in texts]
  assert calls == [512] * 5  # in batches of the engine's size
  assert 'search_cut_queries_total 1.0' in text


@pytest.mark.parametrize('text', ['a' * 2000, '東' * 600])
def test_a_turn_of_long_queries_only_is_one_request(text):
  texts = [f'{i:04d}' + text for i in range(4096)]
  with serving(servers.echo) as server:
    status, _, found = ask(server, queries=texts)  # in ASCII, as requests does
  assert status == 200
  assert [item['id'] for item, in found['result']] == [
      text[:2000] for text in texts]


def test_long_queries_are_cut_and_counted_and_the_others_are_answered():
  with serving(servers.echo) as server:
    status, _, found = ask(server, queries=['a' * 2001, 'b', 'c' * 2000])
    ask(server, queries=['d' * 5000])
    text = ask(server, '/metrics', 'GET')[2]
  assert status == 200
  assert [item['id'] for item, in found['result']] == [
      'a' * 2000, 'b', 'c' * 2000]
  assert 'search_cut_queries_total 2.0' in text


def test_head_is_get_without_a_body():
  with serving() as server:
    status, headers, found = ask(server, '/health', 'HEAD')
    assert (status, found) == (200, '') and headers['Content-Length'] == '16'


def test_health_asks_the_engine_and_names_the_corpus():
  broken = threading.Event()

  def search(queries):
    if broken.is_set():
      raise OSError('the disk is gone')
    return servers.echo(queries)

  about = {'engine': 'bm25', 'corpus': 'abc'}
  with serving(search, about=about) as server:
    assert ask(server, '/health', 'GET')[::2] == (
        200, {'status': 'ok', **about})
    broken.set()
    assert ask(server, queries=['a'])[0] == 503
    server._answered = float('-inf')  # long ago
    assert ask(server, queries=[])[0] == 200  # which does not ask the engine
    status, _, found = ask(server, '/health', 'GET')
    assert (status, found) == (503, {'status': 'failing', **about})
    broken.clear()
    assert ask(server, '/health', 'GET')[0] == 200


def test_a_tape_that_lacks_a_query_is_healthy():
  def replay(queries):
    return [SearchError('not_recorded', 'not in tape') if query.text == 'test'
            else found for query, found in zip(queries, servers.echo(queries))]

  with serving(replay) as server:
    assert ask(server, '/health', 'GET')[::2] == (200, {'status': 'ok'})
    assert ask(server, queries=['test'])[0] == 503
    assert ask(server, queries=['a'])[0] == 200


def test_a_fault_of_our_own_is_500_and_not_shown(monkeypatch):
  warnings = []
  monkeypatch.setattr(wire, 'write_response', lambda *_, **__: 1 / 0)
  with serving(warn=warnings.append) as server:
    assert ask(server, queries=['a'])[::2] == (
        500, {'error': 'this request failed'})
    assert ask(server, '/health', 'GET')[0] == 200
    text = ask(server, '/metrics', 'GET')[2]
  assert 'failures_total 1' in text and 'requests_total{status="500"} 1' in text
  assert ['division' in warning for warning in warnings] == [True]


@pytest.mark.parametrize('broken', [
    lambda queries: 1 / 0, lambda queries: [],
    lambda queries: [SearchError('unavailable', '/etc/shadow')] * len(queries)])
def test_a_failing_engine_is_503_and_its_reason_stays_here(broken):
  logged = []
  with serving(broken, logged.append) as server:
    status, _, found = ask(server, queries=['a'])
    assert status == 503 and found == {'error': 'the search failed'}
    url = f'{server.address}/retrieve'
    error, = remote.remote(urls=(url,), tries=1)(
        [Query('a', 1, tiny.question())])
    assert error.kind == 'unavailable'
  reason, = logged  # once for both
  assert reason.startswith('Warning: a search failed with unavailable: ')
  assert len(reason) > 45


def test_a_full_queue_is_429_and_the_client_comes_again():
  held = servers.Held()
  with (serving(held, waiting_queries=4, gather_secs=0.0,
                limits=wire.Limits(queries=4)) as server,
        concurrent.futures.ThreadPoolExecutor(9) as pool):
    first = pool.submit(ask, server, queries=['first'])
    assert held.asked.wait(20)
    rest = [pool.submit(ask, server, queries=['a', 'b']) for _ in range(2)]
    servers.until(lambda: server.batcher.waiting == 4)
    status, headers, found = ask(server, queries=['c'])
    assert status == 429 and headers['Retry-After'] == '1', found
    patient = pool.submit(
        remote.remote(urls=(f'{server.address}/retrieve',)),
        [Query('c', 1, tiny.question())])
    servers.until(lambda: 'status="429"} 2' in ask(
        server, '/metrics', 'GET')[2])
    held.go.set()
    assert [r.result()[0] for r in (first, *rest)] == [200] * 3
    assert patient.result()[0][0].id == 'c'


def test_a_deadline_is_504_and_what_nobody_waits_for_is_not_searched():
  held = servers.Held()
  with serving(held, deadline_secs=1.0, gather_secs=0.0) as server:
    assert ask(server, queries=['slow'])[0] == 504
    assert ask(server, queries=['late'])[0] == 504
    held.go.set()
    assert ask(server, queries=['on time'])[0] == 200
  assert held.batches == [['slow'], ['on time']]


@pytest.mark.parametrize('size, batch', [(10, 1), (20_000, 512)])
def test_what_a_client_asked_that_hung_up_is_not_searched(size, batch):
  held = servers.Held()
  with (serving(held, gather_secs=0.0, batch_queries=batch) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool):
    first = pool.submit(ask, server, queries=['first'])
    assert held.asked.wait(20)
    second = pool.submit(ask, server, queries=['second'])
    servers.until(lambda: server.batcher.waiting == 1)
    with servers.connect(server) as line:
      body = b'{"queries": ["gone"], "pad": "%s"}' % (b' ' * size)
      line.sendall(servers.post(body, b'Content-Length: %d' % len(body)))
      servers.until(lambda: server.batcher.waiting == 2)
    servers.until(lambda: 'requests_total{status="499"} 1' in ask(
        server, '/metrics', 'GET')[2])
    held.go.set()
    assert first.result()[0] == second.result()[0] == 200
  assert held.batches == [['first'], ['second']]


def test_stop_answers_what_was_asked_and_takes_no_more():
  held = servers.Held()
  with (serving(held) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool):
    asked = pool.submit(ask, server, queries=['begun'])
    assert held.asked.wait(20)
    stopping = pool.submit(server.stop)
    servers.until(lambda: servers.refuses(server))
    held.go.set()
    stopping.result(20)
    assert asked.result(20)[0] == 200
    with pytest.raises(OSError):
      ask(server, queries=['new'])


@pytest.mark.slow
def test_64_clients_at_once_lose_no_request():
  texts = [f'{name} {i}' for i in range(32) for name in ('Tarn', 'Lot')]
  expected = dict(zip(texts, direct(texts, 3)))
  with (serving() as server,
        concurrent.futures.ThreadPoolExecutor(64) as pool):
    search = remote.remote(urls=(f'{server.address}/retrieve',), tries=1)
    one = lambda text: search([Query(text, 3, tiny.question())])[0]
    found = list(pool.map(one, texts * 10))
  assert found == [expected[text] for text in texts * 10]


def test_a_turn_half_of_whose_queries_repeat_is_half_the_work():
  asked = []

  def search(queries):
    asked.extend(q.text for q in queries)
    return [(Passage(q.text, 'T', 'x'),) for q in queries]

  texts = [f'q{i % 1280}' for i in range(2560)]
  with serving(search) as server:
    found = remote.remote(urls=(f'{server.address}/retrieve',))(
        [Query(text, 3, tiny.question()) for text in texts])
  assert [passage.id for passage, in found] == texts
  assert sorted(asked) == sorted(set(texts))


@pytest.mark.slow
def test_512_open_connections_lose_no_request():
  texts = [f'{name} {i}' for i in range(256) for name in ('Tarn', 'Lot')]
  limits = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
  with serving() as server, contextlib.ExitStack() as stack:
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    host, _, port = server.address.removeprefix('http://').rpartition(':')
    lines = [stack.enter_context(contextlib.closing(
        http.client.HTTPConnection(host, int(port), timeout=120)))
             for _ in texts]
    for _ in range(2):
      for line, text in zip(lines, texts):  # all ask before one reads
        line.request('POST', '/retrieve', wire.write_request([text], 3))
      answers = [line.getresponse() for line in lines]
      assert {answer.status for answer in answers} == {200}
      found = [wire.read_response(answer.read(), queries=1, top_k=3)[0]
               for answer in answers]
      assert found == direct(texts, 3)


@pytest.mark.slow
def test_a_server_killed_at_work_is_waited_for_within_the_deadline():
  program = """if True:
      import sys, time
      from searchrl.serving import asgi
      from searchrl.serving import search_server as server
      from searchrl.trajectory import Passage
      def search(queries):
        print('asked', flush=True)
        time.sleep(float(sys.argv[2]))
        return [(Passage(q.text, 'T', 'x'),) for q in queries]
      it = server.Server(search, server.Options(
          asgi.HttpOptions(port=int(sys.argv[1]))))
      it.start()
      print(it.address, flush=True)
      time.sleep(600)"""

  def started(port, secs):
    process = subprocess.Popen(
        [sys.executable, '-c', program, str(port), str(secs)], text=True,
        cwd=pathlib.Path(__file__).parents[1], stdout=subprocess.PIPE)
    return process, process.stdout.readline().strip()

  first, url = started(0, 60)
  second = None
  try:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      search = remote.remote(urls=(f'{url}/retrieve',), tries=50,
                             backoff_secs=0.2, deadline_secs=60.0, failures=100)
      asked = pool.submit(search, [Query('river', 3, tiny.question())])
      assert first.stdout.readline() == 'asked\n'
      first.kill()
      second, _ = started(url.rpartition(':')[2], 0)
      assert asked.result() == [(Passage('river', 'T', 'x'),)]
  finally:
    for process in filter(None, (first, second)):
      process.kill()
      process.communicate()


@pytest.mark.parametrize('options, message', [
    (dict(top_k=101), 'serve.top_k must be at most'),
    (dict(gather_secs=-1), 'serve.gather_secs must be at least 0'),
    (dict(limits=wire.Limits(queries=0)), 'serve.limits.queries must be above'),
    (dict(waiting_queries=100), 'must hold one request of limits.queries=4096'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    search_server.Options(**options)


