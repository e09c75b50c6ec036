# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""optimizer: the schedule by hand, and AdamW against plain loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl.training import optimizer


def params():
  return {'embedding': jnp.ones((4, 2)),
          'layers': {'kernel': jnp.full((3, 2, 2), 0.5),
                     'bias': jnp.full((3, 2), 0.5),
                     'norm': {'scale': jnp.ones((3, 2))}},
          'norm': {'scale': jnp.ones(2)}, 'temperature': jnp.ones(5)}


def adamw_oracle(w, grads, rates, b1, b2, eps, decay, max_norm):
  """Loshchilov and Hutter's algorithm 2, on one flat vector."""
  w, m, v = np.array(w, np.float64), 0.0, 0.0
  for n, g in enumerate(np.array(grads, np.float64)):
    g = g * min(1, max_norm / np.sqrt(np.sum(g * g)))
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    m_hat, v_hat = m / (1 - b1 ** (n + 1)), v / (1 - b2 ** (n + 1))
    w = w - rates[n] * (m_hat / (np.sqrt(v_hat) + eps) + decay * w)
  return w


def test_adamw_follows_its_definition():
  rng = np.random.default_rng(0)
  w, grads = rng.normal(size=6), rng.normal(size=(5, 6)) * 3
  tx = optimizer.adamw(
      learning_rate=0.1, b1=0.8, b2=0.95, weight_decay=0.3, max_grad_norm=2.0,
      warmup_steps=2, total_steps=5, schedule='linear', final_fraction=0.0)
  tree = {'kernel': jnp.asarray(w, jnp.float32).reshape(2, 3)}
  state = tx.init(tree)

  @jax.jit
  def step(tree, state, g):
    updates, state = tx.update({'kernel': g.reshape(2, 3)}, state, tree)
    return optax.apply_updates(tree, updates), state

  for g in grads:
    tree, state = step(tree, state, jnp.asarray(g, jnp.float32))
  rates = 0.1 * np.array([1 / 2, 1, 1, 2 / 3, 1 / 3])
  want = adamw_oracle(w, grads, rates, 0.8, 0.95, 1e-8, 0.3, 2.0)
  np.testing.assert_allclose(tree['kernel'].reshape(-1), want, rtol=2e-5)


def test_only_matrices_decay_though_layers_are_stacked():
  want = {'embedding': True,
          'layers': {'kernel': True, 'bias': False, 'norm': {'scale': False}},
          'norm': {'scale': False}, 'temperature': False}
  assert optimizer.decayed(params()) == want
  tx = optimizer.adamw(learning_rate=0.1, weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, params())
  updates, _ = tx.update(zeros, tx.init(params()), params())
  moved = jax.tree.map(lambda x: bool(jnp.any(x != 0)), updates)
  assert moved == want
  np.testing.assert_allclose(updates['embedding'], -0.1 * 0.5, rtol=1e-6)


def test_clipping_is_by_the_norm_of_all_leaves_together():
  tree = {'a': jnp.zeros(1), 'b': jnp.zeros(1)}
  grads = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}
  for norm, want in ((1.0, 0.6), (None, 3.0)):
    tx = optimizer.adamw(learning_rate=1.0, max_grad_norm=norm)
    _, state = tx.update(grads, tx.init(tree), tree)
    mu = optax.tree.get(state, 'mu')
    np.testing.assert_allclose(mu['a'], (1 - 0.9) * want, rtol=1e-6)


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
  rate = optimizer.learning_rate(2.0, warmup_steps=4)
  np.testing.assert_allclose(
      [rate(n) for n in range(7)], [0.5, 1, 1.5, 2, 2, 2, 2])
  assert optimizer.learning_rate(0.3)(0) == np.float32(0.3)


@pytest.mark.parametrize('schedule, want', [
    ('constant', [1, 2, 2, 2, 2, 2]),
    ('linear', [1, 2, 2, 1.6, 1.2, 0.8]),  # then 0.4 = 0.2 * peak
    ('cosine', [1, 2, 2, 0.4 + 0.8 * (1 + 0.5 ** 0.5), 1.2,
                0.4 + 0.8 * (1 - 0.5 ** 0.5)]),
])
def test_schedules_by_hand(schedule, want):
  rate = optimizer.learning_rate(
      2.0, warmup_steps=2, total_steps=6, schedule=schedule, final_fraction=0.2)
  np.testing.assert_allclose([rate(n) for n in range(6)], want, rtol=1e-6)
  np.testing.assert_allclose(jax.jit(rate)(jnp.int32(4)), want[4], rtol=1e-6)
  end = 2.0 if schedule == 'constant' else 0.4
  np.testing.assert_allclose([rate(6), rate(99)], end, rtol=1e-6)


@pytest.mark.parametrize('changes, message', [
    *((dict(learning_rate=rate), 'learning_rate must be finite and at least 0, '
       f'but is {rate}') for rate in (-1.0, np.nan, np.inf)),
    (dict(b2=2.0), r'b2 must be in \[0, 1\), but is 2.0'),
    (dict(b1=np.nan), r'b1 must be in \[0, 1\), but is nan'),
    (dict(weight_decay=np.nan), 'weight_decay must be at least 0, but is nan'),
    (dict(max_grad_norm=np.nan), 'max_grad_norm must be positive, '
     'or None for no clipping, but is nan'),
    (dict(schedule='cosin'), "schedule must be one of .* but is 'cosin'"),
    (dict(schedule='cosine'), "total_steps must be set for schedule='cosine'"),
    (dict(warmup_steps=9, total_steps=8), 'warmup_steps must be at most'),
    (dict(warmup_steps=-1), 'warmup_steps must be at least 0'),
    (dict(final_fraction=1.5), r'final_fraction must be in \[0, 1\]'),
    (dict(max_grad_norm=0.0), 'max_grad_norm must be positive, '
     'or None for no clipping, but is 0.0'),
])
def test_values_out_of_range_are_named(changes, message):
  with pytest.raises(ValueError, match=message):
    optimizer.adamw(**{'learning_rate': 1e-3} | changes)


def test_half_a_first_moment_is_nearly_the_whole():
  rng = np.random.default_rng(0)
  tree = {'kernel': rng.normal(size=(4, 5)).astype(np.float32)}
  whole, half = (optimizer.adamw(learning_rate=0.1, mu_dtype=dtype)
                 for dtype in ('float32', 'bfloat16'))
  states, trees = [tx.init(tree) for tx in (whole, half)], [tree, tree]
  for _ in range(5):
    grads = {'kernel': rng.normal(size=(4, 5)).astype(np.float32)}
    for i, tx in enumerate((whole, half)):
      updates, states[i] = tx.update(grads, states[i], trees[i])
      trees[i] = optax.apply_updates(trees[i], updates)
  assert optax.tree.get(states[1], 'mu')['kernel'].dtype == 'bfloat16'
  assert optax.tree.get(states[1], 'nu')['kernel'].dtype == np.float32
  assert trees[1]['kernel'].dtype == np.float32
  moved = np.abs(trees[0]['kernel'] - tree['kernel'])
  apart = np.abs(trees[1]['kernel'] - trees[0]['kernel'])
  assert 0 < apart.max() < 0.02 * moved.max()
  with pytest.raises(ValueError, match="but is 'float16'"):
    optimizer.adamw(learning_rate=0.1, mu_dtype='float16')


def test_a_schedule_ends_with_the_run_unless_its_end_is_given():
  options = dict(learning_rate=1.0, schedule='linear', final_fraction=0.0)
  rate = optimizer.schedule_for_run(options, 10)
  assert float(rate(9)) == pytest.approx(0.1) and float(rate(10)) == 0.0
  longer = optimizer.schedule_for_run(options | dict(total_steps=20), 10)
  assert float(longer(10)) == 0.5
  constant = dict(learning_rate=1.0, warmup_steps=9)
  assert optimizer.options_for_run(constant, 3)['total_steps'] is None
  params = {'w': jnp.ones((2, 2))}
  tx = optimizer.for_run(options | dict(weight_decay=0.0), 2)
  state, steps = tx.init(params), []
  for _ in range(3):
    changes, state = tx.update(params, state, params)
    steps.append(float(-changes['w'][0, 0]))
  assert steps == pytest.approx([1.0, 0.5, 0.0], abs=1e-5)
