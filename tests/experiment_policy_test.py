# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""experiment/policy: the policy of a run, its slots and its engine."""

import json
import shutil
import types

import jax
import numpy as np
import pytest

from configs import ask as ask_config
from configs import common
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.models import lora as loras
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rollouts import driver
from searchrl.rollouts import collect
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes

DEVICES = 8


def run_of_adapters(folder):
  """Writes the files of a run of adapters, and returns its policy."""
  base = common.get_config()
  base.model.lora.rank = 4
  base.search.engine = 'dense'
  (folder / 'config.json').write_text(base.to_json())
  shape = weights.read_config(str(policy.TINY_BASE))
  lora = loras.Lora(**base.model.lora)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
      lambda x: jax.numpy.asarray(0.05 * rng.normal(size=x.shape), x.dtype),
      loras.init(lora, shape, jax.random.key(0)))
  checkpoint.save(
      folder / 'checkpoints', 3, {'policy': {'params': adapters}}, {})
  merged = loras.merge(
      weights.load(str(policy.TINY_BASE), shape), adapters, lora)
  return folder, merged


def config_of(**fields):
  config = ask_config.get_config()
  config.ask.update(fields)
  config.search.engine = 'bm25'
  return config


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return run_of_adapters(tmp_path_factory.mktemp('run'))


def test_a_newest_step_that_cannot_be_read_is_passed_over(
    tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(past_runs.processes, 'say', said.append)
  run, _ = run_of_adapters(tmp_path)
  shutil.copytree(run / 'checkpoints' / '3', run / 'checkpoints' / '4')
  assert past_runs.kept_step(run, None, 'evaluate.run') == 3
  assert len(said) == 1 and said[0].startswith('Warning: ')
  assert past_runs.kept_step(run, 4, 'evaluate.run') == 4  # as it was asked for


@pytest.mark.parametrize('step', ['nix', '', '-1'])
def test_a_step_that_is_none_is_named(run, step):
  folder, number = past_runs.parse_run(f'{run[0]}@{step}')
  with pytest.raises(FileNotFoundError) as caught:
    past_runs.kept_step(folder, number, 'evaluate.run')
  assert f'{step!r} is no step: write {run[0]}@STEP, ' in str(caught.value)


def test_a_run_is_named_by_its_folder_a_step_or_its_best(tmp_path):
  (tmp_path / 'config.json').write_text('{"seed": 0}')
  name = str(tmp_path)
  assert past_runs.parse_run(name) == (tmp_path, None)
  assert past_runs.parse_run(f'{name}@3') == (tmp_path, 3)
  with pytest.raises(FileNotFoundError, match='the part before @best must be'):
    past_runs.parse_run(f'{name}@best')
  for step, best in ((3, None), (6, (2, 0.5))):
    checkpoint.save(tmp_path / 'checkpoints', step, {'x': jax.numpy.ones(1)},
                    collect.Progress(step=step, best=best).to_json())
    if not best:
      with pytest.raises(ValueError, match='@best needs a run that was valid'):
        past_runs.parse_run(f'{name}@best')
  assert past_runs.parse_run(f'{name}@best') == (tmp_path, 2)
  collapse = f'{name}@before_collapse'
  assert past_runs.parse_run(collapse) == (tmp_path, None)  # no collapse
  checkpoint.save(tmp_path / 'checkpoints', 9, {'x': jax.numpy.ones(1)},
                  collect.Progress(step=9, before_collapse=6).to_json())
  assert past_runs.parse_run(collapse) == (tmp_path, 6)


def test_the_policy_is_that_of_the_runs_checkpoint(run):
  folder, expected = run
  sampler, params = policy.of_run(config_of(), str(folder), limit=3)
  assert sampler.engine.slots == 8  # of as many devices
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
               params, expected)


def test_adapters_are_not_merged_with_other_weights(run, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(run[0], folder)
  noted = folder / f'{policy.BASE}.json'
  noted.write_text(json.dumps(policy.base_of('')))
  policy.of_run(config_of(), str(folder), limit=3)
  noted.write_text(json.dumps({'digest': 'of others'}))
  with pytest.raises(ValueError, match='model.path of .*run must have the '
                     'weights whose adapters the run trained, but .* has '
                     'others by now'):
    policy.of_run(config_of(), str(folder), limit=3)


def test_weights_that_a_checkpoint_replaces_are_not_read(
    tmp_path, monkeypatch):
  shape = weights.read_config(str(policy.TINY_BASE))
  trained = transformer.init(shape, jax.random.key(1))
  (tmp_path / 'config.json').write_text(common.get_config().to_json())
  checkpoint.save(
      tmp_path / 'checkpoints', 3, {'policy': {'params': trained}}, {})
  monkeypatch.setattr(policy.weights, 'load', lambda *_, **__: pytest.fail(
      'the base model was read'))
  config = config_of()
  _, params = policy.of_run(config, str(tmp_path), limit=3)
  jax.tree.map(np.testing.assert_array_equal, params, trained)
  axes = transformer.logical_axes(shape)
  assert jax.tree.map(lambda x: x.sharding, params) == meshes.shardings(
      meshes.make(**config.mesh), axes)


@pytest.mark.parametrize('most, tensor, slots', [
    (1, 1, 8), (8, 1, 8), (9, 1, 16), (1, 2, 4), (500, 1, 72), (None, 1, 72)])
def test_slots_are_as_many_as_samples_and_devices_take(most, tensor, slots):
  config = config_of()
  config.rollout.update(tensor=tensor, max_length=192)
  sampler, _ = policy.build(config, meshes.make(**config.mesh), limit=most)
  assert sampler.engine.slots == slots
  assert config.rollout.max_num_seqs == 72  # the config itself stays


@pytest.mark.parametrize('inner, search_order', [
    ('remote', 'arrival'), ('bm25', 'deterministic')])
def test_searches_over_a_network_enter_as_they_arrive(inner, search_order):
  config = config_of()  # on a CPU, and with a corpus to load
  config.search = dict(engine='fusion', options=dict(
      engines=(dict(name='bm25'), dict(name=inner))))
  config.rollout.update(max_length=192)
  sampler, _ = policy.build(config, meshes.make(**config.mesh), limit=1)
  assert sampler.schedule.search_order == search_order


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_accelerators_decode_while_the_host_reads(platform):
  mesh = types.SimpleNamespace(size=1, shape={}, devices=np.array([
      types.SimpleNamespace(platform=platform, process_index=0)]))
  schedule = policy.schedule(mesh, config_of().rollout)
  assert schedule.async_decode == (platform != 'cpu')


OPTIONS = dict(
    dialogue='searchrl.agent.dialogue:laptop', seed=0, slots=2, length=64,
    budgets=driver.Budgets(max_new_tokens=8, max_prompt_tokens=40))


def test_a_second_model_is_for_one_process(monkeypatch):
  alone = meshes.make(devices=jax.devices()[:1])
  sampler, params = policy.second(
      str(policy.TINY_BASE), field='judge.model', mesh=alone, **OPTIONS)
  assert sampler.engine.slots == 2
  assert {leaf.sharding.mesh for leaf in jax.tree.leaves(params)} == {alone}
  monkeypatch.setattr(policy.processes, 'count', lambda: 2)
  with pytest.raises(ValueError, match='judge.model can .* a run of one '
                     'process, but this run has 2. Serve .m. with configs/s'
                     'erve_model.py on other machines, and give its URL'):
    policy.second('m', field='judge.model', mesh=meshes.make(), **OPTIONS)


def test_a_run_is_judged_through_its_own_engine(tmp_path):
  assert past_runs.search_of_run('') == ('bm25', {})
  assert past_runs.search_of_run(str(tmp_path)) == ('bm25', {})
  (tmp_path / 'config.json').write_text(json.dumps({
      'search': {'engine': 'dense', 'options': {'encoder': 'tiny_e5'}}}))
  assert past_runs.search_of_run(str(tmp_path)) == (
      'dense', {'encoder': 'tiny_e5'})


def test_processes_with_other_weights_are_refused(tmp_path, monkeypatch):
  (tmp_path / 'model.safetensors').write_bytes(b'stale')
  other = json.dumps({'model.safetensors': 'fresh'}).encode()
  monkeypatch.setattr(policy.processes, 'count', lambda: 2)
  monkeypatch.setattr(policy.processes, 'exchange',
                      lambda tag, data: [data, other])
  with pytest.raises(ValueError, match='model must be alike on all processes'):
    policy.check_alike(str(tmp_path))
