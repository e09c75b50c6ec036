# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""model_server: over HTTP as by the engine; refusals, streams, the end."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import threading
import time
import types

import chats
import fakes
import jax
import numpy as np
import pytest
import servers
import tiny

from searchrl.agent import chat as templates
from searchrl.models import transformer
from searchrl.models.inference import engine as engines
from searchrl.models.inference import sampling
from searchrl.papers.zerosearch import completions
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch.simulator_prompts import Prompts
from searchrl.rollouts import generation
from searchrl.serving import asgi
from searchrl.serving import model_server
from searchrl.serving import openai_api
from searchrl.trajectory import Query

TOKENIZER = chats.qwen()
SHAPE = dataclasses.replace(tiny.CONFIG, vocab_size=TOKENIZER.vocab_size)
EOS = templates.ends(TOKENIZER)
PROMPT = 'the search goes'
HELLO = [{'role': 'user', 'content': 'go on'}]


@pytest.fixture(scope='module')
def params():
  return tiny.params(SHAPE)


@pytest.fixture(scope='module')
def engine():
  return engines.Engine(
      SHAPE, slots=4, length=128,
      stop_table=generation.no_stops(SHAPE.vocab_size, EOS), tile=16, block=16,
      steps=5, seed=4)


@pytest.fixture
def serving(engine, params):
  """Makes a server over the one engine."""
  with contextlib.ExitStack() as stack:
    def start(used=engine, is_compiled=True, **options):
      engine.load(params, None)
      http_part, rest = servers.http_options({'deadline_secs': 600.0} | options)
      generator = generation.Generator(
          used, token_bytes=TOKENIZER.token_bytes, eos_ids=EOS,
          waiting=rest.get('waiting', 256))
      server = model_server.Server(
          generator, TOKENIZER, 128,
          model_server.Options('it', http_part, **rest))
      server.start()
      stack.callback(server.stop)
      if is_compiled:
        servers.until(lambda: generator.is_compiled)
      return server
    yield start


@contextlib.contextmanager
def opened(server, path, method='POST', headers=(), body=None, **record):
  line = http.client.HTTPConnection(*servers.place(server), timeout=60)
  body = json.dumps(record).encode() if body is None else body
  line.request(method, path, body if method == 'POST' else None, dict(headers))
  yield line.getresponse()
  line.close()


def ask(server, path='/v1/completions', method='POST', **fields):
  """Status and record of one request."""
  if method == 'POST' and 'body' not in fields:
    fields = {'model': 'it', **({'messages': HELLO} if 'chat' in path else
                                {'prompt': PROMPT}), **fields}
  with opened(server, path, method, **fields) as response:
    return response.status, json.loads(response.read())


def events(server, path='/v1/completions', **fields):
  fields = {'model': 'it', 'stream': True, **(
      {'messages': HELLO} if 'chat' in path else {'prompt': PROMPT}), **fields}
  with opened(server, path, **fields) as response:
    assert response.headers['Content-Type'] == 'text/event-stream'
    blocks = response.read().decode().split('\n\n')
  assert blocks[-2:] == ['data: [DONE]', '']
  return [json.loads(b.removeprefix('data: ')) for b in blocks[:-2]]


def test_greedy_is_the_argmax_of_a_full_forward(serving, params):
  server = serving()
  status, found = ask(server, temperature=0, max_tokens=20, logprobs=0)
  assert status == 200 and found['object'] == 'text_completion'
  prompt, sampled = TOKENIZER.encode(PROMPT), []
  forward = jax.jit(lambda tokens: transformer.logits(
      params, transformer.forward(params, tokens, SHAPE))[0])
  while len(sampled) < 20 and not {*sampled} & {*EOS}:
    tokens = np.array([*prompt, *sampled, *[0] * (20 - len(sampled))])
    logits = forward(tokens[None])[len(prompt) + len(sampled) - 1]
    sampled.append(int(np.argmax(logits)))
  choice, = found['choices']
  assert choice['text'] == b''.join(
      TOKENIZER.token_bytes[t] for t in sampled).decode(errors='replace')
  ended = 'stop' if sampled[-1] in EOS else 'length'
  assert choice['finish_reason'] == ended
  assert found['usage'] == {
      'prompt_tokens': len(prompt), 'completion_tokens': len(sampled),
      'total_tokens': len(prompt) + len(sampled)}
  last = float(jax.nn.log_softmax(logits)[sampled[-1]])
  assert len(choice['logprobs']['tokens']) == len(sampled)
  assert abs(choice['logprobs']['token_logprobs'][-1] - last) < 1e-4


def texts(found):
  return [c['text'] for c in sorted(found['choices'], key=lambda c: c['index'])]


def test_a_seed_gives_the_same_texts_again_in_any_company(serving):
  server = serving()
  asked = dict(n=3, max_tokens=15, seed=11, top_p=0.95)
  alone = texts(ask(server, **asked)[1])
  assert len(set(alone)) == 3
  with concurrent.futures.ThreadPoolExecutor(9) as pool:
    others = [pool.submit(ask, server, max_tokens=n, temperature=n / 4,
                          prompt=['an answer', 'on'], n=2) for n in range(1, 9)]
    again = pool.submit(ask, server, **asked)
    assert texts(again.result()[1]) == alone
    assert all(other.result()[0] == 200 for other in others)
  assert texts(ask(server, **asked | dict(seed=12))[1]) != alone
  unseeded = [texts(ask(server, n=3, max_tokens=15)[1]) for _ in range(2)]
  assert unseeded[0] != unseeded[1]


def test_a_stop_string_ends_the_text_before_it(serving):
  server = serving()
  whole, = texts(ask(server, max_tokens=40, seed=5)[1])
  middle = whole[len(whole) // 2:][:2]
  _, found = ask(server, max_tokens=40, seed=5, stop=[middle, 'never sampled'])
  choice, = found['choices']
  assert choice['text'] == whole.partition(middle)[0]
  assert choice['finish_reason'] == 'stop'
  assert found['usage']['completion_tokens'] < 40


@pytest.mark.parametrize('path', ['/v1/completions', '/v1/chat/completions'])
def test_events_add_up_to_the_answer(serving, path):
  server = serving()
  asked = dict(n=2, max_tokens=23, seed=3, stop=['e'], logprobs=(
      True if 'chat' in path else 0))
  _, whole = ask(server, path, **asked)
  *chunks, usage = events(server, path, **asked,
                        stream_options={'include_usage': True})
  assert usage['choices'] == [] and usage['usage'] == whole['usage']
  sampled = {0: '', 1: ''}
  tokens, finish = {0: [], 1: []}, {}
  for event in chunks:
    choice, = event['choices']
    number = choice['index']
    assert number not in finish
    if 'chat' in path:
      assert event['object'] == 'chat.completion.chunk'
      assert ('role' in choice['delta']) == (not tokens[number])
      sampled[number] += choice['delta']['content']
      tokens[number] += choice['logprobs']['content']
    else:
      sampled[number] += choice['text']
      tokens[number] += choice['logprobs']['tokens']
    if choice['finish_reason']:
      finish[number] = choice['finish_reason']
  for choice in whole['choices']:
    number = choice['index']
    text = (choice['message']['content'] if 'chat' in path else choice['text'])
    expected = choice['logprobs']
    assert sampled[number] == text and finish[number] == choice['finish_reason']
    assert tokens[number] == expected[
        'content' if 'chat' in path else 'tokens']


def test_a_chat_is_the_completion_of_what_the_template_writes(serving):
  server = serving()
  assert set(templates.turn_ends(TOKENIZER)) == set(
      TOKENIZER.encode('<|im_end|>'))
  _, chat = ask(server, '/v1/chat/completions', temperature=0, max_tokens=9)
  _, plain = ask(server, temperature=0, max_tokens=9,
                 prompt=TOKENIZER.render(HELLO))
  assert chat['object'] == 'chat.completion'
  assert chat['choices'][0]['message'] == {
      'role': 'assistant', 'content': plain['choices'][0]['text']}
  assert chat['usage'] == plain['usage']


@pytest.mark.parametrize('fields, status, message', [
    (dict(body=b'{'), 400, 'JSON'),
    (dict(body=b' ' * (2**20 + 1)), 413, 'at most 1048576 bytes'),
    (dict(temperature=-1), 400, 'temperature must be'),
    (dict(model='gpt'), 404, "must be 'it'"),
    (dict(path='/v1/chat/completions', messages=[]), 400, 'messages must'),
    (dict(path='/v1/embeddings'), 404, 'POST to /v1/completions'),
    (dict(path='/v1/models/other', method='GET'), 404, 'no such page'),
    (dict(path='/v1/completions', method='GET'), 405, 'no such page'),
    (dict(path='/v1/completions', method='PUT'), 405, 'no such page'),
    (dict(path='/v1/completions', method='OPTIONS'), 405, 'no such page'),
    (dict(path='/v1/models'), 404, 'POST to /v1/completions'),
    (dict(stream=True, n=0), 400, 'n must be'),
    (dict(prompt=[3] * 128), 400, 'may have 127 tokens'),
])
def test_what_is_refused(serving, fields, status, message):
  server = serving()
  got, found = ask(server, **fields)
  assert got == status and message in found['error']['message']
  assert set(found['error']) == {'message', 'type', 'param', 'code'}
  assert ask(server, max_tokens=1)[0] == 200  # and it goes on


def test_a_fault_of_our_own_is_answered_and_not_shown(serving, monkeypatch):
  server = serving()
  monkeypatch.setattr(openai_api, 'read', lambda *_, **__: 1 / 0)
  status, found = ask(server)
  assert status == 500 and 'division' not in str(found)


def test_models_health_and_what_is_no_http(serving):
  server = serving()
  assert ask(server, '/health', 'GET') == (
      200, {'status': 'ok', 'waiting': 0, 'speaking': 0})
  _, found = ask(server, '/v1/models', 'GET')
  assert [m['id'] for m in found['data']] == ['it']
  assert ask(server, '/v1/models/it', 'GET')[1] == found['data'][0]
  assert servers.send(server, b'nonsense\r\n\r\n').startswith(
      b'HTTP/1.1 400 ')


def test_a_server_listens_while_it_compiles(serving, engine):
  compiling, asked = fakes.GatedEngine(engine), []
  compiling.compile = lambda: compiling.go.acquire(timeout=20)
  server = serving(compiling, is_compiled=False)
  assert ask(server, '/health', 'GET') == (
      503, {'status': 'compiling', 'waiting': 0, 'speaking': 0})
  assert ask(server, '/v1/models', 'GET')[0] == 200
  thread = threading.Thread(
      target=lambda: asked.append(ask(server, prompt=PROMPT, max_tokens=3)))
  thread.start()
  servers.until(lambda: server.generator.waiting)
  assert not asked
  compiling.go.release(1000)
  thread.join(20)
  assert asked[0][0] == 200
  assert ask(server, '/health', 'GET')[0] == 200


def test_a_token_is_needed_where_one_is_set(serving):
  server = serving(token='right')
  for header in ({}, {'Authorization': 'Bearer wrong'},
                 {'Authorization': 'Bearer é'}):
    for path, method in (('/v1/completions', 'POST'), ('/v1/models', 'GET')):
      with opened(server, path, method, header.items(), model='it',
                  prompt='a') as response:
        assert response.status == 401 and b'right' not in response.read()
  with opened(server, '/v1/models', 'GET',
              {'Authorization': 'Bearer right'}.items()) as response:
    assert response.status == 200
  assert ask(server, '/health', 'GET')[0] == 200
  assert 'right' not in repr(server.options)


def test_a_full_queue_is_429_and_what_was_asked_is_answered_at_the_end(
    serving, engine):
  held = fakes.GatedEngine(engine)
  server = serving(held, waiting=2, limits=openai_api.Limits(choices=2))
  with concurrent.futures.ThreadPoolExecutor(9) as pool:
    begun = pool.submit(ask, server, n=2, max_tokens=3)
    servers.until(lambda: server.generator.running == 2)
    waits = pool.submit(ask, server, n=2, max_tokens=3)
    servers.until(lambda: server.generator.waiting == 2)
    with opened(server, '/v1/completions', model='it', prompt='a') as response:
      assert response.status == 429 and response.headers['Retry-After'] == '1'
      assert 'rate_limit' in json.loads(response.read())['error']['type']
    stopping = pool.submit(server.stop)
    servers.until(lambda: servers.refuses(server))
    held.go.release(1000)
    assert [r.result()[0] for r in (begun, waits)] == [200] * 2
    stopping.result()
  with pytest.raises(ConnectionRefusedError):
    ask(server)


def test_a_deadline_is_504_or_the_last_event(serving, engine):
  held = fakes.GatedEngine(engine)
  server = serving(held, deadline_secs=0.2)
  status, found = ask(server)
  assert status == 504 and found['error']['code'] == 'timeout'
  with opened(server, '/v1/completions', model='it', prompt='a',
              stream=True) as response:
    assert response.status == 504  # nothing had been sampled yet
  held.go.release(1000)
  servers.until(lambda: not server.generator.running)


def test_a_client_that_hangs_up_leaves_its_slot(serving, engine):
  held = fakes.GatedEngine(engine)
  server = serving(held)
  held.go.release(1000)
  asked = dict(max_tokens=120, n=4, seed=1)
  _, whole = ask(server, **asked)
  assert 'length' in [c['finish_reason'] for c in whole['choices']]
  held.go, held.passes = threading.Semaphore(1), 0
  with opened(server, '/v1/completions', model='it', prompt=PROMPT, stream=True,
              **asked) as response:
    assert response.read1(10)  # it has begun
    response.close()
  servers.until(lambda: left(server, held))
  assert held.passes < 120 / 5  # of five tokens


def left(server, held):
  """Lets the engine decode once, and returns whether no choice has a slot."""
  held.go.release()
  time.sleep(0.01)
  return not server.generator.running


def test_a_client_that_hangs_up_before_its_answer_leaves_its_slot(
    serving, engine):
  held = fakes.GatedEngine(engine)
  server = serving(held)
  with servers.connect(server) as line:
    body = json.dumps(dict(model='it', prompt=PROMPT, max_tokens=120, n=4,
                           seed=1)).encode()
    line.sendall(servers.post(body, b'Content-Length: %d' % len(body),
                              path=b'/v1/completions'))
    servers.until(lambda: server.generator.running == 4)
  servers.until(lambda: left(server, held))
  assert held.passes < 120 / 5


def test_a_slow_body_is_408_and_a_body_in_chunks_is_read(serving):
  server = serving(idle_secs=0.2)
  answer = servers.send(server, servers.post(
      b'{', b'Content-Length: 99', path=b'/v1/completions'))
  assert answer.startswith(b'HTTP/1.1 408 ')
  assert b'"message": "the body came too late."' in answer
  body = json.dumps(dict(model='it', prompt='a', max_tokens=1)).encode()
  answer = servers.send(server, servers.post(
      b'%x\r\n%s\r\n0\r\n\r\n' % (len(body), body),
      b'Transfer-Encoding: chunked', b'Connection: close',
      path=b'/v1/completions'))
  assert answer.startswith(b'HTTP/1.1 200 ')


def test_a_padded_length_passes_no_limit(serving):
  with servers.connect(serving()) as line:
    line.sendall(servers.post(b'', b'Content-Length: 00629145600',
                              path=b'/v1/completions'))
    assert line.recv(1000).startswith(b'HTTP/1.1 413 ')


def test_a_long_prompt_is_read_while_others_are_answered(serving, monkeypatch):
  server, go = serving(), threading.Event()
  read = openai_api.read

  def slow(body, **fields):
    assert b'long' not in body or go.wait(20)
    return read(body, **fields)

  monkeypatch.setattr(openai_api, 'read', slow)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    asked = pool.submit(ask, server, prompt='long', max_tokens=1)
    assert ask(server, '/health', 'GET')[0] == 200
    go.set()
    assert asked.result()[0] == 200


def test_64_clients_at_once_are_answered_alike(serving):
  server = serving()
  asked = [dict(max_tokens=1 + n % 7, seed=n) for n in range(64)]
  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    found = list(pool.map(lambda fields: ask(server, **fields), asked))
  assert [status for status, _ in found] == [200] * 64
  for n in (0, 9, 63):
    assert texts(ask(server, **asked[n])[1]) == texts(found[n][1])


def test_openais_own_client(serving):
  openai = pytest.importorskip('openai')
  server = serving(token='right')
  client = openai.OpenAI(base_url=f'{server.address}/v1', api_key='right',
                         max_retries=0, timeout=30)
  assert [m.id for m in client.models.list()] == ['it']
  asked = dict(model='it', messages=HELLO, max_tokens=20, seed=2)
  whole = client.chat.completions.create(**asked, logprobs=True)
  assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
  parts = list(client.chat.completions.create(**asked, stream=True))
  assert len(parts) > 1 and ''.join(
      p.choices[0].delta.content for p in parts
  ) == whole.choices[0].message.content
  plain = client.completions.create(
      model='it', prompt=[PROMPT, 'on'], n=2, max_tokens=4,
      extra_body={'top_k': 5, 'min_p': 0.1})
  assert [c.index for c in plain.choices] == [0, 1, 2, 3]
  with pytest.raises(openai.BadRequestError) as caught:
    client.completions.create(model='it', prompt='a', echo=True)
  assert caught.value.param == 'echo'
  with pytest.raises(openai.NotFoundError):
    client.completions.create(model='other', prompt='a')
  with pytest.raises(openai.AuthenticationError):
    client.with_options(api_key='wrong').models.list()


@pytest.mark.parametrize('options, message', [
    (dict(limits=openai_api.Limits(stops=0)), 'serve.limits.stops must be abo'),
    (dict(waiting=9), 'must hold one request of limits.choices=64'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    model_server.Options(name='it', **options)


def test_a_request_becomes_choices_each_with_a_name_of_its_own():
  asked = types.SimpleNamespace(
      seed=4, prompts=((1, 2), (3,)), budgets=(5, 6), n=2,
      draw=sampling.Draw(0.5), stops=('é',))
  found = model_server.choices(asked)
  assert [c.prompt for c in found] == [(1, 2), (1, 2), (3,), (3,)]
  assert [c.budget for c in found] == [5, 5, 6, 6]
  assert [c.row_ids for c in found] == [
      engines.row_ids(0, 'seed 4', number, 0) for number in range(4)]
  assert all(c.alike for c in found)
  assert found == model_server.choices(asked)
  assert {c.stops for c in found} == {('é'.encode(),)}
  asked.seed = None
  one, other = (model_server.choices(asked)[0].row_ids for _ in range(2))
  assert one != other
  assert not any(c.alike for c in model_server.choices(asked))


class Failing:
  """An engine that fails when it decodes."""

  slots = 2
  compile = append = release = cut = lambda *_: None

  def decode(self, **_):
    raise ZeroDivisionError


def test_a_failing_engine_is_503_and_ends_the_serving(capsys):
  generator = generation.Generator(
      Failing(), token_bytes=TOKENIZER.token_bytes, eos_ids=(), waiting=64)
  http_options = asgi.HttpOptions(port=0)
  server = model_server.Server(
      generator, TOKENIZER, 128, model_server.Options('it', http_options))
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    def ask_when_it_serves():
      servers.until(lambda: not servers.refuses(server))
      return ask(server, max_tokens=3)

    asked = pool.submit(ask_when_it_serves)
    asgi.serve(server, 'it', http_options, is_open=lambda: generator.is_open)
    status, found = asked.result()
  assert status == 503 and 'ending' in found['error']['message']
  assert isinstance(generator.error, ZeroDivisionError)
  assert 'Stopping' in capsys.readouterr().err


def test_it_writes_the_same_documents_alone_and_beside_others(serving):
  host, port = servers.place(serving())
  write = completions.Completions(
      urls=(f'http://{host}:{port}/v1/chat/completions',), model='owner/It',
      prompts=Prompts('{query}', '{query}'), max_tokens=12,
      try_secs=120.0, deadline_secs=120.0)
  tasks = [documents.task(Query('go on', 2, tiny.question(str(i))), noise=0.5,
                          seed=0) for i in range(72)]
  together = write(tasks)
  assert all(isinstance(text, str) for text in together), together
  assert [write([task])[0] for task in tasks[:12]] == together[:12]
  assert len({*together}) > 36  # each by its own seed
  assert write.pop()['simulated/tokens'] == pytest.approx(84 * 12, abs=350)
