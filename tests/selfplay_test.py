# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Self-play: two iterations, killed in every phase; what teaches nothing ends."""

import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from configs import drzero
from configs import drzero_rivals
from searchrl.data import questions as questions_lib
from searchrl.experiment import past_runs
from searchrl.jobs import plan
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import roles
from searchrl.papers.dr_zero import selfplay
from searchrl.rollouts import records
import loopback
import train_test

OPTIMIZATION_LEVEL = 1

ROOT = pathlib.Path(__file__).resolve().parent.parent


def config(**changes):
  """The smoke size, quiet, and barely evaluated."""
  result = drzero.get_config('smoke')
  for role in (result.proposer, result.solver):
    role.train.update(progress=False, loggers=())
  result.solver.evaluate.worlds.update(questions_per_hop=1, kinds=('known',))
  for name, value in changes.items():
    result.update_from_flattened_dict({name.replace('__', '.'): value})
  return result


def read(folder, pattern='step_*.jsonl.gz'):
  return [records.from_json(json.loads(line))
          for file in sorted((folder / 'trajectories').glob(pattern))
          for line in gzip.decompress(file.read_bytes()).splitlines()]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('selfplay') / 'run'
  selfplay.run(config(), str(folder))
  return folder


@pytest.mark.slow
def test_each_phase_leaves_a_run_or_a_file_of_questions(whole):
  for number in (1, 2):
    here = whole / f'iteration_{number}'
    for name in ('proposer/summary.txt', 'proposer/model/model.safetensors',
                 'proposals/report.json', 'solver/summary.txt',
                 'solver/evaluation/after/table.json'):
      assert (here / name).stat().st_size > 0, name
    asked = questions_lib.read(here / 'seeds.jsonl', needs_golds=False)
    assert len(asked) == 24 and not any(q.answers for q in asked)
    kept = questions_lib.read(here / 'proposals' / 'questions.jsonl')
    seeds = {q.uid for q in asked[:12]}
    assert {q.uid.split(':')[1] for q in kept} <= seeds
    assert all(q.answers and q.data_source == 'proposals' for q in kept)
    assert {t.question.uid for t in read(here / 'solver')} <= {
        q.uid for q in kept}
    assert {t.question.uid for t in read(here / 'proposer')} <= {
        q.uid for q in asked}
  first, second = (
      {q.text for q in questions_lib.read(
          whole / f'iteration_{n}/seeds.jsonl', needs_golds=False)}
      for n in (1, 2))
  assert not first & second
  assert 'Alarms' in (whole / 'summary.txt').read_text()
  assert (whole / 'curve.png').stat().st_size > 0


@pytest.mark.slow
def test_every_role_goes_on_from_its_own_and_meets_the_other(whole):
  of = lambda number, role: past_runs.recorded(
      whole / f'iteration_{number}' / role)
  assert of(1, 'proposer')['solver']['run'] == ''
  assert of(1, 'proposer')['train']['init_from'] == ''
  for role in roles.ROLES:
    assert of(2, role)['train']['init_from'] == str(
        whole / 'iteration_1' / role)
  assert of(2, 'proposer')['solver']['run'] == str(
      whole / 'iteration_1' / 'solver')
  assert of(1, 'solver')['algorithm']['name'].endswith(':grpo')
  assert of(2, 'proposer')['algorithm']['name'].endswith(':hrpo')


@pytest.mark.slow
def test_rewards_are_the_judges_and_rollouts_are_counted_apart(whole):
  run = whole / 'iteration_1' / 'proposer'
  lines = [line for line in train_test.lines(run) if 'reward/gate/mean' in line]
  found = read(run)
  assert lines[-1]['training/rollouts'] == len(found) == 16
  played = [t for t in found if t.parts['gate']]
  assert sum(line['reward/attempts/sum'] for line in lines) == 5 * len(played)
  for one in found:
    score = proposals.form(one).score
    right = round(one.parts.get('pass_rate', 0) * 5)
    hard = {0: 0, 1: 1, 2: .75, 3: .5, 4: .25, 5: 0}[right]
    assert one.reward == pytest.approx(.5 * score + hard)
    assert one.outcome_reward == hard == one.parts['difficulty']
    assert bool(score) == proposals.read(one).passes == ('attempts' in one.parts)


@pytest.mark.slow
def test_a_finished_game_prints_its_tables_again(whole, capsys):
  selfplay.run(config(), str(whole))
  assert 'Proposals, tried by the first solver' in capsys.readouterr().out
  with pytest.raises(ValueError, match='proposer.optimizer.learning_rate'):
    selfplay.run(config(proposer__optimizer__learning_rate=1.0), str(whole))


@pytest.mark.slow
def test_a_proposer_that_cannot_write_questions_ends_the_game(tmp_path):
  untaught = config(proposer__model__path='tiny_base',
                    proposer__train__stop_after=2)
  with pytest.raises(ValueError, match='last 2 steps, up to step 2, must not '
                     'all have alike outcomes'):
    selfplay.run(untaught, str(tmp_path))
  report = json.loads((tmp_path / 'examined/before/report.json').read_text())
  assert any('pass the gate' in alarm for alarm in report['alarms'])


@pytest.mark.parametrize('changes, words', [
    (dict(selfplay__iterations=0), 'selfplay.iterations must be at least 1'),
    (dict(proposing__seeds=25), r'proposing.seeds must be from 1 to selfplay.se'
     'eds, 24, but is 25'),
    (dict(proposing__samples=0), 'proposing.samples must be at least 1'),
    (dict(selfplay__document_tokens=0), 'selfplay.document_tokens must be'),
    (dict(selfplay__hops=(0, 0)), 'selfplay.hops must have the shares'),
    (dict(proposer__reward_options__attempts=1),
     'reward_options.attempts must be at least 2'),
    (dict(proposer__reward_options__difficulty='hard'),
     'reward_options.difficulty must be one of'),
    (dict(solver__rollout__max_num_seqs=0), 'rollout.max_num_seqs must be at least 1'),
    (dict(data__per_hop=()), 'search.corpus must name the passages'),
    (dict(proposer__solver__temperature=0.0), 'solver.temperature must be'),
    (dict(proposing__check__attempts=-1),
     'proposing.check.attempts must be at least 0'),
    (dict(solver__train__init_from='runs/a'),
     "solver.train.init_from must be empty in self-play, .* but is 'runs/a'. "
     'Leave it out, or export that run, and name its model by solver.model'),
    (dict(proposer__solver__run='runs/a'), 'proposer.solver.run must be empty'),
    (dict(data__train='q.jsonl'), 'data.train must be empty in self-play'),
    (dict(data__world_seed=101), 'judged in the world that it has learned'),
    (dict(search__corpus='c.jsonl', data__evaluate='none.jsonl'),
     'none.jsonl is not a file. Check data.evaluate'),
    (dict(proposing__check__attempts=2,
          proposing__check__from_documents='foo:bar'),
     'proposing.check.from_documents must be'),
    (dict(proposing__majority__least=0.8, proposing__majority__most=0.5),
     'majority.least must be at most proposing.majority.most, 0.5, but is 0.8'),
    (dict(selfplay__document_tokens=200),
     'budgets.max_prompt_tokens must hold a task with its document, about .* '
     'tokens with selfplay.document_tokens=200, but is 128'),
    (dict(alarms__gate=2.0), 
     'alarms.gate must be at least 0 and at most 1, but is 2.0'),
])
def test_bad_options_are_named_before_anything_is_trained(
    changes, words, tmp_path):
  with pytest.raises((ValueError, FileNotFoundError), match=words):
    selfplay.run(config(**changes), str(tmp_path / 'run'))
  assert not (tmp_path / 'run' / 'iteration_1' / 'proposer').exists()


def test_a_role_is_the_whole_config_of_a_run_and_a_copy():
  shared = config()
  shared.lock()
  own = roles.role_config(shared, 'proposer')
  assert own.seed == shared.seed and own.data.evaluate == 'worlds'
  own.data.evaluate = own.search.corpus = 'mine'
  assert shared.data.evaluate == 'worlds' and shared.search.corpus == ''
  for role in roles.ROLES:
    assert not {'data', 'search', 'world', 'seed', 'plan'} & {*shared[role]}


@pytest.mark.parametrize('size', ['laptop', 'qwen2.5-7b'])
def test_every_rival_differs_from_all_others_in_a_few_fields(size):
  plain = flat(drzero.get_config(size))
  changes = set()
  for name in drzero_rivals.RIVALS:
    rival = flat(drzero_rivals.get_config(f'{name}/{size}'))
    changed = {(key, str(rival.get(key))) for key in plain.keys() | rival.keys()
               if plain.get(key) != rival.get(key)}
    assert 1 <= len(changed) <= 11, (name, changed)
    changes.add(frozenset(changed))
  assert len(changes) == len(drzero_rivals.RIVALS)


@pytest.mark.parametrize('size', ['laptop', 'qwen2.5-7b'])
def test_nested_rivals_cost_the_rollouts_that_they_say(size):
  def rollouts(config):  # a proposer's step: proposals, and the attempts at them
    options = config.proposer.rollout
    return options.questions_per_step * options.group_size * (
        1 + config.proposer.reward_options.attempts)

  plain = rollouts(drzero.get_config(size))
  assert rollouts(drzero_rivals.get_config(f'nested_grpo/{size}')) == (
      plain * 20 / 6)
  for name in ('nested_grpo_equal', 'r_zero', 'sqlm'):
    equal = rollouts(drzero_rivals.get_config(f'{name}/{size}'))
    assert 0.75 * plain <= equal <= plain, name


def flat(tree, prefix=''):
  found = {}
  for key, value in tree.items():
    found |= flat(value, f'{prefix}{key}.') if hasattr(value, 'items') else {
        prefix + key: value}
  return found


def test_an_unknown_rival_is_named():
  with pytest.raises(ValueError, match='rival=nested_grpo.*but is .dr_one.*nearest: r_zero'):
    drzero_rivals.get_config('dr_one')


@pytest.mark.parametrize('size', ['qwen2.5-3b', 'qwen2.5-7b'])
def test_the_papers_size_is_tables_5_and_6_and_plans_two_models(size, capsys):
  found = drzero.get_config(size)
  assert found.selfplay.iterations == 3 and found.selfplay.hops == (4, 3, 2, 1)
  assert found.proposer.rollout.group_size == 1
  assert found.proposer.reward_options.attempts == 5
  assert found.solver.rollout.group_size == 5
  for role, length in ((found.proposer, 4096), (found.solver, 3072)):
    assert role.rollout.questions_per_step == 256
    assert role.rollout.max_length == length
    assert role.train.num_steps == 50 and role.optimizer.warmup_steps == 1
    assert role.optimizer.learning_rate == 1e-6 and role.optimizer.b2 == 0.999
    assert role.optimizer.weight_decay == 0.01
    assert role.optimizer.max_grad_norm == 0.1
    assert role.algorithm.kl_coef == 0.0
    assert role.rollout.budgets.max_turns == 5
  assert found.selfplay.document_tokens == 256
  found.plan.update(devices='h200-8', compile=False)
  plan.run(found, '')
  text = capsys.readouterr().out
  assert text.count('It fits') == 2
  assert text.count('frozen weights of rollouts, bfloat16') == 1


# Killed ----------------------------------------------------------------------

def arguments(folder):
  quiet = [f'--config.{role}.train.{field}' for role in roles.ROLES
           for field in ('progress=False', 'loggers=()')]
  return ['--config=configs/drzero.py:smoke', f'--workdir={folder}', *quiet,
          "--config.solver.evaluate.worlds.kinds=('known',)",
          '--config.solver.evaluate.worlds.questions_per_hop=1']


def command(folder):
  return [sys.executable, '-m', 'searchrl.main', *arguments(folder)]


PHASES = (  # the file whose appearance the kill follows
    'examined/before/report.json', 'iteration_1/proposer/checkpoints/1',
    'iteration_1/proposals/trajectories/round_000000.jsonl.gz',
    'iteration_1/solver/checkpoints/1', 'iteration_2/proposer/init.json',
    'examined/iteration_2/report.json', 'iteration_2/solver/summary.txt')


@pytest.mark.slow
@pytest.mark.long
def test_a_game_killed_in_every_phase_ends_with_equal_bits(tmp_path):
  whole, folder = tmp_path / 'whole', tmp_path / 'run'
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  # A command compiles other programs than a run in the process of the tests.
  subprocess.run(command(whole), cwd=ROOT, env=environment, check=True)
  for phase in PHASES:
    process = subprocess.Popen(command(folder), cwd=ROOT, env=environment,
                               stderr=subprocess.PIPE, text=True)
    while not (folder / phase).exists():
      assert process.poll() is None, process.stderr.read()
      time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
  subprocess.run(command(folder), cwd=ROOT, env=environment, check=True)
  for number in (1, 2):
    for role in roles.ROLES:
      ours, theirs = (base / f'iteration_{number}' / role
                      for base in (folder, whole))
      assert train_test.state_digest(ours) == train_test.state_digest(theirs)
      assert train_test.lines(ours) == train_test.lines(theirs)
    name = f'iteration_{number}/proposals/questions.jsonl'
    assert (folder / name).read_bytes() == (whole / name).read_bytes()
  for name in ('before', 'iteration_1', 'iteration_2'):
    name = f'examined/{name}/report.json'
    assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_play_the_game_of_one(tmp_path):
  for count in (1, 2):
    loopback.run(count, 'searchrl.main', *arguments(tmp_path / str(count)),
                 '--config.selfplay.iterations=1', devices=2 // count,
                 timeout=1200, env={'NPROC': '2'})
  one, two = (tmp_path / str(count) for count in (1, 2))
  for name in ('examined/before/report.json',
               'iteration_1/proposals/questions.jsonl',
               'iteration_1/proposals/report.json', 'iteration_1/seeds.jsonl'):
    assert (one / name).read_bytes() == (two / name).read_bytes(), name
  for role in roles.ROLES:
    ours, theirs = (train_test.lines(base / 'iteration_1' / role)
                    for base in (one, two))
    for name in ('critic/rewards/mean', 'actor/grad_norm'):
      assert [line.get(name) for line in ours] == [
          line.get(name) for line in theirs]
