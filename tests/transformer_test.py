# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""transformer: who sees whom, and that shape tricks change nothing.

That it is Qwen2 is tested in weights_test, against transformers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from searchrl.models import transformer

ROWS, LENGTH = 2, 14
UNTIED = dataclasses.replace(tiny.CONFIG, tie_word_embeddings=False)


@functools.partial(jax.jit, static_argnames='remat')
def forward(params, tokens, segment_ids=None, positions=None, remat=False):
  return transformer.forward(
      params, tokens, tiny.CONFIG, segment_ids=segment_ids,
      positions=positions, remat=remat)


@pytest.fixture(scope='module')
def params():
  return tiny.params()


@pytest.fixture(scope='module')
def tokens():
  return np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH), np.int32)


def assert_close(x, y, atol=1e-4):
  np.testing.assert_allclose(x, y, atol=atol)


@pytest.mark.parametrize('changed', [0, 6, LENGTH - 1])
def test_a_token_changes_nothing_before_it_and_all_after(
    params, tokens, changed):
  other = tokens.copy()
  other[:, changed] = (other[:, changed] + 1) % 96
  before, after = forward(params, tokens), forward(params, other)
  np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
  moved = np.abs(before - after).max(-1)[:, changed:]
  assert (moved > 1e-4).all()


def test_rows_do_not_see_each_other(params, tokens):
  other = tokens.copy()
  other[1] = 7
  np.testing.assert_array_equal(forward(params, tokens)[0],
                                forward(params, other)[0])


def test_packed_documents_equal_rows_of_their_own(params, tokens):
  ends = (5, 6, LENGTH)
  starts = (0, *ends[:-1])
  segments = np.repeat(np.arange(3), np.subtract(ends, starts))
  positions = np.concatenate([np.arange(e - s) for s, e in zip(starts, ends)])
  packed = forward(params, tokens, np.tile(segments, (ROWS, 1)),
                   np.tile(positions, (ROWS, 1)))
  for start, end in zip(starts, ends):
    alone = np.zeros_like(tokens)
    alone[:, :end - start] = tokens[:, start:end]
    assert_close(packed[:, start:end],
                 forward(params, alone)[:, :end - start])


def test_rope_knows_distances_only(params, tokens):
  positions = np.tile(np.arange(LENGTH), (ROWS, 1))
  shifted = forward(params, tokens, None, positions + 100)
  assert_close(shifted, forward(params, tokens), atol=2e-3)
  stretched = forward(params, tokens, None, positions * 2)
  assert np.abs(stretched - forward(params, tokens)).max() > 0.1


def test_rotation_by_hand():
  x = jnp.array([3.0, 0.0, 4.0, 0.0]).reshape(1, 1, 1, 4)  # halves (3 0) (4 0)
  turned = transformer.rotate(x, jnp.array([[2]]), 10_000.0).ravel()
  angle = 2.0  # the first frequency is 1
  np.testing.assert_allclose(turned, [
      3 * np.cos(angle) - 4 * np.sin(angle), 0,
      4 * np.cos(angle) + 3 * np.sin(angle), 0], rtol=1e-6)


def test_recomputing_layers_changes_no_value(params, tokens):
  """Nor any gradient: that is in learner_test."""
  assert_close(forward(params, tokens, remat=True),
               forward(params, tokens), 1e-5)


def test_grouped_queries_equal_repeated_keys_in_float64():
  rng = np.random.default_rng(1)
  q = rng.normal(size=(2, 3, 4, 8))
  k, v = rng.normal(size=(2, 2, 2, 5, 8))
  visible = rng.random((2, 3, 5)) < 0.6
  visible[:, :, 0] = True
  got = transformer.attention(*map(jnp.float32, (q, k, v)), visible)
  for row in range(2):
    for t in range(3):
      for head in range(4):
        keys, values = k[row, head // 2], v[row, head // 2]
        scores = np.array([keys[s] @ q[row, t, head] / np.sqrt(8)
                           for s in range(5)])
        weights = np.where(visible[row, t], np.exp(scores), 0)
        assert_close(got[row, t, head], weights @ values / weights.sum(),
                     atol=1e-5)


def test_a_query_that_sees_nothing_is_finite():
  q = jnp.ones((1, 1, 2, 4))
  v = jnp.arange(12.0).reshape(1, 1, 3, 4)
  seen = transformer.attention(q, v, v, jnp.zeros((1, 1, 3), bool))
  np.testing.assert_allclose(seen[0, 0, 0], v[0, 0].mean(0))


@pytest.mark.parametrize(
    'config', [tiny.CONFIG, UNTIED], ids=['tied', 'untied'])
def test_every_parameter_has_its_logical_axes(config):
  params = jax.eval_shape(
      lambda key: transformer.init(config, key), jax.random.key(0))
  axes = transformer.logical_axes(config)
  jax.tree.map(lambda leaf, names: None, params, axes)  # the same tree
  ranks = jax.tree.map(lambda leaf: leaf.ndim, params)
  named = jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
  assert ranks == named
  assert ('head' in params) == (not config.tie_word_embeddings)
  assert all(names[0] == 'layers' for names in jax.tree.leaves(
      axes['layers'], is_leaf=lambda x: isinstance(x, tuple)))


def test_layers_start_differently():
  init = jax.jit(lambda key: transformer.init(tiny.CONFIG, key))
  params = init(jax.random.key(0))
  kernel = np.asarray(params['layers']['q']['kernel'])
  assert np.abs(kernel[0] - kernel[1]).max() > 1e-3
  assert 0.015 < kernel.std() < 0.025
