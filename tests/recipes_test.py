# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every config that trains: it builds at all sizes, and its smoke size runs."""

import functools
import importlib
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import oracles
import pytest
import tiny

from searchrl.experiment import build as builds
from searchrl.jobs import train
from searchrl.rl import algorithms
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.runtime import metrics
from searchrl.trajectory import Batch

OPTIMIZATION_LEVEL = 1

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLIPPED = ('actor/pg_clipfrac', 'actor/clipfrac_low', 'actor/clipfrac_high')
RATIO = (*CLIPPED, 'timing_s/old_log_prob')  # with several steps a batch
REFERENCE = ('actor/reference_kl',)
RECIPES = {  # module: metrics of its own, and metrics that it must not have
    'configs.ppo': (
        (*RATIO, *REFERENCE, 'critic/vf_loss', 'critic/vf_clipfrac',
         'critic/vpred_mean', 'critic/vf_explained_var', 'critic/values/mean',
         'critic/returns/max', 'critic/grad_norm', 'timing_s/values',
         'timing_s/ref'), ('actor/kl_loss',)),
    'configs.grpo': (RATIO, ('actor/kl_loss', 'critic/vf_loss')),
    'configs.dr_grpo': (RATIO, ()),
    'configs.gspo': (RATIO, ()),
    'configs.dspo': ((*RATIO, 'data/tries_per_kept_group'), ()),
    'configs.dapo': ((*RATIO, 'data/tries_per_kept_group'), ()),
    'configs.gmpo': (RATIO, ()),
    'configs.rloo': ((), (*RATIO, *REFERENCE)),
    'configs.reinforce': (
        ('actor/kl_loss', *REFERENCE, 'timing_s/ref'), RATIO),
    'configs.reinforce_plus_plus': (
        (*RATIO, *REFERENCE), ('actor/kl_loss', 'critic/vf_loss')),
    'configs.hrpo': ((), (*RATIO, *REFERENCE)),
    'configs.mt_grpo': (
        (*RATIO, 'reward/turns/mean', 'reward/turns/sum_per_traj'),
        ('actor/kl_loss',)),
    'configs.gigpo': (RATIO, ('actor/kl_loss', 'reward/turns/mean')),
    'configs.r1': (RATIO, ('actor/kl_loss',)),
    'configs.zerosearch': (
        (*RATIO, 'simulated/noise', 'simulated/secs'), ('actor/kl_loss',)),
    'docs.cispo': ((), CLIPPED),
}
OF_ANOTHER = {'configs.zerosearch': 'grpo', 'configs.r1': 'grpo'}  # recipe
EVERYONE = (
    'actor/pg_loss', 'actor/entropy', 'actor/ppo_kl', 'actor/grad_norm',
    'actor/lr', 'critic/advantages/mean', 'critic/score/mean',
    'critic/rewards/mean', 'train/empty_rows', 'timing_s/adv',
    'timing_s/update_actor', 'timing_s/gen', 'timing_s/step',
    'training/rollout_logprobs_diff_max')
RESUMED = ('configs.ppo', 'configs.mt_grpo')
NEVER_ALIKE = ('timing_s/', 'perf/throughput', 'perf/cpu_seconds',
               'search/latency_ms/', 'simulated/secs')


@pytest.mark.parametrize('size', ['laptop', 'smoke'])
@pytest.mark.parametrize('name', RECIPES)
def test_a_config_builds_its_recipe_and_its_learner(name, size):
  config = importlib.import_module(name).get_config(size)
  algorithm = builds.algorithm(config)
  assert config.algorithm.name.endswith(
      ':' + OF_ANOTHER.get(name, name.partition('.')[2]))
  mesh = meshes.make(devices=jax.devices()[:1])
  learner = builds.learner(
      config, algorithm, tiny.CONFIG, mesh, builds.attend(config, 'xla', mesh))
  assert learner.minibatches == 1 or not algorithm.one_update
  rows = config.rollout.questions_per_step * config.rollout.group_size
  assert rows == {'laptop': 72, 'smoke': 16}[size]
  assert (config.rollout.group_size > 1) == (algorithm.min_group_size > 1)


def test_every_config_that_trains_is_tested():
  names = [f'configs.{path.stem}' for path in (ROOT / 'configs').glob('*.py')]
  modules = {name: importlib.import_module(name) for name in names}
  found = {name for name, module in modules.items()
           if hasattr(module, 'get_config') and name != 'configs.common'
           and module.get_config().job == 'searchrl.jobs.train:run'}
  assert found == RECIPES.keys() - {'docs.cispo'}


@pytest.mark.parametrize('change, message', [
    (dict(algorithm=dict(name='searchrl.rl.option_checks:clip', clip_low=0.1,
                         clip_high=0.1)), 'an Algorithm, but .* NoneType'),
    (dict(algorithm=dict(name='searchrl.rl.algorithms:rloo'),
          rollout=dict(group_size=1)),
     'group_size must be at least 2 for .*rloo'),
    (dict(algorithm=dict(name='searchrl.rl.algorithms:dr_grpo')),
     'algorithm.length must be given'),
    (dict(algorithm=dict(name='recipes_test:of_its_own',
                         mask_observations=False)),
     'algorithm.mask_observations must be True for an algorithm whose loss'),
    (dict(algorithm=dict(name='searchrl.rl.algorithms:dspo'),
          importance_correction=dict(method='mask')), "level must be 'sequence'"),
])
def test_a_config_that_does_not_fit_together_is_refused(change, message):
  config = importlib.import_module('configs.common').get_config('smoke')
  config.algorithm = change.pop('algorithm')
  config.update(change)
  with pytest.raises(ValueError, match=message):
    builds.algorithm(config)


def of_its_own():
  """A recipe that knows no observations."""
  return algorithms.Algorithm(
      algorithms.by_group(), lambda policy, batch, advs: ({}, {}))


def wrong_and_right(weights):
  """Two rows of a group whose tokens have these pi_old / pi_behavior."""
  weights = np.array(weights, np.float32)
  rows, zeros = np.ones(2, bool), np.zeros_like(weights)
  rewards, ids = np.array([0, 1], np.float32), np.zeros(2, np.int32)
  return Batch(
      tokens=zeros.astype(np.int32), loss_mask=weights > 0,
      behavior_logprobs=-np.log(weights), old_logprobs=zeros, rewards=rewards,
      outcome_rewards=rewards, question_ids=ids, group_ids=ids,
      in_baseline=rows, in_loss=rows, on_policy=rows)


@pytest.mark.parametrize('change, weights', [
    (dict(), [1, 1, 1, 1]),
    (dict(method='truncate'), [2, 1.5, 0.25, 1]),
    (dict(method='mask'), [0, 1.5, 0, 1]),
    (dict(method='mask', high=5.0), [4, 1.5, 0, 1]),
    (dict(method='mask', low=0.2), [0, 1.5, 0.25, 1]),
    # The products are 6, and 1/4.
    (dict(method='truncate', level='sequence'), [2, 2, 0.25, 0.25]),
])
def test_a_config_weights_the_mismatch_of_sampler_and_learner(change, weights):
  config = importlib.import_module('configs.grpo').get_config('smoke')
  config.importance_correction.update(change)
  algorithm = builds.algorithm(config)
  batch = wrong_and_right([[4, 1.5], [0.25, 1]])
  policy = algorithms.PolicyOutput(batch.old_logprobs, batch.old_logprobs)
  terms, _ = algorithm.loss(policy, batch, algorithm.advantages(batch))
  gains = np.repeat(oracles.group_relative([0, 1], [0, 0]), 2)
  np.testing.assert_allclose(
      algorithms.total(terms), -np.mean(gains * weights), rtol=1e-5, atol=1e-7)


def short(name):
  """A recipe's smoke size on small budgets, never evaluated."""
  config = importlib.import_module(name).get_config('smoke')
  config.evaluate.worlds.kinds = ()
  config.rollout.max_length = 320
  config.rollout.budgets.max_turns = 3
  config.train.update(
      num_steps=3, checkpoint_every=1 if name in RESUMED else 10,
      keep_checkpoints=10, progress=False, loggers=())
  return config


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """name, tokens -> the folder of its run, on one device; each runs once."""
  folders = {}

  def once(name, tokens='policy'):
    if (name, tokens) not in folders:
      folders[name, tokens] = tmp_path_factory.mktemp(name)
      config = short(name)
      config.algorithm.mask_observations = tokens == 'policy'
      train.run(config, str(folders[name, tokens]))
    return folders[name, tokens]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(meshes, 'make', functools.partial(
        meshes.make, devices=jax.devices()[:1]))
    yield once


def digests(folder, step):
  """A SHA-256 of every leaf of a checkpoint."""
  file = folder / 'checkpoints' / str(step) / 'integrity.json'
  return json.loads(file.read_text())['leaves']


def steps(folder):
  """The metrics of a run's steps."""
  return [line for line in metrics.read(folder / metrics.FILE)
          if 'critic/score/mean' in line]


@pytest.mark.slow
@pytest.mark.parametrize('name', RECIPES)
def test_the_smoke_size_trains(run, name):
  folder = run(name)
  lines = steps(folder)
  assert [line['training/global_step'] for line in lines] == [1, 2, 3]
  for line in lines:
    assert not [key for key, value in line.items() if not math.isfinite(value)]
  own, absent = RECIPES[name]
  updates = [line for line in lines if 'actor/pg_loss' in line]
  for line in lines:  # a step whose groups are all uniform trains on no row
    assert line in updates or line['actor/grad_norm'] == 0
  assert {*EVERYONE, *own} <= updates[-1].keys()
  assert not {*absent} & lines[-1].keys()
  before, after = digests(folder, 0), digests(folder, 3)
  assert before.keys() == after.keys()
  for leaf in before:  # scales too, and moments, and a critic's
    assert before[leaf] != after[leaf], leaf
  assert any('critic' in leaf for leaf in before) == (name == 'configs.ppo')
  assert (folder / 'model' / 'model.safetensors').stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', ['configs.ppo', 'configs.grpo', 'configs.dspo'])
def test_training_on_observations_is_another_run(run, name):
  alone, folder = run(name), run(name, 'all')
  one, two = steps(alone), steps(folder)
  assert len(two) == 3 and all(map(math.isfinite, two[-1].values()))
  for metric in ('critic/score/mean', 'critic/advantages/max',
                 'actor/masked_token_frac', 'data/groups_trained'):
    assert one[0][metric] == two[0][metric]  # of the same trajectories
  assert one[-1]['actor/grad_norm'] != two[-1]['actor/grad_norm']
  before, after = digests(alone, 3), digests(folder, 3)
  assert before.keys() == after.keys()
  for leaf in before:
    if leaf.startswith('policy/params'):
      assert before[leaf] != after[leaf], leaf


@pytest.mark.slow
@pytest.mark.parametrize('name', RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    run, tmp_path, name):
  whole = run(name)
  shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
  for step in (2, 3):  # as if it was killed after step 1
    shutil.rmtree(tmp_path / 'checkpoints' / str(step))
  (tmp_path / 'summary.txt').unlink()
  shutil.rmtree(tmp_path / 'model')
  train.run(short(name), str(tmp_path))
  # With its timings: the first step was not repeated.
  assert steps(tmp_path)[0] == steps(whole)[0]
  assert steps(tmp_path)[1] != steps(whole)[1]
  assert checkpoint.steps(tmp_path / 'checkpoints')[-1] == 3
  assert digests(tmp_path, 3) == digests(whole, 3)
  one, two = ([{key: value for key, value in line.items()
                if not key.startswith(NEVER_ALIKE)} for line in steps(folder)]
              for folder in (tmp_path, whole))
  assert one == two
