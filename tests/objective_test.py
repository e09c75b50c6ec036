# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""objective: a Regularizer, and the options that it gives to a recipe."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl.rl import algorithms
from searchrl.rl import objective
from searchrl.trajectory import Batch

RECIPES = ('ppo', 'grpo', 'gspo', 'dspo', 'gmpo', 'rloo', 'reinforce',
           'reinforce_plus_plus', 'hrpo', 'mt_grpo', 'gigpo')


@objective.regularized(kl_coef=0.1, aggregation='sequence_sum')
def recipe(regularizer, *, clip_high: float = 0.2):
  """A recipe."""
  return regularizer, clip_high


def test_a_recipe_takes_the_named_fields_as_options():
  assert recipe() == (objective.Regularizer(
      kl_coef=0.1, aggregation='sequence_sum'), 0.2)
  assert recipe(clip_high=0.3, kl_coef=0.0) == (
      objective.Regularizer(aggregation='sequence_sum'), 0.3)


def test_a_signature_lists_all_options():
  parameters = inspect.signature(recipe).parameters
  assert {name: p.default for name, p in parameters.items()} == dict(
      clip_high=0.2, kl_coef=0.1, aggregation='sequence_sum')
  assert recipe.__doc__ == 'A recipe.' and recipe.__name__ == 'recipe'


@pytest.mark.parametrize('name', RECIPES)
def test_no_recipe_shows_its_regularizer(name):
  parameters = inspect.signature(getattr(algorithms, name)).parameters
  assert {'kl_coef', 'entropy_coef', 'aggregation'} <= set(parameters)
  assert 'regularizer' not in parameters
  assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty
             for p in parameters.values())


@pytest.mark.parametrize('option', ['clip_lo', 'entropy_coef', 'regularizer'])
def test_an_unknown_option_is_named(option):
  with pytest.raises(TypeError, match=f'recipe.* {option!r}'):
    recipe(**{option: 0.1})


@pytest.mark.parametrize('fields, message', [
    (dict(kl_coef=-0.1), 'kl_coef must be 0 or more'),
    (dict(entropy_coef=-0.1), 'entropy_coef must be 0 or more'),
    (dict(kl_estimator='k9'), 'kl_estimator must be one of'),
    (dict(aggregation='mean'), 'aggregation must be one of'),
    (dict(aggregation='sequence_sum_norm'), 'length must be given'),
    (dict(length=-3), 'length must be a number of tokens, but is -3'),
    (dict(length=0), 'length must be a number of tokens, but is 0'),
])
def test_a_regularizer_out_of_range_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    objective.Regularizer(**fields)


def test_without_kl_changes_nothing_else():
  regularizer = objective.Regularizer(0.1, 'k1', 0.2, 'sequence_sum_norm', 7)
  assert dataclasses.astuple(regularizer.without_kl()) == (
      0.0, 'k1', 0.2, 'sequence_sum_norm', 7)


def test_an_objective_has_the_terms_of_its_regularizer():
  # Two tokens of one row: log pi = -1, -2; the reference is 1 nat above both.
  mask, row = np.ones((1, 2), bool), np.ones(1)
  logprobs = np.array([[-1, -2]], np.float32)
  batch = Batch(
      tokens=np.zeros((1, 2), np.int32), loss_mask=mask, rewards=row,
      behavior_logprobs=logprobs, outcome_rewards=row, question_ids=row,
      group_ids=row, in_baseline=row == 1, in_loss=row == 1,
      on_policy=row == 1, old_logprobs=logprobs, ref_logprobs=logprobs + 1)
  policy = algorithms.PolicyOutput(
      jnp.asarray(logprobs), entropy=np.array([[3, 5]], np.float32))

  def terms(**fields):
    regularizer = objective.Regularizer(**fields)
    loss = objective.objective(
        objective.score_function(regularizer), regularizer)
    return {name: (coefficient, float(mean.value)) for name, (
        coefficient, mean) in loss(policy, batch, row)[0].items()}

  assert terms() == {'policy': (1, 1.5)}
  assert terms(kl_coef=0.1, kl_estimator='k1', entropy_coef=0.2,
               aggregation='sequence_sum') == {
                   'policy': (1, 3), 'kl': (0.1, -2), 'entropy': (-0.2, 8)}


def test_a_recipe_may_pass_options_on():
  @objective.regularized(kl_coef=0.1)
  def passes(regularizer, **options):
    return regularizer.kl_coef, options

  assert passes(kl_coef=0.2, clip_high=0.3) == (0.2, {'clip_high': 0.3})
  assert [*inspect.signature(passes).parameters] == ['kl_coef', 'options']
