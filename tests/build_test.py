# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""build: what a config cannot ask of its rollouts."""

import dataclasses
import math
import sys
import types

import jax
import pytest
import tiny

from configs import dspo
from configs import grpo
from configs import mt_grpo
from configs import ppo
from configs import rloo
from configs import zerosearch
from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.experiment import build
from searchrl.experiment import fingerprint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import workdir
from searchrl.trajectory import Question

DEVICES = 8


@pytest.mark.parametrize('option', [dict(top_k=5), dict(top_p=0.9),
                                    dict(min_p=0.1)])
def test_truncated_sampling_needs_a_loss_without_a_ratio_or_consent(option):
  config = grpo.get_config()
  build.algorithm(config)
  config.rollout.update(option)
  with pytest.raises(ValueError, match='must be off for .*grpo, whose loss has '
                                       'an importance ratio'):
    build.algorithm(config)
  config.rollout.truncation = 'renormalise'
  build.algorithm(config)
  without = rloo.get_config()
  without.rollout.update(option)
  assert build.algorithm(without).one_update


def test_a_truncation_of_no_kind_and_out_of_range_is_refused():
  config = grpo.get_config()
  config.rollout.truncation = 'ignore'
  with pytest.raises(ValueError, match="must be one of 'refuse', 'renorm"):
    build.algorithm(config)
  config.rollout.update(truncation='renormalise', top_p=0.0)
  with pytest.raises(ValueError, match='rollout.top_p must be above 0'):
    build.algorithm(config)


def test_an_attention_that_fails_its_test_is_logged(monkeypatch, capsys):
  """It is so on a GPU without a working kernel."""
  monkeypatch.setattr(
      build.attention, 'resolve',
      lambda *_, **__: ('xla', 'Warning: no kernel'))
  config = grpo.get_config()
  shape = tiny.CONFIG
  name = build.tested_attention(config, shape, meshes.make())
  assert name == 'xla' and 'Warning: no kernel' in capsys.readouterr().err


@pytest.mark.parametrize('rows, axes, a_device, heads', [
    (0, dict(data=1), 2, (4, 2)), (0, dict(data=1, fsdp=4), 1, (4, 2)),
    (12, dict(data=2, fsdp=2, tensor=2), 3, (2, 1))])
def test_the_graphs_of_training_are_those_that_are_tested(
    monkeypatch, rows, axes, a_device, heads):
  """A device has the packed rows of a micro-batch, and its share of heads."""
  found = {}

  def resolve(name, **options):
    found.update(options)
    return 'xla', name

  monkeypatch.setattr(build.attention, 'resolve', resolve)
  config = grpo.get_config()
  config.learner.update(microbatch_rows=rows, pack_length=384, max_segments=5)
  mesh = meshes.make(devices=jax.devices()[:math.prod(axes.values())], **axes)
  build.tested_attention(config, tiny.CONFIG, mesh)
  assert (found['rows'], found['length'], found['max_segments']) == (
      a_device, 384, 5)
  assert (found['heads'], found['kv_heads']) == heads


def test_heads_that_a_kernel_cannot_split_are_refused(monkeypatch):
  monkeypatch.setattr(
      build.attention, 'resolve', lambda *_, **__: ('splash', 'tested'))
  mesh = meshes.make(data=1, tensor=8)
  with pytest.raises(ValueError,
                     match=r'mesh.tensor must divide the 2 KV heads under '
                           r'splash .* is 8.*one of \[1, 2\]'):
    build.tested_attention(grpo.get_config(), tiny.CONFIG, mesh)


@pytest.mark.parametrize('recipe, reward, outcome, warns', [
    (dspo, 'my_lab:long', 'searchrl.agent.rewards:em', True),
    (dspo, 'my_lab:long', 'my_lab:long', False),
    (dspo, 'searchrl.agent.rewards:f1', 'searchrl.agent.rewards:em', False),
    (grpo, 'my_lab:long', 'searchrl.agent.rewards:em', False)])
def test_a_filter_that_does_not_read_the_reward_of_the_user_says_so(
    recipe, reward, outcome, warns, capsys):
  config = recipe.get_config()
  config.update(reward=reward, outcome=outcome)
  build._warn_of_outcome(config, build.algorithm(config))
  said = capsys.readouterr().err
  assert ('keeps groups by outcome=searchrl.agent.rewards:em, and not by '
          'reward=my_lab:long' in said) == warns
  assert bool(said) == warns


def scorer(reward, outcome='searchrl.agent.rewards:em', **options):
  config = grpo.get_config()
  config.update(reward=reward, outcome=outcome)
  with config.unlocked():
    config.reward_options.update(options)
  return build.scorer(config)


def test_a_reward_scores_one_trajectory_or_a_round_or_makes_a_judge(
    monkeypatch):
  module = types.ModuleType('my_lab')
  module.long = lambda trajectory, *, fee=0.1: len(trajectory) - fee
  module.judge = lambda *, n: rewards.Judge(lambda ts: [n] * len(ts))
  module.rank = lambda trajectories, *, by=1: [by * n for n, _ in enumerate(
      trajectories)]
  module.nothing = lambda *, n=1: n
  monkeypatch.setitem(sys.modules, 'my_lab', module)
  assert scorer('my_lab:long', fee=1).judge.score(['abc'])[0].reward == 2
  assert scorer('my_lab:long').judge.one_by_one
  judge = scorer('my_lab:judge', n=5)
  assert judge.judge('ab') == [5, 5] and judge.name == 'my_lab:judge'
  whole = scorer('my_lab:rank', by=3).judge
  assert whole('abc') == [0, 3, 6] and not whole.one_by_one
  assert scorer('searchrl.agent.rewards:em').outcome is rewards.em
  with pytest.raises(ValueError, match='returns a Judge, but my_lab:nothing '
                                       'takes .* alone and returned int'):
    scorer('my_lab:nothing')
  for name in ('my_lab:judge', 'my_lab:rank'):
    with pytest.raises(ValueError, match='outcome must be a function of one '
                                         f'trajectory, but is {name}'):
      scorer('my_lab:long', name)


OURS = 'searchrl.agent.rewards:'


@pytest.mark.parametrize('reward, options, rollout, message', [
    ('format_em', dict(lamda_f=.1), {},
     'reward_options.lamda_f is no option of .*:format_em, which takes '
     'lambda_f, .* Did you mean lambda_f?'),
    ('format_em', dict(lambda_f=7), {}, 'lambda_f must be a number in .* is 7'),
    ('em', dict(fee=7), {}, 'reward_options.fee is no option of .*:em, which '
                            'takes none. Remove it'),
    ('retrieval', dict(mixed_only=True), dict(stop_when_full=True),
     'rollout.stop_when_full is for rewards of one trajectory, .*:retrieval'),
    ('format_me', {}, {}, "no function 'format_me', did you mean format_em"),
])
def test_a_bad_reward_is_refused_before_the_model_is_read(
    monkeypatch, tmp_path, reward, options, rollout, message):
  monkeypatch.setattr(build.policy, 'build', lambda *_: pytest.fail('read'))
  config = grpo.get_config()
  config.reward = OURS + reward
  config.rollout.update(rollout)
  with config.unlocked():
    config.reward_options.update(options)
  with pytest.raises(ValueError, match=message):
    build.build(config, tmp_path)


def test_rewards_of_turns_need_an_algorithm_that_reads_them():
  config = mt_grpo.get_config()
  assert build.algorithm(config).reads_turns
  assert build.scorer(config).turns.keywords == dict(
      new=1.0, duplicate=0.0, invalid=0.0)
  config.algorithm = ppo.get_config().algorithm
  with pytest.raises(ValueError, match='turn_reward must be empty for .*:ppo'):
    build.algorithm(config)
  config.algorithm.turn_rewards = True
  assert build.algorithm(config).reads_turns
  config.turn_reward = ''
  assert build.scorer(config).turns is None


@pytest.mark.parametrize('name, options, message', [
    ('searchrl.agent.turn_rewards:evidense', {}, 'turn_reward must be .*did '),
    ('searchrl.agent.turn_rewards:evidence', dict(old=1.0),
     'turn_reward_options.old is no option of .*:evidence'),
    ('searchrl.agent.rewards:format_em', {},
     'turn_reward must be a function of one trajectory, but is .*:format_em')])
def test_a_bad_reward_of_turns_is_refused(name, options, message):
  config = mt_grpo.get_config()
  config.turn_reward, config.turn_reward_options = name, options
  with pytest.raises(ValueError, match=message):
    build.scorer(config)


@pytest.mark.parametrize('steps', [0, 24])
def test_a_curriculum_as_long_as_the_run_keeps_its_length(tmp_path, steps):
  config = zerosearch.get_config('smoke')
  config.rollout.max_num_seqs = 8
  config.search.options.curriculum.steps = steps
  build.build(config, tmp_path)
  config.train.num_steps += 1
  if steps:
    build.build(config, tmp_path)
  else:
    with pytest.raises(ValueError, match=r'train.num_steps: \d -> \d'):
      build.build(config, tmp_path)


def test_a_question_that_has_changed_since_is_noticed(tmp_path):
  asked = [Question('a', 'Who?', ('x',)), Question('b', 'Where?', ('y',))]
  other = [asked[0], dataclasses.replace(asked[1], answers=('z',))]
  directory = workdir.Workdir(tmp_path, grpo.get_config('smoke'))

  def note(questions):
    data = datasets.Dataset('train', questions, None)
    directory.note('questions', lambda: fingerprint.questions([data]))

  note(asked)
  note(asked)  # a resume
  with pytest.raises(ValueError, match='^.* holds a run whose questions was an'
                     'other: train: .* -> .*--allow_changes'):
    note(other)
  directory.config.allow_changes = True
  note(other)


def test_a_larger_prompt_is_no_other_run(tmp_path):
  past, now = grpo.get_config('smoke'), grpo.get_config('smoke')
  workdir.prepare(tmp_path, past.to_dict())
  now.rollout.budgets.max_prompt_tokens += 100
  workdir.check(tmp_path, now.to_dict(), free=build.FREE)
  now.rollout.budgets.max_turns += 1
  with pytest.raises(ValueError, match='max_turns: 6 -> 7'):
    workdir.check(tmp_path, now.to_dict(), free=build.FREE)


@pytest.mark.parametrize('options, depends', [
    ({}, False), (dict(schedule='linear'), True),
    (dict(schedule='linear', total_steps=100), False)])
def test_results_depend_on_the_number_of_steps_if_a_schedule_ends_with_them(
    options, depends):
  config = grpo.get_config()
  config.critic.optimizer.update(options)
  assert build._depends_on_num_steps(config) == depends
