# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""archive: documents, questions, the script; controls; the data job in small."""

import dataclasses
import json

from configs import archive as configs_archive
import fakes
import numpy as np
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.jobs import archive_data
from searchrl.search import engines
from searchrl.search import snippets
from searchrl.search.corpus import Corpus
from searchrl.toolbox import toolbox
from searchrl.trajectory import (
    Action, Passage, Query, SearchError, ToolCall, ToolResult, Turn)
from searchrl.world import archive

TOWNS = archive.towns(3, 30)


def test_a_town_has_its_numbers_in_the_first_sentence():
  assert archive.towns(3, 30) == TOWNS and archive.towns(4, 30) != TOWNS
  assert len({town.name for town in TOWNS}) == 30
  for town in TOWNS:
    assert town.sentences[0] == (f'{town.name} has {town.people} people and '
                                 f'{town.houses} houses.')
    assert town.people > town.houses
    assert all(value not in town.sentences[0] for value in town.facts.values())
    for value in town.facts.values():
      assert sum(value in sentence for sentence in town.sentences) == 1


@pytest.mark.parametrize('kind', archive.KINDS)
def test_an_answer_follows_from_the_town(kind):
  drawn = archive.problems(TOWNS, kind, np.random.default_rng(0))
  for problem in (next(drawn) for _ in range(30)):
    town = problem.town
    assert problem.answer == {
        'fact': lambda: town.facts[problem.relation],
        'sum': lambda: str(town.people + town.houses),
        'difference': lambda: str(town.people - town.houses)}[kind]()
    assert town.name in problem.wording


def turns_of(problem, habits, tools=('search', 'open', 'calculate')):
  """Returns the script's turns; a page has two sentences, and sums are right.
  """
  rng, turns, page = np.random.default_rng(0), [], 0
  while not turns or turns[-1].action.kind != 'answer':
    _, action = archive.act(problem, turns, habits, rng, tools)
    seen, is_error = '', False
    if action.is_search:
      assert not turns and action.texts[0].startswith(problem.town.name)
      seen = problem.town.sentences[0]
    elif action.kind == 'open':
      sentences = problem.town.sentences[2 * page:2 * page + 2]
      seen, page, is_error = ' '.join(sentences), page + 1, not sentences
    elif action.kind == 'calculate':
      seen = str(eval(action.texts[0]))  # pylint: disable=eval-used
    turns.append(Turn((1,), (0.,), action, (2,), observation=seen,
                      is_tool_error=is_error))
  return turns


@pytest.mark.parametrize('kind', archive.KINDS)
def test_an_agent_that_uses_its_tools_is_right(kind):
  drawn = archive.problems(TOWNS, kind, np.random.default_rng(1))
  for problem in (next(drawn) for _ in range(20)):
    turns = turns_of(problem, archive.Habits(1, 1, 1))
    assert turns[-1].action == Action('answer', (problem.answer,))
    kinds = [turn.action.kind for turn in turns]
    assert kinds.count('search') == 1
    assert ('open' in kinds) == (kind == 'fact')
    assert ('calculate' in kinds) == (kind != 'fact')


def test_an_agent_without_the_habits_guesses():
  for kind, tools in (('fact', ('search',)), ('sum', ('search', 'open'))):
    drawn = archive.problems(TOWNS, kind, np.random.default_rng(1))
    right = [turns_of(p, archive.Habits(1, 1, 1), tools)[-1].action.texts[0]
             == p.answer for p in (next(drawn) for _ in range(40))]
    assert np.mean(right) < .2


def test_a_snippet_is_the_first_sentence():
  corpus = Corpus((Passage('0', 'A. B', 'It is Mr x. Two. Three! Four'),))
  search = lambda **options: engines.make(
      'snippets', corpus, engine=dict(name='bm25'), **options)(
          [Query('four', 1, tiny.question())])[0][0].text
  assert search() == 'It is Mr x.'
  assert search(sentences=3) == 'It is Mr x. Two. Three!'
  with pytest.raises(ValueError, match='sentences must be at least 1, but is 0'):
    search(sentences=0)


@pytest.mark.parametrize('sentences', [
    ['東京は首都である。', '「すごい！？」と言った。', '北は？', '2位'],
    ['北京是首都。', ' ', '“好。”他说。', '对吗？', '（是）'],
    ['Он здесь.', ' ', 'Это т. е. дом.', ' ', 'Ёж!', ' ', '«Да»'],
    ['Il dort.', ' ', 'École !', ' ', '« Oui. »'],
    ['Hola.', ' ', '¿Qué?', ' ', '¡Sí!', ' ', '3 más.', ' ', '“No”'],
    ['Ja.', ' ', '„Nein.“ sagte er.', ' ', 'Übel bzw. schlecht'],
    ['أين هو؟', ' ', 'هنا.', ' ', '٣ كتب'],
    ['यह घर है।', ' ', 'वह'], ['한국.', ' ', '서울은 2 곳이다.', ' ', '끝'],
    ['At 3.5 p.m. he left.', '\n\n', '(Two.) three!', ' ', '"Four"']],
    ids=lambda sentences: sentences[0])
def test_sentences_of_other_scripts_are_cut(sentences):
  text = ''.join(sentences)
  for count, end in enumerate((n for n, part in enumerate(
      sentences, 1) if part.strip()), 1):
    search = snippets.shown(
        lambda _: [(Passage('0', 'T', text),)], sentences=count)
    assert search([Query('q', 1, tiny.question())])[0][0].text == ''.join(
        ' ' if part.isspace() else part for part in sentences[:end])


def call(tool, step=0, **arguments):
  return ToolCall(tool, arguments, tiny.question(), step=step)


def made(**options):
  corpus = Corpus(tuple(Passage(f'p{n}', f't{n}', f'text {n}')
                        for n in range(50)))
  tools = toolbox.make([*options], options, dialogues.SEARCH, None)
  return toolbox.bind(fakes.Search(), tools, corpus=corpus, result_tokens=60,
                      tokenizer=fakes.TOKENIZER, seed=0).tools


def test_random_tools_ignore_what_they_are_asked():
  tools = made(
      open=dict(tool='searchrl.toolbox.controls:random_document'),
      calculate=dict(tool='searchrl.toolbox.controls:random_number'))
  pages = [tools['open']([call('open', step, id='p1')])[0]
           for step in range(40)]
  assert len({page.passages for page in pages}) > 10
  assert not any(page.is_error for page in pages)
  assert pages[7] == tools['open']([call('open', 7, id='p1')])[0]
  numbers = tools['calculate']([call('calculate', step, expression='1 + 1')
                                for step in range(40)])
  assert len({*numbers}) > 30


@pytest.mark.parametrize('of, arguments, right', [
    ('calculate', {'expression': '1 + 1'}, '2'),
    ('open', {'id': 'p1'}, 't1 (page 1 of 1)\ntext 1')])
def test_a_share_of_the_calls_fails(of, arguments, right):
  options = {of: dict(tool='searchrl.toolbox.controls:failing', of=of)}
  calls = [call(of, step, **arguments) for step in range(400)]
  results = made(**options)[of](calls)
  failed = [isinstance(result, SearchError) for result in results]
  assert .18 < np.mean(failed) < .32
  assert {r.text for r in results if isinstance(r, ToolResult)} == {right}
  assert made(**options)[of](calls) == results


def test_the_job_writes_what_the_phases_read(tmp_path):
  config = configs_archive.get_config('phase=data').phases.data
  config.archive.update(towns=24, train_per_kind=6, test_per_kind=4,
                        demonstrations=30)
  archive_data.run(config, str(tmp_path))
  read = lambda name: [json.loads(line) for line in
                       (tmp_path / f'{name}.jsonl').open()]
  corpus = {row['title']: row for row in read('corpus')}
  assert len(corpus) == 24
  tests = {name: read(f'test_{name}') for name in archive_data.SETS}
  assert all(len(rows) == 4 for rows in tests.values())
  asked = lambda rows: {name for row in rows for name in corpus
                        if name in row['question']}
  test_towns = asked([row for rows in tests.values() for row in rows])
  assert test_towns and not test_towns & asked(read('train'))
  for name in ('near', 'deep'):
    for row in tests[name]:
      town, = asked([row])
      text = corpus[town]['text']
      assert row['golden_answers'][0] in text
      assert row['golden_answers'][0] not in text.split('.')[0]
  texts = [''.join(segment['text'] for segment in row['segments'])
           for row in read('demonstrations')]
  assert any('<open>' in text and '(page 1 of ' in text for text in texts)
  assert any('<calculate>' in text for text in texts)
  trained = [segment['text'] for row in read('demonstrations')
             for segment in row['segments'] if segment['trained']]
  assert not any('(page' in text or '<information>' in text for text in trained)


def test_every_arm_is_a_config():
  for arm in configs_archive.ARMS:
    config = configs_archive.get_config(f'arm={arm}')
    assert [*config.order] == ['data', 'tune', arm, 'report']
    phase = config.phases[arm]
    assert ('open' in phase.tools) == (arm != 'no_open')
    assert ('calculate' in phase.tools) == (arm != 'no_calculate')
    assert dataclasses.is_dataclass(toolbox.make(
        phase.tools, phase.tool_options.to_dict(), dialogues.SEARCH, None)[0])


def test_more_questions_than_towns_are_refused(tmp_path):
  config = configs_archive.get_config('phase=data').phases.data
  config.archive.test_per_kind = 101
  with pytest.raises(ValueError, match='test_per_kind must be at most .* 100,'):
    archive_data.run(config, str(tmp_path))
