# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""masked: means of the entries inside a mask; they add up, without NaN."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.rl import advantages
from searchrl.rl import losses
from searchrl.rl import masked
from searchrl.rl.masked import Mean

pytestmark = pytest.mark.usefixtures('no_silent_broadcasting')


@pytest.fixture
def ragged():
  rng = np.random.default_rng(0)
  where = oracles.ragged_mask(rng, 6, 5)
  x = rng.normal(size=where.shape).astype(np.float32)
  return oracles.poison(rng, x, where), where


def test_by_hand():
  x = jnp.array([[1.0, 2.0, jnp.nan], [6.0, jnp.inf, 0.0]])
  where = jnp.array([[True, True, False], [True, False, False]])
  mean = Mean.of(x, where)
  assert (mean.total, mean.count, mean.value) == (9.0, 3.0, 3.0)
  assert masked.mean(x, where) == 3.0
  np.testing.assert_array_equal(masked.row_sum(x, where), [3.0, 6.0])
  np.testing.assert_array_equal(masked.row_mean(x, where), [1.5, 6.0])


@pytest.mark.parametrize('transform', [jax.jit, lambda f: f])
def test_agrees_with_loops(ragged, transform):
  x, where = map(jnp.asarray, ragged)
  rows = [[float(v) for v, w in zip(*r) if w] for r in zip(*ragged)]
  total, count = oracles.aggregate(*ragged, 'token_mean')
  got = transform(Mean.of)(x, where)
  np.testing.assert_allclose(got.total, total, rtol=1e-5, atol=1e-6)
  assert got.count == count
  np.testing.assert_allclose(
      transform(masked.row_mean)(x, where),
      [sum(r) / max(len(r), 1) for r in rows], rtol=1e-5, atol=1e-6)


def test_agrees_with_loops_at_either_precision():
  rng = np.random.default_rng(1)
  where = oracles.ragged_mask(rng, 16, 200)
  x = oracles.poison(rng, rng.normal(size=where.shape), where)
  per_row = {'sequence_sum': masked.row_sum, 'sequence_mean': masked.row_mean}
  for dtype, rtol, atol in (
      (np.float64, 1e-9, 1e-12), (np.float32, 1e-5, 1e-6)):
    rounded = x.astype(dtype)
    total, count = oracles.aggregate(rounded, where, 'token_mean')
    with jax.enable_x64(dtype == np.float64):
      got = jax.jit(Mean.of)(jnp.asarray(rounded), where)
      assert got.total.dtype == got.count.dtype == got.value.dtype == dtype
      np.testing.assert_allclose(got.total, total, rtol, atol)
      np.testing.assert_allclose(
          jax.jit(masked.mean)(rounded, where), total / count, rtol, atol)
      for how, ours in per_row.items():
        rows = jax.jit(ours)(jnp.asarray(rounded), where)
        assert rows.dtype == dtype
        for row, values, here in zip(rows, rounded, where):
          expected, _ = oracles.aggregate(values[None], here[None], how)
          np.testing.assert_allclose(row, expected, rtol, atol)


def test_half_precision_is_summed_in_float32():
  x = jnp.ones((3, 1000), jnp.bfloat16)  # whose integers end at 256
  assert Mean.of(x, jnp.ones((3, 1000), bool)).total == 3000


def test_masked_entries_have_no_gradient(ragged):
  x, where = map(jnp.asarray, ragged)
  gradient = jax.grad(lambda x: Mean.of(x, where).value)(x)
  np.testing.assert_allclose(gradient, where / where.sum(), rtol=1e-6)
  gradient = jax.grad(lambda x: masked.row_mean(x, where).sum())(x)
  lengths = np.maximum(np.array(where).sum(-1, keepdims=True), 1)
  np.testing.assert_allclose(gradient, where / lengths, rtol=1e-6)
  gradient = jax.grad(lambda x: masked.row_sum(x, where).sum())(x)
  np.testing.assert_array_equal(gradient, where)


def test_means_add_up_over_any_split(ragged):
  x, where = ragged
  whole = Mean.of(x, where)
  for cuts in ([1], [3], [2, 4], [1, 2, 3, 4, 5]):
    parts = map(Mean.of, np.split(x, cuts), np.split(where, cuts))
    added = functools.reduce(operator.add, parts)
    assert added.count == whole.count
    np.testing.assert_allclose(added.total, whole.total, rtol=1e-6, atol=1e-6)


def test_nothing_counted_is_zero():
  nothing = Mean.of(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool))
  assert (nothing.total, nothing.count, nothing.value) == (0, 0, 0)


def test_booleans_become_fractions_and_a_mean_is_a_pytree():
  mean = Mean.of(jnp.array([True, False, True]), jnp.array([True, True, False]))
  assert mean.value == 0.5
  doubled = jax.tree.map(lambda leaf: 2 * leaf, mean)
  assert (doubled.total, doubled.count) == (2, 4)


def test_refuses_shapes_that_differ():
  with pytest.raises(ValueError, match=r'where must have .*\(2, 3\).*\(2, 1\)'):
    Mean.of(jnp.zeros((2, 3)), jnp.ones((2, 1), bool))
  for function in (masked.mean, masked.row_sum, masked.row_mean):
    with pytest.raises(ValueError, match=r'where must .*\(3,\). Align them'):
      function(jnp.zeros((2, 3)), jnp.ones(3, bool))


@pytest.mark.parametrize('dtype', [np.int32, np.float32])
def test_a_mask_of_numbers_is_refused_by_name(dtype):
  x, ones = jnp.ones((2, 3)), jnp.ones((2, 3), dtype)
  for call, name in (
      (lambda: masked.mean(x, ones), 'where'),
      (lambda: jax.jit(masked.row_sum)(x, ones), 'where'),
      (lambda: masked.row_mean(x, ones > 0, ones), 'count_mask'),
      (lambda: losses.masked_weights(x, x, ones), 'loss_mask'),
      (lambda: losses.kl(x, x, ones), 'loss_mask'),
      (lambda: advantages.group_relative(
          x[:, 0], jnp.zeros(2, int), ones[:, 0]), 'in_baseline')):
    with pytest.raises(ValueError, match=f'^{name} must be a mask of booleans, '
                       f'but is of {np.dtype(dtype)}'):
      call()


@pytest.mark.filterwarnings('error')
def test_numpy_arrays_in_float64_are_taken_without_a_warning():
  assert Mean.of(np.array([1.0, 3.0]), np.ones(2, bool)).value == 2
