# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""train: the whole loop on the shipped model; exact resume, and refusals."""

import contextlib
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from configs import dspo
from configs import grpo
import pytest
from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.evaluation import evaluator
from searchrl.experiment import health
from searchrl.jobs import train
from searchrl.rollouts import records
from searchrl.rollouts import scoring
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.search import corpus as corpora
from searchrl import trajectory as trajectory_lib
from searchrl.trajectory import Passage, Question

OPTIMIZATION_LEVEL = 1

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMED = ('timing_s/', 'perf/throughput', 'perf/cpu_seconds',
         'search/latency_ms/')


def tiny(recipe, steps=2, **train_options):
  """A recipe of a few steps of a few trajectories, barely evaluated."""
  config = recipe.get_config('smoke')
  config.rollout.max_rounds = 2 if recipe is dspo else 1
  config.evaluate.worlds.update(questions_per_hop=1, kinds=('known',))
  config.train.update(num_steps=steps, progress=False, loggers=(),
                      **train_options)
  return config


def lines(folder):
  """The metrics of a run without those that measure time."""
  return [{k: v for k, v in line.items()
           if not k.startswith(TIMED) and '/latency_ms/' not in k}
          for line in metrics.read(folder / metrics.FILE)]


def state_digest(folder):
  """The seals of the newest checkpoint: a SHA-256 of every leaf."""
  path = folder / 'checkpoints'
  newest = path / str(checkpoint.steps(path)[-1])
  seal = json.loads((newest / 'integrity.json').read_text())
  return seal['leaves'], (newest / 'extra.json').read_text()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """An uninterrupted DSPO run of four steps."""
  folder = tmp_path_factory.mktemp('whole')
  train.run(tiny(dspo, steps=4), str(folder))
  return folder


def _check_card(folder):
  """Checks the numbers of a model's card with the run's own files."""
  card = (folder / 'model/README.md').read_text()
  rollouts = sum(1 for file in (folder / 'trajectories').iterdir()
                 for _ in gzip.open(file))
  assert f'| steps, trajectories | 4, {rollouts} |' in card
  assert '| recipe | dspo, seed 0 |' in card
  shown = (folder / 'summary.txt').read_text().partition('\n\ncurve ')[0]
  assert f'```text\n{shown}\n```' in card
  digest = hashlib.sha256(
      (folder / 'model/model.safetensors').read_bytes()).hexdigest()
  assert f'| sha256 of model.safetensors | `{digest}` |' in card


@pytest.mark.slow
def test_run_leaves_what_the_readme_lists(whole):
  for name in ('config.json', 'environment.json', 'metrics.jsonl', 'curve.png',
               'curve.svg', 'summary.txt', 'model/model.safetensors',
               'model/tokenizer.json', 'evaluation/before/table.json',
               'evaluation/after/records/known.bm25.greedy/000000.jsonl.gz',
               'data/train/corpus.jsonl'):
    assert (whole / name).stat().st_size > 0, name
  _check_card(whole)
  found = lines(whole)
  assert [line['training/global_step'] for line in found] == [0, 1, 2, 3, 4, 4]
  assert 'val/known_1hop/em/greedy' in found[0]
  assert {'critic/score/mean', 'actor/grad_norm', 'env/finish_ratio',
          'data/tries_per_kept_group', 'data/frac_group_failed',
          'tool_call_counts/max', 'search/obs_tokens', 'em/train_1hop',
          'search/latency_ms/p95', 'search/batch_size',
          } <= set(metrics.read(whole / metrics.FILE)[1])
  for line in found[1:5]:
    assert line['search/queries'] >= line['search/batch_size'] > 0


@pytest.mark.slow
def test_trajectories_are_saved_token_by_token(whole):
  file = sorted((whole / 'trajectories').glob('*.gz'))[0]
  trajectories = [records.from_json(json.loads(line))
                  for line in gzip.decompress(file.read_bytes()).splitlines()]
  assert trajectories
  for trajectory in trajectories:
    assert trajectory.stop_reason in trajectory_lib.STOP_REASONS
    assert len(trajectory.tokens) == len(trajectory.loss_mask)
    for turn in trajectory.turns:
      assert len(turn.action_tokens) == len(turn.action_logprobs) > 0
      assert max(turn.action_logprobs) <= 0
    assert trajectory.reward == rewards.em(trajectory)


@pytest.mark.slow
def test_sampler_and_learner_agree_on_log_probs(whole):
  for line in lines(whole)[1:5]:
    assert line['training/rollout_logprobs_diff_max'] < 1e-3


def test_evaluations_and_samples_after_a_restored_step_are_forgotten(tmp_path):
  for step in range(1, 5):
    for name in ('trajectories', 'learned'):
      records.write(tmp_path / name / f'step_{step:06d}.jsonl.gz', [])
    (tmp_path / 'evaluation' / f'step_{step:06d}').mkdir(parents=True)
  (tmp_path / 'evaluation' / 'before').mkdir()
  health.forget_after(2, tmp_path)
  assert {path.name.partition('.')[0] for path in tmp_path.glob('*/*')} == {
      'before', 'step_000001', 'step_000002'}
  assert len([*tmp_path.glob('*/*')]) == 7


def test_lost_lines_of_metrics_are_a_warning(tmp_path, capsys):
  with contextlib.closing(metrics.Writer(tmp_path)) as writer:
    for step in (0, 1, 2, 3):
      writer.write(step, {'reward': 0.5})
    train._warn_of_lost_lines(tmp_path, writer, 0)
    train._warn_of_lost_lines(tmp_path, writer, 3)
    assert not capsys.readouterr().err
    writer.path.write_text(
        ''.join(writer.path.read_text().splitlines(keepends=True)[:2]))
    train._warn_of_lost_lines(tmp_path, writer, 3)
    assert (f'Warning: {writer.path} must have a line for each step up to 3, '
            'but has none for 2 of them, the first of which is 2; restore'
            ) in capsys.readouterr().err


def test_the_end_is_forgotten_by_a_run_that_goes_on(tmp_path, capsys):
  """Also if it was stopped in the last evaluation, before its summary."""
  def lines_with(*names):
    (tmp_path / metrics.FILE).write_text(''.join(
        json.dumps({'training/global_step': 2, name: 1.0}) + '\n'
        for name in names))

  lines_with('val/nq/em/greedy', 'actor/pg_loss')
  train._forget_end(tmp_path, 2)  # the validation during training stays
  assert 'val/' in (tmp_path / metrics.FILE).read_text()
  for name in ('evaluation/after', 'evaluation/step_000002', 'model'):
    (tmp_path / name).mkdir(parents=True)
  train._forget_end(tmp_path, 2)
  assert not (tmp_path / 'model').exists()
  assert [path.name for path in (tmp_path / 'evaluation').iterdir()] == [
      'step_000002']
  assert [json.loads(line).keys() for line in (
      tmp_path / metrics.FILE).read_text().splitlines()][-1] == {
          'training/global_step', 'actor/pg_loss'}
  assert 'goes on' not in capsys.readouterr().err
  (tmp_path / 'summary.txt').touch()
  train._forget_end(tmp_path, 2)
  assert not (tmp_path / 'summary.txt').exists()
  assert 'was finished at step 2, and goes on' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('is_killed', [False, True])
def test_a_finished_run_is_prolonged_and_equals_a_longer_one(
    whole, tmp_path, is_killed):
  train.run(tiny(dspo, steps=2, checkpoint_every=1), str(tmp_path))
  assert (tmp_path / 'summary.txt').exists()
  if is_killed:  # after the last evaluation
    (tmp_path / 'summary.txt').unlink()
  train.run(tiny(dspo, steps=4, checkpoint_every=1), str(tmp_path))
  assert lines(tmp_path) == lines(whole)
  assert state_digest(tmp_path) == state_digest(whole)
  assert (tmp_path / 'summary.txt').read_text().splitlines()[:-3] == (
      whole / 'summary.txt').read_text().splitlines()[:-3]  # paths
  newest = tmp_path / 'checkpoints' / '4' / 'extra.json'
  newest.write_text(newest.read_text()[:-20])  # damaged: a run that ends, again
  train.run(tiny(dspo, steps=4, checkpoint_every=1), str(tmp_path))
  assert lines(tmp_path) == lines(whole)
  assert state_digest(tmp_path) == state_digest(whole)
  for step in (tmp_path / 'checkpoints').iterdir():  # all are damaged
    part = max((file for file in step.rglob('*') if file.is_file()),
               key=lambda file: file.stat().st_size)
    part.write_bytes(bytes(part.stat().st_size))
  with pytest.raises(ValueError, match='Nothing was changed'):
    train.run(tiny(dspo, steps=6, checkpoint_every=1), str(tmp_path))
  assert (tmp_path / 'model').exists() and (tmp_path / 'summary.txt').exists()
  shutil.rmtree(tmp_path / 'checkpoints')  # from here it cannot go on
  train.run(tiny(dspo, steps=6, checkpoint_every=1), str(tmp_path))
  assert lines(tmp_path) == lines(whole)


@pytest.mark.slow
def test_finished_run_prints_its_table_and_exits(whole, tmp_path, capsys):
  """The paths in it are those of the place to which the run was moved."""
  before = (whole / metrics.FILE).read_bytes()
  moved = tmp_path / 'moved'
  shutil.copytree(whole, moved)
  train.run(tiny(dspo, steps=4), str(moved))
  said = capsys.readouterr().out
  assert 'is finished. Raise train.num_steps (now 4) to prolong it' in said
  assert f'metrics  {moved / metrics.FILE}' in said and str(whole) not in said
  assert (moved / metrics.FILE).read_bytes() == before
  config = (moved / 'config.json').read_bytes()
  changed = tiny(dspo, steps=9)
  changed.update(allow_changes=True, seed=7)
  changed.train.max_rollouts = 1
  train.run(changed, str(moved))  # it ends by another limit, and learns nothing
  said = capsys.readouterr().out
  assert 'is finished, and changes of its config have no effect.' in said
  assert 'Raise train.max_rollouts (now 1) to prolong it, or use' in said
  assert (moved / 'config.json').read_bytes() == config


@pytest.mark.slow
def test_a_change_that_the_checkpoint_does_not_fit_leaves_the_run_whole(whole):
  """allow_changes lets it be tried."""
  before = {file: file.read_bytes() for file in whole.glob('*.json')}
  config = tiny(dspo, steps=6)
  config.allow_changes, config.model.lora.rank = True, 4
  with pytest.raises(ValueError, match='template leaf .* is absent'):
    train.run(config, str(whole))
  assert before == {file: file.read_bytes() for file in whole.glob('*.json')}
  assert (whole / 'model').exists() and (whole / 'summary.txt').exists()
  assert (whole / 'evaluation' / 'after').exists()


@pytest.mark.slow
def test_changed_config_is_refused_and_named(whole):
  config = tiny(dspo, steps=4)
  config.optimizer.learning_rate = 1.0
  with pytest.raises(ValueError,
                     match='optimizer.learning_rate: 0.0002 -> 1.0'):
    train.run(config, str(whole))


def _files(tmp_path):
  corpora.write(tmp_path / 'corpus.jsonl', [
      Passage(str(i), f'City {i}', f'City {i} lies on River {i}.')
      for i in range(9)])
  questions_lib.write(tmp_path / 'q.jsonl', [
      Question(f'q{i}', f'What is the river of City {i}?', (f'River {i}',))
      for i in range(4)])


@pytest.mark.slow
def test_own_data_and_own_reward_by_path_and_name(tmp_path):
  _files(tmp_path)
  config = tiny(grpo, steps=1)
  config.data.update(train=str(tmp_path / 'q.jsonl'),
                     evaluate=str(tmp_path / 'q.jsonl'))
  config.data.mix = ()
  config.search.corpus = str(tmp_path / 'corpus.jsonl')
  config.reward = 'train_test:length_reward'
  train.run(config, str(tmp_path / 'run'))
  step = lines(tmp_path / 'run')[1]
  assert step['critic/rewards/mean'] == 0.5
  assert 'val/q/em/greedy' in lines(tmp_path / 'run')[0]


def length_reward(trajectory):
  """An own reward: half a point for whatever."""
  assert trajectory.turns
  return 0.5


@pytest.mark.slow
@pytest.mark.parametrize('reward, options, recipe', [
    ('format_em', dict(lambda_f=0.4), dspo),
    ('retrieval', dict(mixed_only=True, needs_search=True, fatal=True), grpo)])
@pytest.mark.long
def test_the_studys_rewards_are_trained_on(tmp_path, reward, options, recipe):
  config = tiny(recipe, steps=3)
  config.evaluate.worlds.kinds = ()
  config.reward = f'searchrl.agent.rewards:{reward}'
  with config.unlocked():
    config.reward_options.update(options)
  train.run(config, str(tmp_path))
  wanted = {'em', 'format'} | ({'retrieval'} & {reward})
  for step, line in enumerate(lines(tmp_path), start=1):
    file = tmp_path / 'trajectories' / f'step_{step:06d}.jsonl.gz'
    found = [records.from_json(json.loads(record)) for record in
             gzip.decompress(file.read_bytes()).splitlines()]
    for part in wanted:
      assert line[f'reward/{part}/mean'] == pytest.approx(
          sum(t.parts[part] for t in found) / len(found))
    assert all(set(t.parts) == wanted for t in found)
    scored = scoring.Scorer(getattr(rewards, reward)(**options))(found)
    assert [t.reward for t in scored] == [t.reward for t in found]
    assert line['critic/score/mean'] == line['reward/em/mean']
  assert 0 < line['reward/format/mean'] < 1


@pytest.mark.slow
def test_a_reward_that_is_no_number_ends_the_run_before_it_is_trained_on(
    tmp_path):
  config = tiny(grpo)
  config.evaluate.worlds.kinds = ()
  config.reward = 'train_test:nan_of_some'
  with pytest.raises(ValueError, match=(
      'train_test:nan_of_some: the reward must be a finite number, but is nan '
      'for question .*, sample 2. Correct it')):
    train.run(config, str(tmp_path))
  assert not lines(tmp_path)
  assert checkpoint.steps(tmp_path / 'checkpoints') == [0]


def nan_of_some(trajectory):
  """No number for the third sample of each question."""
  return float('nan') if trajectory.sample == 2 else 0.5


@pytest.mark.parametrize('change, message', [
    (dict(rollout=dict(group_size=1)), 'group_size must be at least 2'),
    (dict(model=dict(path='nowhere')), 'must be a folder'),
    (dict(search=dict(engine='google')), 'google'),
    (dict(evaluate=dict(search=dict(engine='bm26'))), 'bm26'),
    (dict(reward='searchrl.agent.rewards:nothing'), 'module:function'),
    (dict(rollout=dict(max_length=100)), 'rollout.max_length must hold'),
    (dict(learner=dict(minibatches=5)), 'learner.minibatches'),
    (dict(data=dict(train='q.jsonl')), 'q.jsonl is not a file'),
    (dict(data=dict(limit=9999)), 'data.limit must be at most'),
    (dict(train=dict(init_from='gone')), 'init_from must be the folder'),
    (dict(algorithm=dict(name='searchrl.rl.algorithms:dpo')), 'dpo'),
    (dict(dialogue='searchrl.agent.dialogue:nothing'), 'dialogue'),
])
def test_bad_input_is_refused_before_any_compilation(tmp_path, change, message):
  config = tiny(grpo)
  with config.unlocked():
    config.update(change)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    train.run(config, str(tmp_path))
  # Nor is the folder claimed: it takes the mended config.
  assert not (tmp_path / 'checkpoints').exists()
  assert not (tmp_path / 'config.json').exists()


def test_corpus_without_passages_is_refused(tmp_path):
  _files(tmp_path)
  (tmp_path / 'corpus.jsonl').write_text('')
  config = tiny(grpo)
  config.data.train = str(tmp_path / 'q.jsonl')
  config.search.corpus = str(tmp_path / 'corpus.jsonl')
  with pytest.raises(ValueError, match='no passage|empty'):
    train.run(config, str(tmp_path / 'run'))


def test_tokenizer_of_another_model_is_refused(tmp_path):
  import shutil
  from searchrl.experiment import policy as policies
  shutil.copytree(policies.TINY_BASE, tmp_path / 'model')
  file = tmp_path / 'model' / 'tokenizer.json'
  raw = json.loads(file.read_text())
  last = max(t['id'] for t in raw['added_tokens'])
  raw['added_tokens'].append(dict(raw['added_tokens'][-1], id=last + 1,
                                  content='<more>'))
  file.write_text(json.dumps(raw))
  config = tiny(grpo)
  config.model.path = str(tmp_path / 'model')
  with pytest.raises(ValueError, match='belong together'):
    train.run(config, str(tmp_path / 'run'))


@pytest.mark.slow
def test_silent_reward_warns_and_names_a_remedy(tmp_path, capsys):
  config = tiny(grpo, steps=2, warn_after=2)
  config.reward = config.outcome = 'train_test:length_reward'
  train.run(config, str(tmp_path))
  assert 'outcomes were alike for 2 steps' in capsys.readouterr().err


def _main(*arguments, **options):
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  return subprocess.Popen(
      [sys.executable, '-m', 'searchrl.main', *arguments], cwd=ROOT,
      env=environment, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, **options)


def test_config_typo_fails_with_a_suggestion(tmp_path):
  process = _main('--config=configs/grpo.py', f'--workdir={tmp_path}',
                  '--config.rollout.groupsize=4')
  _, error = process.communicate(timeout=120)
  assert process.returncode != 0
  assert 'group_size' in error


@pytest.mark.slow
def test_ctrl_c_and_kill_resume_to_the_same_numbers(tmp_path):
  arguments = [
      '--config=configs/dspo.py:smoke', '--config.train.num_steps=4',
      '--config.evaluate.worlds.questions_per_hop=1',
      "--config.evaluate.worlds.kinds=('known',)",
      '--config.rollout.max_rounds=2']
  whole = _main(*arguments, f'--workdir={tmp_path / "whole"}')
  assert whole.wait(timeout=600) == 0, whole.stderr.read()
  folder = tmp_path / 'broken'
  for number in (signal.SIGINT, signal.SIGKILL):
    process = _main(*arguments, f'--workdir={folder}')
    wanted = {signal.SIGINT: 1, signal.SIGKILL: 2}[number]
    file = folder / metrics.FILE
    while process.poll() is None and not (
        file.exists() and f'"training/global_step": {wanted},' in
        file.read_text()):
      time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=600)
    assert process.returncode == {signal.SIGINT: 75, signal.SIGKILL: -9}[number]
    if number == signal.SIGINT:
      assert 'Run the same command to go on' in error
  process = _main(*arguments, f'--workdir={folder}')
  assert process.wait(timeout=600) == 0, process.stderr.read()
  assert lines(folder) == lines(tmp_path / 'whole')
  assert state_digest(folder) == state_digest(tmp_path / 'whole')


@pytest.mark.slow
@pytest.mark.parametrize('moment', [
    'evaluation/before', 'checkpoints/0/integrity.json', 'evaluation/after'])
def test_sigterm_at_any_moment_is_answered_in_a_sentence(tmp_path, moment):
  process = _main('--config=configs/grpo.py:smoke', '--config.train.num_steps=1',
                  f'--workdir={tmp_path}')
  while process.poll() is None and not (tmp_path / moment).exists():
    time.sleep(0.005)
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=300)
  assert process.returncode == 75, error
  assert re.search('(Ended by SIGTERM. What .* holds is whole; run|Run) the same '
                   'command to go on', error)
  assert 'Traceback' not in error


def test_sigterm_while_python_starts_is_answered_too(tmp_path):
  process = _main('--config=configs/grpo.py:smoke', f'--workdir={tmp_path}')
  caught = 1 << (signal.SIGTERM - 1)
  while process.poll() is None:
    status = pathlib.Path(f'/proc/{process.pid}/status').read_text()
    if int(re.search(r'SigCgt:\s+(\w+)', status)[1], 16) & caught:
      break
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=120)
  assert (process.returncode, error) == (
      75, 'Ended by SIGTERM before anything began. Run the same command to go '
      'on.\n')


@pytest.mark.slow
def test_two_runs_on_one_folder_do_not_mix(tmp_path):
  first = _main('--config=configs/grpo.py:smoke', f'--workdir={tmp_path}')
  while first.poll() is None and not (tmp_path / 'metrics.jsonl').exists():
    time.sleep(0.02)
  second = _main('--config=configs/grpo.py:smoke', f'--workdir={tmp_path}')
  _, error = second.communicate(timeout=300)
  assert second.returncode == 1 and error.startswith(
      f'ValueError: {tmp_path} must be used by one run at a time, but process '
      f'{first.pid} of '), error
  assert first.wait(timeout=600) == 0, first.stderr.read()
  assert [line['training/global_step'] for line in lines(tmp_path)
          if 'critic/score/mean' in line] == [1, 2, 3]


def test_a_validation_of_other_questions_is_made_again(tmp_path):
  cases = [evaluator.EvalCase(datasets.Dataset(
      'nq', [Question(f'q{n}', 'q?', ('a',)) for n in range(3)], None),
                              'bm25', None, 'greedy')]
  row = {'set': 'nq', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 'all'}
  for count, stays in ((3, True), (2, False)):
    folder = tmp_path / f'step_{count:06d}'
    folder.mkdir()
    (folder / evaluator.TABLE).write_text(json.dumps([row | {'n': count}]))
    assert (train._table(folder, cases) is not None) == folder.exists() == stays
  assert train._table(tmp_path / 'step_000009', cases) is None
