# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""contrastive: InfoNCE against its definition, in value and in gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from searchrl.models import contrastive


def random_inputs(seed, queries=5, passages=9, dim=7):
  rng = np.random.default_rng(seed)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  return (unit(rng.normal(size=(queries, dim))),
          unit(rng.normal(size=(passages, dim))),
          rng.permutation(passages)[:queries],
          rng.random((queries, passages)) < .3)


@pytest.mark.parametrize('temperature', [1.0, .05, .01])
@pytest.mark.parametrize('seed', range(3))
def test_it_is_its_definition(seed, temperature):
  inputs = random_inputs(seed)
  loss, hits = jax.jit(functools.partial(
      contrastive.info_nce, temperature=temperature))(*inputs)
  expected, first = oracles.info_nce(*inputs, temperature=temperature)
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(hits, first)


def test_its_gradient_is_the_slope_of_the_definition():
  queries, passages, positives, excluded = random_inputs(3)
  mean = lambda q, p: jnp.mean(contrastive.info_nce(
      q, p, positives, excluded, temperature=.1)[0])
  grads = jax.grad(mean, (0, 1))(queries, passages)
  rng = np.random.default_rng(0)
  for which in (0, 1):
    along = rng.normal(size=(queries, passages)[which].shape)

    def moved(h):
      at = [queries, passages]
      at[which] = at[which] + h * along
      return oracles.info_nce(
          *at, positives, excluded, temperature=.1)[0].mean()

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(np.vdot(grads[which], along), slope, rtol=1e-3)


def test_two_passages_by_hand():
  queries = jnp.array([[1.0, 0.0], [0.0, 1.0]])
  # Scores 1 and 0 over temperature 1 / ln 2: ln(2 + 1) - ln 2.
  excluded = jnp.array([[False, False], [True, True]])
  loss, hits = contrastive.info_nce(
      queries, queries, jnp.arange(2), excluded, temperature=1 / np.log(2))
  np.testing.assert_allclose(loss, [np.log(1.5), 0], atol=1e-6)
  assert hits.tolist() == [1, 1]


def test_what_is_excluded_is_neither_pushed_nor_counted():
  queries, passages, _, excluded = random_inputs(4)
  positives = np.array([0, 1, 3, 4, 5])
  excluded[:, 2] = True
  excluded[np.arange(5), positives] = True  # the positive counts all the same
  run = lambda passages: contrastive.info_nce(
      queries, passages, positives, excluded, temperature=.1)
  grad = jax.grad(lambda p: run(p)[0].sum())(passages)
  assert not grad[2].any() and np.isfinite(grad).all() and grad.any()
  nearest = passages.copy()
  nearest[2] = queries[1] * 100
  np.testing.assert_array_equal(run(nearest)[0], run(passages)[0])
  np.testing.assert_array_equal(run(nearest)[1], run(passages)[1])


def test_a_tie_is_no_hit_and_no_negatives_no_loss():
  queries = jnp.ones((1, 1))
  same = jnp.ones((2, 1))
  loss, hits = contrastive.info_nce(
      queries, same, jnp.zeros(1, int), jnp.zeros((1, 2), bool),
      temperature=.05)
  np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
  assert hits.tolist() == [0]


@pytest.mark.parametrize('temperature', [0, -1, float('nan')])
def test_the_temperature_is_checked(temperature):
  with pytest.raises(ValueError, match='temperature must be above 0, but is'):
    contrastive.info_nce(*random_inputs(0), temperature=temperature)
