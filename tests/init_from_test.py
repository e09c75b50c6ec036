# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""init_from: which run can be started from, and what is taken along."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import experiment_policy_test
from configs import common
from configs import ppo
from searchrl.experiment import build
from searchrl.experiment import init_from
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.models import weights
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes

DEVICES = 8


def started(config, folder):
  """Returns what `init_from.start` gives a run."""
  mesh = meshes.make(**config.mesh)
  sampler, base = policy.build(config, mesh, limit=8)
  folder.mkdir(exist_ok=True)
  return init_from.start(config, folder, sampler, base, mesh), sampler


def config_of(run, **model):
  config = common.get_config()
  config.train.init_from = str(run)
  config.model.update(model)
  return config


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def adapters(tmp_path):
  """A run of adapters whose newest step is 3."""
  (tmp_path / 'first').mkdir()
  return experiment_policy_test.run_of_adapters(tmp_path / 'first')


@pytest.mark.slow
def test_merged_adapters_are_the_base_also_when_the_run_is_gone(
    adapters, tmp_path):
  run, merged = adapters
  config = config_of(f'{run}@3')
  init_from.check(config, tmp_path / 'new')
  (params, fresh), _ = started(config, tmp_path / 'new')
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
               params, merged)
  assert fresh({'policy': 'state'}) == {'policy': 'state'}
  shutil.rmtree(run)
  init_from.check(config, tmp_path / 'new')  # it has started
  same(started(config, tmp_path / 'new')[0][0], params)


def test_adapters_of_a_run_that_began_as_another_merge_with_that(
    adapters, tmp_path):
  """`ask` and an evaluation of a chain of runs read it so."""
  run, merged = adapters
  shape = weights.read_config(str(policy.TINY_BASE))
  weights.save(run / past_runs.INIT, merged, shape,
               tokenizer_from=str(policy.TINY_BASE), eos_id=0)
  base = weights.load(str(policy.TINY_BASE), shape)
  twice = policy.trained(run, base, shape)
  name = 'q'
  once = merged['layers'][name]['kernel'] - base['layers'][name]['kernel']
  np.testing.assert_allclose(
      twice['layers'][name]['kernel'] - merged['layers'][name]['kernel'], once,
      atol=1e-6)


def full_run(folder, params, **state):
  """Writes the files of a run without adapters, at step 5."""
  folder.mkdir()
  (folder / 'config.json').write_text(common.get_config().to_json())
  checkpoint.save(folder / 'checkpoints', 5,
                  {'policy': {'params': params}} | state, {})
  return folder


@pytest.mark.slow
def test_a_trained_policy_keeps_its_bits_and_the_critic_comes_along(tmp_path):
  config = config_of(tmp_path / 'first', dtype='bfloat16')
  config.algorithm = ppo.get_config().algorithm
  mesh = meshes.make(**config.mesh)
  sampler, base = policy.build(config, mesh, limit=8)
  learner = build.learner(
      config, build.algorithm(config), sampler.shape, mesh,
      build.attend(config, 'xla', mesh))
  state = learner.init(base)
  moved = jax.tree.map(lambda x: x + jnp.float32(1e-4), {
      network: trained.params for network, trained in state.items()})
  full_run(tmp_path / 'first', moved['policy'],
           critic={'params': moved['critic']})
  params, fresh = init_from.start(
      config, tmp_path / 'new', sampler, base, mesh)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
  begun = fresh(learner.init(params))
  same(begun['policy'].params, moved['policy'])
  same(begun['critic'].params, moved['critic'])
  assert int(begun['policy'].updates) == 0
  shutil.rmtree(tmp_path / 'first')
  with pytest.raises(FileNotFoundError, match='train.init_from must be the f'):
    fresh(learner.init(params))  # killed before its first checkpoint


@pytest.mark.parametrize('run, message', [
    ('gone', 'train.init_from must be the folder of a run with checkpoints'),
    ('first@4', 'has kept, one of 3, but is at 4'),
    ('new', 'train.init_from must be another run'),
])
def test_what_is_no_other_run_is_refused(adapters, tmp_path, run, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    init_from.check(config_of(tmp_path / run), tmp_path / 'new')


def test_another_model_is_refused(adapters, tmp_path):
  run, _ = adapters
  config = config_of(run, path=str(policy.TINY_BASE))
  with pytest.raises(ValueError, match="model.path must .* Set it to ''"):
    init_from.check(config, tmp_path / 'new')  # adapters of the same shape
