# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""packing: each token in one place, little padding, and the inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl import packing

LENGTHS = [5, 0, 9, 3, 3, 8, 1, 4]
LENGTH, PLACES = 10, 3


def reference_lengths(rng, count):
  """Tokens of search trajectories: a prompt, 1 to 4 turns, passages between."""
  turns = rng.choice([1, 2, 3, 4], count, p=[.15, .35, .30, .20])
  result = rng.integers(150, 251, count)
  for turn in range(4):
    sampled = np.minimum(rng.lognormal(np.log(110), 0.6, count), 500)
    passages = rng.normal(480, 60, count)
    result = result + (turn < turns) * sampled + (turn < turns - 1) * passages
  return np.minimum(result, 4096).astype(int)


def test_first_fit_by_hand():
  """9 | 8 1 | 5 4 | 3 3, the longest first."""
  rows = packing.first_fit(LENGTHS, LENGTH, PLACES)
  assert rows == [[2, 6], [5], [0, 7], [3, 4]]


def test_a_row_holds_no_more_documents_than_it_has_places():
  assert packing.first_fit([1] * 7, LENGTH, PLACES) == [
      [0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize('seed', range(5))
def test_every_document_lies_in_one_place_that_holds_it(seed):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, 40, 60)
  rows = packing.first_fit(lengths, 40, 4)
  assert sorted(sum(rows, [])) == np.flatnonzero(lengths).tolist()
  assert max(lengths[row].sum() for row in rows) <= 40
  assert max(map(len, rows)) <= 4


def test_a_document_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match='pack_length must be .* longest '
                     'document, 11 tokens, but is 10. Raise it'):
    packing.first_fit([3, 11], LENGTH, PLACES)


def test_the_reference_mix_wastes_at_most_three_hundredths():
  """Four optimiser steps on 512 questions x 5, micro-batches of 8 rows."""
  lengths = reference_lengths(np.random.default_rng(0), 2560)
  assert lengths.mean() == pytest.approx(1298, rel=0.05)
  computed = 0
  for part in np.split(lengths, 4):
    rows = packing.first_fit(part, 4096, 16)
    assert part.sum() / (len(rows) * 4096) >= 0.985
    computed += -(-len(rows) // 8) * 8 * 4096
  assert lengths.sum() / computed >= 0.97


@pytest.mark.parametrize('microbatch_rows, useful', [(2, 0.81), (1, 0.86)])
def test_small_batches_fill_micro_batches_of_one_row_better(
    microbatch_rows, useful):
  """The shares that docs/scale.md gives: 12 trajectories, rows of 768."""
  rng, computed, total = np.random.default_rng(0), 0, 0
  for _ in range(400):
    lengths = rng.integers(150, 501, 12)
    rows = len(packing.first_fit(lengths, 768, 16))
    computed += -(-rows // microbatch_rows) * microbatch_rows * 768
    total += lengths.sum()
  assert total / computed == pytest.approx(useful, abs=0.01)


@pytest.fixture(scope='module')
def laid():
  rng = np.random.default_rng(0)
  per_token = rng.normal(size=(len(LENGTHS), 12)).astype(np.float32)
  tree = dict(token=per_token, document=np.arange(1, len(LENGTHS) + 1),
              nothing=None)
  rows = packing.first_fit(LENGTHS, LENGTH, PLACES)
  layout = packing.layout(
      rows, LENGTHS, count=6, length=LENGTH, places=PLACES)
  return tree, rows, layout, packing.to_rows(tree, rows, layout)


def test_a_layout_by_hand(laid):
  _, _, layout, moved = laid
  assert layout.segment_ids[0].tolist() == [1] * 9 + [2]
  assert layout.positions[0].tolist() == [*range(9), 0]
  assert layout.positions[2].tolist() == [*range(5), *range(4), 0]
  assert layout.starts[:4].tolist() == [[0, 9, 0], [0, 0, 0], [0, 5, 0],
                                       [0, 3, 0]]
  assert layout.lengths[:4].tolist() == [[9, 1, 0], [8, 0, 0], [5, 4, 0],
                                        [3, 3, 0]]
  assert not layout.segment_ids[4:].any() and not layout.lengths[4:].any()
  assert moved['document'].tolist()[:4] == [[3, 7, 0], [6, 0, 0], [1, 8, 0],
                                            [4, 5, 0]]


def test_what_is_laid_comes_back(laid):
  tree, rows, layout, moved = laid
  back = np.zeros_like(tree['token'])
  packing.from_rows(moved['token'], rows, layout, back)
  inside = np.arange(12) < np.array(LENGTHS)[:, None]
  np.testing.assert_array_equal(back, np.where(inside, tree['token'], 0))
  unpacked = jax.jit(packing.unpack, static_argnums=2)(moved, layout, 12)
  assert unpacked['nothing'] is None
  documents = np.asarray(unpacked['document']) - 1  # -1: an empty place
  assert sorted(documents[documents >= 0]) == np.flatnonzero(LENGTHS).tolist()
  for place, document in enumerate(documents):
    np.testing.assert_array_equal(
        unpacked['token'][place], back[document] if document >= 0 else 0)


def test_gradients_go_where_the_tokens_are(laid):
  """Padding gets none, whatever is computed from it."""
  _, _, layout, moved = laid
  weight = np.random.default_rng(1).normal(
      size=(6 * PLACES, 12)).astype(np.float32)

  def of(x):
    return jnp.sum(packing.unpack(x, layout, 12) * weight)

  gradient = jax.jit(jax.grad(of))(moved['token'])
  expected = np.zeros_like(moved['token'])
  for row in range(6):
    for place in range(PLACES):
      start, used = layout.starts[row, place], layout.lengths[row, place]
      expected[row, start:start + used] = weight[row * PLACES + place, :used]
  np.testing.assert_array_equal(gradient, expected)
