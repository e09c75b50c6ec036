# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""model_server: over HTTP as by the engine itself; refusals, streams, the end."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import chats
import jax
import numpy as np
import pytest
import tiny

from searchrl.jobs import serve_model
from searchrl.models.inference import engine as engines
from searchrl.models import transformer
from searchrl.rollouts import generation
from searchrl.serving import model_server
from searchrl.serving import openai_api

TOKENIZER = chats.qwen()
SHAPE = dataclasses.replace(tiny.CONFIG, vocab_size=TOKENIZER.vocab_size)
EOS = (*TOKENIZER.eos_ids, *serve_model.turn_ends(TOKENIZER))
PROMPT = 'the search goes'
HELLO = [{'role': 'user', 'content': 'go on'}]


@pytest.fixture(scope='module')
def params():
  return tiny.params(SHAPE)


@pytest.fixture(scope='module')
def engine():
  return engines.Engine(
      SHAPE, slots=4, length=128, stop_table=serve_model.never(SHAPE.vocab_size),
      eos_ids=EOS, tile=16, block=16, steps=5, seed=4)


@pytest.fixture
def serving(engine, params):
  """Makes a server over the one engine."""
  with contextlib.ExitStack() as stack:
    def start(its=engine, **options):
      engine.load(params, None)
      generator = generation.Generator(
          its, token_bytes=TOKENIZER.token_bytes, eos_ids=EOS,
          waiting=options.get('waiting', 256))
      server = model_server.Server(
          generator, TOKENIZER, 128,
          model_server.Options(name='it', port=0, **options))
      server.start()
      stack.callback(server.stop)
      return server
    yield start


@contextlib.contextmanager
def opened(server, path, method='POST', headers=(), body=None, **record):
  host, _, port = server.address.removeprefix('http://').rpartition(':')
  line = http.client.HTTPConnection(host, int(port), timeout=30)
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
  prompt, said = TOKENIZER.encode(PROMPT), []
  forward = jax.jit(lambda tokens: transformer.logits(
      params, transformer.forward(params, tokens, SHAPE))[0])
  while len(said) < 20 and not {*said} & {*EOS}:
    tokens = np.array([*prompt, *said, *[0] * (20 - len(said))])
    logits = forward(tokens[None])[len(prompt) + len(said) - 1]
    said.append(int(np.argmax(logits)))
  choice, = found['choices']
  assert choice['text'] == b''.join(
      TOKENIZER.token_bytes[t] for t in said).decode(errors='replace')
  ended = 'stop' if said[-1] in EOS else 'length'
  assert choice['finish_reason'] == ended
  assert found['usage'] == {
      'prompt_tokens': len(prompt), 'completion_tokens': len(said),
      'total_tokens': len(prompt) + len(said)}
  last = float(jax.nn.log_softmax(logits)[said[-1]])
  assert len(choice['logprobs']['tokens']) == len(said)
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
  _, found = ask(server, max_tokens=40, seed=5, stop=[middle, 'never said'])
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
  *told, usage = events(server, path, **asked,
                        stream_options={'include_usage': True})
  assert usage['choices'] == [] and usage['usage'] == whole['usage']
  said = {0: '', 1: ''}
  tokens, finish = {0: [], 1: []}, {}
  for event in told:
    choice, = event['choices']
    number = choice['index']
    assert number not in finish
    if 'chat' in path:
      assert event['object'] == 'chat.completion.chunk'
      assert ('role' in choice['delta']) == (not tokens[number])
      said[number] += choice['delta']['content']
      tokens[number] += choice['logprobs']['content']
    else:
      said[number] += choice['text']
      tokens[number] += choice['logprobs']['tokens']
    if choice['finish_reason']:
      finish[number] = choice['finish_reason']
  for choice in whole['choices']:
    number = choice['index']
    text = (choice['message']['content'] if 'chat' in path else choice['text'])
    its = choice['logprobs']
    assert said[number] == text and finish[number] == choice['finish_reason']
    assert tokens[number] == (its['content'] if 'chat' in path else its['tokens'])


def test_a_chat_is_the_completion_of_what_the_template_writes(serving):
  server = serving()
  assert set(serve_model.turn_ends(TOKENIZER)) == set(
      TOKENIZER.encode('<|im_end|>'))
  _, chat = ask(server, '/v1/chat/completions', temperature=0, max_tokens=9)
  _, plain = ask(server, temperature=0, max_tokens=9,
                 prompt=TOKENIZER.render(HELLO))
  assert chat['object'] == 'chat.completion'
  assert chat['choices'][0]['message'] == {
      'role': 'assistant', 'content': plain['choices'][0]['text']}
  assert chat['usage'] == plain['usage']


@pytest.mark.parametrize('fields, status, told', [
    (dict(body=b'{'), 400, 'JSON'),
    (dict(body=b' ' * (2**20 + 1)), 413, 'at most 1048576 bytes'),
    (dict(temperature=-1), 400, 'temperature must be'),
    (dict(model='gpt'), 404, "must be 'it'"),
    (dict(path='/v1/chat/completions', messages=[]), 400, 'messages must'),
    (dict(path='/v1/embeddings'), 404, 'POST to /v1/completions'),
    (dict(path='/v1/models/other', method='GET'), 404, 'no such page'),
    (dict(path='/v1/completions', method='GET'), 405, 'no such page'),
    (dict(path='/v1/completions', method='PUT'), 501, 'no such request'),
    (dict(stream=True, n=0), 400, 'n must be'),
    (dict(prompt=[3] * 128), 400, 'may have 127 tokens'),
])
def test_what_is_refused(serving, fields, status, told):
  server = serving()
  got, found = ask(server, **fields)
  assert got == status and told in found['error']['message']
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
  host, _, port = server.address.removeprefix('http://').rpartition(':')
  with socket.create_connection((host, int(port)), timeout=20) as line:
    line.sendall(b'nonsense\r\n\r\n')
    assert line.recv(4096).startswith(b'HTTP/1.1 400 ')


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


class Held:
  """An engine whose decodes wait until they are let."""

  def __init__(self, engine):
    self._engine, self.slots = engine, engine.slots
    self.go, self.passes = threading.Semaphore(0), 0

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def decode(self):
    assert self.go.acquire(timeout=20)
    self.passes += 1
    return self._engine.decode()


def wait_for(condition):
  end = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.001)


def test_a_full_queue_is_429_and_what_was_asked_is_answered_at_the_end(
    serving, engine):
  held = Held(engine)
  server = serving(held, waiting=2, limits=openai_api.Limits(choices=2))
  with concurrent.futures.ThreadPoolExecutor(9) as pool:
    begun = pool.submit(ask, server, n=2, max_tokens=3)
    wait_for(lambda: server.generator.speaking == 2)
    waits = pool.submit(ask, server, n=2, max_tokens=3)
    wait_for(lambda: server.generator.waiting == 2)
    with opened(server, '/v1/completions', model='it', prompt='a') as response:
      assert response.status == 429 and response.headers['Retry-After'] == '1'
      assert 'rate_limit' in json.loads(response.read())['error']['type']
    stopping = pool.submit(server.stop)
    wait_for(lambda: not server.generator.is_open)
    held.go.release(1000)
    assert [r.result()[0] for r in (begun, waits)] == [200] * 2
    stopping.result()
    server.stop = lambda: None
  with pytest.raises(OSError):
    ask(server)


def test_a_deadline_is_504_or_the_last_event(serving, engine):
  held = Held(engine)
  server = serving(held, deadline_secs=0.2)
  status, found = ask(server)
  assert status == 504 and found['error']['code'] == 'timeout'
  with opened(server, '/v1/completions', model='it', prompt='a',
              stream=True) as response:
    assert response.status == 504  # nothing had been said yet
  held.go.release(1000)
  wait_for(lambda: not server.generator.speaking)


def test_a_client_that_hangs_up_leaves_its_slot(serving, engine):
  held = Held(engine)
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
  while server.generator.speaking:
    held.go.release()  # it is noticed when something is sent
    time.sleep(0.01)
  assert held.passes < 120 / 5  # of five tokens


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
    (dict(deadline_secs=0), 'serve.deadline_secs must be above 0'),
    (dict(limits=openai_api.Limits(stops=0)), 'serve.limits.stops must be abo'),
    (dict(waiting=9), 'must hold one request of limits.choices=64'),
])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    model_server.Options(name='it', **options)


@pytest.mark.slow
def test_the_job_serves_the_tiny_base_model_and_ends_in_order(tmp_path):
  root = pathlib.Path(__file__).parents[1]
  command = [sys.executable, '-m', 'searchrl.main',
             '--config=configs/serve_model.py', '--config.serve.port=0',
             f'--workdir={tmp_path}']
  with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True
                       ) as process:
    line = ''
    while 'Serving' not in line:
      line = process.stderr.readline()
      assert line, 'it ended'
    assert 'tiny_base at http://127.0.0.1:' in line
    address = re.search(r'at (\S+)/v1;', line)[1]
    server = type('Remote', (), {'address': address})
    status, found = ask(
        server, model='tiny_base', temperature=0, max_tokens=40,
        stop=['</search>'],
        prompt=' Search, then answer: What is the river of Zeston?\n')
    assert status == 200 and '<search>' in found['choices'][0]['text']
    assert ask(server, '/v1/chat/completions', model='tiny_base')[0] == 400
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
