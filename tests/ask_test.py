# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ask: what is shown while a question is answered, votes, and proposals."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest

import experiment_policy_test
from experiment_policy_test import config_of
import reranker_test
import tiny

from configs import ask as ask_config
from configs import common
from searchrl.experiment import policy
from searchrl.experiment import run_defaults
from searchrl.experiment import search as searches
from searchrl.jobs import ask
from searchrl.search import engines
from searchrl.search import mapped_corpus
from searchrl.search import engine_wrappers
from searchrl.trajectory import (
    Action, Passage, Query, Question, Request, SearchError, Trajectory, Turn)

TOKENIZER = tiny.Tokenizer()


def turn(text, kind, passages=(), observation=()):
  ids = TOKENIZER.encode(text)
  return Turn(ids, (0.0,) * len(ids), Action(kind, (text,)),
              tuple(observation), tuple(passages))


def trajectory(*turns, sample=0, reason=None):
  return Trajectory(tiny.question(), sample, 0, (1,), turns, reason)


SEARCHED = turn('<search> a', 'search')
FOUND = turn('<search> a', 'search', [
    Passage('7', 'On\x1b[2J a', 'first \x07 line\nand ' + 'more ' * 60)], (1,))
INVALID = dataclasses.replace(turn('what', 'invalid', observation=(1, 2)),
                              observation='\nTry again.\n')
ANSWERED = turn('<answer> b', 'answer')


def lines_of(*trajectories, samples=1):
  lines = []
  printer = ask.TurnPrinter(TOKENIZER, samples, lines.append)
  for one in trajectories:
    printer(one)
  return lines


def test_each_turn_of_a_trajectory_is_printed_once_as_it_comes():
  lines = lines_of(
      trajectory(SEARCHED), trajectory(FOUND), trajectory(FOUND),
      trajectory(FOUND, INVALID), trajectory(FOUND, INVALID, ANSWERED),
      trajectory(FOUND, INVALID, ANSWERED, reason='answer'))
  assert [line.partition('\n')[0] for line in lines] == [
      'Turn 1', 'Found', 'Turn 2',
      'That was no action; the policy is asked to retry and reads', 'Turn 3']
  assert lines[3].splitlines()[1] == '  Try again.'
  assert lines[0] == 'Turn 1\n  <search> a'
  found = lines[1].splitlines()
  assert len(found) == 2
  assert found[1].startswith('  1. On [2J a: first line and')
  assert found[1].endswith('…') and len(found[1]) < 120
  assert '\x1b' not in ''.join(lines) and '\x07' not in ''.join(lines)


def test_lines_of_several_samples_have_their_numbers():
  lines = lines_of(trajectory(SEARCHED, sample=1),
                   trajectory(ANSWERED, sample=0), samples=2)
  assert [line.splitlines()[0] for line in lines] == [
      '[2] Turn 1', '[1] Turn 1']


def test_a_trajectory_that_is_sampled_again_is_printed_again():
  lines = lines_of(trajectory(FOUND, SEARCHED), trajectory(SEARCHED),
                   trajectory(FOUND))
  assert [line.splitlines()[0] for line in lines] == [
      'Turn 1', 'Found', 'Turn 2', 'Again, for a search had failed.', 'Turn 1',
      'Found']


def answered(*texts):
  return [trajectory(*([turn(text, 'answer')] if text else []), sample=n)
          for n, text in enumerate(texts)]


@pytest.mark.parametrize('texts, winner, votes', [
    (['b'], 'b', []),
    ([None], None, []),
    (['b', 'a', 'The A!', None], 'a', ['2 of 4  a', '1 of 4  b',
                                       '1 of 4  no answer']),
    (['x', 'y', 'y', 'x'], 'x', ['2 of 4  x', '2 of 4  y']),
    ([None, None], None, ['2 of 2  no answer']),
])
def test_votes_are_counted_by_what_an_answer_means(texts, winner, votes):
  lines = []
  assert ask.vote(answered(*texts), lines.append) == winner
  assert [line.strip() for line in lines[1:]] == votes


def test_examples_are_of_every_hop_count():
  questions = [tiny.question(f'{hops}{n}', hops=hops)
               for hops in (2, 1, 3) for n in range(4)]
  assert [q.uid for q in ask.spread(questions)] == [
      '10', '20', '30', '11', '21']
  assert len(ask.spread(questions[:2])) == 2


def test_why_a_search_failed_is_printed_once():
  lines, error = [], SearchError('timeout', 'after\x1b 3 s')
  search = ask.with_warnings(lambda queries: [error, (), error], lines.append)
  assert search([1, 2, 3]) == [error, (), error]
  inner = types.SimpleNamespace(pop=dict, wait=lambda: lines.append('waits'))
  engine_wrappers.wait(ask.with_warnings(inner, lines.append))  # as `inner` would
  assert lines.pop() == 'waits'
  assert lines == ['Warning: a search failed: timeout after  3 s']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return experiment_policy_test.run_of_adapters(tmp_path_factory.mktemp('run'))


def test_a_runs_folder_as_size_gives_its_settings_and_can_be_overruled(run):
  folder, _ = run
  config = ask_config.get_config(str(folder))
  assert config.ask.run == str(folder)
  config = run_defaults.complete(config, str(folder), 'ask.run')
  assert config.search.engine == 'dense'
  assert config.data.per_hop == common.get_config().data.per_hop
  past = json.loads((folder / 'config.json').read_text())
  past['dialogue'], past['rollout']['max_length'] = 'mine:mine', 99
  past['rollout']['budgets']['top_k'], past['data']['evaluate'] = 7, 'e.jsonl'
  other = folder / 'other'
  shutil.copytree(folder / 'checkpoints', other / 'checkpoints')
  (other / 'config.json').write_text(json.dumps(past))
  config = ask_config.get_config(f'run={other}')
  config.rollout.budgets.max_turns = 2
  config = run_defaults.complete(config, str(other), 'ask.run')
  assert (config.dialogue, config.rollout.max_length,
          config.rollout.budgets.top_k, config.rollout.budgets.max_turns) == (
              'mine:mine', 99, 7, 2)
  with pytest.raises(ValueError, match='run must be'):
    ask_config.get_config(str(folder / 'nothing'))


@pytest.mark.parametrize('fields, error, message', [
    (dict(samples=0), ValueError, 'ask.samples must be at least 1, but is 0'),
    (dict(temperature=0.0), ValueError, 'ask.temperature must be above 0'),
    (dict(run='/none'), FileNotFoundError, 'ask.run must be the folder of a'),
])
def test_what_is_refused(fields, error, message, tmp_path):
  with pytest.raises(error, match=message):
    ask.run(config_of(**fields), str(tmp_path))


def test_a_run_of_another_dialogue_is_refused_with_a_remedy(run, tmp_path):
  past = json.loads((run[0] / 'config.json').read_text())
  past['dialogue'] = 'searchrl.agent.dialogue:laptop'
  shutil.copytree(run[0], tmp_path / 'past')
  (tmp_path / 'past/config.json').write_text(json.dumps(past))
  config = config_of(run=str(tmp_path / 'past'))
  config.dialogue = 'searchrl.agent.dialogue:search_r1'
  with pytest.raises(ValueError, match=r'dialogue must be .* Set it to that\.'):
    ask.run(config, str(tmp_path))


def test_without_a_question_it_proposes_some_of_the_corpus(tmp_path, capsys):
  config = config_of()
  config.data.per_hop = (2, 2, 2)
  ask.run(config, str(tmp_path))
  folder = tmp_path / 'data' / 'train'
  questions = [json.loads(line)['question'] for line in
               (folder / 'questions.jsonl').read_text().splitlines()]
  shown = capsys.readouterr().out.splitlines()
  assert len(shown) == 8 and {line.strip() for line in shown[1:6]} < set(
      questions)
  assert '--question' in shown[-1] and questions[0] in shown[-1]
  corpus = tmp_path / 'own.jsonl'
  corpus.write_text((folder / 'corpus.jsonl').read_text())
  config.search.corpus = str(corpus)
  ask.run(config, str(tmp_path))
  shown = capsys.readouterr().out
  assert 'By their titles' in shown and shown.count('Who or what is') == 6
  assert f'--config.search.corpus={corpus}' in shown
  corpus.write_text('{"id": "0", "title": "", "text": "x"}\n'
                    '{"id": "1", "title": "Tarn", "text": "y"}\n')
  config.model.path = str(policy.TINY_BASE)
  ask.run(config, str(tmp_path))
  *_, title, _, command = capsys.readouterr().out.splitlines()
  assert title == '  Who or what is Tarn?'
  assert command.startswith(
      '  python -m searchrl.main --config=configs/ask.py '
      f'--config.model.path={policy.TINY_BASE} --config.search.corpus={corpus}')
  corpus.write_text('{"id": "0", "title": "", "text": "x"}\n')
  ask.run(config, str(tmp_path))
  assert "--question 'YOUR QUESTION'" in capsys.readouterr().out


@pytest.mark.slow
def test_a_question_is_answered_as_evaluation_would(tmp_path, capsys):
  config = config_of(samples=1)
  config.data.per_hop = (1, 1)
  ask.run(config, str(tmp_path))
  asked = capsys.readouterr().out.splitlines()[2].strip()
  config.ask.question = asked
  ask.run(config, str(tmp_path))
  out, err = capsys.readouterr()
  sampler, params = policy.of_run(config, '', limit=8)
  corpus = mapped_corpus.load(tmp_path / 'data' / 'train' / 'corpus.jsonl')
  expected, = sampler.rollout(
      sampler.sync(params).weights, [Request(Question('other', asked, ()))],
      temperature=0.0, step=5, search=engines.make('bm25', corpus)).trajectories
  assert expected.answer and out == expected.answer + '\n'
  assert err.startswith(f'Question: {asked}\nTurn 1\n  ')
  assert err.count('Turn ') == len(expected.turns)
  places = [err.index(' '.join(p.title.split()) + ': ')
            for t in expected.turns for p in t.passages[:1]]
  assert places == sorted(places) and len(places) == expected.searches
  _votes_of_samples_with_seeds(config, tmp_path, capsys)


def _votes_of_samples_with_seeds(config, folder, capsys):
  """Several samples vote, and another seed draws others."""
  config.ask.samples = 5
  printed = []
  for seed in (0, 0, 1):
    config.seed = seed
    ask.run(config, str(folder))
    out, err = capsys.readouterr()
    votes = re.findall(r'^  (\d) of 5  (.*)$', err, re.M)
    assert sum(int(n) for n, _ in votes) == 5
    assert max(int(n) for n, what in votes if what != 'no answer') == int(
        dict((what, n) for n, what in votes)[out.strip()])
    printed.append((out, sorted(re.findall(r'^\[\d\][^\[]*', err, re.M))))
  assert printed[0] == printed[1] != printed[2]


@pytest.mark.slow
def test_without_an_answer_it_fails_with_the_reason(tmp_path, capsys):
  config = config_of(question='What is the river of Zinina Rilson?')
  config.data.per_hop = (1,)
  config.rollout.budgets.max_turns = 1  # it can search, but not answer
  with pytest.raises(SystemExit, match='No answer: the turns were used up.'):
    ask.run(config, str(tmp_path))
  assert not capsys.readouterr().out


@pytest.mark.slow
def test_a_search_can_be_reranked(tmp_path, capsys):
  folder = reranker_test.make_folder(tmp_path)
  config = config_of(question='What is the river of Zinina Rilson?')
  config.data.per_hop = (2,)
  config.search.engine = 'rerank'
  config.search.options = dict(engine=dict(name='bm25'), model=str(folder),
                               max_length=64)
  config.rollout.budgets.max_turns = 2
  try:
    ask.run(config, str(tmp_path))
  except SystemExit:
    pass  # whatever it answered: what it found was printed
  printed = capsys.readouterr().err
  query = Query(re.search(r'<search>(.*?)</search>', printed)[1].strip(),
                config.rollout.budgets.top_k, tiny.question())
  corpus = mapped_corpus.load(ask.corpus_file(config, '', tmp_path))
  (reranked,), (plain,) = (
      engine([query]) for engine in (
          searches.engine(config.search, corpus, seed=0),
          engines.make('bm25', corpus)))
  shown = re.findall(r'^  \d\. (.*?): ', printed, re.M)[:len(reranked)]
  assert shown == [p.title for p in reranked] != [p.title for p in plain]


@pytest.mark.slow
def test_question_is_a_flag_that_belongs_to_ask(tmp_path):
  def main(*arguments):
    return subprocess.run(
        [sys.executable, '-m', 'searchrl.main', *arguments,
         f'--workdir={tmp_path}'], capture_output=True, text=True,
        cwd=pathlib.Path(__file__).parents[1], check=False)
  other = main('--config=configs/dspo.py', '--question=where?')
  assert other.returncode == 1 and not other.stdout
  assert "--question is a flag of --config=configs/ask.py" in other.stderr
  blank = main('--config=configs/ask.py', '--question= ')
  assert blank.returncode == 1 and "but is ' '" in blank.stderr
  proposed = main('--config=configs/ask.py').stdout
  question = re.search(r"--question '(.*)'", proposed)[1]
  found = main('--config=configs/ask.py', f'--question={question}')
  assert found.returncode == 0, found.stderr
  assert len(found.stdout.splitlines()) == 1 and 'Turn 1' in found.stderr
