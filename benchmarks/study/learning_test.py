# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/study/learning.py: its command lines parse, its records are resumed."""

import argparse
import json
import math
import pathlib
import re
import signal
import subprocess
import threading
import time

import pytest

from configs import arguments
from configs import evaluate
from searchrl.data import datasets
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.runtime import config_fields
from searchrl.runtime import config_files
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Question

import experiments
import learning
import outcomes
import reading
import report

ROOT = pathlib.Path(__file__).resolve().parents[2]
FRACTIONS = {'grpo': (0.4, 0.2, 0.1, 0.03, 0.01),
             'gspo': (0.5, 0.31, 0.12, 0.04, 0.0)}  # by experiments.CLIPS


def calibrated():
  """Records of calibration with known clip fractions."""
  return {(experiments._calibration(recipe, clip).name, 99): {
      'cpu_secs': {'train': 50.0},
      'curves': {'actor/pg_clipfrac': [0.5 * fraction, 1.5 * fraction]}}
          for recipe, clips in experiments.CLIPS.items()
          for clip, fraction in zip(clips, FRACTIONS[recipe])}


EVERY = experiments.all_of(calibrated())
ARMS = {arm.name: arm for arm in experiments.distinct([*EVERY.values()])}


# Experiments ------------------------------------------------------------------

def config_of(arguments):
  """The config of a command line, as main reads it from the root."""
  settings, flags = config_fields.split(arguments)
  file, = (flag.removeprefix('--config=') for flag in flags
           if flag.startswith('--config='))
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    config = config_files.load(file)
  config_fields.assign(config, settings, file)
  config_checks.check(config)
  return config


@pytest.mark.parametrize('name', ARMS)
def test_the_command_lines_of_an_arm_are_configs(name):
  arm = ARMS[name]
  for part, command in experiments.commands(arm, 3).items():
    config = config_of(command)
    if arm.solver and part == 'train':
      assert config.job == 'searchrl.papers.dr_zero.selfplay:run'
      assert config.seed == 3 and config.data.world_seed == 4
      assert arm.solver == f'iteration_{config.selfplay.iterations}/solver'
      assert not config.search.options.to_dict()  # as it is judged
      continue
    engine = part.removeprefix('through_')
    engine, options = experiments.ENGINES[
        engine if engine in experiments.ENGINES else arm.engine]
    if part == 'train' and 'search.engine' in arm.training:
      assert config.evaluate.search.engine == engine
      engine = arm.training['search.engine']
      options = arm.training['search.options']
    assert config.search.engine == engine
    assert config.search.options.to_dict() == options
    assert config.seed == 3 and config.evaluate.worlds.world_seed == 104
    assert isinstance(config.evaluate.worlds.kinds, tuple)
    if part == 'train':
      build.algorithm(config)
      assert config.data.world_seed == 4
      recipe = {'zerosearch': 'grpo'}.get(arm.recipe, arm.recipe)
      assert config.algorithm.name.endswith(f':{recipe}')
      assert config.train.num_steps == arm.steps
    else:
      assert config.job == 'searchrl.jobs.evaluate:run'


def test_arms_of_an_experiment_differ_in_what_it_is_about():
  def of(name):
    return config_of(experiments.commands(ARMS[name], 0)['train'])
  one, two = of('grpo on policy'), of('grpo on all')
  assert one.algorithm.mask_observations
  two.algorithm.mask_observations = True
  assert one.to_json() == two.to_json()
  assert (one.optimizer.learning_rate, one.learner.minibatches) == (3e-4, 2)
  assert of('tiny_raw lambda 0.4').reward_options.lambda_f == 0.4
  assert of('grpo on noise').train.num_steps == 20
  assert of('dspo').evaluate.every == 2 and of('gspo').evaluate.every == 6
  for rung, (rate, updates) in arguments.STRESS.items():
    config = of(experiments.at_rung('dapo', rung))
    assert config.optimizer.learning_rate == rate
    assert config.learner.minibatches == updates
    assert config.train.max_rollouts == report.BUDGET


def test_every_pair_is_of_arms_of_its_experiment_and_every_measure_is_known():
  for experiment in EVERY.values():
    names = {arm.name for arm in experiment.arms}
    assert {name for pair in experiment.pairs for name in pair} <= names
    assert {*experiment.measures} <= report.MEASURES.keys()
    assert experiment.smallest > 0 and len(experiment.hypothesis) > 50


def test_no_run_is_trained_on_a_world_of_the_test():
  seeds = {*experiments.SEEDS, experiments.CALIBRATION_SEED}
  assert not {s + 1 for s in seeds} & {s + 101 for s in seeds}


def test_two_arms_of_one_name_are_refused():
  one = experiments.Experiment('', ('greedy',), 0.1, (
      experiments.Arm('a', 'grpo'), experiments.Arm('a', 'dspo')), ())
  with pytest.raises(ValueError, match="two that differ are called 'a'"):
    list(experiments.distinct([one]))
  assert list(ARMS).count('grpo') == 1  # the arm of several experiments


def test_ranges_are_matched_by_their_clip_fractions():
  # GSPO at its .05 clips .31; of GRPO's, .4 is nearest, that of the range .02.
  # GRPO at its .2 clips .03; of GSPO's, .04 is nearest, that of the range .2.
  token, sequence = experiments.matched(calibrated())
  assert token.name == 'grpo stress_2 matched' and token.size == 'stress_2'
  assert {*token.training.values()} == {0.02}
  assert {*sequence.training.values()} == {0.2}
  some = dict(list(calibrated().items())[1:])
  assert experiments.matched(some) == ()
  arms = experiments.all_of(some)['stress'].arms
  assert {arm.name for arm in arms} | {token.name, sequence.name} == {
      arm.name for arm in EVERY['stress'].arms}


# Questions with passages ------------------------------------------------------

def test_questions_stand_below_what_bm25_finds_for_them():
  passages = (Passage('0', 'Sea', 'A sea is wide.'),
              Passage('1', 'Ann', 'Ann was born in Oslo.'),
              Passage('2', 'Bob', 'Bob was born in Rome.'))
  asked = Question('q', 'Where was Ann born?', ('Oslo',), 1, 'known_1hop')
  found, = reading.with_passages(
      datasets.Dataset('known', [asked], Corpus(passages)), top_k=2)
  assert found.text == (
      'Doc 1(Title: "Ann") Ann was born in Oslo.\n'
      'Doc 2(Title: "Bob") Bob was born in Rome.\nWhere was Ann born?')
  assert (found.uid, found.answers, found.hops) == ('q', ('Oslo',), 1)


def test_an_evaluation_is_prepared_of_its_own_questions(tmp_path):
  options = {'search.engine': 'bm25', 'evaluate.worlds.max_hops': 3,
             'evaluate.worlds.kinds': ('known', 'unseen'),
             'evaluate.worlds.questions_per_hop': 3}
  added = reading.prepare(options, tmp_path)
  config = evaluate.get_config()
  config.update_from_flattened_dict(options)
  before = build.evaluation_sets(config, tmp_path)
  for word in added:
    name, _, value = word.removeprefix('--config.').partition('=')
    config.update_from_flattened_dict({name: value})
  after = build.evaluation_sets(config, tmp_path / 'unused')
  assert [data.name for data in after] == ['known', 'unseen']
  for old, new in zip(before, after):
    assert [q.hops for q in new.questions] == [1] * 3 + [2] * 3 + [3] * 3
    for one, two in zip(old.questions, new.questions):
      assert two.answers == one.answers
      passages, _, question = two.text.rpartition('\n')
      assert question == one.text
      assert re.match(r'Doc 1\(Title: "[^"]+"\) .+\nDoc 2\(', passages)


# Runs and their records -------------------------------------------------------

ROWS = [dict(set=name, decoding=decoding, hops=hops, n=50, em=0.1 * hops,
             searches=float(hops)) for name in ('known', 'famous')
        for decoding in ('greedy', 'sampled') for hops in (1, 2, 3, 4, 'all')
        if hops != 'all']


class Main:
  """Stands for the processes of runs: writes what they would leave."""

  def __init__(self):
    self.calls, self.fails = [], None

  def __call__(self, arguments, folder, part, devices):
    assert devices == 1
    self.calls.append((folder.name, part))
    outcomes.add_cost(folder, part, cpu=10.0, wall=5.0)
    if (folder.name, part) == self.fails:
      raise RuntimeError('stopped')
    (folder / part).mkdir()
    if part == 'train':
      seed = int(folder.name.rpartition('seed')[2])
      lines = [{'val/known_1hop/em/greedy': 0.0, 'val/known_2hop/em/greedy': 0,
                'val/known_3hop/em/greedy': 0.0}]
      lines += [{'timing_s/step': 1.0, 'critic/score/mean': 0.1 * step,
                 'search/calls_per_traj': 1.0, 'training/rollouts': 72 * step}
                for step in (1, 2)]
      lines += [{'val/known_1hop/em/greedy': 0.9, 'val/known_2hop/em/greedy':
                 0.6 + 0.1 * seed, 'val/known_3hop/em/greedy': 0.3}]
      (folder / part / 'metrics.jsonl').write_text(
          ''.join(json.dumps(line) + '\n' for line in lines))
      (folder / part / 'summary.txt').write_text('done')
    else:
      assert f'--workdir={folder / part}' in arguments
      (folder / part / 'table.json').write_text(json.dumps(ROWS))


@pytest.fixture(name='runs')
def _runs(monkeypatch):
  runs = Main()
  monkeypatch.setattr(learning, '_command', runs)
  monkeypatch.setattr(experiments, 'all_of', lambda found: {'small': SMALL})
  return runs


SMALL = experiments.Experiment(
    'one is better', ('greedy', 'area'), 0.05,
    (experiments.Arm('base', evaluations=('full', 'unseen')),
     experiments.Arm('one', 'grpo', evaluations=('full', 'unseen'))),
    (('one', 'base'),))


def asked(folder, **changes):
  return argparse.Namespace(**dict(
      experiment=['small'], arms=[], seeds=[0, 1], parallel=1,
      runs=folder / 'runs',
      limit_minutes=math.inf, records=folder / 'records.jsonl') | changes)


def test_a_run_with_a_record_is_not_repeated(runs, tmp_path):
  learning.study(asked(tmp_path))
  assert runs.calls == [
      (f'{arm}_seed{seed}', part) for seed in (0, 1) for arm, parts in (
          ('base', ('full', 'unseen')), ('one', ('train', 'full', 'unseen')))
      for part in parts]
  lines = (tmp_path / 'records.jsonl').read_text()
  runs.calls.clear()
  learning.study(asked(tmp_path))
  assert not runs.calls
  assert (tmp_path / 'records.jsonl').read_text() == lines
  learning.study(asked(tmp_path, seeds=[1, 2]))
  assert {folder for folder, _ in runs.calls} == {'base_seed2', 'one_seed2'}


def test_a_record_has_curves_costs_and_rows(runs, tmp_path):
  learning.study(asked(tmp_path, seeds=[1]))
  record = learning.read(tmp_path / 'records.jsonl')['one', 1]
  assert record['curves']['critic/score/mean'] == [0.1, 0.2]
  assert record['greedy'] == [[0, 0.0, 0.0, 0.0], [144, 0.9, 0.7, 0.3]]
  assert record['cpu_secs'] == dict(train=10.0, full=10.0, unseen=10.0)
  assert record['rows']['full/known/greedy/2'] == [50, 0.2, 2.0]
  assert record['commands'] == experiments.commands(SMALL.arms[1], 1)
  assert {'git', 'cpu', 'packages', 'cores'} <= record.keys()


def test_the_curve_of_random_passages_is_theirs(tmp_path):
  (tmp_path / 'train').mkdir()
  names = [f'val/known_noise_{hops}hop/em/greedy' for hops in (1, 2, 3)]
  (tmp_path / 'train' / 'metrics.jsonl').write_text(
      json.dumps(dict.fromkeys(names, 0.25)) + '\n')
  outcomes.add_cost(tmp_path, 'train', cpu=1.0, wall=1.0)
  found = outcomes.of(tmp_path)
  assert found['greedy'] == [[0, 0.25, 0.25, 0.25]] and not found['curves']
  untrained = finished('base', 0, 0.5, ())
  assert report.area(untrained) is None and report.steps_to(untrained) is None


def test_an_interrupted_run_goes_on_where_it_was(runs, tmp_path):
  runs.fails = 'one_seed0', 'unseen'
  with pytest.raises(RuntimeError, match='stopped'):
    learning.study(asked(tmp_path))
  assert list(learning.read(tmp_path / 'records.jsonl')) == [('base', 0)]
  runs.fails = None
  runs.calls.clear()
  learning.study(asked(tmp_path, seeds=[0]))
  assert runs.calls == [('one_seed0', 'unseen')]
  record = learning.read(tmp_path / 'records.jsonl')['one', 0]
  assert record['cpu_secs']['unseen'] == 20.0  # both times


def test_no_run_begins_that_would_end_too_late(runs, tmp_path):
  learning.study(asked(tmp_path, limit_minutes=0))
  assert not runs.calls and not (tmp_path / 'records.jsonl').exists()
  base, one = (learning.expected(arm, {}) for arm in SMALL.arms)
  between = (base + one) / 2 / 60
  learning.study(asked(tmp_path, seeds=[0], limit_minutes=between))
  assert list(learning.read(tmp_path / 'records.jsonl')) == [('base', 0)]


def test_a_record_of_another_command_is_refused(runs, tmp_path):
  learning.study(asked(tmp_path, seeds=[0]))
  file = tmp_path / 'records.jsonl'
  file.write_text(file.read_text().replace('questions_per_hop=200',
                                           'questions_per_hop=100'))
  with pytest.raises(ValueError, match="record of 'base', seed 0, was made"):
    learning.study(asked(tmp_path))


@pytest.mark.parametrize('error, ended', [
    (KeyboardInterrupt, True), (RuntimeError, False)])
def test_an_interrupt_stops_what_runs_a_failure_does_not(
    error, ended, tmp_path, monkeypatch):
  def fails(*_):
    raise error

  monkeypatch.setattr(learning, 'record', fails)
  monkeypatch.setattr(experiments, 'all_of', lambda found: {'small': SMALL})
  with subprocess.Popen(['sleep', '60']) as process:
    monkeypatch.setattr(learning, '_running', {process.pid})
    with pytest.raises(error):
      learning.study(asked(tmp_path))
    if not ended:
      assert process.poll() is None
      process.kill()
    assert process.wait() == (-signal.SIGTERM if ended else -signal.SIGKILL)


def test_what_ends_beside_a_failure_is_recorded(tmp_path, monkeypatch):
  begun, failed = threading.Event(), threading.Event()

  def one_of_two(arm, seed, options):
    del options
    if arm.name == 'base':
      assert begun.wait(10)
      failed.set()
      raise RuntimeError('base')
    begun.set()
    assert failed.wait(10)
    time.sleep(0.2)  # the failure is known by now
    return {'arm': arm.name, 'seed': seed, 'cpu_secs': {'train': 1.0}}

  monkeypatch.setattr(learning, 'record', one_of_two)
  monkeypatch.setattr(experiments, 'all_of', lambda found: {'small': SMALL})
  with pytest.raises(RuntimeError, match='base'):
    learning.study(asked(tmp_path, parallel=2))
  assert [*learning.read(tmp_path / 'records.jsonl')] == [('one', 0)]


def test_a_process_that_fails_ends_the_run_and_says_where(tmp_path):
  with pytest.raises(RuntimeError, match='train in .* ended before its time'):
    learning._command(['--config=configs/none.py'], tmp_path, 'train')
  assert 'none.py' in (tmp_path / 'log.txt').read_text()
  cost, = (tmp_path / 'costs.jsonl').read_text().splitlines()
  assert json.loads(cost)['cpu'] > 0


def test_a_run_has_one_device_and_one_thread(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
  monkeypatch.setenv('NPROC', '7')
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'shared')
  found = learning.environment()
  assert learning.environment(2)['XLA_FLAGS'].endswith('device_count=2')
  assert found['NPROC'] == found['OMP_NUM_THREADS'] == '1'
  assert 'XLA_FLAGS' not in found and found['JAX_PLATFORMS'] == 'cpu'
  assert found['JAX_COMPILATION_CACHE_DIR'] == 'shared'


# Plan and report --------------------------------------------------------------

def test_the_plan_counts_an_arm_once_and_takes_what_was_measured(monkeypatch):
  small = {'a': SMALL, 'b': SMALL}
  monkeypatch.setattr(experiments, 'all_of', lambda found: small)
  found = {('one', 0): {'cpu_secs': dict(train=3000.0, full=600.0)}}
  base = learning.expected(SMALL.arms[0], {}) * 2 / 3600
  *_, a, b, total = learning.plan(['a', 'b'], [0, 1], found).splitlines()
  assert a == (f'| a | 4 | 1 | {900 * (base + 2):.0f} | {base + 2:.1f} '
               f'| {base + 1:.1f} |')
  assert b == '| b | 0 | 0 | 0 | 0.0 | 0.0 |'
  assert total == a.replace('| a |', '| all |')


def test_the_study_fits_its_hours():
  lines = learning.plan(['recipes', 'stress', 'engines'], experiments.SEEDS,
                        calibrated()).splitlines()
  assert float(lines[-1].split('|')[-3]) <= 15


def finished(arm, seed, em, curve=((0, 0.0), (1728, 1.0))):
  """A record whose every greedy cell is `em`."""
  return {'arm': arm, 'seed': seed, 'cpu_secs': {'train': 100.0},
          'commands': {'through_bm25': []},
          'curves': {'critic/score/mean': [0.0] * 5 + [em] * 5,
                     'search/calls_per_traj': [1.0] * 10,
                     'training/rollouts': list(range(173, 1731, 173))},
          'greedy': [[at, y, y, y] for at, y in curve],
          'rows': {f'{part}/known/greedy/{hops}': [200, em, hops]
                   for part in ('full', 'through_bm25')
                   for hops in (1, 2, 3, 4)}}


def records(**arms):
  """Returns records of arms, with one seed for each of their values."""
  return {(arm, seed): finished(arm, seed, em) for arm, values in arms.items()
          for seed, em in enumerate(values)}


def test_measures_of_a_record():
  found = finished('dspo', 0, 0.5, ((0, 0.0), (864, 0.5), (2592, 1.0)))
  values = {name: measure(found) for name, measure in report.MEASURES.items()}
  assert values['greedy'] == values['greedy, 4 hops'] == values['reward'] == 0.5
  assert values['searches'] == 2.0 and values['sampled'] is None
  # To 1728 alone, as it filters: .25 over half, then .5 to .75.
  assert values['area'] == pytest.approx((0.25 + 0.625) / 2)
  assert values['steps to .6'] == pytest.approx((864 + 1728 * 0.2) / 72)
  assert values['through_bm25'] == values['through_exact'] == 0.5


def test_tables_give_means_and_verdicts():
  found = records(base=[0.1, 0.2, 0.3], one=[0.6, 0.7, 0.81])
  shown = report.text({'small': SMALL}, found)
  assert 'Hypothesis: one is better' in shown
  assert re.search(r'\| base \| 3 \| 0\.200 ± 0\.100 \|', shown)
  # Differences .5 .5 .51: mean .5033, 4.303 * .00577 / 1.732 = .0143.
  assert '| one - base | **+0.503 [+0.489, +0.518]** |' in shown


def test_a_mean_says_of_how_many_seeds_it_is():
  assert report.mean_and_spread([3.0, 5.0], 5) == '4.000 ± 1.414 (2 of 5)'
  assert report.mean_and_spread([], 5) == ''


def test_the_figures_show_every_arm_that_has_records(tmp_path, monkeypatch):
  labels = []
  keep = report.pyplot.close
  monkeypatch.setattr(report.pyplot, 'close', lambda figure: (
      labels.append({line.get_label() for axis in figure.axes
                     for line in axis.lines}), keep(figure)))
  found = records(grpo=[0.5, 0.7]) | records(
      **{'dspo stress_2': [0.4], 'gspo stress_2 matched': [0.3]})
  report.draw(found, tmp_path)
  assert labels == [{'grpo', 'dspo', 'gspo matched'}, {'bm25'}]
  assert (tmp_path / 'stress.png').stat().st_size > 10_000
  assert (tmp_path / 'through_engines.png').stat().st_size > 10_000
