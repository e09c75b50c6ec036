# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""exact_host: against float64 loops; what any index does with bad input."""

import functools

import jax
import numpy as np
import pytest

from searchrl.search.index import exact_device
from searchrl.search.index import exact_host
from searchrl.search.index import vector_store


def unit(rng, *shape):
  x = rng.normal(size=shape).astype(np.float32)
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def brute_force(rows, vectors, k):
  """float64; ties to the lower row."""
  scores = vectors.astype(np.float64) @ rows.T.astype(np.float64)
  ids = np.argsort(-scores, axis=1, kind='stable')[:, :k]
  return np.take_along_axis(scores, ids, 1), ids


def on_eight(source, **options):
  """Builds it on eight simulated devices, with blocks smaller than a shard."""
  return exact_device.build(
      source, devices=jax.local_devices(), **{'block_rows': 3} | options)


BUILDERS = {'numpy': exact_host.on_host, 'one device': exact_device.build,
            'eight devices': on_eight,
            'separate blocks': functools.partial(on_eight, separate=True)}


@pytest.mark.parametrize('name', BUILDERS)
@pytest.mark.parametrize('count', [1, 5, 8, 61])
@pytest.mark.parametrize('k', [1, 4, 100])
def test_ids_and_scores_are_those_of_brute_force(name, count, k):
  rng = np.random.default_rng(count)
  rows, vectors = unit(rng, count, 12), unit(rng, 5, 12)
  index = BUILDERS[name](vector_store.InMemory(rows))
  scores, ids = index(vectors, k)
  expected, order = brute_force(rows, vectors, k)
  np.testing.assert_array_equal(ids, order)
  np.testing.assert_allclose(scores, expected, atol=1e-6)
  assert scores.dtype == np.float32


@pytest.mark.parametrize('name', BUILDERS)
def test_ties_go_to_the_lower_row_wherever_they_lie(name, monkeypatch):
  monkeypatch.setattr(exact_host, '_BLOCK', 4)
  rows = np.zeros((40, 3), np.float32)
  rows[[2, 3, 19, 20, 39], 0] = 1
  rows[:, 1] = -1
  index = BUILDERS[name](vector_store.InMemory(rows))
  _, ids = index(np.eye(3, dtype=np.float32)[:1], 7)
  assert ids.tolist() == [[2, 3, 19, 20, 39, 0, 1]]


@pytest.mark.parametrize('name', BUILDERS)
def test_scores_below_zero_are_found_too(name):
  rows = -np.ones((9, 2), np.float32)
  scores, ids = BUILDERS[name](vector_store.InMemory(rows))(
      np.ones((1, 2), np.float32), 9)
  assert ids.tolist() == [list(range(9))] and set(scores[0]) == {-2.0}


@pytest.mark.parametrize('vectors, k, message', [
    (np.ones((1, 4)), 1, r'shape \[B, 3\].* \(1, 4\)'),
    (np.ones(3), 1, 'have'), (np.full((1, 3), np.nan), 1, 'must be finite'),
    (np.full((1, 3), np.inf), 1, 'must be finite'),
    (np.ones((1, 3)), 0, 'k must be at least 1')])
def test_bad_queries_never_reach_the_library(vectors, k, message):
  index = exact_host.Index('x', 5, 3, find=None)
  with pytest.raises(ValueError, match=message):
    index(vectors, k)


def test_no_queries_are_no_call():
  scores, ids = exact_host.Index('x', 5, 3, find=None)(np.zeros((0, 3)), 9)
  assert scores.shape == ids.shape == (0, 5)


def test_what_libraries_return_of_too_few_rows_is_no_row():
  """NaN with id 0, id -1, ids too high, fewer columns: all are empty places."""
  def find(vectors, k):
    return (np.array([[.9, np.nan, .5, .4, .3]]), np.array([[3, 0, -1, 9, 1]]))
  scores, ids = exact_host.Index('x', 6, 2, find)(np.ones((1, 2)), 6)
  assert ids.tolist() == [[3, 1, -1, -1, -1, -1]]
  np.testing.assert_array_equal(
      scores, np.float32([[.9, .3, *[-np.inf] * 4]]))


def test_recall_counts_by_hand_and_ties_count_for_each_other():
  scores = np.zeros((2, 10), np.float32)
  exact_ids = np.array([[4, 2, 7, 9], [1, 2, 3, 4]])
  scores[0, exact_ids[0]] = .9, .8, .7, .7
  scores[1, exact_ids[1]] = .9, .8, .7, .1
  found = np.array([[2, 9, 4], [1, 8, -1]])
  recall_of = exact_host.recall_of(
      vector_store.InMemory(scores.T), np.eye(2, dtype=np.float32), 3)
  assert recall_of(found) == pytest.approx(4 / 6)
  assert recall_of(exact_ids) == 1


def test_recall_counts_each_of_many_rows_that_tie():
  """An index that compares all rows, and takes the last of equal ones."""
  rng = np.random.default_rng(0)
  rows = unit(rng, 400, 24) * 7  # rounding of float32 exceeds 1e-6 here
  rows[100:300] = rows[0]
  vectors = np.concatenate([rows[:40], unit(rng, 40, 24)]).astype(np.float32)
  source = vector_store.InMemory(rows)
  ids = 399 - exact_host.on_host(
      vector_store.InMemory(rows[::-1]))(vectors, 3)[1]
  assert (ids[0] > 290).all()
  recall_of = exact_host.recall_of(source, vectors, 3)
  assert recall_of(ids) == 1
  ids[:, 2] = -1
  assert recall_of(ids) == pytest.approx(2 / 3)
