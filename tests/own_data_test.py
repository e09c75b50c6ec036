# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Own data, whole runs: weighted files, named sets, evaluation in training."""

import collections
import gzip
import json
import shutil

from configs import grpo
import fakes
import pytest

import question_files_test
import train_test
from searchrl.evaluation import shards
from searchrl.evaluation import evaluator
from searchrl.jobs import train
from searchrl.rollouts import records
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.search import corpus as corpora
from searchrl.trajectory import Passage

OPTIMIZATION_LEVEL = 1

pytestmark = pytest.mark.slow

SOURCES = ('nq', 'hotpotqa')
STEPS = 3


def rows(source, count):
  """Returns rows in Search-R1's form; ids are 0, 1, ... in every source."""
  return [question_files_test.search_r1(
      source, n, id=f'train_{n}', question=f'What is the {source} of City {n}',
      golden_answers=[f'River {n}']) for n in range(count)]


def configured(folder, kind):
  """A run on two files, 1:2, evaluated on two sets in every step."""
  write = (question_files_test.write if kind == 'jsonl' else
           question_files_test.write_parquet)
  for source in SOURCES:
    write(folder / f'{source}.{kind}', rows(source, 12))
  merged = write(folder / f'test.{kind}', [
      row for source in SOURCES for row in rows(source, 3)])
  corpora.write(folder / 'corpus.jsonl', [
      Passage(str(n), f'City {n}', f'City {n} lies on River {n}.')
      for n in range(9)])
  named = ','.join(f'{s}={folder}/{s}.{kind}' for s in SOURCES)
  config = train_test.tiny(grpo, steps=STEPS, checkpoint_every=2,
                           keep_best=False)
  config.data.update(
      train=named, weights=(1, 2), limit=18, question_mark=True,
      evaluate=str(merged) if kind == 'parquet' else named)
  config.search.update(corpus=str(folder / 'corpus.jsonl'), engine='bm25')
  config.search.options = {}
  config.evaluate.update(every=1, limit=2, initial=False)
  config.rollout.budgets.max_turns = 2
  return config


@pytest.fixture(scope='module', params=['jsonl', 'parquet'])
def run(request, tmp_path_factory):
  """Killed while it was evaluated after step 2 of 3, and resumed."""
  folder = tmp_path_factory.mktemp(request.param)
  config = configured(folder, request.param)
  evaluate, calls = evaluator.run, []

  def killed(*args, **kwargs):
    calls.append(args)
    if len(calls) == 2:
      raise fakes.Killed
    return evaluate(*args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluator, 'run', killed)
    with pytest.raises(fakes.Killed):
      train.run(config, str(folder / 'run'))
    assert checkpoint.steps(folder / 'run' / 'checkpoints') == [0]
    train.run(config, str(folder / 'run'))
  assert len(calls) == 2 + 2 + 1  # steps 1, 2; again; after
  return folder / 'run', config


def trained_on(folder, step):
  file = folder / 'trajectories' / f'step_{step:06d}.jsonl.gz'
  trajectories = [records.from_json(json.loads(line))
                  for line in gzip.decompress(file.read_bytes()).splitlines()]
  return {t.question.uid: t.question for t in trajectories}


def test_every_step_draws_the_files_by_their_weights(run):
  folder, config = run
  seen = collections.Counter()
  for step in range(1, STEPS + 1):
    questions = trained_on(folder, step)
    assert len(questions) == config.rollout.questions_per_step == 4
    assert all(uid.startswith(f'{q.data_source}/train_')
               and q.text.endswith('?') for uid, q in questions.items())
    seen.update(q.data_source for q in questions.values())
    for source, share in zip(SOURCES, (1 / 3, 2 / 3)):
      assert abs(seen[source] - share * 4 * step) < 1
  assert seen == {'nq': 4, 'hotpotqa': 8}


def test_sets_keep_their_names_in_tables_records_and_metrics(run):
  folder, _ = run
  rows_ = json.loads((folder / 'evaluation/after/table.json').read_text())
  assert {row['set'] for row in rows_} == {*SOURCES, 'mean'}
  assert {row['hops'] for row in rows_} == {'all'}
  records = shards.read_all(folder / 'evaluation/after/records')
  assert {record['set'] for record in records} == {*SOURCES}
  summary = (folder / 'summary.txt').read_text()
  assert all(name in summary for name in (*SOURCES, 'mean'))
  last = metrics.read(folder / metrics.FILE)[-1]
  assert {'val/nq/em/greedy', 'val/hotpotqa/f1/sampled',
          'val/nq_noise/em/greedy', 'val/mean/em/greedy'} <= set(last)


def test_training_is_evaluated_at_every_due_step_once(run):
  folder, _ = run
  assert sorted(path.name for path in (folder / 'evaluation').iterdir()) == [
      'after', 'step_000001', 'step_000002']
  lines = metrics.read(folder / metrics.FILE)
  held = [(line['training/global_step'], 'val/nq/em/greedy' in line)
          for line in lines]
  assert held == [(1, False), (1, True), (2, False), (2, True), (3, False),
                  (3, True)]
  assert 'val/nq/em/sampled' not in lines[1]
  table = json.loads(
      (folder / 'evaluation/step_000002/table.json').read_text())
  assert [(row['set'], row['n']) for row in table] == [
      ('nq', 2), ('hotpotqa', 2), ('mean', 4)]


@pytest.mark.parametrize('run', ['jsonl'], indirect=True)
@pytest.mark.long
def test_evaluation_changes_nothing_in_training(run, tmp_path):
  folder, config = run
  config.evaluate.update(every=0, limit=0)  # free to change
  config.data.evaluate = ''
  train.run(config, str(tmp_path))
  (ours, progress), (theirs, other) = map(
      train_test.state_digest, (tmp_path, folder))
  assert ours == theirs
  # But that a run which was validated knows its best.
  best = {'best': None, 'best_of': None}
  assert json.loads(progress) | best == json.loads(other) | best


@pytest.mark.parametrize('run', ['jsonl'], indirect=True)
def test_a_run_goes_on_from_another_one_on_other_data(run, tmp_path):
  folder, config = run
  shutil.copytree(folder, tmp_path / 'first')
  config.data.update(
      train=config.data.train.split(',')[0], weights=(), limit=0, evaluate='')
  config.train.update(init_from=f'{tmp_path}/first@3', num_steps=1)
  config.evaluate.every = 0
  train.run(config, str(tmp_path / 'second'))
  shutil.rmtree(tmp_path / 'first')
  (tmp_path / 'second' / 'summary.txt').unlink()
  config.train.num_steps = STEPS  # resumes without the other run
  train.run(config, str(tmp_path / 'second'))
  assert json.loads((tmp_path / 'second/init.json').read_text()) == {
      'run': f'{tmp_path}/first', 'step': 3, 'critic': False}
  assert {uid.partition('/')[0] for uid in trained_on(
      tmp_path / 'second', STEPS)} == {'nq'}
