# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""evaluate: the job's table, records and note of what was searched."""

from collections import Counter
import gzip
import json
import string

import jax
import pytest

from configs import evaluate as evaluate_config
from searchrl.data import datasets
from searchrl.evaluation import evaluator
from searchrl.evaluation import shards
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.jobs import evaluate
from searchrl.runtime import mesh as meshes


def configured(**fields):
  config = evaluate_config.get_config('smoke')
  config.evaluate.worlds.update(
      questions_per_hop=1, kinds=('known',), max_hops=2)
  config.evaluate.update(fields)
  return config


def recomputed(folder):
  """{(set, engine, decoding): scores} of the records' trajectories alone."""
  def plain(text):
    text = ''.join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in text.split() if word not in ('a', 'an', 'the')]

  found = {}
  for file in sorted(folder.glob('records/*/*.jsonl.gz')):
    for line in gzip.open(file, 'rt', encoding='utf-8'):
      record = json.loads(line)
      of, one = record['trajectory'], dict.fromkeys(('em', 'subem', 'f1'), 0.0)
      golds = [plain(gold) for gold in of['question']['answers']]
      last = of['turns'][-1]['action'] if of['turns'] else {'kind': ''}
      said = plain(last['texts'][0]) if last['kind'] == 'answer' else []
      for gold in filter(None, golds):
        both = sum((Counter(said) & Counter(gold)).values())
        one['em'] = max(one['em'], float(said == gold))
        one['subem'] = max(one['subem'], ' '.join(gold) in ' '.join(said))
        one['f1'] = max(one['f1'], 2 * both / (len(said) + len(gold)))
      read = [' '.join(plain(f"{p['title']} {p['text']}"))
              for turn in of['turns'] for p in turn['passages']]
      one['recall'] = any(' '.join(gold) in text
                          for gold in golds for text in read)
      one['searches'] = sum(
          turn['action']['kind'] == 'search' and bool(turn['passages'])
          for turn in of['turns'])
      one['answered'] = last['kind'] == 'answer'
      one['tokens'] = sum(len(turn['action_tokens']) for turn in of['turns'])
      key = record['set'], record['engine'], record['decoding']
      found.setdefault(key, []).append(one)
  return {key: {name: sum(one[name] for one in ones) / len(ones)
                for name in ones[0]} for key, ones in found.items()}


@pytest.mark.slow
def test_a_model_folder_is_evaluated_in_every_way(tmp_path, capsys):
  evaluate.run(configured(), str(tmp_path))
  rows = json.loads((tmp_path / 'table.json').read_text())
  assert [(r['engine'], r['decoding'], r['hops']) for r in rows] == [
      (engine, decoding, hops) for engine, decoding in (
          ('bm25', 'greedy'), ('bm25', 'sampled'), ('noise', 'greedy'))
      for hops in (1, 2, 'all')]
  records = [*shards.read_all(tmp_path / 'records')]
  assert len(records) == sum(
      row['n'] for row in rows if row['hops'] == 'all') == 6
  for row in rows:  # a row is the mean of its records
    scores = [r['em'] for r in records if (r['engine'], r['decoding']) == (
        row['engine'], row['decoding']) and row['hops'] in (
            'all', r['trajectory']['question']['hops'])]
    assert row['em'] == sum(scores) / len(scores)
  facts = json.loads((tmp_path / 'fingerprint.json').read_text())
  assert {row['fingerprint'] for row in rows} == {
      r['fingerprint'] for r in records} == {facts['fingerprint']}
  assert facts['model']['digest'] and facts['data']['known']
  note = json.loads((tmp_path / 'search.json').read_text())
  assert note['known']['engine'] == 'bm25' and note['known']['passages'] > 10
  assert 'noise' in capsys.readouterr().out


@pytest.mark.parametrize('copies, limit, alike, slots, cache', [
    (1, None, False, 256, 9_000), (1, 3, False, 3, 0),
    (1, 100, False, 100, 9_000), (1, 3, True, 64, 9_000),
    (1, 100, True, 100, 9_000), (1, 300, True, 256, 9_000),
    (2, 3, False, 4, 0), (2, 3, True, 128, 9_000)])
def test_a_few_questions_take_a_few_slots(
    copies, limit, alike, slots, cache, monkeypatch):
  config = configured()
  config.search.engine = 'bm25'
  config.rollout.update(max_num_seqs=256, max_length=1_000, cache_tokens=9_000)
  monkeypatch.setattr(policy, 'load', lambda folder, **options: options)
  mesh = meshes.make(devices=jax.devices()[:copies])
  made = policy.build(config, mesh, limit=limit, alike=alike, folder='a folder')
  assert (made['slots'], made['cache_tokens']) == (slots, cache)


@pytest.mark.slow
def test_scores_are_those_of_thirty_independent_lines(tmp_path):
  config = configured()
  config.evaluate.worlds.update(
      questions_per_hop=12, common_per_hop=12, kinds=('known', 'famous'))
  evaluate.run(config, str(tmp_path))
  independent = recomputed(tmp_path)
  whole = [row for row in json.loads((tmp_path / 'table.json').read_text())
           if row['hops'] == 'all']
  assert len(independent) == len(whole) == 6
  for row in whole:
    own = independent[row['set'], row['engine'], row['decoding']]
    assert {name: row[name] for name in own} == pytest.approx(own, abs=1e-12)
  assert len({row['em'] for row in whole}) > 2  # not all alike


def test_a_run_without_checkpoints_is_refused(tmp_path):
  (tmp_path / 'run').mkdir()
  with pytest.raises(FileNotFoundError, match='with checkpoints, but .*run is none'):
    evaluate.run(configured(run=str(tmp_path / 'run')), str(tmp_path / 'out'))


@pytest.mark.parametrize('size', ['smoke', 'search_r1/qwen2.5-7b'])
def test_nothing_to_evaluate_on_is_said_before_a_model_is_loaded(
    tmp_path, size):
  config = evaluate_config.get_config(size)
  config.evaluate.worlds.kinds = ()
  with pytest.raises(ValueError, match='data.evaluate must name questions if '):
    evaluate.run(config, str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()


def test_a_step_that_a_run_has_not_kept_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(past_runs.checkpoint, 'steps', lambda folder: [4, 8])
  monkeypatch.setattr(
      past_runs, 'recorded', lambda run: {'model': {'path': ''}})
  with pytest.raises(ValueError, match='evaluate.run must be at a step whose '
                     'checkpoint .*run has kept, one of 4, 8, but is at 6'):
    evaluate.run(configured(run=f'{tmp_path}/run@6'), str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()


def compared(**methods):
  config = configured(
      decodings=('greedy',), noise=False, order=tuple(methods))
  for name, method in methods.items():
    config.evaluate.methods[name] = dict(
        method='agent', path='', run='', taught=True) | method
  return config


@pytest.mark.slow
def test_methods_are_compared_in_one_table(tmp_path, capsys):
  config = compared(
      rag=dict(method='rag'), cot=dict(method='cot', taught=False),
      lost=dict(run='runs/never'), agent={})
  evaluate.run(config, str(tmp_path))
  rows = json.loads((tmp_path / 'table.json').read_text())
  assert [row['method'] for row in rows if row.get('hops', 'all') == 'all'] == [
      'rag', 'cot', 'lost', 'agent']
  notes = {row['method']: row['note'] for row in rows}
  assert notes == {'rag': '', 'cot': 'prompt never taught', 'agent': '',
                   'lost': 'runs/never is not there'}
  for name in ('rag', 'cot', 'agent'):
    lines = [*shards.read_all(tmp_path / 'methods' / name / 'records')]
    whole, = (row for row in rows
              if row['method'] == name and row['hops'] == 'all')
    assert len(lines) == whole['n'] == 2
    assert whole['em'] == sum(line['em'] for line in lines) / 2
  text = capsys.readouterr().out
  assert 'minus agent' in text and "McNemar's p" in text
  assert text.count('runs/never is not there') == 1


def test_a_methods_run_may_be_that_of_the_seed(tmp_path, capsys):
  config = compared(mine=dict(run=str(tmp_path / 'seed_{seed}')))
  config.seed = 7
  evaluate.run(config, str(tmp_path / 'out'))
  row, = json.loads((tmp_path / 'out/table.json').read_text())
  assert row['note'] == f'{tmp_path}/seed_7 is not there'


def test_a_method_without_a_model_of_its_own_has_the_configs(monkeypatch):
  config = evaluate_config.get_config('methods/qwen2.5-7b-instruct')
  assert config.search.engine == 'dense' and config.evaluate.prompts == 'plain'
  methods = config.evaluate.methods
  assert config.evaluate.order == (
      'direct', 'cot', 'rag', 'ircot', 'search_o1', 'ra_agent')
  for method in methods.values():
    assert evaluate._of_method(config, method).model.path == (
        'Qwen/Qwen2.5-7B-Instruct')
  methods.cot.path = 'mine'
  assert evaluate._of_method(config, methods.cot).model.path == 'mine'


def test_runs_of_the_laptop_are_not_compared_with_a_model():
  with pytest.raises(ValueError, match='suite=trained compares the laptop'):
    evaluate_config.get_config('trained/qwen2.5-7b-instruct')


@pytest.mark.parametrize('change, words', [
    (dict(rag=dict(method='rage')), "evaluate.methods.rag.method must be one of "
     "agent, direct, .*but is 'rage'"),
    (dict(agent={}), 'evaluate.order must name rows of evaluate.methods')])
def test_methods_that_are_none_are_named(change, words, tmp_path):
  config = compared(**change)
  if 'agent' in change:
    config.evaluate.order = ('agents',)
  with pytest.raises(ValueError, match=words):
    evaluate.run(config, str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()


def test_a_methods_run_has_its_own_protocol(monkeypatch):
  recorded = {'model': {'path': 'theirs'}, 'dialogue': 'a:dialogue',
              'tools': ['search', 'open'], 'tool_options': {'open': {'x': 1}},
              'rollout': {'budgets': {'max_turns': 9}, 'max_length': 77}}
  monkeypatch.setattr(past_runs, 'recorded', lambda run: recorded)
  config = compared(mine=dict(run='runs/mine'))
  own = evaluate._of_method(config, config.evaluate.methods.mine)
  assert (own.model.path, own.dialogue, own.tools, own.rollout.max_length) == (
      'theirs', 'a:dialogue', ('search', 'open'), 77)
  assert own.tool_options.open.x == 1 and own.rollout.budgets.max_turns == 9
  assert config.rollout.max_length != 77


def test_an_agent_has_its_tools_and_a_baseline_has_the_engine_alone():
  case = evaluator.EvalCase(
      datasets.Dataset('nq', [], None), 'bm25', 'search', 'greedy')
  bind = lambda search, corpus: f'{search} with tools'
  assert evaluate._with_method(case, 'agent', bind).search == (
      'search with tools')
  assert evaluate._with_method(case, 'rag', bind).search == 'search'


def test_several_samples_need_sampled_answers(tmp_path):
  config = configured(decodings=('greedy',), samples=3)
  with pytest.raises(ValueError, match='evaluate.samples must be 1 where'):
    evaluate.run(config, str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()
