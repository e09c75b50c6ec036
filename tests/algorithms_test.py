# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""algorithms: one contract for every recipe, and how a config names one."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import algorithms, masked
from searchrl.trajectory import Batch, Question

OURS = 'searchrl.rl.algorithms:'
RECIPES = {
    'grpo': {},
    'grpo_all_terms': dict(
        kl_coef=0.1, entropy_coef=0.01, aggregation='sequence_mean'),
    'gspo': {},
    'dspo': {},
    'dspo_all_terms': dict(kl_coef=0.1, kl_estimator='k2', entropy_coef=0.01),
}


@pytest.fixture(autouse=True)
def _no_silent_broadcasting():
  with jax.numpy_rank_promotion('raise'):
    yield


@pytest.fixture(params=RECIPES)
def algorithm(request):
  name, options = request.param, RECIPES[request.param]
  return algorithms.make(OURS + name.removesuffix('_all_terms'), **options)


def random_batch(seed=0, rewards=(0, 1, 0, 1, 0, 1), length=5):
  """Two questions, holes in every row, and one row that only fills.

  The first four rows are one group; nothing that is masked may be read.
  """
  rng = np.random.default_rng(seed)
  rows = len(rewards)
  mask = oracles.ragged_mask(rng, rows, length)
  mask[:, 1] = True
  mask[-1] = False
  in_loss = mask.any(-1)

  def noise():
    logprobs = -rng.exponential(size=mask.shape).astype(np.float32)
    return oracles.poison(rng, logprobs, mask)

  return jax.tree.map(jnp.asarray, Batch(
      tokens=np.zeros(mask.shape, np.int32),
      loss_mask=mask,
      behavior_logprobs=noise(),
      rewards=np.where(in_loss, rewards, np.nan).astype(np.float32),
      outcome_rewards=np.array(rewards, np.float32),
      question_ids=np.array([0, 0, 0, 0, 1, 1]),
      group_ids=np.array([0, 0, 0, 0, 1, 1]),
      in_baseline=in_loss,
      in_loss=in_loss,
      on_policy=in_loss,
      old_logprobs=noise(),
      ref_logprobs=noise(),
  ))


def policy_of(batch, logprobs):
  return algorithms.PolicyOutput(logprobs, entropy=-batch.behavior_logprobs)


def loss_of(algorithm, batch, logprobs, advs=None, counts=None):
  if advs is None:
    advs = algorithm.advantages(batch)
  terms, _ = algorithm.loss(policy_of(batch, logprobs), batch, advs)
  return algorithms.total(terms, counts)


def nudged(batch, seed=5, scale=0.3):
  """The old policy's log-probs, some way off."""
  noise = np.random.default_rng(seed).normal(size=batch.loss_mask.shape)
  return batch.old_logprobs + scale * jnp.asarray(noise, jnp.float32)


# The contract.


def test_trains_sampled_tokens_only_and_in_the_right_direction(algorithm):
  batch = random_batch()
  batch = dataclasses.replace(batch, ref_logprobs=batch.old_logprobs)
  gradient = jax.jit(jax.grad(lambda x: loss_of(algorithm, batch, x)))(
      batch.old_logprobs)
  np.testing.assert_array_equal(gradient[~batch.loss_mask], 0)
  push = -jnp.where(batch.loss_mask, gradient, 0).sum(-1)
  # Rewards 0, 1, 0, 1; then a group of one, and a row that only fills.
  np.testing.assert_array_equal(jnp.sign(push), [-1, 1, -1, 1, 0, 0])


def test_masked_positions_may_hold_anything(algorithm):
  batch = random_batch()
  logprobs = nudged(batch)
  clean = jax.tree.map(
      lambda x: jnp.where(batch.loss_mask, x, 0)
      if x.shape == batch.loss_mask.shape else x, batch)
  run = jax.jit(jax.value_and_grad(
      lambda x, batch: loss_of(algorithm, batch, x)))
  value, gradient = run(logprobs, batch)
  expected, expected_gradient = run(
      jnp.where(batch.loss_mask, logprobs, 0), clean)
  assert np.isfinite(value) and value == expected
  np.testing.assert_array_equal(gradient, expected_gradient)


def test_any_split_gives_the_same_loss_gradient_and_metrics(algorithm):
  batch = random_batch()
  logprobs = nudged(batch)
  advs = algorithm.advantages(batch)
  terms, _ = algorithm.loss(policy_of(batch, logprobs), batch, advs)
  counts = {name: mean.count for name, (_, mean) in terms.items()}

  @jax.jit
  def run(logprobs, batch, advs):
    def objective(logprobs):
      policy = policy_of(batch, logprobs)
      terms, metrics = algorithm.loss(policy, batch, advs)
      return algorithms.total(terms, counts), metrics
    return jax.value_and_grad(objective, has_aux=True)(logprobs)

  inputs = logprobs, batch, advs
  (loss, metrics), gradient = run(*inputs)
  for edges in ([0, 3, 6], range(7)):
    parts = [jax.tree.map(lambda x: x[start:stop], inputs)
             for start, stop in zip(edges, edges[1:])]
    outs, gradients = zip(*(run(*part) for part in parts))
    added, added_metrics = jax.tree.map(lambda *xs: sum(xs), *outs)
    np.testing.assert_allclose(added, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.concatenate(gradients), gradient, rtol=1e-5, atol=1e-6)
    for name, mean in metrics.items():
      assert added_metrics[name].count == mean.count
      np.testing.assert_allclose(
          added_metrics[name].total, mean.total, rtol=1e-5, atol=1e-5)


def test_counts_depend_on_masks_alone(algorithm):
  batch = random_batch()
  one, two = (
      algorithm.loss(policy_of(batch, logprobs), batch, jnp.zeros(6))
      for logprobs in (nudged(batch), jnp.full(batch.tokens.shape, jnp.nan)))
  for name, (_, mean) in one[0].items():
    assert mean.count == two[0][name][1].count > 0
  for name, mean in one[1].items():
    assert mean.count == two[1][name].count > 0


@pytest.mark.parametrize('case', ['constant', 'all_empty', 'no_baseline'])
def test_degenerate_batches_are_finite_and_teach_nothing(algorithm, case):
  batch = random_batch(rewards=[0.1] * 6)
  nothing = jnp.zeros(6, bool)
  if case == 'all_empty':
    batch = dataclasses.replace(
        batch, loss_mask=jnp.zeros_like(batch.loss_mask), in_loss=nothing)
  if case == 'no_baseline':
    batch = dataclasses.replace(batch, in_baseline=nothing)
  logprobs = nudged(batch)
  advs = algorithm.advantages(batch)
  np.testing.assert_array_equal(advs, 0)
  terms, metrics = algorithm.loss(policy_of(batch, logprobs), batch, advs)
  assert terms['policy'][1].value == 0
  for mean in [*metrics.values(), algorithms.total(terms)]:
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(mean))
  gradient = jax.grad(lambda x: loss_of(algorithm, batch, x))(logprobs)
  assert np.isfinite(gradient).all()
  if 'kl' not in terms or case == 'all_empty':
    np.testing.assert_array_equal(gradient, 0)


# What each recipe is made of.


@pytest.mark.parametrize('name', RECIPES)
def test_agrees_with_loops(name):
  options = RECIPES[name]
  token = name.startswith('grpo')
  algorithm = algorithms.make(
      OURS + name.removesuffix('_all_terms'), **options)
  batch = random_batch()
  logprobs = nudged(batch, scale=0.3 if token else 1e-3)
  terms, metrics = jax.jit(algorithm.loss)(
      policy_of(batch, logprobs), batch, algorithm.advantages(batch))

  mask, old = np.array(batch.loss_mask), batch.old_logprobs
  advs = oracles.group_relative(
      batch.rewards, batch.group_ids, batch.in_baseline)
  if token:
    how = options.get('aggregation', 'token_mean')
    expected = oracles.aggregate(
        oracles.token_ratio_loss(logprobs, old, advs, mask, 0.2, 0.2),
        mask, how)
  else:
    how = 'sequence_mean'
    per_row = oracles.sequence_ratio_loss(
        logprobs, old, advs, mask, 3e-4, 4e-4)
    expected = per_row.sum(), mask.any(-1).sum()
  kl = oracles.kl(
      logprobs, batch.ref_logprobs, mask, options.get('kl_estimator', 'k3'))
  values = {
      'policy': (1.0, expected),
      'kl': (0.1, oracles.aggregate(kl, mask, how)),
      'entropy': (
          -0.01, oracles.aggregate(-batch.behavior_logprobs, mask, how)),
  }
  assert set(terms) == (set(values) if options else {'policy'})
  for term, (coefficient, mean) in terms.items():
    assert coefficient == values[term][0]
    total, count = values[term][1]
    assert mean.count == count
    np.testing.assert_allclose(mean.total, total, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
      algorithms.total(terms),
      sum(values[term][0] * values[term][1][0] / values[term][1][1]
          for term in terms), rtol=1e-5, atol=1e-6)
  assert ('actor/kl_loss' in metrics) == ('kl' in terms)
  assert {'actor/pg_loss', 'actor/pg_clipfrac', 'actor/clipfrac_low',
          'actor/clipfrac_high', 'actor/ppo_kl', 'actor/entropy'
         } <= set(metrics)


def test_two_rows_by_hand():
  # A = -+ 1 / sqrt 2 (nearly). Row 0 falls to 1/2: clipped at 0.8. Row 1 falls
  # too, against its advantage, so that its loss stays -A / 2.
  half = jnp.log(jnp.full((2, 1), 0.5))
  yes = jnp.ones(2, bool)
  batch = Batch(
      tokens=jnp.zeros((2, 1), jnp.int32), loss_mask=yes[:, None],
      behavior_logprobs=jnp.zeros((2, 1)), rewards=jnp.array([0.0, 1.0]),
      outcome_rewards=jnp.array([0.0, 1.0]), question_ids=jnp.zeros(2, int),
      group_ids=jnp.zeros(2, int), in_baseline=yes, in_loss=yes, on_policy=yes,
      old_logprobs=jnp.zeros((2, 1)))
  algorithm = algorithms.grpo()
  terms, metrics = algorithm.loss(
      algorithms.PolicyOutput(half, -half), batch, algorithm.advantages(batch))
  expected = 0.5**0.5 * (0.8 - 0.5) / 2
  np.testing.assert_allclose(algorithms.total(terms), expected, rtol=1e-5)
  assert metrics['actor/clipfrac_low'].value == 0.5
  assert metrics['actor/clipfrac_high'].value == 0
  np.testing.assert_allclose(metrics['actor/ppo_kl'].value, np.log(2))


def test_only_the_terms_in_use_ask_for_anything():
  batch = dataclasses.replace(random_batch(), ref_logprobs=None)
  plain, with_kl = algorithms.grpo(), algorithms.grpo(kl_coef=0.1)
  assert plain.needs == frozenset() and with_kl.needs == {'ref_logprobs'}
  assert np.isfinite(loss_of(plain, batch, batch.old_logprobs))
  with pytest.raises(ValueError, match='batch.ref_logprobs must be scored'):
    loss_of(with_kl, batch, batch.old_logprobs)
  with pytest.raises(ValueError, match='batch.old_logprobs must be scored'):
    loss_of(plain, dataclasses.replace(batch, old_logprobs=None),
            batch.behavior_logprobs)


def test_rows_of_an_earlier_policy_keep_their_behavior_logprobs():
  batch = random_batch()
  on_policy = jnp.array([True, False, True, False, True, False])
  batch = dataclasses.replace(batch, on_policy=on_policy)
  old = algorithms.denominator_logprobs(batch)
  for row in range(6):
    source = batch.old_logprobs if on_policy[row] else batch.behavior_logprobs
    np.testing.assert_array_equal(old[row], source[row])


def test_rows_out_of_the_loss_are_not_trained_on(algorithm):
  batch = random_batch()
  out = jnp.array([True, False, True, True, True, False])
  one = dataclasses.replace(batch, in_loss=out)
  two = dataclasses.replace(batch, loss_mask=batch.loss_mask & out[:, None])
  assert (loss_of(algorithm, one, batch.old_logprobs)
          == loss_of(algorithm, two, batch.old_logprobs))


def test_keep_mixed_agrees_with_loops():
  rng = np.random.default_rng(0)
  for _ in range(20):
    ids = rng.integers(-3, 1000, 4)[rng.integers(4, size=12)]
    rewards = rng.choice([0.0, 0.1, 1.0, np.nan], 12, p=[0.6, 0.1, 0.2, 0.1])
    got = algorithms.keep_mixed(rewards, ids)
    assert isinstance(got, np.ndarray) and got.dtype == bool
    np.testing.assert_array_equal(got, oracles.keep_mixed(rewards, ids))


def test_keep_by_hand():
  ids = np.array([7, 7, 9, 9, 7, 2])
  rewards = np.array([0, 1, 0.1, 0.1, np.nan, 1], np.float32)
  np.testing.assert_array_equal(
      algorithms.dspo().keep(rewards, ids), [1, 1, 0, 0, 1, 0])
  for recipe in (algorithms.grpo, algorithms.gspo):
    assert recipe().keep(rewards, ids).all()


def test_facts_of_the_recipes(algorithm):
  question = Question('q7', 'Who?', ('She',), hops=2)
  assert algorithm.group_of(question) == 'q7'
  assert algorithm.min_group_size == 2


def test_total_of_a_term_without_tokens_is_zero():
  nothing = masked.Mean(jnp.zeros(()), jnp.zeros(()))
  three = masked.Mean(jnp.array(6.0), jnp.array(2.0))
  terms = {'policy': (1.0, three), 'kl': (0.5, nothing)}
  assert algorithms.total(terms) == 3
  assert algorithms.total(terms, {'policy': 12.0, 'kl': 0.0}) == 0.5


# How a config names one.


@pytest.mark.parametrize('name, options, message', [
    ('dspo', {}, r"module:function, but is 'dspo'.*algorithms:dspo"),
    ('searchrl.rl.algorithms:', {}, 'must read module:function'),
    ('searchrl.rl.nowhere:dspo', {}, 'there is no searchrl.rl.nowhere'),
    ('no_such_lab.cispo:cispo', {}, 'there is no no_such_lab'),
    (OURS + 'dsop', {}, "no function 'dsop'; did you mean dspo?"),
    (OURS + 'dspo', dict(clip_lo=0.1),
     "among clip_low, clip_high, .*'clip_lo' was given"),
    (OURS + 'gspo', dict(aggregation='token_mean'), "'aggregation' was given"),
    (OURS + 'keep_all', dict(outcome_rewards=[], question_ids=[]),
     'returns an Algorithm, but .* returned ndarray'),
    (OURS + 'grpo', dict(aggregation='mean'), 'aggregation must be one of'),
    (OURS + 'grpo', dict(kl_estimator='k9'), 'kl_estimator must be one of'),
    (OURS + 'gspo', dict(clip_low=1.5), r'clip_low must lie in \[0, 1\)'),
])
def test_refuses_a_bad_name_or_option(name, options, message):
  with pytest.raises(ValueError, match=message):
    algorithms.make(name, **options)


def test_a_recipe_of_your_own_needs_no_registration(monkeypatch):
  module = types.ModuleType('my_lab')
  module.mine = lambda **options: algorithms.grpo(**options)
  monkeypatch.setitem(sys.modules, 'my_lab', module)
  algorithm = algorithms.make('my_lab:mine', kl_coef=0.1)
  assert algorithm.needs == {'ref_logprobs'}


def test_a_broken_import_inside_a_module_is_not_hidden(tmp_path, monkeypatch):
  (tmp_path / 'broken_lab.py').write_text('import not_installed_anywhere\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='not_installed_anywhere'):
    algorithms.make('broken_lab:mine')
