# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Optimisers of a run's policy and critic, and their learning rates."""

from typing import Any

import optax

from searchrl.training import learner as learners
from searchrl.training import optimizer as optimizers_lib


def _updates(config: Any, has_critic: bool) -> dict[str, int]:
  """Returns the updates of the whole run, as {'policy': n, 'critic': n}.

  The policy's updates begin after `critic.warmup_updates` of the critic.
  """
  total = config.train.num_steps * config.learner.minibatches
  warmup = config.critic.warmup_updates if has_critic else 0
  return {'policy': max(total - warmup, 1), 'critic': total}


def optimizers(config: Any, has_critic: bool
              ) -> dict[str, optax.GradientTransformation]:
  """Returns the optimisers of a run, as a dict with 'policy' and 'critic'."""
  options = {'policy': config.optimizer, 'critic': config.critic.optimizer}
  return {name: optimizers_lib.for_run(options[name], updates)
          for name, updates in _updates(config, has_critic).items()}


def learning_rates(config: Any, learner: learners.Learner, state: Any,
                   rollbacks: int) -> dict[str, float]:
  """Returns the learning rates of the last updates; 0 before the first.

  They are 'actor/lr' and, with a critic, 'critic/lr'. Each of the run's
  rollbacks has multiplied them by `guards.rollback_rate`.
  """
  done = learner.updates(state)
  total = _updates(config, has_critic='critic' in done)

  def last(name: str, options: Any) -> float:
    if not done[name]:
      return 0.0
    schedule = optimizers_lib.schedule_for_run(options, total[name])
    return config.guards.rollback_rate ** rollbacks * schedule(done[name] - 1)

  rates = {'actor/lr': last('policy', config.optimizer)}
  if 'critic' in done:
    rates['critic/lr'] = last('critic', config.critic.optimizer)
  return rates
