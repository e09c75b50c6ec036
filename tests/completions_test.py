# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""search/remote/completions: what is sent, and what becomes of every fault."""

import json
import time

import faulty
import pytest
import tiny

from searchrl.papers.zerosearch import completions
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch.simulator_prompts import Prompts
from searchrl.search import engine_wrappers
from searchrl.search import engines
from searchrl.search.remote.wire import Malformed
from searchrl.trajectory import Query, SearchError

PROMPTS = Prompts('Useful: {query} {ground_truth}', 'Noisy: {query}')
SIMULATED = 'searchrl.papers.zerosearch.simulated:make'
QUICK = dict(deadline_secs=20.0, try_secs=1.0, tries=3, backoff_secs=0.01,
             failures=100, rest_secs=0.05, pause_secs=5.0)


def reply(path, body):
  """Repeats the prompt."""
  del path
  asked = json.loads(body)
  text = f'Doc 1: {asked["messages"][1]["content"]}\nDoc 2: {asked["seed"]}'
  return json.dumps({
      'choices': [{'message': {'role': 'assistant', 'content': text},
                   'finish_reason': 'stop'}],
      'usage': {'completion_tokens': 7}}).encode()


def serving(faults=(), body=reply):
  return faulty.Server(faults, body)


def writer(*urls, **options):
  return completions.Completions(
      urls=urls, prompts=PROMPTS, **QUICK | options)


def task(text='river', seed=7, **fields):
  return documents.Task(Query(text, 2, tiny.question(**fields)), True, seed)


def test_each_task_is_a_request_with_its_own_seed():
  with serving() as server:
    write = writer(server.url, model='m', max_tokens=50, temperature=0.5)
    tasks = [task(f'q{i}', i) for i in range(40)]
    assert write(tasks) == [
        f'Doc 1: Useful: q{i} here\nDoc 2: {i}' for i in range(40)]
    body = json.loads(server.requests[0][2])
    number = body.pop('seed')
    assert body == {
        'model': 'm', 'max_tokens': 50, 'temperature': 0.5, 'messages': [
            {'role': 'system', 'content': ''},
            {'role': 'user', 'content': f'Useful: q{number} here'}]}
    assert write.pop()['simulated/tokens'] == 280
    assert write.pop()['simulated/tokens'] == 0
    assert write([]) == []


@pytest.mark.parametrize('text', ['\x00', '\ud800', '"\\', '😀', '{problem}'])
def test_no_text_is_too_strange(text):
  with serving() as server:
    found, = writer(server.url)([task(text)])
  assert found.startswith('Doc 1: Useful: ')


@pytest.mark.parametrize('faults', [
    ['500'], ['busy'], ['closes at once'], ['closes early'],
    ['never answers', '503']])
def test_a_passing_fault_is_tried_again_with_the_same_seed(faults):
  with serving(faults) as server:
    found, = writer(server.url, try_secs=0.5)([task()])
    assert found == 'Doc 1: Useful: river here\nDoc 2: 7'
    assert len({body for _, _, body in server.requests}) == 1


@pytest.mark.parametrize('faults, kind', [
    (['500'] * 3, 'unavailable'), (['404'], 'refused'), (['401'], 'refused'),
    (['never answers'] * 3, 'timeout'), (['not JSON'], 'bad_response'),
    (['empty'], 'bad_response'), (['a list'], 'bad_response'),
    (['deep'], 'bad_response'), (['truncated JSON'], 'bad_response'),
    (['redirects'], 'refused'), (['talks for ever'], 'bad_response')])
def test_a_lasting_fault_is_typed_and_of_one_task_alone(faults, kind):
  with serving(faults) as server:
    write = writer(server.url, connections=1, try_secs=0.3)
    failed, good = write([task('a'), task('b')])
  assert isinstance(failed, SearchError) and failed.kind == kind
  assert good.startswith('Doc 1: Useful: b')


@pytest.mark.parametrize('record', [
    {}, {'choices': []}, {'choices': [{}]}, {'choices': [{'message': {}}]},
    {'choices': [{'message': {'content': None}}]},
    {'choices': [{'message': {'content': ' \n'}}]},
    {'choices': [{'message': {'content': [{'text': 'Doc 1: a'}]}}]}])
def test_a_response_without_a_text_is_refused(record):
  with pytest.raises(completions.Malformed, match='content must be a text'):
    completions.read_completion(json.dumps(record).encode())


@pytest.mark.parametrize('usage', [None, {}, {'completion_tokens': -1},
                                   {'completion_tokens': 'many'}])
def test_tokens_that_are_not_said_count_nothing(usage):
  record = {'choices': [{'message': {'content': 'x'}}], 'usage': usage}
  assert completions.read_completion(json.dumps(record).encode()) == ('x', 0)


def test_a_question_without_an_answer_is_not_sent():
  with serving() as server:
    failed, good = writer(server.url)([task(answers=()), task()])
    assert failed.kind == 'unanswerable' and "'q'" in failed.detail
    assert good.startswith('Doc 1') and len(server.requests) == 1


def test_a_server_that_is_down_ends_neither_in_a_loop_nor_in_silence():
  begun = time.monotonic()
  write = writer(faulty.unused_url(), pause_secs=0.2)
  assert write([task()])[0].kind == 'unavailable'
  with pytest.raises(ConnectionError, match='pause_secs=0.2'):
    write.wait()
  assert time.monotonic() - begun < 20


def test_a_run_is_not_resumed_because_one_token_is_answered():
  def body(path, asked):
    if json.loads(asked)['max_tokens'] > 1:
      raise ValueError
    return reply(path, asked)

  with serving(body=body) as server:
    write = writer(
        server.url, tries=1, try_secs=20.0, deadline_secs=60.0, pause_secs=0.2)
    found = write([task(f'q{i}', i) for i in range(12)] + [task(answers=())])
    assert [error.kind for error in found] == [
        'unavailable'] * 12 + ['unanswerable']
    with pytest.raises(ConnectionError, match='12 of 12 at a time failed'):
      write.wait()
    server.body = reply
    write.wait()
    assert write([task()]) == ['Doc 1: Useful: river here\nDoc 2: 7']


def test_tasks_without_an_answer_pause_no_run():
  with serving(['500'] * 3) as server:
    write = writer(server.url, pause_secs=0.2)
    found = write([task()] + [task(answers=())] * 12)
    assert {one.kind for one in found[1:]} == {'unanswerable'}
    assert write.wait() is None  # and raises nothing


def test_a_run_waits_for_a_server_that_comes_back(capsys):
  with serving(['500'] * 4) as server:
    search = engines.make(
        SIMULATED, None, writer='served', urls=(server.url,),
        prompts=dict(useful='u {query}', noisy='n {query}'), **QUICK)
    query = Query('a', 2, tiny.question())
    assert search([query])[0].kind == 'unavailable'
    engine_wrappers.wait(search)
    assert len(search([query])[0]) == 2
    metrics = search.pop()
  assert metrics['search/remote/failed_calls'] >= 1
  assert metrics['simulated/tokens'] >= 7
  assert capsys.readouterr().err == ''  # one try more was enough


@pytest.mark.parametrize('options, message', [
    (dict(max_tokens=0), 'max_tokens'), (dict(temperature=-1), 'temperature'),
    (dict(connections=0), 'connections'), (dict(tries=0), 'tries'),
    (dict(token_env='NOT_THERE'), 'NOT_THERE is not set')])
def test_bad_options_are_refused_by_name(options, message):
  with pytest.raises(ValueError, match=message):
    writer('http://127.0.0.1:1/v1', **options)


@pytest.mark.parametrize('content', [' ', '', None, 'Doc'])
def test_any_completion_says_that_a_server_answers(content):
  body = json.dumps({'choices': [{'message': {'content': content}}]}).encode()
  assert completions.read_any(body) == ('', 0)


@pytest.mark.parametrize('body', [b'{}', b'{"choices": []}', b'{"error": 1}'])
def test_what_is_no_completion_is_no_answer(body):
  with pytest.raises(Malformed):
    completions.read_any(body)
