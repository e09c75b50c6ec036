# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""learner: the gradient of one whole batch, however it is split and sharded."""

import contextlib
import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from searchrl.models import policy_logprobs
from searchrl.rl import algorithms
from searchrl.rl import diagnostics
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners
from searchrl.trajectory import Batch

DEVICES = 8

CONFIG = dataclasses.replace(tiny.CONFIG, num_attention_heads=8)
ROWS, LENGTH, FILLER = 16, 24, 4
TEMPERATURE = 0.9
# Every kind of term; a step along the gradient shows its every digit.
ALGORITHM = algorithms.grpo(kl_coef=0.1, entropy_coef=0.01)
OPTIMIZER = optax.sgd(0.1)


def make(mesh=None, algorithm=ALGORITHM, **options):
  options = dict(
      rows=ROWS, length=LENGTH, temperature=TEMPERATURE) | options
  mesh = mesh or meshes.make(devices=jax.devices()[:1])
  return learners.make(CONFIG, algorithm, OPTIMIZER, mesh, **options)


@pytest.fixture(scope='module')
def params():
  return jax.device_get(tiny.params(CONFIG))


@pytest.fixture(scope='module')
def ref_params():
  return jax.device_get(tiny.params(CONFIG, seed=1))


@pytest.fixture(scope='module')
def learner():
  return make()


def ragged_batch():
  """Ragged rows of four groups, the last rows empty, three rows off-policy."""
  rng = np.random.default_rng(0)
  mask = rng.random((ROWS, LENGTH)) < 0.5
  mask &= np.arange(LENGTH) < np.where(
      np.arange(ROWS) % 3, rng.integers(3, 11, ROWS),
      rng.integers(14, LENGTH + 1, ROWS))[:, None]
  mask[:, 0] = False
  mask[0] = np.arange(LENGTH) > 0
  mask[-FILLER:] = False
  real = mask.any(1)
  rewards = np.where(real, rng.random(ROWS), 0).astype(np.float32)
  return Batch(
      tokens=rng.integers(0, 96, mask.shape, np.int32), loss_mask=mask,
      behavior_logprobs=np.where(mask, -rng.exponential(
          size=mask.shape), 0).astype(np.float32),
      rewards=rewards, outcome_rewards=rewards,
      question_ids=np.arange(ROWS) // 4, group_ids=np.arange(ROWS) // 4,
      in_baseline=real, in_loss=real,
      on_policy=real & (np.arange(ROWS) % 5 > 0))


@pytest.fixture(scope='module')
def batch(learner, params, ref_params):
  return scored_whole(learner, learner.init(params), ragged_batch(), ref_params)


def scored_whole(learner, state, batch, base):
  """A batch with all `old_logprobs`, which an update would partly compute."""
  packed = learner.score(state, batch, base)
  return dataclasses.replace(
      packed.batch, old_logprobs=learner.logprobs(state, packed, base))


def update(learner, state, batch, **options):
  """An update on a batch that was scored before."""
  return learner.update(state, learner.pack(batch), **options)[:2]


@functools.partial(jax.jit, static_argnames='algorithm')
def whole_step(params, batch, algorithm=ALGORITHM):
  """One step on a batch as it is; and its metrics."""
  def loss(params):
    out = algorithms.PolicyOutput(*policy_logprobs.token_logprobs(
        params, batch.tokens, CONFIG, temperature=TEMPERATURE))
    terms, metrics = algorithm.loss(out, batch, algorithm.advantages(batch))
    return algorithms.total(terms), metrics

  grads, metrics = jax.grad(loss, has_aux=True)(params)
  updates, _ = OPTIMIZER.update(grads, OPTIMIZER.init(params), params)
  return optax.apply_updates(params, updates), {
      name: mean.value for name, mean in metrics.items()}


@pytest.fixture(scope='module')
def expected(batch, params):
  """The step that the filler rows must not change."""
  real = jax.tree.map(lambda x: x[:-FILLER], batch)
  return jax.device_get(whole_step(params, real))


OF_THE_BATCH = {  # reported once, not by every optimiser step
    'train/empty_rows', 'train/frac_rows_trained', 'actor/reference_kl',
    'critic/advantages/mean',
    'critic/advantages/max', 'critic/advantages/min'}
MISMATCH = ('training/rollout_', 'rollout_corr/')


def assert_same(updated, expected, atol):
  params, metrics = expected
  state, ours = updated
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol),
               jax.device_get(state['policy'].params), params)
  assert {name for name in ours if not name.startswith(MISMATCH)} == {
      *metrics, 'actor/grad_norm', 'actor/updates_left_out',
      'perf/useful_tokens', *OF_THE_BATCH}
  assert ours['actor/updates_left_out'] == 0
  for name, value in metrics.items():
    np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=atol,
                               err_msg=name)


def test_an_update_is_the_gradient_of_the_whole_batch(
    learner, batch, params, expected):
  updated = update(learner, learner.init(params), batch)
  assert_same(updated, expected, atol=1e-6)
  moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), params, expected[0])
  assert max(jax.tree.leaves(moved)) > 1e-3
  assert int(updated[0]['policy'].updates) == 1
  np.testing.assert_allclose(
      updated[1]['actor/grad_norm'], float(optax.global_norm(jax.tree.map(
          lambda x, y: (x - y) / 0.1, params, expected[0]))), rtol=1e-3)


@pytest.fixture(scope='module')
def halves():
  return make(minibatches=2, remat=True)


def test_two_micro_batches_and_remat_change_nothing(
    halves, batch, params, expected):
  learner = dataclasses.replace(halves, minibatches=1)
  assert_same(
      update(learner, learner.init(params), batch), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('options', [
    dict(max_segments=1), dict(max_segments=5, fit_segments=True),
    dict(max_segments=2, microbatch_rows=2),
    dict(pack_length=4 * LENGTH, microbatch_rows=1),
    dict(pack_length=2 * LENGTH, max_segments=3, microbatch_rows=5)])
def test_how_trajectories_lie_in_rows_changes_nothing(
    options, batch, params, expected):
  learner = make(**options)
  packed = learner.pack(batch)
  minibatch, = packed.minibatches
  assert minibatch.useful == batch.lengths.sum() / (
      minibatch.count * learner.microbatch_rows * learner.pack_length)
  state, metrics, *_ = learner.update(learner.init(params), packed)
  assert metrics['perf/useful_tokens'] == minibatch.useful
  assert_same((state, metrics), expected, atol=1e-6)


def test_what_filler_rows_hold_changes_nothing(learner, batch, params):
  filler = np.arange(ROWS) >= ROWS - FILLER
  other = dataclasses.replace(
      batch, tokens=np.where(filler[:, None], 5, batch.tokens),
      group_ids=np.where(filler, 0, batch.group_ids),
      question_ids=np.where(filler, 0, batch.question_ids))
  one, two = (update(learner, learner.init(params), b) for b in (batch, other))
  jax.tree.map(np.testing.assert_array_equal, one[0]['policy'].params,
               two[0]['policy'].params)
  assert one[1] == two[1]


@pytest.mark.slow
@pytest.mark.parametrize('layout', [
    (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 1, 4), (2, 2, 2)])
def test_eight_devices_make_the_update_of_one(layout, batch, params, expected):
  mesh = meshes.make(**dict(zip(meshes.AXES, layout)))
  learner = make(mesh)
  state = learner.init(params)
  kernel = state['policy'].params['layers']['gate']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (
      2, 32 // layout[1], 48 // layout[2])
  scored = scored_whole(learner, state, dataclasses.replace(
      batch, old_logprobs=None), params)
  np.testing.assert_allclose(scored.old_logprobs, batch.old_logprobs, atol=1e-5)
  state, metrics = update(learner, state, batch)
  assert_same((state, metrics), expected, atol=1e-5)
  updated = state['policy'].params['layers']['gate']['kernel']
  assert updated.sharding.is_equivalent_to(kernel.sharding, 3)


@pytest.mark.parametrize('data, rows', [(1, 2), (1, 4), (2, 2)])
def test_one_step_begins_with_the_old_log_probs(
    data, rows, batch, params, ref_params, expected):
  learner = make(meshes.make(data=data, devices=jax.devices()[:data]),
                 microbatch_rows=rows)
  state = learner.init(params)
  unscored = learner.score(state, ragged_batch(), ref_params)
  assert unscored.batch.old_logprobs is None
  np.testing.assert_allclose(
      unscored.batch.ref_logprobs, batch.ref_logprobs, atol=1e-5)
  updated = learner.update(state, unscored)[:2]
  assert_same(updated, expected, atol=1e-5)
  for name, value in diagnostics.mismatch(
      batch, np.ones(ROWS, bool)).items():
    np.testing.assert_allclose(updated[1][name], value, rtol=1e-3, atol=1e-6,
                               err_msg=name)


@pytest.mark.slow
def test_observations_are_trained_on_in_packed_rows_too(
    batch, params, ref_params, expected):
  """Their old log-probs are those that the policy computes on the way."""
  on_all = algorithms.with_observations(ALGORITHM)
  learner = make(algorithm=on_all, microbatch_rows=4, pack_length=2 * LENGTH)
  state = learner.init(params)
  unscored = learner.score(state, ragged_batch(), ref_params)
  scored = scored_whole(learner, state, ragged_batch(), ref_params)
  assert scored.old_logprobs[~batch.loss_mask].any()
  real = jax.tree.map(lambda x: x[:-FILLER], scored)
  wanted = jax.device_get(whole_step(params, real, algorithm=on_all))
  updated = learner.update(state, unscored)[:2]
  assert_same(updated, wanted, atol=1e-5)
  change = jax.tree.map(lambda x, y: np.abs(x - y).max(), wanted[0],
                        expected[0])
  assert max(jax.tree.leaves(change)) > 1e-3


@pytest.mark.parametrize('minibatches', [1, 2])
def test_advantages_that_read_the_old_log_probs_have_them(
    minibatches, batch, params):
  weighted = algorithms.corrected(ALGORITHM)
  learner = learners.make(
      CONFIG, weighted, OPTIMIZER, meshes.make(devices=jax.devices()[:1]),
      rows=ROWS, length=LENGTH, temperature=TEMPERATURE,
      minibatches=minibatches)
  assert learner.scores_old and not make().scores_old
  scored = learner.score(learner.init(params), ragged_batch(), params)
  np.testing.assert_allclose(
      scored.batch.old_logprobs, batch.old_logprobs, atol=1e-5)


def test_score_gives_the_log_probs_of_both_policies(batch, params, ref_params):
  for weights, scored in ((params, batch.old_logprobs),
                          (ref_params, batch.ref_logprobs)):
    logprobs, _ = jax.jit(functools.partial(
        policy_logprobs.token_logprobs, config=CONFIG, temperature=TEMPERATURE))(
            weights, batch.tokens)
    # Of the sampled tokens: an algorithm that skips others reads no others.
    known = np.arange(LENGTH) < np.asarray(batch.lengths)[:, None]
    assert (known & ~batch.loss_mask)[:, 1:].any()
    np.testing.assert_allclose(
        scored, np.where(batch.loss_mask, logprobs, 0), atol=1e-5)
    assert isinstance(scored, np.ndarray) and scored.dtype == np.float32


def test_mini_batches_are_steps_one_after_the_other(halves, batch, params):
  state, metrics = update(halves, halves.init(params), batch)
  assert int(state['policy'].updates) == 2
  one = dataclasses.replace(halves, minibatches=1)
  stepped, seen = one.init(params), []
  for rows in (slice(0, 8), slice(8, 16)):  # no group is in both
    stepped, of_half = update(one, stepped, jax.tree.map(
        lambda x: x[rows], batch))
    seen.append(of_half)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
               state['policy'].params, stepped['policy'].params)
  for name in metrics.keys() - OF_THE_BATCH:
    if name.startswith(MISMATCH):
      continue  # these, too, are the batch's
    np.testing.assert_allclose(
        metrics[name], np.mean([of_half[name] for of_half in seen]), rtol=1e-5)


def test_the_first_step_computes_its_own_old_log_probs(
    halves, batch, params, ref_params):
  state = halves.init(params)
  packed = halves.score(state, ragged_batch(), ref_params)
  is_nan = np.isnan(packed.batch.old_logprobs)
  assert is_nan[:8].all() and not is_nan[8:].any()
  np.testing.assert_allclose(
      packed.batch.old_logprobs[8:], batch.old_logprobs[8:], atol=1e-5)
  state, metrics, updated, *_ = halves.update(state, packed)
  np.testing.assert_allclose(
      np.where(batch.loss_mask, updated.old_logprobs, 0),
      np.where(batch.loss_mask, batch.old_logprobs, 0), atol=1e-5)
  expected, wanted = update(halves, halves.init(params), batch)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
               state['policy'].params, expected['policy'].params)
  assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_mini_batches_share_the_baselines_of_the_whole_batch(
    halves, batch, params):
  """Although their rows are trained on one after the other."""
  mixed = dataclasses.replace(batch, group_ids=np.arange(ROWS) % 4)
  state, _ = update(halves, halves.init(params), mixed)
  one = dataclasses.replace(
      halves, minibatches=1, train_step=copy.copy(halves.train_step))
  stepped = one.init(params)
  whole = np.asarray(ALGORITHM.advantages(mixed))
  for rows in (slice(0, 8), slice(8, 16)):
    vars(one.train_step)['advantages'] = lambda _, rows=rows: whole[rows]
    stepped, _ = update(one, stepped, jax.tree.map(lambda x: x[rows], mixed))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
               state['policy'].params, stepped['policy'].params)


def test_a_batch_of_filler_changes_nothing(learner, batch, params):
  empty = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
  state, metrics = update(learner, learner.init(params), empty)
  jax.tree.map(np.testing.assert_array_equal, state['policy'].params, params)
  assert int(state['policy'].updates) == 0
  assert metrics == {'train/empty_rows': ROWS}


UNIFORM = np.array([1, 0, 1, 0])  # 1: all rewards of the group are equal


def with_uniform_groups(batch, uniform=UNIFORM):
  """The batch, with the reward .3 in some groups; its recipe has no KL."""
  rewards = np.where(np.repeat(uniform, 4) & batch.in_loss, 0.3, batch.rewards)
  return dataclasses.replace(
      batch, rewards=rewards.astype(np.float32), ref_logprobs=None)


RECIPES_THAT_SKIP = {
    'grpo_token_mean': algorithms.grpo(kl_coef=0, aggregation='token_mean'),
    'dr_grpo': algorithms.dr_grpo(length=20),
    'gspo': algorithms.gspo(clip_low=.1, clip_high=.1),
    'sft': algorithms.sft(),
    'all_tokens': algorithms.with_observations(algorithms.grpo(kl_coef=0)),
    'truncated': algorithms.corrected(algorithms.grpo(kl_coef=0)),
}


@pytest.mark.parametrize('name', [
    name if name == 'grpo_token_mean' else
    pytest.param(name, marks=pytest.mark.slow) for name in RECIPES_THAT_SKIP])
def test_rows_of_advantage_0_change_the_gradient_by_rounding_only(
    name, batch, params):
  """An update without them is one step on the whole batch as it is."""
  algorithm = RECIPES_THAT_SKIP[name]
  assert algorithm.skips_zero
  mixed = with_uniform_groups(batch)
  if name == 'sft':  # its advantage is the reward
    mixed = dataclasses.replace(mixed, rewards=np.where(
        np.repeat(UNIFORM, 4), 0, mixed.rewards))
  skipping = make(algorithm=algorithm, microbatch_rows=1)
  state, metrics, _, _, trained = skipping.update(
      skipping.init(params), skipping.pack(mixed))
  expected, _ = whole_step(params, mixed, algorithm=algorithm)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
               jax.device_get(state['policy'].params), expected)
  real = mixed.loss_mask.any(1)
  assert trained[real].tolist() == (np.repeat(UNIFORM, 4) == 0)[real].tolist()
  assert metrics['train/frac_rows_trained'] == trained[real].mean()


def test_rows_of_advantage_0_are_neither_scored_nor_packed(batch, params):
  """The other rows keep their mini-batch, whose metrics are theirs."""
  skipping = make(algorithm=algorithms.grpo(kl_coef=0), minibatches=2,
                  microbatch_rows=1)
  mixed = dataclasses.replace(with_uniform_groups(batch), old_logprobs=None)
  packed = skipping.score(skipping.init(params), mixed)
  first, second = packed.minibatches
  real = set(np.flatnonzero(mixed.loss_mask.any(1)))
  assert set(sum(first.documents, [])) == real & {4, 5, 6, 7}
  assert not second.documents and second.count == 0  # group 3 is empty
  state, metrics, updated, *_ = skipping.update(skipping.init(params), packed)
  np.testing.assert_allclose(
      updated.old_logprobs[4:8][mixed.loss_mask[4:8]],
      batch.old_logprobs[4:8][mixed.loss_mask[4:8]], atol=1e-5)
  assert int(state['policy'].updates) == 2
  alone = dataclasses.replace(skipping, minibatches=1)
  _, of_group, *_ = alone.update(alone.init(params), alone.pack(
      jax.tree.map(lambda x: x[4:8], packed.batch)))
  for name in ('actor/entropy', 'actor/pg_loss', 'perf/useful_tokens'):
    np.testing.assert_allclose(metrics[name], of_group[name], rtol=1e-4)


@pytest.mark.parametrize('algorithm', [
    ALGORITHM, algorithms.grpo(kl_coef=0, entropy_coef=0.01)])
def test_no_row_is_skipped_that_the_kl_or_the_entropy_needs(
    algorithm, batch, params):
  assert not algorithm.skips_zero
  mixed = dataclasses.replace(
      with_uniform_groups(batch), ref_logprobs=batch.ref_logprobs)
  learner = make(algorithm=algorithm)
  assert learner._trained(mixed, algorithm.advantages(mixed)).all()


def test_a_batch_of_advantage_0_is_an_update_by_momentum(batch, params):
  """The update is the one that a computed gradient of 0 would make."""
  uniform = with_uniform_groups(batch, np.ones(4, int))
  adam = optax.adam(1e-3)
  state, after = {}, {}
  for skips in (True, False):
    learner = learners.make(
        CONFIG, dataclasses.replace(
            algorithms.grpo(kl_coef=0), skips_zero=skips),
        adam, meshes.make(devices=jax.devices()[:1]), rows=ROWS, length=LENGTH)
    state, _ = update(
        learner, learner.init(params), with_uniform_groups(batch))
    before = jax.device_get(state['policy'].params)
    after[skips], metrics = update(learner, state, uniform)
    assert metrics['actor/grad_norm'] == 0
    assert ('actor/entropy' in metrics) != skips
    assert metrics['train/frac_rows_trained'] == 1 - skips
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
               jax.device_get(after[True]), jax.device_get(after[False]))
  moved = jax.tree.map(
      lambda x, y: np.abs(x - y).max(), before, after[False]['policy'].params)
  assert max(jax.tree.leaves(moved)) > 1e-4
  assert int(after[True]['policy'].updates) == 2


def test_updates_leave_the_parameters_given_to_init_alone(learner, batch):
  given = tiny.params(CONFIG)
  before = jax.tree.map(lambda x: np.array(x, copy=True), given)
  state = learner.init(given)
  for _ in range(2):
    state, _ = update(learner, state, batch)
  jax.tree.map(np.testing.assert_array_equal, given, before)
  assert jax.tree.map(jnp.shape, state['policy'].params) == jax.tree.map(
      jnp.shape, given)


def test_what_takes_time_is_timed_under_its_name(learner, batch, params):
  names = []

  @contextlib.contextmanager
  def timer(name):
    names.append(name)
    yield
    names.append(f'{name} is over')

  state = learner.init(params)
  scored = make(minibatches=2).score(state, batch, params, timer=timer)
  assert names == ['old_log_prob', 'old_log_prob is over', 'ref', 'ref is over']
  names.clear()
  learner.update(state, scored, timer=timer)
  assert names == ['adv', 'adv is over', 'update_actor', 'update_actor is over']


def test_moments_are_sharded_like_their_parameters(params):
  learner = learners.make(
      CONFIG, ALGORITHM, optax.adam(1e-3), meshes.make(data=2, fsdp=4),
      rows=ROWS, length=LENGTH)
  state = learner.init(params)
  moments = state['policy'].opt_state[0].mu
  jax.tree.map(
      lambda x, y: (x.sharding.is_equivalent_to(y.sharding, x.ndim)
                    or pytest.fail(f'{x.sharding} is not {y.sharding}')),
      state['policy'].params, moments)
  assert state['policy'].opt_state[0].count.sharding.is_fully_replicated


@pytest.mark.parametrize('options, message', [
    (dict(rows=16, minibatches=3), 'divide the rows of a batch, 16, but is 3'),
    (dict(pack_length=LENGTH - 1),
     'at least rollout.max_length=24 .* are 23 and 16'),
    (dict(max_segments=0), 'must be 1 or more, but they are 24 and 0'),
    (dict(max_segments=LENGTH), 'above learner.max_segments'),
    (dict(rows=16, microbatch_rows=4, mesh=dict(data=8)),
     r'multiple of the mesh.s data \* fsdp \* expert = 8, but is 4'),
])
def test_numbers_that_do_not_fit_are_refused(options, message):
  options = dict(options)
  mesh = meshes.make(**options.pop('mesh')) if 'mesh' in options else None
  with pytest.raises(ValueError, match=message):
    make(mesh, **options)


def test_a_model_that_does_not_split_over_the_mesh_is_refused(params):
  learner = learners.make(
      dataclasses.replace(CONFIG, vocab_size=92), ALGORITHM, OPTIMIZER,
      meshes.make(data=1, tensor=8), rows=ROWS, length=LENGTH)
  cut = {**params, 'embed': {'embedding': params['embed']['embedding'][:92]}}
  with pytest.raises(ValueError, match='dimension 0 .vocab. is 92 and the mesh '
                                       'has tensor=8'):
    learner.init(cut)


def test_a_metric_that_micro_batches_would_add_up_is_refused(batch, params):
  def loss(output, batch, advantages):
    terms, metrics = ALGORITHM.loss(output, batch, advantages)
    return terms, metrics | {'own/number': jnp.float32(1)}

  learner = make(algorithm=dataclasses.replace(ALGORITHM, loss=loss))
  with pytest.raises(ValueError, match="be searchrl.masked.Mean, but 'own/num"):
    update(learner, learner.init(params), batch)


def test_advantages_that_are_no_array_are_refused(batch, params):
  learner = make(algorithm=dataclasses.replace(
      ALGORITHM, advantages=lambda batch: {'a': batch.rewards}))
  with pytest.raises(ValueError, match='an array or an Estimate, but .* dict'):
    update(learner, learner.init(params), batch)
