# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""critic: values of what came before; and the learner that trains one."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import learner_test as learning
import numpy as np
import optax
import pytest
import tiny

from searchrl.models import critic
from searchrl.models import policy_logprobs
from searchrl.models import transformer
from searchrl.rl import algorithms
from searchrl.rl import losses
from searchrl.rl import masked
from searchrl.runtime import checkpoint
from searchrl.runtime import mesh as meshes
from searchrl.training import learner as learners

DEVICES = 8

CONFIG, ROWS, LENGTH = learning.CONFIG, learning.ROWS, learning.LENGTH
ALGORITHM = algorithms.ppo(
    entropy_coef=0.01, discount=0.99, gae_lambda=0.9, kl_coef=0.1)
POLICY_RATE, CRITIC_RATE = 0.1, 0.02
STEPS = 3


def make(mesh=None, optimizer=optax.sgd(POLICY_RATE), **options):
  options = dict(rows=ROWS, length=LENGTH, temperature=learning.TEMPERATURE,
                 critic_optimizer=optax.sgd(CRITIC_RATE)) | options
  return learners.make(
      CONFIG, ALGORITHM, optimizer,
      mesh or meshes.make(devices=jax.devices()[:1]), **options)


@pytest.fixture(scope='module')
def params():
  return jax.device_get(tiny.params(CONFIG))


@pytest.fixture(scope='module')
def learner():
  return make()


@pytest.fixture(scope='module')
def batch(learner, params):
  """Scored by another policy as a reference; with random values."""
  scored = learner.score(
      learner.init(params), learning.ragged_batch(),
      tiny.params(CONFIG, 1)).batch
  values = np.random.default_rng(1).normal(size=scored.values.shape)
  return dataclasses.replace(scored, values=values.astype(np.float32))


@pytest.fixture(scope='module')
def random_critic(params):
  """A critic with a random head: a fresh one has no gradient below it."""
  rng = np.random.default_rng(2)
  kernel = 0.2 * rng.normal(size=(32, 1)).astype(np.float32)
  return critic.init(params) | {'value': {
      'kernel': kernel, 'bias': np.full(1, 0.25, np.float32)}}


def start(learner, params, random_critic):
  """The learner's first state, with that critic in it."""
  state = learner.init(params)
  placed = jax.tree.map(
      lambda x, like: jax.device_put(np.array(x), like.sharding),
      random_critic, state['critic'].params)
  return state | {'critic': dataclasses.replace(
      state['critic'], params=placed)}


@jax.jit
def whole_step(policy_params, critic_params, batch):
  """One step of each network on a batch as it is."""
  estimate = ALGORITHM.advantages(batch)
  mask = algorithms.trained_tokens(batch)

  def policy_loss(params):
    out = algorithms.PolicyOutput(*policy_logprobs.token_logprobs(
        params, batch.tokens, CONFIG, temperature=learning.TEMPERATURE),
                                  values=jnp.zeros(mask.shape))
    terms, _ = ALGORITHM.loss(out, batch, estimate)
    return algorithms.total({k: terms[k] for k in ('policy', 'entropy')})

  def value_loss(params):
    values = critic.token_values(params, batch.tokens, CONFIG)
    return masked.mean(losses.value_loss(
        values, batch.values, estimate.returns, mask), mask)

  def step(loss, params, rate):
    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda x, g: x - rate * g, params, grads)

  _, policy_params = step(policy_loss, policy_params, POLICY_RATE)
  loss, critic_params = step(value_loss, critic_params, CRITIC_RATE)
  return policy_params, critic_params, loss


@pytest.fixture(scope='module')
def expected(batch, params, random_critic):
  """Policy, critic and value losses after STEPS; filler rows left out."""
  real = jax.tree.map(lambda x: x[:-learning.FILLER], batch)
  ours, fitted, value_losses = params, random_critic, []
  for _ in range(STEPS):
    ours, fitted, loss = whole_step(ours, fitted, real)
    value_losses.append(float(loss))
  return jax.device_get((ours, fitted, value_losses))


def assert_updates(learner, batch, state, expected, atol=1e-6):
  """STEPS updates are the expected ones."""
  value_losses = []
  for _ in range(STEPS):
    state, metrics = learning.update(learner, state, batch)
    value_losses.append(metrics['critic/vf_loss'])
  for ours, theirs in zip((state['policy'].params, state['critic'].params),
                          expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol),
                 jax.device_get(ours), theirs)
  np.testing.assert_allclose(value_losses, expected[2], rtol=1e-4)
  return state


def assert_equal(one, two):
  jax.tree.map(np.testing.assert_array_equal, one, two)


# The model.


@pytest.mark.parametrize('tied', [False, True])
def test_a_fresh_critic_has_the_backbone_and_values_of_0(tied):
  config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
  params = tiny.params(config)
  fresh = critic.init(params)
  assert_equal({k: fresh[k] for k in fresh if k != 'value'},
               {k: params[k] for k in params if k != 'head'})
  tokens = np.arange(12).reshape(2, 6)
  values = values_of(fresh, tokens)
  assert values.shape == (2, 6) and values.dtype == jnp.float32
  np.testing.assert_array_equal(values, 0)
  # Axes are tuples, and so are no part of the tree.
  jax.tree.map(lambda leaf, axes: leaf.ndim == len(axes) or pytest.fail(
      f'{leaf.shape} {axes}'), fresh, critic.logical_axes(config))


@jax.jit
def values_of(params, tokens):
  return critic.token_values(params, tokens, CONFIG)


def test_a_value_depends_on_earlier_tokens_alone(random_critic):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 96, (1, 9))
  before = np.array(values_of(random_critic, tokens))
  assert before[0, 0] == 0 and np.all(before[0, 1:] != 0)
  for t in range(9):
    changed = tokens.copy()
    changed[0, t] = (changed[0, t] + 1) % 96
    after = np.array(values_of(random_critic, changed))
    np.testing.assert_array_equal(after[0, :t + 1], before[0, :t + 1])
    assert np.all(after[0, t + 1:] != before[0, t + 1:])


def test_a_value_is_a_linear_reading_of_the_state_before(random_critic):
  tokens = np.arange(10).reshape(2, 5)
  hidden = np.asarray(jax.jit(lambda params: transformer.forward(
      params, tokens, CONFIG))(random_critic), np.float64)
  kernel, bias = (np.asarray(random_critic['value'][name], np.float64)
                  for name in ('kernel', 'bias'))
  np.testing.assert_allclose(
      values_of(random_critic, tokens)[:, 1:],
      (hidden @ kernel + bias)[:, :-1, 0], rtol=1e-4, atol=1e-5)


# What the learner does with it.


def test_updates_are_gradients_of_the_whole_batch(
    learner, batch, params, random_critic, expected):
  state = start(learner, params, random_critic)
  state = assert_updates(learner, batch, state, expected)
  assert int(state['policy'].updates) == int(
      state['critic'].updates) == STEPS
  assert expected[2][0] > expected[2][1] > expected[2][2]  # it learns
  backbones = (jax.device_get(state['policy'].params['layers']),
               jax.device_get(state['critic'].params['layers']),
               params['layers'])
  for one, two in ((0, 1), (0, 2), (1, 2)):
    apart = jax.tree.map(
        lambda x, y: np.abs(x - y).max(), backbones[one], backbones[two])
    assert max(jax.tree.leaves(apart)) > 1e-4


def test_how_trajectories_lie_in_rows_changes_nothing(
    batch, params, random_critic, expected):
  learner = make(microbatch_rows=2, pack_length=2 * LENGTH, remat=True)
  minibatch, = learner.pack(batch).minibatches
  assert minibatch.rows.batch.values.shape == (8, 2, 2 * LENGTH)
  assert minibatch.count > 1 and max(map(len, minibatch.documents)) > 1
  assert_updates(
      learner, batch, start(learner, params, random_critic), expected)


@pytest.mark.slow
@pytest.mark.parametrize('layout', [(8, 1, 1), (2, 2, 2)])
def test_eight_devices_make_the_updates_of_one(
    layout, batch, params, random_critic, expected):
  learner = make(meshes.make(**dict(zip(meshes.AXES, layout))))
  state = assert_updates(learner, batch, start(learner, params, random_critic),
                         expected, atol=1e-5)
  for leaf, shape in (
      (state['critic'].params['value']['kernel'], (32 // layout[1], 1)),
      (state['critic'].params['layers']['gate']['kernel'],
       (2, 32 // layout[1], 48 // layout[2]))):
    assert leaf.sharding.shard_shape(leaf.shape) == shape


def test_score_adds_values_and_every_part_is_timed(
    learner, params, random_critic):
  names = []

  @contextlib.contextmanager
  def timer(name):
    names.append(name)
    yield

  state = start(learner, params, random_critic)
  batch = learning.ragged_batch()
  packed = learner.score(state, batch, params, timer=timer)
  scored = packed.batch
  assert names == ['old_log_prob', 'ref', 'values']
  values = values_of(random_critic, batch.tokens)
  np.testing.assert_allclose(scored.values[batch.loss_mask],
                             values[batch.loss_mask], atol=1e-5)
  assert isinstance(scored.values, np.ndarray)
  np.testing.assert_array_equal(scored.old_logprobs, scored.ref_logprobs)
  metrics = learner.update(state, packed, timer=timer).metrics
  assert names[3:] == ['adv', 'update_actor']
  where = batch.loss_mask
  np.testing.assert_allclose(
      metrics['critic/values/mean'], scored.values[where].mean(), rtol=1e-5)
  assert {'critic/vf_loss', 'critic/vf_clipfrac', 'critic/vpred_mean',
          'critic/vf_explained_var', 'critic/grad_norm', 'critic/returns/max',
          'critic/advantages/mean', 'actor/grad_norm', 'actor/reference_kl',
          'actor/pg_loss', 'train/empty_rows'} <= set(metrics)
  assert metrics['actor/reference_kl'] == 0


def test_updates_leave_what_init_was_given_alone(learner, batch):
  given = tiny.params(CONFIG)
  before = jax.tree.map(lambda x: np.array(x, copy=True), given)
  state = learner.init(given)
  fresh = learner.init(given)
  for _ in range(STEPS):
    state, _ = learning.update(learner, state, batch)
  assert_equal(given, before)
  assert_equal(fresh['policy'].params, before)
  assert_equal(fresh['critic'].params, critic.init(before))


def test_a_critic_changes_nothing_about_the_policy(learner, batch, params):
  """Whatever its optimiser does: only the advantages connect the two."""
  still = make(critic_optimizer=optax.sgd(0.0))
  one, _ = learning.update(learner, learner.init(params), batch)
  two, _ = learning.update(still, still.init(params), batch)
  assert_equal(one['policy'].params, two['policy'].params)
  assert_equal(two['critic'].params, critic.init(params))
  assert np.any(np.array(one['critic'].params['value']['kernel']))


@pytest.fixture(scope='module')
def warming():
  """Returns a learner whose optimisers have moments, with two steps a batch."""
  adam = optax.adam(1e-3)
  return make(optimizer=adam, critic_optimizer=adam, minibatches=2,
              critic_warmup=3)


def test_the_policy_waits_until_the_critic_is_warm(warming, batch, params):
  state = warming.init(params)
  before = jax.device_get(state)
  state, metrics = learning.update(warming, state, batch)
  assert_equal(state['policy'], before['policy'])
  assert int(state['critic'].updates) == 2
  assert np.any(np.array(state['critic'].params['value']['kernel']))
  assert 'actor/grad_norm' not in metrics and metrics['critic/grad_norm'] > 0
  assert metrics['actor/pg_loss'] == pytest.approx(0, abs=1)
  # The third step is the critic's alone, the fourth is the policy's first.
  state, metrics = learning.update(warming, state, batch)
  assert int(state['critic'].updates) == 4
  assert int(state['policy'].updates) == 1
  assert int(state['policy'].opt_state[0].count) == 1
  assert metrics['actor/grad_norm'] > 0
  moved = jax.tree.map(
      lambda x, y: np.abs(x - y).max(), state['policy'].params,
      before['policy'].params)
  assert max(jax.tree.leaves(jax.device_get(moved))) > 1e-4


def test_a_checkpoint_holds_the_critic_bit_for_bit(
    warming, batch, params, tmp_path):
  state, _ = learning.update(warming, warming.init(params), batch)
  digest = checkpoint.digest(state)
  checkpoint.save(tmp_path, 1, state, {'step': 1})
  _, restored, _ = checkpoint.restore(tmp_path, warming.init(params))
  assert checkpoint.digest(restored) == digest
  one, two = (learning.update(warming, s, batch)[0] for s in (state, restored))
  assert int(two['policy'].updates) == 1  # the warm-up is counted on
  assert checkpoint.digest(one) == checkpoint.digest(two)
