# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: what clients send our servers, and what servers send our clients."""

import asyncio
import functools
import json
import math
import re

import chats
import strategies
from strategies import Dice, fuzzed
import text_oracles
import tiny

from searchrl.papers.zerosearch import completions
from searchrl.papers.zerosearch import documents
from searchrl.rollouts import generation
from searchrl.search.remote import web
from searchrl.search.remote import wire
from searchrl.serving import asgi
from searchrl.serving import model_server
from searchrl.serving import openai_api
from searchrl.serving import search_server
from searchrl.trajectory import Passage

LIMITS = wire.Limits(body_bytes=4000, queries=4, query_chars=20, top_k=9)
WIRE_NAMES = ['queries', 'topk', 'return_scores', 'result', 'document', 'id',
              'contents', 'title', 'text', 'score', 'x']


def asked_in(dice: Dice):
  """A request of a search client, now and then above a limit."""
  return {'queries': dice.many(5, lambda d: strategies.text(d, 2)),
          'topk': dice.below(11), 'return_scores': bool(dice.below(2))}


def found_in(dice: Dice):
  """A response of a search server; now and then its score is none."""
  score = dice.one_of([0.5] * 9 + [-0.0, math.inf, math.nan, True, 10**400, '1'])
  return {'result': [
      [{'document': {'id': '7', 'contents': strategies.text(dice, 4)},
        'score': score},
       {'document': {'id': 8, 'title': strategies.text(dice, 3), 'text': 'x'},
        'score': 1}],
      [{'id': 'b', 'contents': 'bare'}]]}


def refused(call, *kinds):
  """The result of a call, or None and its refusal: one line, not too long."""
  try:
    return call(), ''
  except kinds as error:
    message = str(error)
    assert message and '\n' not in message and len(message) < 500, message
    return None, message


def loaded(body: bytes):
  """The record of a body by Python's reader; None if it is none."""
  try:
    record = json.loads(body)
  except (ValueError, RecursionError):
    return None
  return record if isinstance(record, dict) else None


def is_whole(number) -> bool:
  return isinstance(number, int) and not isinstance(number, bool)


@fuzzed()
def test_a_search_request_is_read_or_refused(dice: Dice):
  body = strategies.body(dice, strategies.mutated(
      dice, asked_in(dice), WIRE_NAMES, 2))
  found, why = refused(lambda: wire.read_request(
      body, limits=LIMITS, default_top_k=2), wire.Malformed, wire.TooLarge)
  record = loaded(body) or {}
  queries, top_k, scored = (record.get(name) for name in (
      'queries', 'topk', 'return_scores'))
  legal = isinstance(queries, list) and all(
      isinstance(query, str) for query in queries) and len(queries) <= 4 and (
          top_k is None or is_whole(top_k) and 0 <= top_k <= 9) and (
              scored is None or isinstance(scored, bool))
  assert (found is not None) == legal, why
  if found:
    assert list(found.queries) == [query[:20] for query in queries]
    assert (found.top_k, found.return_scores) == (top_k or 2, bool(scored))


def passage_by_hand(item):
  """The protocol of a passage; None where it is broken."""
  document, score = item, 0.0
  if isinstance(item, dict) and 'document' in item:
    document, score = item['document'], item.get('score', 0.0)
  if not isinstance(document, dict) or isinstance(score, bool) or (
      not isinstance(score, int | float) or not math.isfinite(score)
      if not is_whole(score) else abs(score) > 1e308):
    return None
  title, text = document.get('title'), document.get('text')
  if 'contents' in document:
    if not isinstance(document['contents'], str):
      return None
    title, text = text_oracles.title_and_text(document['contents'], title)
  if isinstance(title, str):
    title = title.strip('\r\n') if 'contents' not in document else title
    title = ' '.join(title.split()) if '\n' in title else title
  uid = document.get('id')
  if not isinstance(title, str) or not isinstance(text, str) or not (
      uid is None or isinstance(uid, str) or is_whole(uid)):
    return None
  return uid, title, text, float(score)


@fuzzed()
def test_a_search_response_is_read_or_refused(dice: Dice):
  body = strategies.body(dice, strategies.mutated(
      dice, found_in(dice), WIRE_NAMES, 1))
  found, why = refused(lambda: wire.read_response(body, queries=2, top_k=2),
                       wire.Malformed)
  lists = (loaded(body) or {}).get('result')
  legal = isinstance(lists, list) and len(lists) == 2 and all(
      isinstance(items, list) and all(map(passage_by_hand, items))
      for items in lists)
  huge = re.search(rb'[0-9]{19}', body)  # a number that may become a float
  assert (found is not None) == legal or huge and not found, why
  for items, passages in zip(lists if legal else (), found or ()):
    assert len(passages) == min(len(items), 2)
    for item, passage in zip(items, passages):
      uid, title, text, score = passage_by_hand(item)
      assert (passage.title, passage.text, passage.score) == (
          title, text, score) and '\n' not in title
      assert passage.id and isinstance(passage.id, str) or uid == ''
      assert uid is None or is_whole(uid) and abs(uid) > 2**63 or (
          passage.id == str(uid))
  if found:
    whole = [tuple(map(without_halves, passages)) for passages in found]
    again = wire.write_response(whole, return_scores=True)
    assert wire.read_response(again, queries=2, top_k=2) == whole


def without_halves(passage):
  return Passage(*(strategies.whole(text) for text in (
      passage.id, passage.title, passage.text)), passage.score)


@fuzzed()
def test_what_the_wire_writes_is_what_it_reads(dice: Dice):
  results = [tuple(map(without_halves, dice.many(3, strategies.passage)))
             for _ in range(dice.below(4))]
  body = wire.write_response(results, return_scores=True)
  assert wire.read_response(body, queries=len(results), top_k=3) == results
  queries = dice.many(4, lambda d: strategies.whole(strategies.text(d, 4)))
  request = wire.read_request(wire.write_request(queries, 1 + dice.below(9)),
                              limits=LIMITS, default_top_k=2)
  assert list(request.queries) == [query[:20] for query in queries]


@fuzzed()
def test_a_completion_is_read_or_refused(dice: Dice):
  text = dice.one_of(['', ' ', '\n']) if dice.chance(4) else (
      f'Doc 1: {strategies.text(dice, 3)}')
  record = {'choices': [{'message': {'content': text, 'role': 'x'}}],
            'usage': {'completion_tokens': 7}}
  body = strategies.body(dice, strategies.mutated(dice, record, [
      'choices', 'message', 'content', 'usage', 'completion_tokens']))
  found, why = refused(lambda: completions.read_completion(body),
                       wire.Malformed)
  try:
    said = loaded(body)['choices'][0]['message']['content']
  except (TypeError, KeyError, IndexError):
    said = None
  assert (found is not None) == (isinstance(said, str) and bool(
      said.strip())), why
  if found:
    assert found[0] == said and isinstance(found[1], int) and found[1] >= 0


@fuzzed()
def test_what_a_web_search_sends_is_read_or_refused(dice: Dice):
  item = {'title': 'T', 'link': 'https://x', 'snippet': 'text'}
  record = {'answer_box': item, 'organic_results': [item, item],
            'related_questions': [{'question': 'q', 'answer': 'a'}]}
  body = strategies.body(dice, strategies.mutated(dice, record, [
      'answer_box', 'organic_results', 'related_questions', 'error', 'title',
      'link', 'snippet', 'question', 'answer']))
  found, why = refused(lambda: web.read_results(body, 3), wire.Malformed)
  if loaded(body) is None:
    assert why
  for passage in found or ():
    assert passage.id and '\n' not in passage.title and passage.score == 0
    assert all(isinstance(text, str) for text in (
        passage.id, passage.title, passage.text))
  assert len(found or ()) <= 3


@fuzzed()
def test_documents_of_a_simulator_are_read_or_refused(dice: Dice):
  text, top_k = strategies.text(dice), 1 + dice.below(4)
  if dice.below(2):
    text = 'Doc 1: ' + text
  found, _ = refused(lambda: documents.read(text, top_k), documents.Malformed)
  if found is not None:
    assert 1 <= len(found) <= top_k and all(found)
    assert sum(map(len, found)) <= len(text)
    for place, document in enumerate(found):
      assert document == ' '.join(document.split())
      title, rest = documents.titled(document)
      assert document == (f'"{title}" {rest}' if title else rest)
    again = documents.write([('', document) for document in found])
    assert documents.read(again, 4) == found


CHAT, PLAIN = chats.qwen(), tiny.Tokenizer()
API_LIMITS = openai_api.Limits(body_bytes=4000, choices=6, stops=2,
                               stop_chars=9)
SAMPLING = {
    'model': 'it', 'n': 2, 'max_tokens': 5, 'temperature': 0.5, 'top_p': 0.9,
    'top_k': 3, 'min_p': 0.1, 'stop': ['a', 'b'], 'seed': 7, 'stream': True,
    'stream_options': {'include_usage': True}, 'user': 'me'}
API_NAMES = [*SAMPLING, 'messages', 'prompt', 'role', 'content', 'type', 'text',
             'logprobs', 'max_completion_tokens', 'tools', 'echo', 'best_of',
             'logit_bias', 'name']


def api_request(dice: Dice, is_chat: bool) -> bytes:
  record = SAMPLING | {'max_tokens': dice.one_of([5, 190 + dice.below(10)])}
  for _ in range(dice.below(8)):
    record.pop(dice.one_of(list(SAMPLING)[1:]), None)
  text = strategies.text(dice, 5) or 'on'
  if is_chat:
    record['messages'] = [
        {'role': 'system', 'content': 'be brief'},
        {'role': 'user', 'content': [{'type': 'text', 'text': text}]
         if dice.below(2) else text}]
  else:
    record['prompt'] = dice.one_of([text, [text, 'on'], [5, 6], [[5], [6, 7]]])
  return strategies.body(dice, strategies.mutated(dice, record, API_NAMES, 2))


@fuzzed()
def test_a_request_of_openais_api_is_read_or_refused(dice: Dice):
  is_chat = bool(dice.below(2))
  tokenizer = CHAT if is_chat else dice.one_of([CHAT, PLAIN])
  body = api_request(dice, is_chat)
  read = lambda: openai_api.read(
      body, is_chat=is_chat, name='it', tokenizer=tokenizer, length=200,
      limits=API_LIMITS)
  try:
    found = read()
  except openai_api.Refused as error:
    assert error.status in (400, 404)
    told = json.loads(openai_api.write_error(error))['error']
    assert told['type'] == 'invalid_request_error' and told['message']
    assert '\n' not in told['message'] and len(told['message']) < 500
    assert told['param'] or loaded(body) is None
    return
  assert found == read()
  assert 1 <= len(found.prompts) * found.n <= 6
  for prompt, budget in zip(found.prompts, found.budgets, strict=True):
    assert prompt and 1 <= budget <= 200 - len(prompt)
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in prompt)
  cut = found.draw.truncation
  assert 0 <= found.draw.temperature <= 100 and 0 < cut.top_p <= 1
  assert 0 <= cut.min_p <= 1 and cut.top_k >= 0
  assert found.seed is None or -2**63 <= found.seed < 2**63
  assert all(0 < len(stop.encode()) <= 36 for stop in found.stops)
  if is_chat:  # no message poses as another's
    special = [id_ for id_ in found.prompts[0] if id_ in CHAT.special_ids]
    messages = loaded(body)['messages']
    plain = CHAT.encode(CHAT.render([
        {'role': message['role'], 'content': 'x'} for message in messages]))
    assert special == [id_ for id_ in plain if id_ in CHAT.special_ids]


class Client:
  """Asks an application in this process, without a socket."""

  def __init__(self, app):
    self._app, self._loop = app, asyncio.new_event_loop()

  def __call__(self, method: str, path: str, body: bytes, headers=(),
               pieces: int = 1):
    """Returns the status and the body of the answer."""
    scope = {'type': 'http', 'asgi': {'version': '3.0'}, 'http_version': '1.1',
             'method': method, 'path': path, 'raw_path': path.encode(),
             'query_string': b'', 'root_path': '', 'scheme': 'http',
             'headers': list(headers), 'client': ('127.0.0.1', 5),
             'server': ('127.0.0.1', 80)}
    size = -(-len(body) // pieces) or 1
    cut = [body[at:at + size] for at in range(0, len(body), size)] or [b'']
    inbox = [{'type': 'http.request', 'body': piece, 'more_body': more}
             for piece, more in zip(cut, [True] * (len(cut) - 1) + [False])]
    sent = []

    async def receive():
      if inbox:
        return inbox.pop(0)
      return await asyncio.Future()  # the client waits

    async def send(message):
      sent.append(message)

    self._loop.run_until_complete(self._app(scope, receive, send))
    return sent[0]['status'], b''.join(
        message.get('body', b'') for message in sent[1:])


def searches(queries):
  """An engine that finds each query's text; some fail."""
  return [(Passage(query.text, 'T', 'x'),) * min(query.top_k, 2)
          for query in queries]


@functools.cache
def search_client():
  server = search_server.Server(searches, search_server.Options(
      asgi.HttpOptions(port=0), limits=LIMITS, gather_secs=0.0,
      waiting_queries=4))
  return Client(server._app())


PATHS = ['/retrieve', '/health', '/metrics', '/', '//retrieve', '/retrieve/',
         '/\ud83d'.encode('utf-8', 'replace').decode(), '/é']
METHODS = ['POST', 'GET', 'HEAD', 'PUT', 'OPTIONS', 'DELETE', 'Ü']


@fuzzed(short=150, share=0.4)
def test_a_search_server_answers_whatever_is_asked(dice: Dice):
  body = strategies.body(dice, strategies.mutated(
      dice, asked_in(dice), WIRE_NAMES, 2))
  if dice.chance(8):
    body = body * 60
  odd = dice.chance(4)
  path = dice.one_of(PATHS) if odd else '/retrieve'
  method = dice.one_of(METHODS) if odd else 'POST'
  headers = [(b'content-length', dice.one_of([
      b'0', b'7', b'00000004', b'4001', b'9' * 30, str(len(body)).encode()]))
             ] * dice.below(2)
  status, answer = search_client()(
      method, path, body, headers, 1 + dice.below(3))
  assert status in ((200, 400, 413) if path == '/retrieve' and method == 'POST'
                    else (200, 404, 405))
  if path == '/metrics' or not answer:
    return
  record = json.loads(answer)
  assert len(answer) < 20_000 and b'Traceback' not in answer
  assert ('error' in record) == (status != 200)
  if 'result' in record:
    asked = loaded(body)
    assert len(record['result']) == len(asked['queries'])
    for query, found in zip(asked['queries'], record['result']):
      texts = [json.loads(json.dumps(p.get('document', p)))['id']
               for p in found]
      assert set(texts) <= {strategies.whole(query[:20])}


class Speaks:
  """A generator that repeats the end of each prompt at once."""

  is_open, waiting, running = True, 0, 0

  def submit(self, choices, put):
    for number, choice in enumerate(choices):
      ids = choice.prompt[-choice.budget:]
      put(generation.Piece(number, CHAT.decode(ids), ids, (-0.5,) * len(ids),
                           'length'))
    return generation.Stream(put)

  def close(self, within_secs):
    pass


@functools.cache
def model_client():
  server = model_server.Server(Speaks(), CHAT, 200, model_server.Options(
      'it', asgi.HttpOptions(port=0), API_LIMITS))
  return Client(server._app())


@fuzzed(short=100, share=0.3)
def test_a_model_server_answers_whatever_is_asked(dice: Dice):
  is_chat = bool(dice.below(2))
  path = '/v1/chat/completions' if is_chat else '/v1/completions'
  status, answer = model_client()('POST', path, api_request(dice, is_chat), (),
                            1 + dice.below(3))
  assert status in (200, 400, 404, 413) and b'Traceback' not in answer
  if status != 200:
    assert json.loads(answer)['error']['message']
  elif answer.startswith(b'data: '):
    *events, last, empty = answer.split(b'\n\n')
    assert last == b'data: [DONE]' and empty == b''
    for event in events:
      assert json.loads(event.removeprefix(b'data: '))['id']
  else:
    record = json.loads(answer)
    assert record['usage']['completion_tokens'] >= len(record['choices'])
