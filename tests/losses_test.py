# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""losses: each against its definition, in value and in gradient.

Entries outside the mask are poisoned with NaN and infinities throughout.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import losses

pytestmark = pytest.mark.usefixtures('no_silent_broadcasting')
CLIP = dict(clip_low=0.2, clip_high=0.3)
LOW_HIGH = tuple(CLIP.values())
SMALL, REALISTIC = (7, 6), (16, 200)


def random_inputs(
    seed=0, dtype=np.float64, gap=0.4, poisoned=True, shape=SMALL):
  """logprobs, old_logprobs, advantages [B], mask; rows drift, tokens too."""
  rng = np.random.default_rng(seed)
  mask = oracles.ragged_mask(rng, *shape)
  old = -rng.exponential(size=mask.shape)
  drift = rng.normal(size=(len(mask), 1))
  logprobs = old + gap * (rng.normal(size=mask.shape) + drift) / 2**0.5
  advs = rng.normal(size=len(mask))
  if poisoned:
    logprobs = oracles.poison(rng, logprobs, mask)
    old = oracles.poison(rng, old, mask)
    advs = oracles.poison(rng, advs, mask.any(-1))
  return *(x.astype(dtype) for x in (logprobs, old, advs)), mask


def token_loss(logprobs, old, advs, mask, dual_clip=None):
  return losses.token_ratio_loss(
      logprobs, old, advs, mask, **CLIP, dual_clip=dual_clip)


def sequence_loss(logprobs, old, advs, mask, dual_clip=None):
  return losses.sequence_ratio_loss(
      logprobs, old, advs, mask, **CLIP, dual_clip=dual_clip)


def dual_clipped(ours, oracle, dual):
  return (lambda *args: ours(*args, dual_clip=dual),
          lambda *args: oracle(*args, *LOW_HIGH, dual))


def value_with(clip):
  """A critic's V and V_old, whose returns are half of V_old."""
  return (
      lambda v, old, advs, mask: losses.value_loss(
          v, old, old / 2, mask, value_clip=clip),
      lambda v, old, advs, mask: oracles.value_loss(
          v, old, old / 2, mask, clip))


def kl_with(estimator):
  return (
      lambda logp, ref, advs, mask: losses.kl(
          logp, ref, mask, estimator=estimator),
      lambda logp, ref, advs, mask: oracles.kl(logp, ref, mask, estimator))


def aggregated(how):
  def ours(logp, old, advs, mask):
    per_token = token_loss(logp, old, advs, mask)
    return losses.aggregate(per_token, mask, how=how).value

  def oracle(logp, old, advs, mask):
    per_token = oracles.token_ratio_loss(logp, old, advs, mask, *LOW_HIGH)
    total, count = oracles.aggregate(per_token, mask, how)
    return np.array(total / count)

  return ours, oracle


# Each: logprobs, old (or reference) log-probs, advantages, mask -> values; the
# first alone is differentiated.
FUNCTIONS = {
    'token_ratio': (
        lambda logp, old, advs, mask: losses.token_ratio(logp, old, mask),
        lambda logp, old, advs, mask: oracles.token_ratio(logp, old, mask)),
    'sequence_ratio': (
        lambda logp, old, advs, mask: losses.sequence_ratio(logp, old, mask),
        lambda logp, old, advs, mask: oracles.sequence_ratio(logp, old, mask)),
    'token_ratio_loss': (
        token_loss, lambda *args: oracles.token_ratio_loss(*args, *LOW_HIGH)),
    'sequence_ratio_loss': (
        sequence_loss,
        lambda *args: oracles.sequence_ratio_loss(*args, *LOW_HIGH)),
    'token_dual_clip': dual_clipped(token_loss, oracles.token_ratio_loss, 1.4),
    'sequence_dual_clip': dual_clipped(
        sequence_loss, oracles.sequence_ratio_loss, 1.1),
    'geometric_mean_loss': (
        lambda *args: losses.geometric_mean_loss(*args, **CLIP),
        lambda *args: oracles.geometric_mean_loss(*args, *LOW_HIGH)),
    'score_function_loss': (
        lambda logp, old, advs, mask: losses.score_function_loss(
            logp, advs, mask),
        lambda logp, old, advs, mask: oracles.score_function_loss(
            logp, advs, mask)),
    'value_loss': value_with(None),
    'value_loss_clipped': value_with(0.3),
    **{how: aggregated(how) for how in losses.AGGREGATIONS},
    **{name: kl_with(name) for name in losses.KL_ESTIMATORS},
}


def weighed(function):
  """One number, to which every value adds by a weight, masked ones too."""
  def total(*args):
    values = function(*args)
    return (values * np.random.default_rng(9).normal(size=values.shape)).sum()
  return total


def some_of(mask):
  """About half of each row's tokens, its first one among them."""
  return mask & ((np.arange(mask.shape[1])[None] % 2 == 0)
                 | (mask.cumsum(1) == 1))


def counted(ours, oracle):
  return (
      lambda *args: ours(*args, **CLIP, count_mask=some_of(args[-1])),
      lambda *args: oracle(*args, *LOW_HIGH, count_mask=some_of(args[-1])))


def aggregated_and_counted(how):
  return (
      lambda logp, old, advs, mask: losses.aggregate(
          logp, mask, how=how, length=5, count_mask=some_of(mask)).value,
      lambda logp, old, advs, mask: np.divide(*oracles.aggregate(
          logp, mask, how, 5, some_of(mask))))


COUNTED = {  # sum over more tokens than they count
    'sequence': counted(
        losses.sequence_ratio_loss, oracles.sequence_ratio_loss),
    'geometric': counted(
        losses.geometric_mean_loss, oracles.geometric_mean_loss),
    **{how: aggregated_and_counted(how) for how in losses.AGGREGATIONS},
}


@pytest.mark.parametrize(
    'ours, oracle', (FUNCTIONS | {
        f'{name}_counted': pair for name, pair in COUNTED.items()}).values(),
    ids=[*FUNCTIONS, *(f'{name}_counted' for name in COUNTED)])
def test_agrees_with_loops_in_x64_value_and_gradient(ours, oracle):
  gradient_of = jax.jit(jax.grad(weighed(ours)))
  for seed in range(3):
    logprobs, old, advs, mask = inputs = random_inputs(seed)
    with jax.enable_x64(True):
      value = ours(*map(jnp.asarray, inputs))
      gradient = np.array(gradient_of(*map(jnp.asarray, inputs)))
    np.testing.assert_allclose(value, oracle(*inputs), rtol=1e-9, atol=1e-12)
    expected = oracles.gradient(
        lambda x: weighed(oracle)(x, *inputs[1:]), logprobs, mask)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(gradient[~mask], 0)


@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.parametrize('transform, shape', [
    (lambda f: f, SMALL), (jax.jit, REALISTIC)], ids=['eager', 'jit'])
def test_agrees_with_loops_in_float32(name, transform, shape):
  ours, oracle = FUNCTIONS[name]
  inputs = random_inputs(dtype=np.float32, shape=shape)
  got = transform(ours)(*map(jnp.asarray, inputs))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, oracle(*inputs), rtol=1e-5, atol=1e-6)
  gradient = transform(jax.grad(weighed(ours)))(*map(jnp.asarray, inputs))
  with jax.enable_x64(True):  # which the test above compares with loops
    *floats, mask = inputs
    expected = np.array(jax.jit(jax.grad(weighed(ours)))(
        *(jnp.asarray(x, np.float64) for x in floats), jnp.asarray(mask)))
  np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', FUNCTIONS)
def test_only_logprobs_are_differentiated(name):
  ours, _ = FUNCTIONS[name]
  logprobs, old, advs, mask = random_inputs(dtype=np.float32)
  gradients = jax.grad(
      lambda old, advs: ours(logprobs, old, advs, mask).sum(), (0, 1))(
          jnp.asarray(old), jnp.asarray(advs))
  for gradient in gradients:
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize('ours, oracle', [
    (token_loss, lambda *args: oracles.token_ratio_loss(*args, *LOW_HIGH)),
    FUNCTIONS['token_dual_clip'], FUNCTIONS['score_function_loss']])
def test_advantages_may_belong_to_tokens(ours, oracle):
  rng = np.random.default_rng(3)
  logprobs, old, _, mask = random_inputs()
  advs = oracles.poison(rng, rng.normal(size=mask.shape), mask)
  with jax.enable_x64(True):
    got = ours(*map(jnp.asarray, (logprobs, old, advs, mask)))
  np.testing.assert_allclose(got, oracle(logprobs, old, advs, mask), rtol=1e-9)


WEIGHTS = {
    f'{name}_{level}': (
        functools.partial(ours, level=level, **options),
        functools.partial(oracle, level=level, **options))
    for level in ('token', 'sequence')
    for name, ours, oracle, options in (
        ('truncated', losses.truncated_weights, oracles.truncated_weights,
         dict(high=1.2)),
        ('masked', losses.masked_weights, oracles.masked_weights,
         dict(low=0.8, high=1.3)))
}


@pytest.mark.parametrize('name', WEIGHTS)
def test_weights_agree_with_loops_and_are_constant(name):
  ours, oracle = WEIGHTS[name]
  old, behavior, _, mask = random_inputs()
  expected = oracle(old, behavior, mask)
  assert len(np.unique(expected)) > 2  # beyond the interval, and within
  with jax.enable_x64(True):
    got = jax.jit(ours)(*map(jnp.asarray, (old, behavior, mask)))
  np.testing.assert_allclose(got, expected, rtol=1e-9)
  for shape, transform in ((SMALL, lambda f: f), (REALISTIC, jax.jit)):
    old, behavior, _, mask = random_inputs(dtype=np.float32, shape=shape)
    inputs = *map(jnp.asarray, (old, behavior)), mask
    got = transform(ours)(*inputs)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
        got, oracle(old, behavior, mask), rtol=1e-5, atol=1e-6)
    for gradient in transform(jax.grad(
        lambda *args: weighed(ours)(*args, mask), (0, 1)))(*inputs[:2]):
      np.testing.assert_array_equal(gradient, 0)


def test_entropy_agrees_with_loops_value_and_gradient():
  rng = np.random.default_rng(0)
  mask = oracles.ragged_mask(rng, 5, 4)
  logits = 3 * rng.normal(size=(*mask.shape, 6))
  barred = rng.random(logits.shape) < 0.2  # tokens that cannot be drawn
  barred[..., 0] = False
  logits[barred] = -np.inf
  logits = oracles.poison(rng, logits, mask[..., None])
  logits = logits.astype(np.float32).astype(np.float64)  # exact in both
  free = mask[..., None] & ~barred
  with jax.enable_x64(True):
    value = losses.entropy(jnp.asarray(logits), mask)
    gradient = jax.jit(jax.grad(
        lambda x: weighed(losses.entropy)(x, mask)))(jnp.asarray(logits))
    gradient = np.array(gradient)
  np.testing.assert_allclose(
      value, oracles.entropy(logits, mask), rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(
      gradient, oracles.gradient(
          lambda x: weighed(oracles.entropy)(x, mask), logits, free),
      rtol=1e-9, atol=1e-9)
  np.testing.assert_array_equal(gradient[~free], 0)
  logits = jnp.asarray(logits, jnp.float32)
  for transform in (jax.jit, lambda f: f):
    np.testing.assert_allclose(
        transform(losses.entropy)(logits, mask),
        oracles.entropy(logits, mask), rtol=1e-5, atol=1e-6)
    got = transform(jax.grad(
        lambda x: weighed(losses.entropy)(x, mask)))(logits)
    np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-6)


def test_entropy_of_a_large_vocabulary():
  logits = 3 * np.random.default_rng(0).normal(size=(1, 3, 50_000))
  logits[0, 1] *= 10  # a sharp one
  logits[0, 2] = 100.0  # an even one
  logits, mask = logits.astype(np.float32), np.ones((1, 3), bool)
  np.testing.assert_allclose(
      losses.entropy(jnp.asarray(logits), mask),
      oracles.entropy(logits, mask), rtol=1e-5, atol=1e-6)


def test_overlong_penalty_agrees_with_loops():
  lengths = np.arange(40)
  expected = oracles.overlong_penalty(lengths, 30, 7)
  for transform in (jax.jit, lambda f: f):
    penalty = transform(functools.partial(
        losses.overlong_penalty, max_length=30, buffer=7))
    got = penalty(jnp.asarray(lengths))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
      np.testing.assert_allclose(
          penalty(jnp.asarray(lengths)), expected, rtol=1e-9)


# By hand.


def test_two_tokens_by_hand():
  # Gaps ln 2 and ln 8: s = exp(ln 16 / 2) = 4, clipped for A = +1 alone.
  logprobs = jnp.log(jnp.array([[2.0, 8.0, 5.0]] * 2))
  mask = jnp.array([[True, True, False]] * 2)
  args = logprobs, jnp.zeros((2, 3)), jnp.array([1.0, -1.0]), mask
  clip = dict(clip_low=0.2, clip_high=0.2)
  np.testing.assert_allclose(
      losses.sequence_ratio_loss(*args, **clip), [-1.2, 4.0], rtol=1e-6)
  np.testing.assert_allclose(
      losses.token_ratio_loss(*args, **clip),
      [[-1.2, -1.2, 0.0], [2.0, 8.0, 0.0]], rtol=1e-6)


def test_surrogate_by_hand():
  # Below the range a fall is kept for A > 0 (it may recover), cut for A < 0.
  ratio = jnp.array([0.5, 0.5, 2.0, 2.0, 1.1])
  advs = jnp.array([1.0, -1.0, 1.0, -1.0, 3.0])
  got = losses.clipped_surrogate(ratio, advs, clip_low=0.2, clip_high=0.3)
  np.testing.assert_allclose(got, [-0.5, 0.8, -1.3, 2.0, -3.3], rtol=1e-6)
  slope = jax.grad(lambda r: losses.clipped_surrogate(
      r, advs, clip_low=0.2, clip_high=0.3).sum())(ratio)
  np.testing.assert_array_equal(slope, [-1.0, 0.0, 0.0, 1.0, -3.0])


def test_dual_clip_by_hand():
  # A ratio of 5 and A = -1: a loss of 5, but of 3 with that bound, and no
  # gradient. The bound changes neither A > 0 nor a ratio below 3.
  ratio = jnp.array([5.0, 5.0, 2.0, 0.5])
  advs = jnp.array([-1.0, 1.0, -1.0, -1.0])
  clip = dict(clip_low=0.2, clip_high=0.2)
  for dual, values, slopes in (
      (None, [5.0, -1.2, 2.0, 0.8], [1, 0, 1, 0]),
      (3.0, [3.0, -1.2, 2.0, 0.8], [0, 0, 1, 0])):
    loss = functools.partial(
        losses.clipped_surrogate, advantages=advs, **clip, dual_clip=dual)
    np.testing.assert_allclose(loss(ratio), values, rtol=1e-6)
    slope = jax.grad(lambda r: loss(r).sum())(ratio)
    np.testing.assert_array_equal(slope, slopes)


def test_geometric_mean_by_hand():
  # Ratios 2 and 8, limited to 2 for A > 0: 2; free for A < 0: sqrt 16 = 4.
  # Ratios 1/2 and 1/8, limited to 1/2 for A < 0: 1/2; free for A > 0: 1/4.
  ratio = jnp.array([[2, 7, 8], [2, 7, 8], [0.5, 7, 0.125], [0.5, 7, 0.125]])
  mask = jnp.array([[True, False, True]] * 4)
  advs = jnp.array([1.0, -1.0, -1.0, 1.0])
  loss = lambda x: losses.geometric_mean_loss(
      x, jnp.zeros((4, 3)), advs, mask, clip_low=np.log(2), clip_high=np.log(2))
  np.testing.assert_allclose(
      loss(jnp.log(ratio)), [-2, 4, 0.5, -0.25], rtol=1e-6)
  # Two tokens share the gradient, unless one is beyond its limit.
  slope = jax.grad(lambda x: loss(x).sum())(jnp.log(ratio) * 0.99)
  np.testing.assert_array_equal(
      slope != 0, [[1, 0, 0], [1, 0, 1], [1, 0, 0], [1, 0, 1]])


def test_score_function_by_hand():
  got = losses.score_function_loss(
      jnp.array([[-3.0, jnp.nan, -1.0]]), jnp.array([2.0]),
      jnp.array([[True, False, True]]))
  np.testing.assert_array_equal(got, [[6, 0, 2]])


def test_value_loss_by_hand():
  # V went from 0 to 2, and is clipped at 1/2. R = 3: errors of 1 and, clipped,
  # of 2.5, which is larger and has no gradient. R = 0: errors of 2 and 1/2.
  values, returns = jnp.array([[2.0, 2.0, 9.0]]), jnp.array([[3.0, 0.0, 0.0]])
  mask = jnp.array([[True, True, False]])
  for clip, expected, slopes in (
      (0.5, [[3.125, 2, 0]], [[0, 2, 0]]), (None, [[0.5, 2, 0]], [[-1, 2, 0]])):
    loss = lambda v: losses.value_loss(
        v, jnp.zeros((1, 3)), returns, mask, value_clip=clip)
    np.testing.assert_array_equal(loss(values), expected)
    slope = jax.grad(lambda v: loss(v).sum())(values)
    np.testing.assert_array_equal(slope, slopes)


def test_entropy_by_hand():
  # Two of four that are equally likely, a certain one, and 1/4 against 3/4.
  bar = -np.inf
  logits = jnp.array([[[5, 5, bar, bar], [0, bar, bar, bar],
                       [0, np.log(3), bar, bar], [1, 2, 3, 4]]])
  got = losses.entropy(logits, jnp.array([[True, True, True, False]]))
  expected = np.log(2), 0, np.log(4) - 0.75 * np.log(3), 0
  np.testing.assert_allclose(got, [expected], rtol=1e-6)


def test_weights_by_hand():
  # To the learner one token is 3 times as likely, one a quarter: the row 3/4.
  old = jnp.log(jnp.array([[3.0, 7.0, 0.25]]))
  args = old, jnp.zeros((1, 3)), jnp.array([[True, False, True]])
  for function, level, expected in (
      (losses.truncated_weights, 'token', [2, 1, 0.25]),
      (losses.truncated_weights, 'sequence', [0.75, 1, 0.75]),
      (losses.masked_weights, 'token', [3, 1, 0]),
      (losses.masked_weights, 'sequence', [0.75, 1, 0.75])):
    np.testing.assert_allclose(
        function(*args, level=level), [expected], rtol=1e-6)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint32, np.int16, np.float32])
def test_overlong_penalty_takes_lengths_of_any_type(dtype):
  got = losses.overlong_penalty(
      np.array([1, 8, 9, 40], dtype), max_length=10, buffer=4)
  np.testing.assert_allclose(got, [0, -0.5, -0.75, -1])


def test_overlong_penalty_by_hand():
  got = losses.overlong_penalty(
      jnp.array([0, 6, 7, 8, 10, 12]), max_length=10, buffer=4)
  np.testing.assert_array_equal(got, [0, 0, -0.25, -0.5, -1, -1])


def test_on_policy_both_ratios_have_the_score_function_gradient():
  logprobs, _, advs, mask = random_inputs(dtype=np.float32, poisoned=False)
  for ours, share in (
      (token_loss, np.ones(len(mask))),
      (sequence_loss, 1 / np.maximum(mask.sum(-1), 1))):
    got = jax.grad(lambda x: ours(x, logprobs, advs, mask).sum())(
        jnp.asarray(logprobs))
    np.testing.assert_allclose(
        got, np.where(mask, -(advs * share)[:, None], 0), rtol=1e-6)


def test_token_ratio_is_finite_for_any_gap():
  gaps = jnp.array([[-1e4, -21.0, 0.0, 21.0, 1e4]])
  got = losses.token_ratio(gaps, jnp.zeros((1, 5)), jnp.ones((1, 5), bool))
  np.testing.assert_allclose(
      got, np.exp([[-20.0, -20.0, 0.0, 20.0, 20.0]]), rtol=1e-5)


def test_abs_does_not_push_a_token_where_policy_equals_reference():
  mask = jnp.ones((1, 3), bool)
  push = jax.grad(lambda x: losses.kl(
      x, jnp.array([[0.0, -1.0, -2.0]]), mask, estimator='abs').sum())
  np.testing.assert_array_equal(
      push(jnp.array([[0.0, -2.0, -1.0]])), [[0, -1, 1]])


def test_one_token_far_below_the_reference_leaves_k3_a_number():
  # exp(90) is no float32. Above 20 nats k3 is the tangent there.
  mask = jnp.ones((1, 4), bool)
  logp = jnp.array([[-20.5, -21.0, -90.0, -1e4]])
  estimate = lambda x: losses.kl(x, jnp.zeros((1, 4)), mask, estimator='k3')
  slope = math.expm1(20)
  np.testing.assert_allclose(
      estimate(logp), [[slope - 20 + slope * over for over in (0.5, 1, 70, 9980)]],
      rtol=1e-6)
  np.testing.assert_allclose(
      jax.grad(lambda x: estimate(x).sum())(logp), [[-slope] * 4], rtol=1e-6)


def test_k3_is_right_for_small_gaps_and_never_negative():
  # exp(x) - 1 - x would be off by 6e-8 whatever x is, ten times k3 at 1e-4.
  rng = np.random.default_rng(0)
  x = 10.0**rng.uniform(-9, 0.5, (2, 500)) * [[1], [-1]]
  x[:, :5] = [[1e-4, 1e-3, 1e-2, 0.5, 0], [-1e-4, -1e-3, -1e-2, -8, 0]]
  x, mask = x.astype(np.float32), np.ones(x.shape, bool)
  estimate = functools.partial(losses.kl, estimator='k3')
  expected = oracles.kl(np.zeros(x.shape), x, mask, 'k3')
  for transform in (jax.jit, lambda f: f):
    got = transform(estimate)(jnp.zeros(x.shape), jnp.asarray(x), mask)
    assert (np.array(got) >= 0).all()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    small = np.abs(x) < 0.1
    assert (np.abs(got - expected) < 3e-7 * np.abs(x) + 1e-30)[small].all()


@pytest.mark.parametrize('how', losses.AGGREGATIONS)
def test_aggregate_by_hand_and_over_splits(how):
  # Rows (1, 2), (6,) and an empty one; T = 3.
  x = jnp.array([[1.0, jnp.nan, 2.0], [6.0, 9.0, 9.0], [9.0, 9.0, jnp.inf]])
  mask = jnp.array([[True, False, True], [True, False, False], [False] * 3])
  whole = losses.aggregate(x, mask, how=how)
  assert (whole.total, whole.count) == {
      'token_mean': (9.0, 3.0), 'sequence_mean': (7.5, 2.0),
      'sequence_sum': (9.0, 2.0), 'sequence_sum_norm': (3.0, 2.0)}[how]
  parts = [losses.aggregate(x[i:i+1], mask[i:i+1], how=how) for i in range(3)]
  assert parts[0] + parts[1] + parts[2] == whole


def test_what_is_counted_need_not_be_what_is_summed():
  per_token = jnp.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
  mask = jnp.array([[True, True, True], [True, False, False]])
  policys = jnp.array([[True, False, True], [True, False, False]])
  for how, total, count in (
      ('token_mean', 10, 3), ('sequence_mean', 3 + 4, 2),
      ('sequence_sum', 10, 2), ('sequence_sum_norm', 5, 2)):
    mean = losses.aggregate(
        per_token, mask, how=how, length=2, count_mask=policys)
    assert (mean.total, mean.count) == (total, count)
  # A geometric mean over two of three tokens: (e^1 e^2 e^3)^(1/2), clipped.
  old = jnp.zeros((1, 3))
  ratio = losses.sequence_ratio(
      per_token[:1], old, mask[:1], count_mask=policys[:1])
  np.testing.assert_allclose(ratio, np.exp([3.0]), rtol=1e-6)
  with pytest.raises(ValueError, match='count_mask must have the shape of'):
    losses.aggregate(per_token, mask, how='sequence_mean',
                     count_mask=policys[:1])


def test_the_norm_may_be_a_constant():
  x, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
  mean = losses.aggregate(x, mask, how='sequence_sum_norm', length=12)
  assert mean.value == 0.25


def test_truncated_weights_are_1_outside_the_mask_below_1_too():
  x, mask = jnp.zeros((1, 3)), jnp.array([[True, False, True]])
  np.testing.assert_array_equal(
      losses.truncated_weights(x, x, mask, high=0.5), [[0.5, 1, 0.5]])


def test_refuses_bad_input():
  x, mask, advs = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros(2)
  with pytest.raises(ValueError, match=r'old_logprobs must .*\(2, 3\).*\(2,\)'):
    losses.token_ratio(x, advs, mask)
  with pytest.raises(ValueError, match=r'must have shape \(2,\) \(one per seq'):
    losses.sequence_ratio_loss(x, x, x, mask)
  with pytest.raises(ValueError, match=r'\(2, 3\).*, or \(2,\).*have \(2, 1\)'):
    losses.token_ratio_loss(x, x, advs[:, None], mask)
  with pytest.raises(ValueError, match="k1, abs, k2, k3, but is 'k4'"):
    losses.kl(x, x, mask, estimator='k4')
  with pytest.raises(ValueError, match="how must be .*token_mean.*'mean'"):
    losses.aggregate(x, mask, how='mean')
  with pytest.raises(ValueError, match='level must be one of token.* is 1'):
    losses.truncated_weights(x, x, mask, level=1)
  for high in (-1.0, 0.0, float('nan')):
    with pytest.raises(ValueError, match=f'high must be above 0, .* {high}'):
      losses.truncated_weights(x, x, mask, high=high)
  with pytest.raises(ValueError, match="level must be .*, but is 'row'"):
    losses.masked_weights(x, x, mask, level='row')
  with pytest.raises(ValueError, match=r'must have shape \(2,\) \(one per seq'):
    losses.geometric_mean_loss(x, x, x, mask)
  with pytest.raises(ValueError, match=r'loss_mask must .*\(2, 3\).*\(2,\)'):
    losses.score_function_loss(x, advs, mask[:, 0])
  with pytest.raises(ValueError, match=r'returns must have .*\(2, 3\).*\(2,\)'):
    losses.value_loss(x, x, advs, mask)
  with pytest.raises(ValueError, match=r'logits.* must have .* has \(2,\)'):
    losses.entropy(x, mask)
  with pytest.raises(ValueError, match=r'advantages must .*\(2, 3\).*\(2,'):
    losses.clipped_surrogate(x, advs, **CLIP)


@pytest.mark.parametrize('clip, message', [
    (dict(clip_low=-0.1), r'clip_low must lie in \[0, 1\].*-0.1 and 0.3'),
    (dict(clip_low=1.5), r'clip_low must lie in \[0, 1\].*1.5 and 0.3'),
    (dict(clip_high=-1e-3), 'clip_high be 0 or more.*0.2 and -0.001.*Give'),
    (dict(clip_low=np.nan), 'nan and 0.3'),
    (dict(dual_clip=np.nan), 'dual_clip must be above 1, but is nan'),
    (dict(dual_clip=1.0), 'dual_clip must be above 1, but is 1.0. 3 is usual'),
])
@pytest.mark.parametrize('loss', [
    losses.token_ratio_loss, losses.sequence_ratio_loss])
def test_refuses_bad_clip_ranges(loss, clip, message):
  x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
  with pytest.raises(ValueError, match=message):
    loss(x, x, jnp.zeros(2), mask, **CLIP | clip)


def test_refuses_other_bad_ranges():
  x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
  for clip in (dict(clip_low=-0.4), dict(clip_high=-0.4)):
    with pytest.raises(ValueError, match='must be 0 nats or more.*-0.4.*Give'):
      losses.geometric_mean_loss(x, x, jnp.zeros(2), mask, **clip)
  with pytest.raises(ValueError, match='value_clip must be 0 or .*-1.*or None'):
    losses.value_loss(x, x, x, mask, value_clip=-1.0)
  with pytest.raises(ValueError, match='value_clip must be 0 or .* is nan'):
    losses.value_loss(x, x, x, mask, value_clip=np.nan)
  with pytest.raises(ValueError, match='must be 0 nats or more, but are '):
    losses.geometric_mean_loss(x, x, x[:, 0], mask, clip_high=np.nan)
  for length in (0, -1, np.nan):
    with pytest.raises(ValueError, match='^length must be at least 1, but is '):
      losses.aggregate(x, mask, how='sequence_sum_norm', length=length)
  for buffer in (0, -1, 11):
    with pytest.raises(ValueError, match=rf'\(0, 10\], but is {buffer}. Give'):
      losses.overlong_penalty(jnp.zeros(2), max_length=10, buffer=buffer)


def test_refuses_an_empty_interval_and_keeps_1_outside_the_mask():
  x, mask = jnp.zeros((1, 2)), jnp.array([[True, False]])
  with pytest.raises(ValueError, match='0 <= low < high, but are 2.0 and 1.0'):
    losses.masked_weights(x, x, mask, low=2.0, high=1.0)
  got = losses.masked_weights(x, x, mask, low=1.5, high=2.0)
  np.testing.assert_array_equal(got, [[0.0, 1.0]])


@pytest.mark.parametrize('ours', [sequence_loss, losses.geometric_mean_loss])
def test_a_row_without_advantage_stays_finite_whatever_its_ratio(ours):
  gaps = jnp.array([[500.0, 900.0], [-500.0, -900.0]])
  args = jnp.zeros((2, 2)), jnp.zeros(2), jnp.ones((2, 2), bool)
  np.testing.assert_array_equal(ours(gaps, *args), 0)
  np.testing.assert_array_equal(
      jax.grad(lambda x: ours(x, *args).sum())(gaps), 0)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('loss', [
    losses.token_ratio_loss, losses.sequence_ratio_loss,
    losses.geometric_mean_loss])
def test_the_gradient_at_ratio_1_is_whole_in_half_precision(loss, dtype):
  old = -jnp.linspace(0.1, 3, 32).reshape(4, 8).astype(dtype)
  advs, mask = jnp.array([1.0, -1, 2, -0.5]), jnp.ones((4, 8), bool)
  half, single = (
      jax.grad(lambda x: loss(x, x0, advs, mask).mean())(x0)
      for x0 in (old, old.astype(jnp.float32)))
  assert half.dtype == dtype
  np.testing.assert_allclose(half, single, rtol=1e-2)


def test_the_gradient_of_the_kl_is_finite_in_half_precision():
  logprobs = jnp.array([[-1.0, -2.0, -9.0]], jnp.float16)
  other, mask = logprobs - 0.125, jnp.array([[True, True, False]])
  gradient = jax.grad(lambda x: losses.kl(x, other, mask).sum())(logprobs)
  # Gradient of exp(x) - 1 - x, with x = other - logprobs.
  np.testing.assert_allclose(
      gradient, [[1 - np.exp(-0.125), 1 - np.exp(-0.125), 0]], rtol=1e-3)
  assert gradient.dtype == jnp.float16
