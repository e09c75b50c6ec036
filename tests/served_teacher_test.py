# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""served_teacher: what a served model writes becomes demonstrations."""

import dataclasses
import json
import re

import chats
import demonstrate_test
import faulty
import pytest
import tiny

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tools
from searchrl.jobs import demonstrate
from searchrl.rollouts import served_teacher
from searchrl.rollouts import scripted
from searchrl.rollouts import driver
from searchrl.trajectory import Action, Passage, Request

OPTIONS = dict(model='big', temperature=0.5, max_tokens=50)
data = demonstrate_test._data


def reply(text):
  return json.dumps({'choices': [{'message': {'content': text}}]}).encode()


def of_towns(path, request):
  """Searches once, and answers what it reads; sample 0 answers wrongly."""
  request = request if isinstance(request, dict) else json.loads(request)
  messages = request['messages']
  number = re.search(r'town (\d+)', messages[1]['content'])[1]
  if len(messages) == 2:
    return reply(f' <think> hm </think>\n<search> river of the town {number} ')
  read = re.search(r'on the river (Riv\d+)', messages[-1]['content'])[1]
  return reply(f'<answer> {read if request["seed"] >= 1000 else "no"} ')


def test_right_answers_of_a_teacher_are_kept(data, tmp_path, capsys):
  with faulty.Server([], of_towns) as server:
    config = demonstrate_test.config(
        data, demonstrate_test.TINY, source='teacher', hops=(1,),
        questions_a_round=5)
    config.teacher.update(url=server.url, model='big', samples=2)
    demonstrate.run(config, str(tmp_path / 'run'))
    count = len(server.requests)
    demonstrate.run(config, str(tmp_path / 'run'))  # all rounds are kept
    assert len(server.requests) == count == 2 * 2 * demonstrate_test.TOWNS
  lines = demonstrate_test.written(tmp_path / 'run')
  assert len(lines) == demonstrate_test.TOWNS
  first, last = demonstrate_test.texts_of(lines[0])
  assert first.startswith('<think> hm </think>\n<search> river of the town')
  assert first.endswith(' </search>') and last.startswith('<answer> Riv')
  assert '12 have a lower reward' in capsys.readouterr().out


@pytest.mark.parametrize('url, proxy', [
    ('https://api.invalid/v1', 'http://proxy:1'), ('http://10.0.0.1/v1', ''),
    ('https://inside.invalid/v1', '')])
def test_a_teacher_of_the_web_is_called_through_the_proxy(
    url, proxy, monkeypatch):
  monkeypatch.setenv('HTTPS_PROXY', 'http://proxy:1')
  monkeypatch.setenv('HTTP_PROXY', 'http://proxy:1')
  monkeypatch.setenv('NO_PROXY', 'inside.invalid')
  calls = []
  monkeypatch.setattr(served_teacher.transport, 'posting_json',
                      lambda urls, **options: calls.append((urls, options)))
  served_teacher.Teacher(dialogues.tags(), tiny.Tokenizer(), url=url, **OPTIONS)
  (urls, options), = calls
  assert (urls, options['proxy']) == ((url,), proxy)


def test_a_failing_teacher_is_asked_again_and_then_an_error(data, tmp_path):
  config = demonstrate_test.config(
      data, demonstrate_test.TINY, source='teacher', hops=(1,), count=1)
  config.teacher.update(url=faulty.unused_url(), samples=1, tries=2,
                        deadline_secs=5.0)
  with pytest.raises(ConnectionError, match='teacher.url must answer, '
                     'but failed with un'):
    demonstrate.run(config, str(tmp_path / 'run'))
  with faulty.Server(['500'], of_towns) as server:
    made = served_teacher.Teacher(
        dialogues.tags(), chats.qwen(), url=server.url,
        wiring=dict(sleep=lambda secs: None), **OPTIONS)
    text = made(Request(tiny.question(text='the town 3')), ())
  assert text.endswith('<search> river of the town 3  </search>'.replace(
      '  ', ' ')) and len(server.requests) == 2


def test_a_question_that_the_teacher_refuses_is_left_out(
    data, tmp_path, capsys):
  def answer(path, request):
    request = request if isinstance(request, dict) else json.loads(request)
    if 'town 3?' in request['messages'][1]['content']:
      raise ValueError('the server fails here')
    return of_towns(path, request | {'seed': 1000})

  config = demonstrate_test.config(
      data, demonstrate_test.TINY, source='teacher', hops=(1,))
  with faulty.Server([], answer) as server:
    server.fails = '400'
    config.teacher.update(url=server.url, samples=2)
    demonstrate.run(config, str(tmp_path / 'run'))
  said = capsys.readouterr()
  assert said.err.count("refuses question 'one3' (127.0.0.1") == 1
  assert '2 have a turn that is no action' in said.out
  lines = demonstrate_test.written(tmp_path / 'run')
  assert len(lines) == demonstrate_test.TOWNS - 1


def test_a_thought_that_the_prompt_opens_is_opened_once():
  dialogue = dataclasses.replace(
      dialogues.tags(), after='</information><think>\n', tail='<think>\n')
  text = '<think> hm </think> <search> a </search>'
  with faulty.Server([], lambda *_: reply(text)) as server:
    teacher = served_teacher.Teacher(
        dialogue, chats.qwen(), url=server.url, **OPTIONS)
    first = teacher(Request(tiny.question()), ())
  assert first == 'hm </think> <search> a </search>'


@pytest.mark.parametrize('make', [dialogues.search_r1, chat.search_r1,
                                  tools.dr_zero])
def test_a_teacher_reads_what_the_policy_reads(make):
  tokenizer = chats.qwen()
  dialogue = make(tokenizer)
  sent = []

  def answer(path, request):
    sent.append(request if isinstance(request, dict) else json.loads(request))
    kind = 'search' if len(sent) == 1 else 'answer'
    turn = dialogue.write('hm', Action(kind, ('a "word"',)))
    for stop in dialogue.stop_strings:  # as servers leave it out
      turn = turn.removesuffix(stop)
    return reply(turn)

  with faulty.Server([], answer) as server:
    teacher = served_teacher.Teacher(
        dialogue, tokenizer, url=server.url, **OPTIONS)
    trajectory, = scripted.rollout(
        teacher, [Request(tiny.question())], tokenizer=tokenizer,
        dialogue=dialogue, budgets=driver.Budgets(
            max_new_tokens=300, max_prompt_tokens=2000),
        length=4000,
        search=lambda queries: [(Passage('p', 'Tarn', 'A "river".'),)])
  assert trajectory.answer == 'a "word"'
  assert [turn.text for turn in trajectory.turns] == [
      dialogue.write('hm', Action(kind, ('a "word"',)))
      for kind in ('search', 'answer')]
  system, user, own, found = sent[1]['messages']
  assert [m['role'] for m in sent[1]['messages']] == [
      'system', 'user', 'assistant', 'user']
  assert dialogue.write('...', Action('answer', ('...',))) in system['content']
  assert 'where?' in user['content']
  assert own['content'] == trajectory.turns[0].text
  assert 'A "river".' in found['content'] and 'Tarn' in found['content']
  assert 'im_start' not in found['content'] and (
      'assistant' not in found['content'])
  assert sent[0]['stop'] == list(dialogue.stop_strings)


def test_the_stop_string_is_the_one_that_makes_an_action():
  tags = dialogues.tags()
  close = lambda text: served_teacher.close(text, tags)
  assert close('<search> a ') == '<search> a </search>'
  assert close('<answer> a') == '<answer> a</answer>'
  assert close('<answer> a</answer> more') == '<answer> a</answer>'
  assert close('I do not know') == 'I do not know'


@pytest.mark.parametrize('finish', ['stop', 'length', None])
def test_a_turn_that_is_cut_off_is_not_closed(finish):
  text = '<search> who wrote the novel that inspired the fil'
  body = json.dumps({'choices': [{
      'message': {'content': text}, 'finish_reason': finish}]}).encode()
  with faulty.Server([], lambda *_: body) as server:
    teacher = served_teacher.Teacher(
        dialogues.tags(), chats.qwen(), url=server.url, **OPTIONS)
    turn = teacher(Request(tiny.question()), ())
  assert turn == text + '</search>' * (finish != 'length')


def test_bad_options_are_named(data, tmp_path):
  config = demonstrate_test.config(
      data, demonstrate_test.TINY, source='teacher')
  with pytest.raises(ValueError, match="teacher.url must be .* but is ''"):
    demonstrate.run(config, str(tmp_path / 'run'))
  config.demonstrations.hops = (4,)
  with pytest.raises(ValueError, match=r'hops=\(4,\), but none of 24 has'):
    demonstrate.run(config, str(tmp_path / 'run'))
  config.demonstrations.source = 'nobody'
  with pytest.raises(ValueError, match='source must be'):
    demonstrate.run(config, str(tmp_path / 'run'))


def test_a_reply_without_a_text_is_an_empty_turn():
  body = json.dumps({'choices': [{'message': {
      'role': 'assistant', 'content': None}, 'finish_reason': 'length'}]})
  assert served_teacher.read_turn(body.encode()) == ('', True)


@pytest.mark.parametrize('options, words', [
    (dict(deadline_secs=0), 'teacher.deadline_secs must be above 0'),
    (dict(tries='3'), "teacher.tries must be a number, but is '3'"),
    (dict(retry=2), "teacher has no option 'retry'"),
    (dict(token_env='NOT_SET'), 'teacher.token_env must name')])
def test_options_are_named_by_the_group_that_has_them(options, words):
  with pytest.raises(ValueError, match=words):
    served_teacher.connection(
        'http://127.0.0.1:1/v1', 'teacher.url', **dict(token_env='') | options)
