# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""algorithms: one contract for every recipe, and the terms of each.

Tokens that are not trained on are poisoned with NaN and infinities.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from docs import cispo
from searchrl.rl import algorithms
from searchrl.rl import masked
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners
from searchrl.trajectory import Batch, Question

pytestmark = pytest.mark.usefixtures('no_silent_broadcasting')
DEVICES = 8

KL = dict(kl_coef=0.1, kl_estimator='k2')
ALL = dict(KL, entropy_coef=0.01)
NORM = dict(aggregation='sequence_sum_norm', length=5)
TABLE = {  # name: recipe, its options, those of `corrected`
    'ppo': ('ppo', {}, None),
    'ppo_plain': (
        'ppo', dict(kl_coef=0.0, value_clip=None, whiten=False), None),
    'ppo_all_terms': ('ppo', dict(
        ALL, **NORM, dual_clip=1.2, value_clip=0.2, discount=0.9,
        gae_lambda=0.8), None),
    'grpo': ('grpo', {}, None),
    'grpo_all_terms': ('grpo', dict(
        ALL, dual_clip=1.2, normalize_std=False, aggregation='token_mean'),
                       None),
    'dr_grpo': ('dr_grpo', dict(length=5), None),
    'dr_grpo_all_terms': (
        'dr_grpo', dict(length=5, kl_coef=0.1, entropy_coef=0.01), None),
    'dapo': ('dapo', {}, None),
    'dapo_all_terms': ('dapo', dict(
        max_length=5, buffer=3, kl_coef=0.1, entropy_coef=0.01), None),
    'gspo': ('gspo', {}, None),
    'gspo_all_terms': ('gspo', dict(ALL, dual_clip=1.2), None),
    'dspo': ('dspo', {}, None),
    'dspo_all_terms': ('dspo', dict(ALL, normalize_std=False), None),
    'gmpo': ('gmpo', {}, None),
    'gmpo_all_terms': ('gmpo', dict(ALL, clip_low=0.2, clip_high=0.3), None),
    'rloo': ('rloo', {}, None),
    'rloo_all_terms': ('rloo', dict(ALL, **NORM), None),
    'reinforce': ('reinforce', {}, None),
    'reinforce_all_terms': (
        'reinforce', dict(ALL, aggregation='sequence_mean'), None),
    'reinforce_plus_plus': ('reinforce_plus_plus', {}, None),
    'reinforce_plus_plus_all_terms': (
        'reinforce_plus_plus', dict(ALL, discount=0.9), None),
    'reinforce_plus_plus_baseline': (
        'reinforce_plus_plus', dict(group_baseline=True), None),
    'reinforce_plus_plus_baseline_all_terms': ('reinforce_plus_plus', dict(
        ALL, group_baseline=True, aggregation='sequence_mean'), None),
    'hrpo': ('hrpo', {}, None),
    'hrpo_all_terms': ('hrpo', dict(ALL, **NORM, delta=0.1), None),
    'sft': ('sft', {}, None),
    'mt_grpo': ('mt_grpo', {}, None),
    'mt_grpo_all_terms': ('mt_grpo', dict(
        ALL, **NORM, turn_coef=0.5, dual_clip=1.2, normalize_std=False), None),
    'gigpo': ('gigpo', {}, None),
    'gigpo_all_terms': ('gigpo', dict(
        ALL, step_coef=0.5, discount=0.8, dual_clip=1.2, normalize_std=False,
        aggregation='sequence_mean'), None),
    'ppo_turn_rewards': ('ppo', dict(
        turn_rewards=True, discount=0.9, gae_lambda=0.8, whiten=False), None),
    'cispo': ('cispo', dict(clip_high=0.2), None),
    'ppo_masked': ('ppo', {}, dict(method='mask', low=0.7, high=1.4)),
    'grpo_truncated': ('grpo', {}, dict(high=1.2)),
    'gspo_masked': ('gspo', {}, dict(method='mask', level='sequence')),
    'gigpo_truncated': ('gigpo', {}, dict(high=1.2)),
    'rloo_truncated': ('rloo', {}, dict(level='sequence', high=1.2)),
}


def make(recipe, options, correction, tokens='policy'):
  function = getattr(cispo if recipe == 'cispo' else algorithms, recipe)
  algorithm = function(**options)
  if tokens == 'all':
    algorithm = algorithms.with_observations(algorithm)
  return algorithms.corrected(
      algorithm, **correction) if correction else algorithm


ALGORITHMS = {name: make(*entry) for name, entry in TABLE.items()}
ON_ALL = {  # also trained on observations
    name: make(*TABLE[name], tokens='all') for name in (
        'ppo_all_terms', 'grpo_all_terms', 'dr_grpo', 'dapo', 'gspo',
        'dspo_all_terms', 'gmpo_all_terms', 'rloo', 'reinforce',
        'reinforce_all_terms', 'reinforce_plus_plus', 'hrpo', 'cispo',
        'mt_grpo_all_terms', 'gigpo', 'ppo_turn_rewards', 'ppo_masked', 'grpo_truncated', 'gspo_masked', 'rloo_truncated')}


@pytest.fixture(params=TABLE)
def name(request):
  return request.param


@pytest.fixture
def algorithm(name):
  return ALGORITHMS[name]


def random_batch(seed=0):
  """Eight rows, most of them with a hole where an observation was.

  Four rows of one group; one alone in its group; two of a group, the second
  out of the loss, for it was truncated; and one that only fills. The turns are
  the runs of sampled tokens; that of row 3 is two. Two of the turns have no
  reward. The later turns of the first three rows began in one state.
  """
  rng = np.random.default_rng(seed)
  mask = np.array([[0, 1, 1, 0, 1, 1],
                   [0, 1, 0, 0, 1, 0],
                   [0, 0, 1, 1, 0, 1],
                   [0, 1, 1, 1, 1, 1],
                   [0, 1, 0, 1, 0, 0],
                   [0, 0, 0, 1, 1, 1],
                   [0, 1, 1, 0, 0, 1],
                   [0, 0, 0, 0, 0, 0]], bool)
  in_loss = np.arange(8) < 6
  trained = mask & in_loss[:, None]
  old = -rng.exponential(size=mask.shape)
  begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  begins[3, 3] = True
  turn_ids = np.where(mask, begins.cumsum(1), 0)
  ends = mask & (np.pad(turn_ids, ((0, 0), (0, 1)))[:, 1:] != turn_ids)
  turn_rewards = rng.normal(size=mask.shape).astype(np.float32)
  turn_rewards[[1, 6], [1, 5]] = np.nan
  firsts = np.array([0, 0, 0, 0, 1, 2, 2, 0])[:, None]
  others = np.array([3, 3, 3, 4, 5, 6, 6, 0])[:, None]

  def near(x, scale=0.5):
    x = (x + scale * rng.normal(size=x.shape)).astype(np.float32)
    return oracles.poison(rng, x, trained)

  return Batch(
      tokens=np.zeros(mask.shape, np.int32),
      loss_mask=mask,
      behavior_logprobs=near(old),
      rewards=np.array([0, 1, 0, 1, 1, 1, 0, np.nan], np.float32),
      outcome_rewards=np.array([0, 1, 0, 1, 1, 1, 0, 0], np.float32),
      question_ids=np.array([0, 0, 0, 0, 1, 2, 2, 0]),
      group_ids=np.array([0, 0, 0, 0, 1, 2, 2, 0]),
      in_baseline=np.arange(8) < 7,
      in_loss=in_loss,
      on_policy=np.array([1, 1, 0, 1, 1, 0, 1, 0], bool),
      old_logprobs=near(old, 0),
      ref_logprobs=near(old),
      values=near(0.5 + 0 * old),
      weights=oracles.poison(
          rng, rng.random(mask.shape).astype(np.float32), trained),
      turn_ids=turn_ids, turn_rewards=oracles.poison(rng, turn_rewards, ends),
      state_ids=np.where(mask, np.where(turn_ids > 1, others, firsts), 0),
  )


def trained_tokens(batch):
  return batch.loss_mask & batch.in_loss[:, None]


def denominator(batch):
  return np.where(
      batch.on_policy[:, None], batch.old_logprobs, batch.behavior_logprobs)


def random_output(batch, scale=0.3, seed=5):
  """Outputs of a policy near that of the ratio's denominator, and a critic."""
  rng = np.random.default_rng(seed)
  noise = rng.normal(size=(2, *batch.tokens.shape)).astype(np.float32)
  entropy = rng.exponential(size=batch.tokens.shape).astype(np.float32)
  return algorithms.PolicyOutput(
      denominator(batch) + np.float32(scale) * noise[0],
      oracles.poison(rng, entropy, trained_tokens(batch)),
      batch.values + np.float32(0.4) * noise[1])


def with_observations(batch, out):
  """Log-probs and entropies are known of observations, too; nothing else is."""
  observed = oracles.observed_tokens(trained_tokens(batch))
  rng = np.random.default_rng(6)
  old, ref, new, entropy = rng.exponential(
      size=(4, *observed.shape)).astype(np.float32)
  batch = dataclasses.replace(
      batch, old_logprobs=np.where(observed, -old, batch.old_logprobs),
      ref_logprobs=np.where(observed, -ref, batch.ref_logprobs))
  return batch, algorithms.PolicyOutput(
      np.where(observed, -old + np.float32(1e-3) * new, out.logprobs),
      np.where(observed, entropy, out.entropy), out.values)


@functools.partial(jax.jit, static_argnums=0)
def estimate(algorithm, batch):
  return algorithm.advantages(batch)


@functools.partial(jax.jit, static_argnums=0)
def run(algorithm, batch, out, advs, counts=None):
  """((loss, (terms, metrics)), gradient with respect to all of `out`)."""
  def loss(out):
    terms, metrics = algorithm.loss(out, batch, advs)
    return algorithms.total(terms, counts), (terms, metrics)

  return jax.value_and_grad(loss, has_aux=True)(out)


def run_whole(algorithm, batch, out):
  return run(algorithm, batch, out, estimate(algorithm, batch))


def assert_close(got, expected, rtol=1e-5, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(
      x, y, rtol=rtol, atol=atol), got, expected)


# The contract.

MIXED = [-1, 1, -1, 1, 0, 1, 0, 0]  # against the group; a group of one gives 0
DIRECTION = {
    # Values of 0.5, but -1 on row 2 and 2 on row 3, more than its reward.
    'ppo': [-1, 1, 1, -1, 1, 1, 0, 0],
    'reinforce': [0, 1, 0, 1, 1, 1, 0, 0],  # no baseline: nothing is punished
    'sft': [0, 1, 0, 1, 1, 1, 0, 0],
    'reinforce_plus_plus': [-1, 1, -1, 1, 1, 1, 0, 0],  # against the batch
}


def test_trains_sampled_tokens_only_and_in_the_right_direction(name, algorithm):
  batch = random_batch()
  # On policy, without drift or discount: only rewards decide.
  if name in ('ppo_all_terms', 'reinforce_plus_plus_all_terms'):
    recipe, options, _ = TABLE[name]
    algorithm = make(recipe, {**options, 'discount': 1.0}, None)
  base = batch.old_logprobs
  trained = trained_tokens(batch)
  level = np.array([0.5, 0.5, -1, 2, 0.5, 0.5, 0.5, 0.5], np.float32)[:, None]
  batch = dataclasses.replace(
      batch, behavior_logprobs=base, ref_logprobs=base,
      values=np.where(trained, level, np.nan),
      turn_rewards=np.zeros_like(batch.turn_rewards))
  out = algorithms.PolicyOutput(base, base, batch.values)
  gradient = jax.device_get(run_whole(algorithm, batch, out)[1])
  for leaf in jax.tree.leaves(gradient):
    np.testing.assert_array_equal(leaf[~trained], 0)
  push = -gradient.logprobs.sum(-1)
  expected = np.array(DIRECTION.get(TABLE[name][0], MIXED))
  if TABLE[name][1].get('group_baseline'):  # whitening moves what was 0
    push, expected = np.delete(push, 4), np.delete(MIXED, 4)
  if TABLE[name][0] == 'dapo' and TABLE[name][1]:  # long row 3 loses its 1
    push, expected = push[:3], expected[:3]
  np.testing.assert_array_equal(np.sign(push), expected)


def test_masked_positions_may_hold_anything(algorithm):
  batch = random_batch()
  out = random_output(batch)
  trained = trained_tokens(batch)

  def cleaned(x):
    return np.where(trained, x, 0) if x.dtype == np.float32 and (
        x.ndim == 2) else x

  clean = dataclasses.replace(
      jax.tree.map(cleaned, batch), rewards=np.nan_to_num(batch.rewards),
      turn_rewards=np.where(batch.turn_ids > 0, batch.turn_rewards, 0))
  got = run_whole(algorithm, batch, out)
  expected = run_whole(algorithm, clean, jax.tree.map(cleaned, out))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


def test_any_split_gives_the_same_loss_gradient_and_metrics(algorithm):
  batch = random_batch()
  for together, whole in splits(algorithm, batch, random_output(batch)):
    assert_close(together, whole)
    assert counts_of(together) == counts_of(whole)


@pytest.mark.parametrize('name', ['ppo_all_terms', 'gspo'])
def test_any_split_gives_the_same_on_observations(name):
  batch = random_batch()
  for together, whole in splits(
      ON_ALL[name], *with_observations(batch, random_output(batch))):
    assert_close(together, whole)
    assert counts_of(together) == counts_of(whole)


def counts_of(results):
  """The counts of the metrics, which must be equal to the bit."""
  return {name: float(mean.count) for name, mean in results[-1].items()}


def splits(algorithm, batch, out):
  """Loss, gradient and metrics of the parts together, and of the whole."""
  inputs = jax.device_get((batch, out, estimate(algorithm, batch)))
  (loss, (terms, metrics)), gradient = run(algorithm, *inputs)
  counts = {name: mean.count for name, (_, mean) in terms.items()}
  for edges in (0, 4, 8), range(9):
    outs, gradients = zip(*(
        run(algorithm, *jax.tree.map(lambda x: x[start:stop], inputs), counts)
        for start, stop in zip(edges, edges[1:])))
    losses, aux = zip(*outs)
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *gradients)
    seen = jax.tree.map(
        lambda *xs: sum(map(float, xs)), *(metrics for _, metrics in aux))
    yield (sum(losses), joined, seen), (loss, gradient, metrics)


def test_counts_depend_on_masks_alone(algorithm):
  batch = random_batch()
  advs = estimate(algorithm, batch)
  nothing = np.full(batch.tokens.shape, np.nan, np.float32)
  (_, one), _ = run(algorithm, batch, random_output(batch), advs)
  (_, two), _ = run(
      algorithm, batch, algorithms.PolicyOutput(nothing, nothing, nothing),
      jax.tree.map(np.zeros_like, advs))
  for terms, metrics in one, two:
    means = [mean for _, mean in terms.values()] + [*metrics.values()]
    # Six rows are trained on, and what they sampled.
    assert {float(mean.count) for mean in means} <= {
        6, trained_tokens(batch).sum()}


@pytest.mark.parametrize('case', ['constant', 'empty', 'no_baseline', 'one'])
def test_degenerate_batches_are_finite(name, algorithm, case):
  batch = random_batch()
  rewards = np.where(batch.in_baseline, np.float32(0.1), np.nan)
  batch = dataclasses.replace(
      batch, rewards=rewards, turn_rewards=np.zeros_like(batch.turn_rewards))
  nobody = np.zeros(8, bool)
  if case == 'empty':
    batch = dataclasses.replace(
        batch, loss_mask=np.zeros_like(batch.loss_mask), in_loss=nobody,
        in_baseline=nobody, turn_ids=np.zeros_like(batch.turn_ids))
  if case == 'no_baseline':
    batch = dataclasses.replace(batch, in_baseline=nobody)
  out = random_output(batch)
  if case == 'one':
    batch, out = jax.tree.map(lambda x: x[1:2], (batch, out))
  advs = estimate(algorithm, batch)
  (loss, (terms, metrics)), gradient = run(algorithm, batch, out, advs)
  for leaf in jax.tree.leaves((advs, loss, terms, metrics, gradient)):
    assert np.isfinite(leaf).all()
  recipe, options, _ = TABLE[name]
  if case == 'empty':
    assert loss == 0 and not any(map(np.any, jax.tree.leaves(gradient)))
    return
  by_group = recipe not in ('ppo', 'reinforce', 'reinforce_plus_plus', 'sft')
  by_group |= options.get('group_baseline', False)
  # Equal rows give no gradient, unless their KL or their length differs.
  # GiGPO discounts a reward by the number of turns.
  if by_group and recipe != 'gigpo' and name not in (
      'rloo_all_terms', 'dapo_all_terms') or (
      recipe == 'reinforce' and case == 'no_baseline'):
    np.testing.assert_array_equal(advs, 0)
    assert terms['policy'][1].total == 0
    if 'kl' not in terms:
      np.testing.assert_array_equal(gradient.logprobs, 0)


def test_more_padding_and_filler_change_nothing(algorithm):
  batch = random_batch()
  inputs = batch, random_output(batch)

  def padded(x):
    fill = np.nan if x.dtype == np.float32 else 0
    return np.pad(x, [(0, 4), (0, 3)][:x.ndim], constant_values=fill)

  (loss, (_, metrics)), gradient = run_whole(algorithm, *inputs)
  (more, (_, more_metrics)), wider = run_whole(
      algorithm, *jax.tree.map(padded, inputs))
  assert_close((more, more_metrics), (loss, metrics))
  assert_close(wider, jax.tree.map(
      lambda x: np.pad(x, [(0, 4), (0, 3)]), gradient))


def test_eight_devices_give_the_loss_and_gradient_of_one(algorithm):
  batch = random_batch()
  inputs = batch, random_output(batch)
  expected = run_whole(algorithm, *inputs)
  sharded = meshes.shard_batch(meshes.make(data=2, fsdp=4), inputs)
  assert len(sharded[0].rewards.sharding.device_set) == 8
  assert_close(run_whole(algorithm, *sharded), expected)


def test_jit_changes_nothing(algorithm):
  batch, out = jax.tree.map(
      jnp.asarray, (random_batch(), random_output(random_batch())))
  advs = algorithm.advantages(batch)
  assert_close(estimate(algorithm, batch), advs)
  (loss, aux), _ = run_whole(algorithm, batch, out)
  terms, metrics = algorithm.loss(out, batch, advs)
  assert_close((loss, aux), (algorithms.total(terms), (terms, metrics)))


@pytest.mark.parametrize('name', ON_ALL)
def test_observations_leave_the_weights_of_the_policys_tokens(name):
  batch = random_batch()
  batch, out = with_observations(batch, random_output(batch))
  # At ratio 1, where no clip is active and a row's ratio weights nothing.
  batch = dataclasses.replace(batch, on_policy=batch.in_loss)
  out = dataclasses.replace(out, logprobs=batch.old_logprobs)
  (_, (alone, seen)), gradient = run_whole(ALGORITHMS[name], batch, out)
  (_, (terms, metrics)), more = run_whole(ON_ALL[name], batch, out)
  mask = trained_tokens(batch)
  observed = oracles.observed_tokens(mask)
  for term, (_, mean) in terms.items():
    assert mean.count == alone[term][1].count
  assert_close(more.logprobs[mask], gradient.logprobs[mask], 1e-6, 1e-8)
  assert_close(more.entropy[mask], gradient.entropy[mask], 1e-6)
  assert_close(more.values[~observed], gradient.values[~observed], 1e-6)
  np.testing.assert_array_equal(gradient.logprobs[observed], 0)
  np.testing.assert_array_equal(more.logprobs[~mask & ~observed], 0)
  pushed = (gradient.logprobs[:, :-1] != 0) & observed[:, 1:]
  assert np.all(more.logprobs[:, 1:][pushed] != 0) and pushed.any()
  # Metrics other than the terms themselves are the policy's.
  for metric in metrics.keys() - {'actor/pg_loss', 'actor/kl_loss'}:
    assert_close(metrics[metric], seen[metric], 1e-6)


@pytest.mark.parametrize('name', ['ppo', 'reinforce_plus_plus'])
def test_an_observation_has_the_advantage_of_what_fetched_it(name):
  algorithm = algorithms.with_observations(ALGORITHMS[name])
  batch = random_batch()
  mask = trained_tokens(batch)
  advs, plain = (getattr(e, 'advantages', e) for e in jax.device_get(
      (estimate(algorithm, batch), estimate(ALGORITHMS[name], batch))))
  np.testing.assert_array_equal(advs, oracles.held(plain, mask))
  np.testing.assert_array_equal(advs[mask], plain[mask])
  np.testing.assert_array_equal(advs[1, 2:4], plain[1, [1, 1]])
  assert advs[1, 2] != 0


def test_observed_tokens_lie_between_what_the_policy_sampled():
  batch = random_batch()
  observed = algorithms.observed_tokens(batch)
  np.testing.assert_array_equal(
      observed, oracles.observed_tokens(trained_tokens(batch)))
  assert np.argwhere(observed).tolist() == [
      [0, 3], [1, 2], [1, 3], [2, 4], [4, 2]]


def test_a_row_out_of_the_loss_is_a_row_without_sampled_tokens(algorithm):
  batch = random_batch()
  out = random_output(batch)
  cut = batch.in_loss & (np.arange(8) != 3)
  one = dataclasses.replace(batch, in_loss=cut)
  two = dataclasses.replace(batch, loss_mask=batch.loss_mask & cut[:, None])
  jax.tree.map(np.testing.assert_array_equal,
               run_whole(algorithm, one, out), run_whole(algorithm, two, out))


# The terms of each recipe.

PAPERS = {  # the defaults of each recipe
    'ppo': dict(clip=(0.2, 0.2), value_clip=0.5, discount=1, gae_lambda=1,
                whiten=True, kl=('reward', 1e-3, 'k1'), how='token_mean',
                turn_rewards=False),
    'mt_grpo': dict(clip=(0.2, 0.2), kl=('loss', 0.01, 'k3'), turn_coef=1,
                    how='token_mean'),
    'gigpo': dict(clip=(0.2, 0.2), kl=('loss', 0.01, 'k3'), step_coef=1,
                  discount=0.95, how='token_mean'),
    'grpo': dict(clip=(0.2, 0.2), kl=('loss', 0.04, 'k3'),
                 how='sequence_mean'),
    'dr_grpo': dict(clip=(0.2, 0.2), kl=('loss', 0, 'k3'),
                    normalize_std=False, how='sequence_sum_norm'),
    'dapo': dict(clip=(0.2, 0.28), kl=('loss', 0, 'k3'), max_length=20480,
                 buffer=4096, how='token_mean'),
    'gspo': dict(clip=(3e-4, 4e-4), kl=('loss', 0, 'k3'), how='sequence_mean'),
    'dspo': dict(clip=(3e-4, 4e-4), kl=('loss', 0, 'k3'), how='sequence_mean'),
    'gmpo': dict(clip=(0.4, 0.4), kl=('loss', 0, 'k3'), how='sequence_mean'),
    'rloo': dict(kl=('reward', 0, 'k1'), how='sequence_sum'),
    'reinforce': dict(kl=('loss', 1e-3, 'k3'), how='token_mean'),
    'reinforce_plus_plus': dict(
        clip=(0.2, 0.2), kl=('reward', 1e-3, 'k1'), discount=1,
        how='token_mean'),
    'hrpo': dict(kl=('loss', 0, 'k3'), delta=1e-6, how='sequence_sum'),
    'sft': dict(kl=('loss', 0, 'k3'), how='token_mean'),
    'cispo': dict(clip=(1, 4), kl=('loss', 0, 'k3'), how='token_mean'),
}


def settings(recipe, options):
  """The settings of a recipe with these options."""
  config = types.SimpleNamespace(**{
      'dual_clip': None, 'normalize_std': True, 'group_baseline': False,
      'entropy_coef': 0, 'length': None, **PAPERS[recipe], **options})
  config.how = options.get('aggregation', config.how)
  if recipe not in ('rloo', 'hrpo', 'reinforce', 'sft'):
    config.clip = (options.get('clip_low', config.clip[0]),
               options.get('clip_high', config.clip[1]),
               *([config.dual_clip] if config.dual_clip else []))
  where, coef, estimator = config.kl
  if config.group_baseline:
    where, estimator = 'loss', 'k2'
  config.kl = (where, options.get('kl_coef', coef),
           options.get('kl_estimator', estimator))
  return config


def advantages_by_loops(recipe, config, batch, mask):
  """Advantages, and a critic's returns."""
  in_reward, coef, estimator = config.kl
  penalty = np.zeros(mask.shape)
  if in_reward == 'reward' and coef:
    penalty = coef * oracles.kl(
        batch.old_logprobs, batch.ref_logprobs, mask, estimator)
  group = batch.group_ids, batch.in_baseline
  match recipe:
    case 'ppo':
      rewards = oracles.token_rewards(batch.rewards, mask, penalty)
      if config.turn_rewards:
        rewards += np.where(mask, oracles.turn_rewards_at_ends(
            batch.turn_rewards, batch.turn_ids), 0)
      advs, returns = oracles.gae(
          rewards, batch.values, mask, discount=config.discount,
          gae_lambda=config.gae_lambda)
      return oracles.whiten(advs, mask) if config.whiten else advs, returns
    case 'reinforce_plus_plus' if config.group_baseline:
      return oracles.reinforce_plus_plus_baseline(
          batch.rewards, group[0], mask, group[1]), None
    case 'reinforce_plus_plus':
      return oracles.reinforce_plus_plus(
          oracles.token_rewards(batch.rewards, mask, penalty), mask,
          discount=config.discount), None
    case 'mt_grpo':
      return oracles.mt_grpo(
          batch.rewards, batch.turn_rewards, batch.turn_ids, *group,
          turn_coef=config.turn_coef, normalize_std=config.normalize_std), None
    case 'gigpo':
      return oracles.gigpo(
          batch.rewards, batch.turn_rewards, batch.turn_ids, batch.state_ids,
          *group, step_coef=config.step_coef, discount=config.discount,
          normalize_std=config.normalize_std), None
    case 'reinforce':
      return np.where(batch.in_baseline, batch.rewards, 0), None
    case 'sft':
      return oracles.weighted(batch.rewards, batch.weights, mask), None
    case 'rloo':
      return oracles.leave_one_out(
          batch.rewards - penalty.sum(-1), *group), None
    case 'hrpo':
      return oracles.hop_group_relative(
          batch.rewards, *group, delta=config.delta), None
    case 'dapo':
      penalty = oracles.overlong_penalty(
          mask.sum(-1), config.max_length, config.buffer)
      return oracles.group_relative(batch.rewards + penalty, *group), None
  return oracles.group_relative(
      batch.rewards, *group, normalize_std=config.normalize_std), None


def corrected_by_loops(
    advs, batch, mask, observed, method='truncate', level='token', low=0.5,
    high=2.0):
  inputs = batch.old_logprobs, batch.behavior_logprobs, mask, level
  weights = (oracles.truncated_weights(*inputs, high) if method == 'truncate'
             else oracles.masked_weights(*inputs, low, high))
  out = np.zeros(mask.shape)
  for i, t in np.argwhere(mask | observed):
    out[i, t] = advs[i] if advs.ndim == 1 else advs[i, t]
    if batch.on_policy[i] and (mask[i, t] or level == 'sequence'):
      out[i, t] *= weights[i, t if mask[i, t] else mask[i].argmax()]
  by_row = level == 'sequence' and advs.ndim == 1
  return out[range(8), mask.argmax(-1)] if by_row else out


def policy_loss_by_loops(
    recipe, config, logprobs, old, advs, mask, count_mask, start):
  """Returns the loss of each token, or of each row, by loops."""
  match recipe:
    case 'gspo' | 'dspo':
      return oracles.sequence_ratio_loss(
          logprobs, old, advs, mask, *config.clip, count_mask=count_mask)
    case 'gmpo':
      return oracles.geometric_mean_loss(
          logprobs, old, advs, mask, *config.clip, count_mask=count_mask)
    case 'rloo' | 'hrpo' | 'reinforce' | 'sft':
      return oracles.score_function_loss(logprobs, advs, mask)
    case 'cispo':  # the ratio is a constant, that of the start
      ratio = np.minimum(
          oracles.token_ratio(start, old, mask), 1 + config.clip[1])
      return ratio * oracles.score_function_loss(logprobs, advs, mask)
  return oracles.token_ratio_loss(logprobs, old, advs, mask, *config.clip)


def terms_by_loops(recipe, config, batch, out, advs, returns, start, observed):
  """name: coefficient, (total, count)."""
  mask = trained_tokens(batch)
  summed = mask | observed
  how = config.how, config.length, mask
  old = np.where(observed, batch.old_logprobs, denominator(batch))
  loss = policy_loss_by_loops(
      recipe, config, out.logprobs, old, advs, summed, mask, start)
  terms = {'policy': (1, oracles.aggregate(loss, summed, *how)
                      if loss.ndim == 2
                      else (loss.sum(), mask.any(-1).sum()))}
  in_loss, coef, estimator = config.kl
  if in_loss == 'loss' and coef:
    kl = oracles.kl(out.logprobs, batch.ref_logprobs, summed, estimator)
    terms['kl'] = coef, oracles.aggregate(kl, summed, *how)
  if config.entropy_coef:
    terms['entropy'] = -config.entropy_coef, oracles.aggregate(
        out.entropy, summed, *how)
  if recipe == 'ppo':
    fit = oracles.value_loss(
        out.values, batch.values, returns, mask, config.value_clip)
    terms['value'] = 1, oracles.aggregate(fit, mask, 'token_mean')
  return terms


@pytest.mark.parametrize('name, tokens', [
    *((name, 'policy') for name in TABLE), *((name, 'all') for name in ON_ALL)])
def test_agrees_with_loops(name, tokens):
  recipe, options, correction = TABLE[name]
  algorithm = (ON_ALL if tokens == 'all' else ALGORITHMS)[name]
  batch = random_batch()
  tight = recipe in ('gspo', 'dspo')
  out = random_output(batch, scale=3e-4 if tight else 0.3)
  observed = np.zeros(batch.tokens.shape, bool)
  if tokens == 'all':
    batch, out = with_observations(batch, out)
    observed = oracles.observed_tokens(trained_tokens(batch))
  got_advs = estimate(algorithm, batch)
  (loss, (terms, metrics)), gradient = run(algorithm, batch, out, got_advs)

  config = settings(recipe, options)
  batch, out = jax.tree.map(
      lambda x: x.astype(np.float64) if x.dtype == np.float32 else x,
      (batch, out))
  mask = trained_tokens(batch)
  advs, returns = advantages_by_loops(recipe, config, batch, mask)
  if tokens == 'all' and advs.ndim == 2:
    advs = oracles.held(advs, mask)
  if correction:
    advs = corrected_by_loops(advs, batch, mask, observed, **correction)
  summed = mask | observed
  where = summed if advs.ndim == 2 else mask.any(-1)
  ours = getattr(got_advs, 'advantages', got_advs)
  np.testing.assert_allclose(ours[where], advs[where], rtol=2e-5, atol=1e-6)
  if recipe == 'ppo':
    np.testing.assert_allclose(
        got_advs.returns[mask], returns[mask], rtol=1e-5, atol=1e-6)

  def expected(out):
    return terms_by_loops(
        recipe, config, batch, out, advs, returns, start, observed)

  def expected_loss(field, x):
    return sum(coef * total / count for coef, (total, count) in expected(
        dataclasses.replace(out, **{field: x})).values())

  start = out.logprobs
  named = expected(out)
  assert set(terms) == set(named)
  for term, (coefficient, (total, count)) in named.items():
    np.testing.assert_allclose(terms[term][0], coefficient, rtol=1e-6)
    assert terms[term][1].count == count
    np.testing.assert_allclose(terms[term][1].total, total, rtol=2e-5,
                               atol=2e-6, err_msg=term)
  np.testing.assert_allclose(
      loss, expected_loss('logprobs', start), rtol=2e-5, atol=2e-6)
  for field in ('logprobs', 'values', 'entropy'):
    np.testing.assert_allclose(
        getattr(gradient, field),
        oracles.gradient(functools.partial(expected_loss, field),
                         getattr(out, field), summed, step=1e-6),
        rtol=2e-4, atol=2e-6, err_msg=field)
  assert ('actor/kl_loss' in metrics) == ('kl' in terms)
  assert {'actor/pg_loss', 'actor/entropy', 'actor/ppo_kl'} <= set(metrics)
  if recipe not in ('rloo', 'hrpo', 'reinforce', 'sft', 'cispo'):
    assert {'actor/pg_clipfrac', 'actor/clipfrac_low', 'actor/clipfrac_high'
           } <= set(metrics)
  assert ('critic/vf_loss' in metrics) == (recipe == 'ppo')


# By hand.


def small_batch(mask, rewards, **fields):
  mask = np.array(mask, bool)
  rewards = np.array(rewards, np.float32)
  rows, ids = mask.any(-1), np.zeros(len(mask), int)
  zeros = np.zeros(mask.shape, np.float32)
  return Batch(**{**dict(
      tokens=np.zeros(mask.shape, np.int32), loss_mask=mask,
      behavior_logprobs=zeros, rewards=rewards, outcome_rewards=rewards,
      question_ids=ids, group_ids=ids, in_baseline=rows, in_loss=rows,
      on_policy=rows, old_logprobs=zeros), **fields})


def test_grpo_on_two_rows_by_hand():
  # A = -+ 1 / sqrt 2 (nearly). Row 0 falls to 1/2: clipped at 0.8. Row 1 falls
  # too, against its advantage, so that its loss stays -A / 2.
  half = np.log(np.full((2, 1), 0.5, np.float32))
  batch = small_batch([[1], [1]], [0, 1])
  (loss, (_, metrics)), _ = run_whole(
      algorithms.grpo(kl_coef=0), batch, algorithms.PolicyOutput(half, -half))
  np.testing.assert_allclose(loss, 0.5**0.5 * (0.8 - 0.5) / 2, rtol=1e-5)
  assert metrics['actor/clipfrac_low'].value == 0.5
  assert metrics['actor/clipfrac_high'].value == 0
  np.testing.assert_allclose(metrics['actor/ppo_kl'].value, np.log(2))


def test_ppo_on_one_row_with_an_observation_by_hand():
  # Tokens a, b, (observation), c; the reward 1 on c; discount = lambda = 1/2.
  #   c: delta = 1 - 3/4                    A =  1/4                R = 1
  #   b: delta = 3/4 / 2 - 1/4 = 1/8        A =  1/8 + 1/16         R = 7/16
  #   a: delta = 1/4 / 2 - 1/2 = -3/8       A = -3/8 + 3/64         R = 11/64
  values = np.array([[np.nan, 0.5, 0.25, 99, 0.75]], np.float32)
  batch = small_batch([[0, 1, 1, 0, 1]], [1], values=values)
  algorithm = algorithms.ppo(
      discount=0.5, gae_lambda=0.5, whiten=False, kl_coef=0)
  advs, returns = found = estimate(algorithm, batch)
  np.testing.assert_array_equal(advs, [[0, -21 / 64, 3 / 16, 0, 1 / 4]])
  np.testing.assert_array_equal(returns, [[0, 11 / 64, 7 / 16, 0, 1]])
  zeros = batch.old_logprobs
  (_, (terms, _)), _ = run(
      algorithm, batch, algorithms.PolicyOutput(zeros, zeros, values), found)
  np.testing.assert_allclose(
      terms['policy'][1].value, -(-21 / 64 + 3 / 16 + 1 / 4) / 3, rtol=1e-6)
  np.testing.assert_allclose(
      terms['value'][1].value,
      ((21 / 64)**2 + (3 / 16)**2 + (1 / 4)**2) / 2 / 3, rtol=1e-6)


def test_hrpo_on_two_hop_classes_by_hand():
  # One hop: 1 and 0, so A = +-1. Two hops: 0, 0, 1, with mean 1/3 and variance
  # 2/9, so A = -1/sqrt 2, -1/sqrt 2, sqrt 2. Each token costs one nat.
  batch = small_batch([[1, 0], [1, 1], [1, 0], [1, 0], [1, 1]],
                      [1, 0, 0, 0, 1], group_ids=np.array([0, 0, 1, 1, 1]))
  algorithm, root = algorithms.hrpo(delta=0), 2**0.5
  advs = estimate(algorithm, batch)
  np.testing.assert_allclose(
      advs, [1, -1, -root / 2, -root / 2, root], rtol=1e-6)
  nat = -np.ones((5, 2), np.float32)
  (loss, _), _ = run(
      algorithm, batch, algorithms.PolicyOutput(nat, nat), advs)
  np.testing.assert_allclose(loss, (1 - 2 - root + 2 * root) / 5, rtol=1e-5)


def test_dapo_penalises_long_rows_alone():
  # Rows of 1 to 5 tokens, all of them right.
  batch = small_batch(np.tri(5, 5), np.ones(5))
  np.testing.assert_allclose(
      estimate(algorithms.dapo(max_length=4, buffer=2), batch),
      oracles.group_relative([1, 1, 0.5, 0, 0], batch.group_ids), rtol=1e-5)
  np.testing.assert_array_equal(estimate(algorithms.dapo(), batch), 0)


def test_supervised_training_is_the_weighted_mean_of_minus_log_pi():
  batch = small_batch([[0, 1, 1], [1, 1, 0]], [1, 1])
  out = algorithms.PolicyOutput(
      np.array([[9, -1, -2], [-3, -4, 9]], np.float32), np.zeros((2, 3)))

  def loss(batch, **options):
    return float(run_whole(algorithms.sft(**options), batch, out)[0][0])

  assert loss(batch) == 2.5
  np.testing.assert_allclose(
      loss(batch), float(run_whole(algorithms.reinforce(kl_coef=0), batch, out)
                         [0][0]))
  weights = np.array([[7, 1, 0.5], [0.5, 0, 7]], np.float32)
  weighted = dataclasses.replace(batch, weights=weights)
  np.testing.assert_allclose(loss(weighted), (1 + 1 + 1.5) / 2)
  assert loss(dataclasses.replace(batch, weights=0 * weights)) == 0
  # Rejection sampling: a row of reward 0 is no lesson.
  rewards = np.array([1, 0], np.float32)
  assert loss(dataclasses.replace(batch, rewards=rewards)) == 3 / 4


def test_corrections_by_hand():
  # Weights 4 and 1/4, of a row whose product is 1; the same, off-policy.
  gaps = np.log(np.array([[4, 0.25], [4, 0.25]], np.float32))
  batch = small_batch([[1, 1], [1, 1]], [0, 2], behavior_logprobs=-gaps,
                      on_policy=np.array([True, False]))
  plain = algorithms.rloo()  # A = -2, 2
  for options, expected in (
      (dict(method='truncate'), [[-4, -0.5], [2, 2]]),
      (dict(method='mask'), [[0, 0], [2, 2]]),
      (dict(method='mask', low=0.2, high=3), [[0, -0.5], [2, 2]]),
      (dict(method='truncate', level='sequence'), [-2, 2]),
      (dict(method='mask', level='sequence', low=1.5, high=3), [0, 2])):
    weighted = algorithms.corrected(plain, **options)
    np.testing.assert_allclose(estimate(weighted, batch), expected, rtol=1e-6)
    assert weighted.needs == {'old_logprobs'}  # the weights read them
    assert dataclasses.replace(
        weighted, advantages=plain.advantages, needs=plain.needs) == plain


@pytest.mark.parametrize('level, expected', [
    ('token', [[4, 9, 0.5]]),  # times 1: nobody sampled it
    ('sequence', [[2, 18, 2]])])
def test_corrections_of_observations_by_hand(level, expected):
  # Weights 4 and 1/2 of the tokens, 2 of the row; advantages 1, 9 and 1.
  gaps = np.log(np.array([[4, 9, 0.5]], np.float32))
  batch = small_batch([[1, 0, 1]], [0], behavior_logprobs=-gaps)
  plain = dataclasses.replace(
      ALGORITHMS['reinforce'],
      advantages=lambda batch: jnp.array([[1.0, 9.0, 1.0]]))
  weighted = algorithms.corrected(plain, level=level, high=5.0)
  got = estimate(weighted, batch)
  np.testing.assert_allclose(got, expected, rtol=1e-6)


# What it requires of the trainer.


@pytest.mark.parametrize('recipe, needs', {
    'ppo': {'values', 'ref_logprobs', 'old_logprobs'},
    'grpo': {'ref_logprobs'}, 'reinforce': {'ref_logprobs'},
    'reinforce_plus_plus': {'ref_logprobs', 'old_logprobs'},
    'dr_grpo': set(), 'dapo': set(), 'gspo': set(), 'dspo': set(),
    'gmpo': set(), 'rloo': set(), 'hrpo': set(), 'sft': set(),
    'mt_grpo': {'ref_logprobs'}, 'gigpo': {'ref_logprobs'},
    'cispo': set()}.items())
def test_facts_of_the_recipes(recipe, needs):
  algorithm = ALGORITHMS[recipe]
  assert algorithm.needs == needs
  assert (algorithm.level == 'sequence') == (
      recipe in ('gspo', 'dspo', 'gmpo'))
  assert algorithm.min_group_size == 1 + (recipe not in (
      'ppo', 'reinforce', 'reinforce_plus_plus', 'hrpo', 'sft'))
  assert algorithm.one_update == (
      recipe in ('rloo', 'reinforce', 'hrpo', 'sft'))
  assert algorithm.reads_turns == (recipe in ('mt_grpo', 'gigpo'))
  assert (algorithm.keep is algorithms.keep_mixed) == (
      recipe in ('dapo', 'dspo'))
  question = Question('q7', 'Who?', ('She',), hops=2)
  if recipe == 'hrpo':
    assert algorithm.group_of(question) == 2
  else:  # samples asked for together
    assert algorithm.group_of is None


@pytest.mark.parametrize('tokens', ['policy', 'all'])
def test_recipes_that_skip_zeros_have_no_gradient_there(name, tokens):
  """These recipes are those that have no KL, no entropy and no critic."""
  if tokens == 'all' and name not in ON_ALL:
    pytest.skip('not trained on observations')
  algorithm = (ON_ALL if tokens == 'all' else ALGORITHMS)[name]
  batch, zeros = random_batch(), np.array([1, 0, 0, 1, 0, 1, 0, 0], bool)
  out = random_output(batch)
  if tokens == 'all':
    batch, out = with_observations(batch, out)
  advs = jax.tree.map(lambda x: jnp.where(
      zeros.reshape(-1, *[1] * (x.ndim - 1)), 0, x), estimate(algorithm, batch))
  _, gradient = run(algorithm, batch, out, advs)
  moved = [leaf for leaf in jax.tree.leaves(gradient)
           if np.any(leaf[zeros & np.asarray(batch.in_loss)])]
  assert bool(moved) != algorithm.skips_zero
  for leaf in jax.tree.leaves(gradient):
    assert not np.any(leaf[~np.asarray(batch.in_loss)])


def test_the_baseline_of_reinforce_plus_plus_needs_a_group():
  assert ALGORITHMS['reinforce_plus_plus'].min_group_size == 1
  assert ALGORITHMS['reinforce_plus_plus_baseline'].min_group_size == 2


def test_only_the_terms_in_use_ask_for_anything(name, algorithm):
  batch = random_batch()
  for field in ('ref_logprobs', 'values', 'old_logprobs'):
    without = dataclasses.replace(batch, **{field: None})
    trace = functools.partial(jax.eval_shape, functools.partial(
        run_whole, algorithm), without, random_output(batch))
    if field in algorithm.needs or field == 'old_logprobs':
      with pytest.raises(ValueError, match=f'batch.{field} must be scored'):
        trace()
    else:
      trace()


def test_rows_of_an_earlier_policy_keep_their_behavior_logprobs():
  batch = random_batch()
  old = algorithms.denominator_logprobs(batch)
  for row in range(8):
    source = (batch.old_logprobs if batch.on_policy[row]
              else batch.behavior_logprobs)
    mask = batch.loss_mask[row]
    np.testing.assert_array_equal(old[row, mask], source[row, mask])
    # Nobody sampled the others.
    np.testing.assert_array_equal(
        old[row, ~mask], batch.old_logprobs[row, ~mask])


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
  for recipe in ('dspo', 'dapo'):
    np.testing.assert_array_equal(
        ALGORITHMS[recipe].keep(rewards, ids), [1, 1, 0, 0, 1, 0])
  for recipe in ('grpo', 'gspo', 'ppo', 'cispo'):
    assert ALGORITHMS[recipe].keep(rewards, ids).all()


def test_total_of_a_term_without_tokens_is_zero():
  nothing = masked.Mean(jnp.zeros(()), jnp.zeros(()))
  three = masked.Mean(jnp.array(6.0), jnp.array(2.0))
  terms = {'policy': (1.0, three), 'kl': (0.5, nothing)}
  assert algorithms.total(terms) == 3
  assert algorithms.total(terms, {'policy': 12.0, 'kl': 0.0}) == 0.5


# What is refused.


@pytest.mark.parametrize('recipe, options, message', [
    *(('gspo dspo gmpo'.split()[i], dict(aggregation='token_mean'),
       "aggregation must be 'sequence_mean' for .*'token_mean'")
      for i in range(3)),
    *((recipe, dict(aggregation=how),
       f"must be 'sequence_sum' or .* for {recipe}, .* but is '{how}'")
      for recipe in ('rloo', 'hrpo')
      for how in ('token_mean', 'sequence_mean')),
    *((recipe, dict(aggregation='sequence_sum_norm'), 'length must be given')
      for recipe in ('ppo', 'grpo', 'rloo', 'reinforce', 'hrpo',
                     'reinforce_plus_plus')),
    ('dr_grpo', dict(length=0), 'length must be given'),
    ('grpo', dict(aggregation='mean'), 'aggregation must be one of'),
    *((recipe, dict(kl_estimator='k9'), 'kl_estimator must be one of')
      for recipe in ('ppo', 'grpo', 'gspo', 'rloo', 'reinforce_plus_plus')),
    *((recipe, dict(clip_low=1.5), r'clip_low must lie in \[0, 1\]')
      for recipe in ('ppo', 'grpo', 'dapo', 'gspo', 'dspo',
                     'reinforce_plus_plus')),
    ('grpo', dict(clip_high=-0.1), 'clip_high be 0 or more'),
    ('gspo', dict(dual_clip=1.0), 'dual_clip must be above 1'),
    ('gmpo', dict(clip_low=-0.1), 'must be 0 nats or more'),
    ('mt_grpo', dict(turn_coef=-1), 'turn_coef must be 0 or more, but is -1'),
    ('gigpo', dict(step_coef=-1), 'step_coef must be 0 or more, but is -1'),
    ('gigpo', dict(discount=2), r'discount must lie in \[0, 1\], but is 2'),
    ('dapo', dict(buffer=0), r'buffer must lie in \(0, max_length\]'),
    ('dapo', dict(max_length=3, buffer=4), r'\(0, 3\], but is 4'),
])
def test_refuses_what_is_out_of_range(recipe, options, message):
  with pytest.raises(ValueError, match=message):
    getattr(algorithms, recipe)(**options)


@pytest.mark.parametrize('recipe, options, message', [
    ('gspo', {}, "level must be 'sequence' for an algorithm whose ratio"),
    ('grpo', dict(method='trim'), 'method must be one of truncate, mask'),
    ('grpo', dict(level='row'), 'level must be one of token, sequence'),
    ('grpo', dict(low=2.0), '0 <= low < high, but are 2.0 and 2.0'),
])
def test_refuses_a_correction(recipe, options, message):
  with pytest.raises(ValueError, match=message):
    algorithms.corrected(ALGORITHMS[recipe], **options)


@pytest.mark.parametrize('loss', [
    algorithms.objective(lambda logprobs, old, advs, mask: (None, {})),
    lambda policy, batch, advs: ({}, {})])
def test_a_loss_that_knows_no_observations_is_refused_them(loss):
  mine = dataclasses.replace(ALGORITHMS['grpo'], loss=loss)
  with pytest.raises(ValueError, match='algorithm.mask_observations must be True '
                     'for an algorithm whose loss takes no `observed`'):
    algorithms.with_observations(mine)


@pytest.mark.parametrize('recipe, options, message', [
    *((recipe, dict(minibatches=2), 'learner.minibatches must be 1 for')
      for recipe in ('rloo', 'reinforce', 'hrpo')),
    ('ppo', {}, 'critic_optimizer must be given for an algorithm that needs'),
])
def test_a_learner_refuses_what_a_recipe_cannot(recipe, options, message):
  with pytest.raises(ValueError, match=message):
    learners.make(None, ALGORITHMS[recipe], None, meshes.make(), rows=16,
                  length=32, **options)
