# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""server: Search-R1's requests answered, all others refused; under load."""

import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import faulty
import pytest
import tiny

from configs import serve_search as serve_search_config
from searchrl.jobs import serve_search
from searchrl.search.corpus import Corpus
from searchrl.search import factory
from searchrl.search.remote import remote
from searchrl.search.remote import wire
from searchrl.serving import search_server
from searchrl.trajectory import Passage, Query, SearchError

CORPUS = Corpus(tuple(
    Passage(str(i), f'Place {i}', f'{name} "quoted" <tag> 東 river {i % 7}')
    for i, name in enumerate('Tarn Garonne Lot Aude Agout Viaur'.split() * 5)))
TEXTS = ('Tarn river', 'the Lot', 'nothing of it', '', 'place 7', 'Aude 3')


def engine():
  return factory.make('bm25', CORPUS)


@contextlib.contextmanager
def serving(search=None, warn=print, **options):
  server = search_server.Server(
      search or engine(), search_server.Options(port=0, **options), warn)
  server.start()
  try:
    yield server
  finally:
    server.stop()


def ask(server, path='/retrieve', method='POST', headers=(), **record):
  """Status, headers and record of one request."""
  host, _, port = server.address.removeprefix('http://').rpartition(':')
  connection = http.client.HTTPConnection(host, int(port), timeout=20)
  body = record.pop('body', None)
  body = json.dumps(record).encode() if body is None else body
  connection.request(method, path, body if method == 'POST' else None,
                     dict(headers))
  response = connection.getresponse()
  text = response.read()
  connection.close()
  found = text.decode()
  if response.headers['Content-Type'] == 'application/json':
    found = json.loads(found)
  return response.status, response.headers, found


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


@pytest.mark.parametrize('record, status, told', [
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
    (dict(queries=['a'] * 513), 413, 'at most 512, but 513'),
    (dict(queries=['a' * 2001]), 413, 'at most 2000, but 2001'),
    (dict(queries=['a'], topk=101), 413, 'at most 100, but 101'),
    (dict(body=b' ' * (2**20 + 1)), 413, 'bytes'),
    (dict(path='/rerank', queries=['a']), 404, '/retrieve'),
    (dict(path='/retrieve', method='GET'), 405, ''),
    (dict(path='/', method='GET'), 404, ''),
    (dict(path='/retrieve', method='PUT'), 501, ''),
])
def test_what_is_refused(record, status, told):
  with serving() as server:
    got, _, found = ask(server, **record)
    assert got == status and told in found['error']
    assert ask(server, queries=['river'])[0] == 200  # and it goes on


def test_the_largest_request_is_answered():
  with serving() as server:
    status, _, found = ask(
        server, queries=['r' * 2000] + ['river'] * 511, topk=100)
  assert status == 200 and len(found['result']) == 512
  assert len(found['result'][1]) == 30


@pytest.mark.parametrize('lines, status', [
    (b'nonsense\r\n\r\n', 400),
    (b'GET /' + b'a' * 70_000 + b' HTTP/1.1\r\n\r\n', 414),
    (b'POST /retrieve HTTP/1.1\r\nContent-Length: -1\r\n\r\n', 411),
    (b'POST /retrieve HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n', 411),
    (b'POST /retrieve HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n',
     413),
    (b'GET /health HTTP/1.1\r\n' + b'a: b\r\n' * 200 + b'\r\n', 431),
    (b'GET /health HTTP/1.1\r\na:' + b'b' * 70_000 + b'\r\n\r\n', 431),
    (b'GET /health HTTP/2.0\r\n\r\n', 505),
    (b'GET /health\r\n', 400),
    (b'GET /health HTTP/1.1\r\nno colon\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\na: b\r\n folded\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\nname : b\r\n\r\n', 400),
    (b'GET /health HTTP/1.1\r\n: b\r\n\r\n', 400),
    (b'POST /retrieve HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n'
     b'\r\n', 400),
    (b'\r\n', 400),
])
def test_lines_that_are_no_request(lines, status):
  with serving() as server:
    host, _, port = server.address.removeprefix('http://').rpartition(':')
    with socket.create_connection((host, int(port)), timeout=20) as line:
      line.sendall(lines)
      answer = b''
      while piece := line.recv(65536):
        answer += piece
  assert answer.startswith(b'HTTP/1.1 %d ' % status), answer[:200]
  assert b'Traceback' not in answer and b'Python' not in answer


def test_a_body_that_drips_is_not_waited_for():
  with serving(deadline_secs=0.3) as server:
    host, _, port = server.address.removeprefix('http://').rpartition(':')
    with socket.create_connection((host, int(port)), timeout=20) as line:
      line.sendall(b'POST /retrieve HTTP/1.1\r\nContent-Length: 9999\r\n\r\n')
      answered = threading.Event()
      sender = threading.Thread(target=drip, args=(line, answered))
      sender.start()
      answer = line.recv(1000)
      answered.set()
      sender.join()
  assert answer.startswith(b'HTTP/1.1 408 ')


def drip(line, answered):
  with contextlib.suppress(OSError):
    while not answered.wait(0.05):
      line.sendall(b' ')


def test_a_client_that_waits_to_be_told_to_go_on():
  body = json.dumps({'queries': ['river']}).encode()
  with serving() as server:
    host, _, port = server.address.removeprefix('http://').rpartition(':')
    with socket.create_connection((host, int(port)), timeout=20) as line:
      line.sendall(b'POST /retrieve HTTP/1.1\r\nExpect: 100-continue\r\n'
                   b'Content-Length: %d\r\n\r\n' % len(body))
      assert line.recv(1000).startswith(b'HTTP/1.1 100 ')
      line.sendall(body)
      assert line.recv(1000).startswith(b'HTTP/1.1 200 ')


@pytest.mark.parametrize('broken', [
    lambda queries: 1 / 0, lambda queries: [],
    lambda queries: [SearchError('unavailable', '/etc/shadow')] * len(queries)])
def test_a_failing_engine_is_503_and_its_reason_stays_here(broken):
  told = []
  with serving(broken, told.append) as server:
    status, _, found = ask(server, queries=['a'])
    assert status == 503 and found == {'error': 'the search failed'}
    url = f'{server.address}/retrieve'
    error, = remote.remote(urls=(url,), tries=1)(
        [Query('a', 1, tiny.question())])
    assert error.kind == 'unavailable'
  reason, = told  # once for both
  assert reason.startswith('Warning: a search failed with unavailable: ')
  assert len(reason) > 45


def until(condition):
  """Returns when it is so; gives up after a while."""
  for _ in range(20_000):
    if condition():
      return
    time.sleep(0.001)
  raise AssertionError('it never came about')


class Held:
  """An engine that answers when it is let, and tells when it was asked."""

  def __init__(self):
    self.asked, self.go, self.batches = threading.Event(), threading.Event(), []

  def __call__(self, queries):
    self.batches.append([q.text for q in queries])
    self.asked.set()
    self.go.wait(20)
    return [(Passage(q.text, 'T', 'x'),) for q in queries]


def test_concurrent_requests_make_batches_and_equal_queries_are_asked_once():
  held = Held()
  with (serving(held, gather_secs=0.0) as server,
        concurrent.futures.ThreadPoolExecutor(41) as pool):
    first = pool.submit(ask, server, queries=['first'])
    assert held.asked.wait(20)
    rest = [pool.submit(ask, server, queries=[f'q{i % 20}', 'both'])
            for i in range(40)]
    until(lambda: server.batcher.waiting == 80)
    held.go.set()
    assert first.result()[0] == 200
    for i, done in enumerate(rest):
      lists = done.result()[2]['result']
      assert [l[0]['id'] for l in lists] == [f'q{i % 20}', 'both']
  assert held.batches[0] == ['first'] and len(held.batches) == 2
  assert sorted(held.batches[1]) == sorted(['both'] + [
      f'q{i}' for i in range(20)])


def test_a_full_queue_is_429_and_the_client_comes_again():
  held = Held()
  with (serving(held, waiting_queries=4, gather_secs=0.0,
                limits=wire.Limits(queries=4)) as server,
        concurrent.futures.ThreadPoolExecutor(9) as pool):
    first = pool.submit(ask, server, queries=['first'])
    assert held.asked.wait(20)
    rest = [pool.submit(ask, server, queries=['a', 'b']) for _ in range(2)]
    until(lambda: server.batcher.waiting == 4)
    status, headers, found = ask(server, queries=['c'])
    assert status == 429 and headers['Retry-After'] == '1', found
    patient = pool.submit(
        remote.remote(urls=(f'{server.address}/retrieve',)),
        [Query('c', 1, tiny.question())])
    until(lambda: 'status="429"} 2' in ask(server, '/metrics', 'GET')[2])
    held.go.set()
    assert [r.result()[0] for r in (first, *rest)] == [200] * 3
    assert patient.result()[0][0].id == 'c'


def test_a_deadline_is_504_and_what_nobody_waits_for_is_not_searched():
  held = Held()
  with serving(held, deadline_secs=1.0, gather_secs=0.0) as server:
    assert ask(server, queries=['slow'])[0] == 504
    assert ask(server, queries=['late'])[0] == 504
    held.go.set()
    assert ask(server, queries=['on time'])[0] == 200
  assert held.batches == [['slow'], ['on time']]


def test_stop_answers_what_was_asked_and_takes_no_more():
  held = Held()
  with (serving(held) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool):
    asked = pool.submit(ask, server, queries=['begun'])
    assert held.asked.wait(20)
    stopping = pool.submit(server.stop)
    until(lambda: server.draining)
    held.go.set()
    stopping.result(20)
    assert asked.result(20)[0] == 200
    with pytest.raises(OSError):
      ask(server, queries=['new'])
    server.stop = lambda: None


def test_a_token_is_needed_where_one_is_set():
  with serving(token='right') as server:
    for header in ({}, {'Authorization': 'Bearer wrong'},
                   {'Authorization': 'right'}, {'Authorization': 'Bearer é'}):
      status, _, found = ask(server, queries=['river'], headers=header.items())
      assert status == 401 and 'right' not in str(found)
    good = {'Authorization': 'Bearer right'}.items()
    assert ask(server, queries=['river'], headers=good)[0] == 200
    assert 'right' not in repr(server.options)


def test_health_and_metrics():
  parser = pytest.importorskip('prometheus_client.parser')
  with serving() as server:
    assert ask(server, '/health', 'GET')[::2] == (200, {'status': 'ok'})
    for texts in (['river', 'river', 'Lot'], ['Aude']):
      ask(server, queries=texts)
    ask(server, queries=3)
    until(lambda: 'request_seconds_count 3' in ask(server, '/metrics', 'GET')[2])
    status, headers, text = ask(server, '/metrics', 'GET')
  assert status == 200 and headers['Content-Type'].startswith('text/plain')
  found = {}
  for family in parser.text_string_to_metric_families(text):
    for sample in family.samples:
      found[sample.name.removeprefix('searchrl_search_'),
            *sample.labels.values()] = sample.value
  assert found['requests_total', '200'] == 2
  assert found['requests_total', '400'] == 1
  assert found['queries_total',] == 4 and found['engine_queries_total',] == 3
  assert found['engine_batch_queries_bucket', '1'] == 1
  assert found['engine_batch_queries_bucket', '4'] == 2
  assert found['engine_batch_queries_sum',] == 4
  assert found['request_seconds_count',] == 3
  assert found['request_seconds_bucket', '+Inf'] == 3


def test_more_connections_than_allowed_are_closed():
  with serving(connections=2) as server:
    host, _, port = server.address.removeprefix('http://').rpartition(':')
    lines = [socket.create_connection((host, int(port)), timeout=20)
             for _ in range(3)]
    assert lines[2].recv(10) == b''  # closed, while the others are open
    for line in lines:
      line.close()


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
      from searchrl.serving import search_server as server
      from searchrl.trajectory import Passage
      def search(queries):
        print('asked', flush=True)
        time.sleep(float(sys.argv[2]))
        return [(Passage(q.text, 'T', 'x'),) for q in queries]
      it = server.Server(search, server.Options(port=int(sys.argv[1])))
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
    (dict(deadline_secs=0), 'serve.deadline_secs must be above 0'),
    (dict(port=70_000), 'serve.port must be at most 65535'),
    (dict(gather_secs=-1), 'serve.gather_secs must be at least 0'),
    (dict(limits=wire.Limits(queries=0)), 'serve.limits.queries must be above'),
    (dict(waiting_queries=100), 'must hold one request of limits.queries=512'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    search_server.Options(**options)


def config_of(tmp_path, **changes):
  config = serve_search_config.get_config('smoke')
  (tmp_path / 'c.jsonl').write_text('{"id": "a", "contents": "Tarn"}\n')
  config.search.corpus = str(tmp_path / 'c.jsonl')
  config.search.update(changes)
  return config


def test_a_port_that_is_taken_is_told(tmp_path):
  config = config_of(tmp_path)
  with serving() as server:
    config.serve.port = int(server.address.rpartition(':')[2])
    with pytest.raises(ValueError, match='must be free, but 127.0.0.1, port'):
      serve_search.run(config, str(tmp_path))


def test_an_engine_that_does_not_answer_is_not_served(tmp_path):
  config = config_of(tmp_path, engine='remote', options=dict(
      urls=(faulty.unused_url(),), tries=1))
  with pytest.raises(ValueError, match="'remote' failed with unavailable"):
    serve_search.run(config, str(tmp_path))


def test_the_token_comes_from_the_environment(tmp_path, monkeypatch):
  config, seen = config_of(tmp_path), []
  config.serve.update(port=0, token_env='TOKEN_OF_TEST')
  monkeypatch.setattr(serve_search, 'run_until_told', lambda server, what: (
      seen.append((server.options.token, what)), server.start(), server.stop()))
  with pytest.raises(ValueError, match='TOKEN_OF_TEST is not set'):
    serve_search.run(config, str(tmp_path))
  monkeypatch.setenv('TOKEN_OF_TEST', 'abc')
  serve_search.run(config, str(tmp_path))
  assert seen == [('abc', 'bm25 over 1 passages')]


@pytest.mark.slow
def test_the_job_serves_a_file_and_ends_in_order(tmp_path):
  root = pathlib.Path(__file__).parents[1]
  (tmp_path / 'c.jsonl').write_text(
      '{"id": "a", "contents": "\\"Tarn\\"\\nA river."}\n'
      '{"id": "b", "contents": "\\"Alps\\"\\nMountains."}\n')
  command = [sys.executable, '-m', 'searchrl.main',
             '--config=configs/serve_search.py', '--config.serve.port=0',
             f'--config.search.corpus={tmp_path / "c.jsonl"}',
             f'--workdir={tmp_path / "run"}']
  with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True
                       ) as process:
    line = ''
    while 'Serving' not in line:
      line = process.stderr.readline()
      assert line, 'it ended'
    assert 'bm25 over 2 passages at http://127.0.0.1:' in line
    url = line.partition(' at ')[2].partition(';')[0]
    search = remote.remote(urls=(url,))
    found, = search([Query('river', 3, tiny.question())])
    assert [p.id for p in found] == ['a']
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_http_1_0_is_answered_and_closed():
  body = json.dumps({'queries': ['river']}).encode()
  with serving() as server:
    host, _, port = server.address.removeprefix('http://').rpartition(':')
    with socket.create_connection((host, int(port)), timeout=20) as line:
      line.sendall(b'POST /retrieve HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s'
                   % (len(body), body))
      answer = b''
      while piece := line.recv(65536):
        answer += piece
  assert b' 200 ' in answer.partition(b'\r\n')[0]
