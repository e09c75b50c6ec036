# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""minibatches: every trajectory lies once in the rows of its mini-batch."""

import jax
import learner_test as learning
import numpy as np
import pytest

from searchrl.training import minibatches

SHAPE = dict(microbatch_rows=2, pack_length=2 * learning.LENGTH, max_segments=3)


@pytest.fixture(scope='module')
def batch():
  return learning.ragged_batch()


@pytest.fixture(scope='module')
def packed(batch):
  return minibatches.pack(batch, 2, **SHAPE)


def members(batch, begin, end):
  """Returns the rows of a range that are no filler."""
  return [i for i in range(begin, end) if batch.loss_mask[i].any()]


def test_each_mini_batch_holds_its_trajectories(packed, batch):
  assert packed.batch is batch and len(packed.minibatches) == 2
  for minibatch, begin in zip(packed.minibatches, (0, 8)):
    inside = members(batch, begin, begin + 8)
    assert sorted(sum(minibatch.documents, [])) == inside
    assert max(map(len, minibatch.documents)) <= 3
    assert minibatch.rows.batch.tokens.shape == (4, 2, 2 * learning.LENGTH)
    assert minibatch.count == -(-len(minibatch.documents) // 2)
    assert minibatch.useful == batch.lengths[inside].sum() / (
        minibatch.count * 2 * 2 * learning.LENGTH)


def test_rows_hold_the_fields_of_their_trajectories(packed, batch):
  for minibatch in packed.minibatches:
    rows = minibatch.rows
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), rows)
    for row, documents in enumerate(minibatch.documents):
      for place, document in enumerate(documents):
        places = flat.layout.segment_ids[row] == place + 1
        length = batch.lengths[document]
        np.testing.assert_array_equal(
            flat.batch.tokens[row, places], batch.tokens[document, :length])
        assert flat.batch.rewards[row, place] == batch.rewards[document]


def test_numbers_come_back_to_where_they_belong(packed, batch):
  tokens = [minibatch.rows.batch.tokens for minibatch in packed.minibatches]
  inside = np.arange(learning.LENGTH) < batch.lengths[:, None]
  np.testing.assert_array_equal(
      packed.from_rows(tokens), np.where(inside, batch.tokens, 0))
  with pytest.raises(ValueError, match='shorter'):
    packed.from_rows(tokens[:1])


def test_scores_and_advantages_lie_in_the_same_rows(packed, batch):
  scores = np.random.default_rng(1).random(batch.tokens.shape, np.float32)
  advantages = np.arange(learning.ROWS, dtype=np.float32)
  scored = packed.with_scores({'ref_logprobs': scores})
  assert scored.batch.ref_logprobs is scores
  whole = minibatches.pack(scored.batch, 2, **SHAPE)
  for one, other in zip(scored.minibatches, whole.minibatches):
    jax.tree.map(np.testing.assert_array_equal, one.rows, other.rows)
    laid = one.with_advantages(advantages).rows.advantages
    assert laid.shape == (4, 2, 3)
    assert laid[0, 0, 0] == one.documents[0][0]


@pytest.mark.parametrize('lengths, places', [
    ([5, 5, 5], 4), ([9, 4, 9], 2), ([9, 9], 1), ([3] * 5, 5), ([], 1)])
def test_places_follow_the_fullest_row(batch, lengths, places):
  """A power of two, and 5 at most; rows of 15 tokens."""
  all_lengths = np.zeros(learning.ROWS, int)
  all_lengths[:len(lengths)] = lengths
  options = dict(microbatch_rows=2, pack_length=15, max_segments=5)
  fitted, whole = (
      minibatches.pack_one(batch, all_lengths, np.arange(learning.ROWS),
                           fit_segments=fit, **options).rows
      for fit in (True, False))
  assert fitted.layout.starts.shape[-1] == places
  jax.tree.map(
      lambda few, many: np.testing.assert_array_equal(
          few, many if few.shape == many.shape else many[..., :places]),
      fitted, whole)


def test_rows_that_are_not_trained_on_are_not_packed(batch):
  """Shapes stay, and so do mini-batches with tokens, even without a row."""
  trained = np.arange(learning.ROWS) >= 8
  trained[9] = False
  few = minibatches.pack(batch, 2, trained, **SHAPE)
  assert [sorted(sum(m.documents, [])) for m in few.minibatches] == [
      [], [i for i in members(batch, 8, 16) if i != 9]]
  assert few.minibatches[0].count == 0
  assert few.trained is trained
  whole = minibatches.pack(batch, 2, **SHAPE)
  assert whole.trained.all()
  for one, other in zip(few.minibatches, whole.minibatches):
    np.testing.assert_array_equal(one.members, other.members)
    assert jax.tree.map(np.shape, one.rows) == jax.tree.map(
        np.shape, other.rows)


def test_a_mini_batch_of_filler_is_left_out(batch):
  four = minibatches.pack(batch, 4, **SHAPE).minibatches
  assert [sorted(sum(m.documents, [])) for m in four] == [
      members(batch, begin, begin + 4) for begin in (0, 4, 8)]
