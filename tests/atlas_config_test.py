# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""configs/atlas.py: what each arm changes."""

import pytest

from configs import atlas

DIFFERENCES = {  # arm -> fields of its phase that are not those of grpo
    'grpo': {},
    'lora': {'model.lora.rank': 16, 'optimizer.learning_rate': 1e-4},
    'fee': {'reward': 'searchrl.agent.rewards:em_with_fee',
            'reward_options.fee': 0.05},
    'no_search': {'dialogue': 'searchrl.agent.chat:from_memory',
                  'rollout.budgets.max_turns': 1},
    'unmasked': {'algorithm.mask_observations': False},
    'format': {'reward': 'searchrl.agent.rewards:format_em'},
    'random': {'search.engine': 'noise', 'search.options': {}},
    'dense': {'search.engine': 'dense', 'search.options': {}}}


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
