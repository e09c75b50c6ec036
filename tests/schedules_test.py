# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""schedules: the rates of policy and critic end with the run."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from configs import ppo
from searchrl.experiment import schedules

STEPS, MINIBATCHES, WARMUP, PEAK = 5, 2, 3, 0.1


@pytest.fixture(name='config')
def _config():
  config = ppo.get_config('smoke')
  config.train.num_steps, config.learner.minibatches = STEPS, MINIBATCHES
  config.critic.warmup_updates = WARMUP
  for options in (config.optimizer, config.critic.optimizer):
    options.update(learning_rate=PEAK, warmup_steps=0)
    with options.unlocked():
      options.update(schedule='linear', final_fraction=0.0)
  return config


def by_hand(updates):
  """Rates that fall along a line from the peak to 0 after the last update."""
  return PEAK * (1 - np.arange(updates) / updates)


@pytest.mark.parametrize('has_critic', [False, True])
def test_an_optimiser_of_a_run_decays_until_its_last_update(config, has_critic):
  made = schedules.optimizers(config, has_critic)
  total = STEPS * MINIBATCHES
  for name, updates in (('policy', total - WARMUP * has_critic),
                        ('critic', total)):
    params = {'w': jnp.ones(3)}
    state, sizes = made[name].init(params), []
    for _ in range(updates):  # a constant gradient: Adam's step is the rate
      update, state = made[name].update({'w': jnp.full(3, 0.1)}, state, params)
      sizes.append(-float(update['w'][0]))
    np.testing.assert_allclose(sizes, by_hand(updates), rtol=1e-4)


def test_the_rates_that_are_shown_are_those_of_the_last_update(config):
  def shown(done, rollbacks=0):
    learner = types.SimpleNamespace(updates=lambda state: state)
    return schedules.learning_rates(config, learner, done, rollbacks)

  policy, critic = by_hand(STEPS * MINIBATCHES - WARMUP), by_hand(
      STEPS * MINIBATCHES)
  assert shown({'policy': 0}) == {'actor/lr': 0}
  assert shown({'policy': 0, 'critic': 2}) == {
      'actor/lr': 0, 'critic/lr': pytest.approx(critic[1])}
  assert shown({'policy': 7, 'critic': 10}) == {
      'actor/lr': pytest.approx(policy[6]),
      'critic/lr': pytest.approx(critic[9])}
  assert shown({'policy': 10}, rollbacks=2) == {'actor/lr': pytest.approx(
      critic[9] * config.guards.rollback_rate ** 2)}
