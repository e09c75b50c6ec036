# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""configs/atlas.py: what each arm changes, and all phases of a small one."""

import importlib.util

import chats
import model_defaults_test
import pytest

from configs import atlas
from searchrl.jobs import phases
from searchrl.runtime import metrics
from searchrl.world import atlas_sources

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None
        for name in atlas_sources.PACKAGES),
    reason="needs pip install 'searchrl[atlas]'")
DIFFERENCES = {  # arm -> fields of its phase that are not those of grpo
    'grpo': {},
    'lora': {'model.lora.rank': 16, 'optimizer.learning_rate': 1e-4},
    'fee': {'reward': 'searchrl.agent.rewards:em_with_fee',
            'reward_options.fee': 0.05},
    'no_search': {'dialogue': 'searchrl.agent.chat:from_memory',
                  'rollout.budgets.max_turns': 1},
    'unmasked': {'algorithm.mask_observations': False},
    'format': {'reward': 'searchrl.agent.rewards:format_em'},
    'random': {'search.engine': 'noise'},
    'dense': {'search.engine': 'dense'}}


def flat(values, prefix=''):
  """Returns the fields of nested dicts by their dotted names."""
  if not isinstance(values, dict) or not values:
    return {prefix: values}
  return {name: value for key, part in values.items()
          for name, value in flat(part, f'{prefix}.{key}'.strip('.')).items()}


def differences(arm):
  """Returns the fields of an arm's phase that grpo lacks or has otherwise."""
  ours, theirs = (flat(atlas.get_config(f'arm={name}').phases[name].to_dict())
                  for name in (arm, 'grpo'))
  return {name: value for name, value in ours.items()
          if name not in theirs or theirs[name] != value}


@pytest.mark.parametrize('arm', sorted({*atlas.ARMS} - {'dspo'}))
def test_an_arm_changes_what_its_name_says_and_nothing_else(arm):
  assert differences(arm) == DIFFERENCES[arm]


def test_dspo_has_its_algorithm_and_the_conversations_and_data_of_grpo():
  changed = differences('dspo')
  assert changed['algorithm.name'] == 'searchrl.rl.algorithms:dspo'
  assert {name.partition('.')[0] for name in changed} <= {
      'algorithm', 'learner', 'optimizer', 'rollout'}, changed
  assert not any(name.startswith('rollout.budgets') for name in changed)


@pytest.mark.parametrize('arm', sorted(atlas.ARMS))
def test_arms_share_all_phases_but_their_own_and_the_report(arm):
  config, grpo = atlas.get_config(f'arm={arm}'), atlas.get_config()
  names = tuple(name if name != 'grpo' else arm for name in grpo.order)
  assert config.order == names
  assert config.phases.report.report.runs == (f'{{workdir}}/{arm}',)
  for name in {*names} - {arm, 'report'}:
    assert config.phases[name].to_json() == grpo.phases[name].to_json(), name


def small(model):
  """Returns the config with the least of everything."""
  config = atlas.get_config()
  config.model = model
  parts = config.phases
  parts.data.update(per_kind=20, cities=0, train_per_hop=20, test_per_hop=2)
  parts.demonstrations.demonstrations.count = 12
  parts.tune.batch.documents = 4
  parts.tune.optimizer.warmup_steps = 1
  parts.tune.train.tensorboard = parts.grpo.train.tensorboard = False
  parts.grpo.train.num_steps = 1
  parts.grpo.optimizer.warmup_steps = 0
  parts.grpo.rollout.update(
      questions_per_step=2, group_size=2, max_num_seqs=4)
  parts.methods.rollout.max_num_seqs = 4
  for name in ('demonstrations', 'grpo', 'methods'):  # a token per character
    parts[name].rollout.max_length = 1024
    parts[name].rollout.budgets.max_prompt_tokens = 512
  parts.tune.learner.pack_length = 2048
  return config


@pytest.mark.slow
@needs_packages
def test_a_small_atlas_runs_through_all_phases_and_only_once(tmp_path, capsys):
  model = model_defaults_test.make_model(tmp_path / 'base', chats.QWEN2)
  config, folder = small(model), tmp_path / 'atlas'
  phases.run(config, str(folder))
  for file in ('data/corpus.jsonl', 'demonstrations/demonstrations.jsonl',
               'tune/model/config.json', 'grpo/model/config.json',
               'methods/table.json', 'report/report.html'):
    assert (folder / file).is_file(), file
  assert any('train/step' in line or 'step' in line
             for line in metrics.read(folder / 'grpo' / metrics.FILE))
  written = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
  capsys.readouterr()
  phases.run(config, str(folder))
  assert capsys.readouterr().err.count('done before') == len(config.order)
  assert {path: path.stat().st_mtime_ns
          for path in folder.rglob('*')} == written
