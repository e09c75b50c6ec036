# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""asgi: what a request may cost, odd clients, many connections, and the end."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import servers
from uvicorn.loops import asyncio as loop_asyncio
from uvicorn.protocols.http import h11_impl

from searchrl.search.remote import wire
from searchrl.serving import asgi

BODY = json.dumps({'queries': ['river']}).encode()
LENGTH = b'Content-Length: %d' % len(BODY)
LAST = b'Connection: close'
MIB = 2**20


@pytest.fixture(params=['httptools', 'h11'])
def parser(request, monkeypatch):
  """The parser that uvicorn uses with httptools, and the one without it."""
  pytest.importorskip(request.param)
  if request.param == 'h11':
    monkeypatch.setattr('uvicorn.protocols.http.auto.AutoHTTPProtocol',
                        h11_impl.H11Protocol)
    monkeypatch.setattr('uvicorn.loops.auto.auto_loop_factory',
                        loop_asyncio.asyncio_loop_factory)
  return request.param


def test_small_answers_are_not_delayed(parser):
  with serving() as server:
    connection = http.client.HTTPConnection(*servers.place(server), timeout=20)
    start = time.monotonic()
    for _ in range(50):  # Nagle's delay would be 40 ms each
      connection.request('POST', '/retrieve', BODY)
      assert connection.getresponse().read()
    assert time.monotonic() - start < 1.5
    connection.close()


def serving(search=servers.echo, **options):
  return servers.serving(search, limits=wire.Limits(body_bytes=MIB), **options)


def status_of(answer):
  return int(answer.split(b' ', 2)[1])


def assert_serves(server):
  assert servers.ask(server, queries=['river'])[0] == 200


@pytest.mark.parametrize('lines', [
    b'nonsense\r\n\r\n',
    b'GET /health HTTP/1.1\r\nno colon\r\n\r\n',
    b'GET /health HTTP/1.1\r\nHost: a\r\nname : b\r\n\r\n',
    b'GET /health HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n',
    servers.post(b'', b'Content-Length: -1'),
    servers.post(b'', b'Content-Length: 1', b'Content-Length: 2'),
    servers.post(b'', b'Transfer-Encoding: chunked') + b'no size\r\n',
    b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',  # TLS
])
def test_what_is_no_http_is_answered_as_such(parser, lines):
  with serving() as server:
    answer = servers.send(server, lines)
    assert status_of(answer) == 400, answer[:200]
    assert b'Traceback' not in answer and b'python' not in answer.lower()
    assert_serves(server)


@pytest.mark.parametrize('lines', [
    servers.post(BODY, LENGTH, LAST),
    servers.post(BODY, b'Content-Length: 000%d' % len(BODY), LAST),
    servers.post(b'%x\r\n%s\r\n0\r\n\r\n' % (len(BODY), BODY),
                 b'Transfer-Encoding: chunked', LAST),
    b'\r\n' + servers.post(BODY, LENGTH, LAST),
    b'POST /retrieve HTTP/1.0\r\n' + LENGTH + b'\r\n\r\n' + BODY,
    servers.post(BODY, LENGTH, LAST, path=b'/retrieve?a=b'),
], ids=['plain', 'zeros', 'chunked', 'empty line first', 'HTTP/1.0', 'query'])
def test_every_framing_of_a_request_is_answered(parser, lines):
  if lines.startswith(b'\r\n') and parser == 'h11':
    pytest.skip('h11 takes an empty line for a request')
  with serving() as server:
    answer = servers.send(server, lines)
    assert status_of(answer) == 200 and b'"id":"river"' in answer


def test_an_upgrade_is_not_made_and_the_server_goes_on(parser):
  with serving(idle_secs=1.0) as server:
    answer = servers.send(server, servers.post(
        BODY, LENGTH, b'Connection: Upgrade, close', b'Upgrade: websocket'))
    assert status_of(answer) in (200, 400, 408)  # httptools leaves the body
    assert_serves(server)


SECOND = b'GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n'


@pytest.mark.parametrize('headers', [
    (b'Content-Length: 5', b'Transfer-Encoding: chunked'),
    (b'Transfer-Encoding: chunked',
     b'Content-Length: %d' % (5 + len(SECOND))),
    (b'Content-Length: 5', b'Transfer-Encoding: xchunked')])
def test_two_lengths_smuggle_no_second_request(parser, headers):
  with serving() as server:
    answer = servers.send(server, servers.post(
        b'0\r\n\r\n' + SECOND, *headers))
    assert status_of(answer) == 400 and answer.count(b'HTTP/1.1 ') == 1
    assert b'searchrl_search' not in answer


def test_a_get_with_a_body_is_one_request(parser):
  with serving() as server:
    answer = servers.send(
        server, b'GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n'
        b'Connection: close\r\n\r\nGET /metrics HTTP/1.1\r\nab: c\r\n\r\n')
  assert answer.count(b'HTTP/1.1 ') == 1 and status_of(answer) == 200


def overlong(way):
  """A request whose body never ends, in pieces."""
  piece = b' ' * 2**16
  if way == 'chunked':
    yield servers.post(b'', b'Transfer-Encoding: chunked')
    while True:
      yield b'10000\r\n' + piece + b'\r\n'
  yield servers.post(b'', b'Content-Length: ' + {
      'announced': b'629145600', 'zeros': b'0' * 5000 + b'629145600',
      'more than a number holds': b'9' * 19}[way])
  while True:
    yield piece


@pytest.mark.parametrize('way', [
    'announced', 'zeros', 'more than a number holds', 'chunked'])
def test_a_body_above_the_limit_is_413_however_it_is_framed(parser, way):
  sent = 0
  with serving() as server:
    with servers.connect(server) as line:
      line.settimeout(0.001)
      answer = b''
      for piece in overlong(way):
        try:
          answer = line.recv(65536)
          break
        except TimeoutError:
          pass
        line.settimeout(20)
        line.sendall(piece)
        sent += len(piece)
        line.settimeout(0.001)
        assert sent < 16 * MIB, 'nobody stops it'
    if (parser, way) == ('h11', 'zeros'):  # of 20 digits at most
      assert status_of(answer) == 400
    else:
      assert status_of(answer) == 413
    assert_serves(server)


def test_a_client_that_reads_after_it_has_sent_learns_that_it_is_too_much(
    parser):
  with serving() as server:
    for _ in range(5):
      status, _, found = servers.ask(server, body=b' ' * (3 * MIB))
      assert (status, found) == (413, {'error': 'at most 1048576 bytes'})


def test_a_body_of_just_the_limit_is_read(parser):
  with serving() as server:
    assert servers.ask(server, body=BODY.ljust(MIB))[0] == 200
    assert servers.ask(server, body=BODY.ljust(MIB + 1))[0] == 413


@pytest.mark.parametrize('deep', [
    b'[' * MIB, b'{"queries":' * 50_000, b'{"queries": ' + b'[' * 1000_000,
    b'{"a": ' + b'[' * 400 + b']' * 400 + b', "queries": 3}'])
def test_deeply_nested_json_is_answered_as_such(deep):
  with serving() as server:
    assert servers.ask(server, body=deep)[0] == 400
    assert_serves(server)


def test_a_slow_body_is_408_and_the_connection_ends(parser):
  with serving(idle_secs=0.3) as server, servers.connect(server) as line:
    line.sendall(servers.post(b'', b'Content-Length: 9999'))
    start, answer = time.monotonic(), b''
    line.settimeout(0.05)
    while True:
      with contextlib.suppress(TimeoutError):
        piece = line.recv(1000)
        answer += piece
        if not piece:
          break
      with contextlib.suppress(OSError):
        line.send(b' ')
      assert time.monotonic() - start < 10, 'it is held for ever'
    assert status_of(answer) == 408
    assert answer.endswith(b'{"error": "the body came too late"}')
    assert_serves(server)


def test_dripped_headers_cost_no_thread_and_hold_nobody_up():
  with serving() as server, contextlib.ExitStack() as stack:
    assert_serves(server)
    threads = threading.active_count()
    lines = [stack.enter_context(servers.connect(server)) for _ in range(50)]
    for byte in b'GET /health HT':
      for line in lines:
        line.sendall(bytes([byte]))
    assert threading.active_count() == threads
    assert_serves(server)


def test_2000_idle_connections_keep_nobody_waiting():
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if hard < 5000:
    pytest.skip(f'{hard} files may be open here')
  program = """if True:
      import resource, sys
      from searchrl.serving import asgi, search_server
      from searchrl.trajectory import Passage
      _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
      resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
      server = search_server.Server(
          lambda queries: [(Passage('a', 'T', 'x'),) for _ in queries],
          search_server.Options(asgi.HttpOptions(port=0)))
      server.start()
      print(server.address, flush=True)
      sys.stdin.read()"""
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
  with contextlib.ExitStack() as stack:
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    process = stack.enter_context(subprocess.Popen(
        [sys.executable, '-c', program], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parents[1]))
    stack.callback(process.kill)
    server = type('Elsewhere', (), {
        'address': process.stdout.readline().strip()})
    for _ in range(2000):
      stack.enter_context(servers.connect(server))
    for _ in range(20):
      assert_serves(server)


def test_more_requests_than_connections_allow_are_503_and_idle_ones_are_none():
  held = servers.Held()
  with (serving(held, connections=2) as server, contextlib.ExitStack() as stack,
        concurrent.futures.ThreadPoolExecutor(2) as pool):
    for _ in range(5):
      stack.enter_context(servers.connect(server))
    begun = [pool.submit(servers.ask, server, queries=[text])
             for text in ('a', 'b')]
    servers.until(lambda: 'active_requests 2' in servers.ask(
        server, '/metrics', 'GET')[2])
    status, _, found = servers.ask(server, queries=['c'])
    assert status == 503 and found == {
        'error': 'too many requests are under way'}
    assert 'refused_connections_total 1' in servers.ask(
        server, '/metrics', 'GET')[2]
    held.go.set()
    assert [done.result()[0] for done in begun] == [200, 200]


def test_a_client_that_waits_for_continue(parser):
  with serving() as server, servers.connect(server) as line:
    line.sendall(servers.post(b'', LENGTH, b'Expect: 100-continue'))
    assert line.recv(1000).startswith(b'HTTP/1.1 100 ')
    line.sendall(BODY)
    assert servers.read_until(line, b']]}').startswith(b'HTTP/1.1 200 ')
    line.sendall(servers.post(b'', b'Content-Length: 99999999',
                              b'Expect: 100-continue'))
    assert line.recv(1000).startswith(b'HTTP/1.1 413 ')  # and not 100


def test_a_client_that_hangs_up_is_no_fault_of_the_servers(parser):
  with serving() as server:
    with servers.connect(server) as line:
      line.sendall(servers.post(b'{"que', LENGTH))
    servers.until(lambda: 'requests_total{status="499"} 1' in servers.ask(
        server, '/metrics', 'GET')[2])
    text = servers.ask(server, '/metrics', 'GET')[2]
    assert 'failures_total 0' in text and 'status="500"' not in text


@pytest.mark.parametrize('given, allowed', [
    ('Bearer right', True), ('bearer right', True), ('BEARER  right ', True),
    ('Bearer wrong', False), ('right', False), ('Basic right', False),
    ('Bearer', False), ('Bearer é', False), ('', False)])
def test_the_scheme_of_a_token_has_no_case(given, allowed):
  with serving(token='right') as server:
    status, _, found = servers.ask(
        server, queries=['a'], headers={'Authorization': given}.items())
    assert status == (200 if allowed else 401), found
    assert 'right' not in str(found) and 'right' not in repr(server.options)


def test_a_large_body_without_a_token_is_not_read_to_its_end():
  with serving(token='right') as server, servers.connect(server) as line:
    line.sendall(servers.post(b'', b'Content-Length: %d' % 2**40))
    sent = 0
    with contextlib.suppress(OSError):
      while sent < 64 * MIB:
        sent += line.send(b' ' * MIB)
    assert sent < 64 * MIB


def test_a_stop_under_load_answers_what_was_asked(parser):
  def slow(queries):
    time.sleep(0.02)
    return servers.echo(queries)

  done = []

  def ask_on(server, number):
    with contextlib.suppress(OSError):  # refused, or closed
      for i in range(1000):
        status, _, found = servers.ask(server, queries=[f'{number} {i}'])
        done.append(status)
        if status == 200:
          assert found['result'][0][0]['id'] == f'{number} {i}'

  with serving(slow) as server:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
      asking = [pool.submit(ask_on, server, n) for n in range(16)]
      while len(done) < 50:
        time.sleep(0.01)
      server.stop()
      for one in asking:
        one.result(20)
    assert {*done} <= {200, 503} and done.count(200) >= 50
    with pytest.raises(ConnectionRefusedError):
      servers.connect(server)


def test_a_stop_ends_idle_connections_and_is_over_soon():
  with serving() as server:
    with servers.connect(server) as line, servers.connect(server) as other:
      other.sendall(b'GET /hea')
      line.sendall(servers.post(BODY, LENGTH))
      assert servers.read_until(line, b']]}').startswith(b'HTTP/1.1 200 ')
      start = time.monotonic()
      server.stop()
      assert line.recv(10) == b'' == other.recv(10)
      assert time.monotonic() - start < 10


def test_an_answered_connection_that_asks_nothing_more_is_closed(parser):
  with serving(idle_secs=0.2) as server, servers.connect(server) as line:
    line.sendall(servers.post(BODY, LENGTH))
    assert servers.read_until_closed(line).startswith(b'HTTP/1.1 200 ')


def test_a_port_in_use_is_named():
  with serving() as server:
    port = servers.place(server)[1]
    with pytest.raises(ValueError, match=(
        'must be free, but: Address already in use .while attempting to bind '
        fr"on address .'127.0.0.1', {port}... Choose another port")):
      asgi.HttpServer(None, asgi.HttpOptions(port=port))


def test_an_address_of_ipv6_is_written_in_brackets():
  if not socket.has_ipv6:
    pytest.skip('there is no IPv6 here')
  try:
    server = asgi.HttpServer(None, asgi.HttpOptions(host='::1', port=0))
  except ValueError:
    pytest.skip('there is no IPv6 here')
  assert server.url.startswith('http://[::1]:')
  server.stop()  # it was never started


@pytest.mark.parametrize('options, message', [
    (dict(deadline_secs=0), 'serve.deadline_secs must be above 0, but is 0'),
    (dict(idle_secs=float('nan')), 'serve.idle_secs must be above 0'),
    (dict(connections=0), 'serve.connections must be above 0'),
    (dict(port=70_000), 'serve.port must be at most 65535, but is 70000'),
    (dict(port=-1), 'serve.port must be at least 0, but is -1'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    asgi.HttpOptions(**options)


def test_options_are_taken_from_the_fields_of_a_config(monkeypatch):
  monkeypatch.setenv('TOKEN_OF_TEST', 'secret')
  fields = dict(host='::1', port=3, token_env='TOKEN_OF_TEST', other=5)
  options, rest = asgi.take_options(fields)
  assert options == asgi.HttpOptions(host='::1', port=3, token='secret')
  assert rest == {'other': 5} and 'secret' not in repr(options)
  assert asgi.take_options({'token_env': ''}) == (asgi.HttpOptions(), {})
  with pytest.raises(ValueError, match='serve.token_env must name a variable'):
    asgi.take_options({'token_env': 'NOT_SET_ANYWHERE'})


PROGRAM = """if True:
    import sys, time
    from searchrl.serving import asgi, search_server
    from searchrl.trajectory import Passage
    def search(queries):
      print('asked', flush=True)
      time.sleep(float(sys.argv[1]))
      return [(Passage('a', 'T', 'x'),) for _ in queries]
    options = search_server.Options(
        asgi.HttpOptions(host=sys.argv[2], port=0), gather_secs=0.0)
    server = search_server.Server(search, options)
    asgi.serve(server, 'it at ' + server.address, options.http)"""


@contextlib.contextmanager
def program(secs, host='127.0.0.1'):
  with subprocess.Popen(
      [sys.executable, '-c', PROGRAM, str(secs), host], text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      cwd=pathlib.Path(__file__).parents[1]) as process:
    try:
      line = process.stderr.readline()
      assert line.startswith('Serving it at http://'), line
      address = line.partition(' at ')[2].partition(';')[0]
      yield process, type('Elsewhere', (), {'address': address})
    finally:
      process.kill()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_server_answer_and_ends_it_with_0(number):
  with (program(0.5) as (process, server),
        concurrent.futures.ThreadPoolExecutor(1) as pool):
    asked = pool.submit(servers.ask, server, queries=['river'])
    assert process.stdout.readline() == 'asked\n'
    os.kill(process.pid, number)
    assert asked.result(20)[0] == 200
    assert process.wait(20) == 0
    assert 'Stopping; requests under way are answered' in process.stderr.read()


def test_a_second_ctrl_c_does_not_wait():
  with (program(60) as (process, server),
        concurrent.futures.ThreadPoolExecutor(1) as pool):
    asked = pool.submit(servers.ask, server, queries=['river'])
    assert process.stdout.readline() == 'asked\n'
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr.readline().startswith('Stopping')
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) not in (0, None)
    with pytest.raises(OSError):
      asked.result(20)


def test_an_open_address_without_a_token_is_warned_of():
  with program(0, host='0.0.0.0') as (process, _):
    line = process.stderr.readline()
    assert line.startswith('Warning: anyone who can reach 0.0.0.0 can')
