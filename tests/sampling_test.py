# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""sampling: frequencies against the softmax, truncations against a sort."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl.models.inference import sampling
from searchrl.models.inference.sampling import Truncation


def test_another_seed_samples_otherwise():
  @jax.jit
  def draw(seed):
    key = jax.random.key_data(jax.random.key(seed))
    return sampling.sample(jnp.zeros((32, 50)), jnp.tile(key, (32, 1)),
                          jnp.arange(32), jnp.float32(1))[0]

  assert (draw(0) == draw(0)).all()
  assert (draw(0) != draw(1)).mean() > 0.9


def test_samples_follow_the_softmax():
  logits = jnp.array([1.0, -2.0, 0.5, 0.0, -30.0, 2.0, -1.0, 0.3])
  rows, temperature = 20_000, 1.5
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), rows))
  tokens, logprobs = jax.jit(sampling.sample)(
      jnp.tile(logits, (rows, 1)), keys, jnp.full(rows, 9),
      jnp.float32(temperature))
  scaled = np.asarray(logits, np.float64) / temperature
  probs = np.exp(scaled) / np.exp(scaled).sum()
  np.testing.assert_allclose(logprobs, np.log(probs)[tokens], rtol=1e-5)
  counts = np.bincount(tokens, minlength=8)
  assert counts[4] == 0  # e**-20: never
  likely = probs > 1e-6
  chi2 = np.sum((counts - rows * probs)[likely] ** 2 / (rows * probs)[likely])
  assert chi2 < 22.5  # 6 degrees of freedom: exceeded once in a thousand


def test_samples_of_one_row_follow_the_softmax_over_positions():
  rows = 20_000
  key = jnp.tile(jax.random.key_data(jax.random.key(1)), (rows, 1))
  tokens, _ = jax.jit(sampling.sample)(
      jnp.zeros((rows, 8)), key, jnp.arange(rows), jnp.float32(1))
  counts = np.bincount(tokens, minlength=8)
  assert np.sum((counts - rows / 8) ** 2 / (rows / 8)) < 24.3  # as above, 7


# A large one is cut into blocks for eight devices: of 16 tokens, or padded.
@pytest.mark.parametrize('size', [5, 128, 200, 1792, 16_512, 16_500])
def test_a_vocabulary_of_any_size_is_drawn_from_to_its_ends(size):
  rows, rng = 20_000 if size < 10_000 else 1_000, np.random.default_rng(size)
  logits = np.full(size, -np.inf)
  support = np.unique([0, size // 3, size // 2, size - 2, size - 1])
  logits[support] = rng.normal(size=len(support))
  key = jnp.tile(jax.random.key_data(jax.random.key(size)), (rows, 1))
  tokens, logprobs = jax.jit(sampling.sample)(
      jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1)), key,
      jnp.arange(rows), jnp.float32(1))
  probs = np.exp(logits) / np.exp(logits).sum()
  counts = np.bincount(tokens, minlength=size)
  assert counts.sum() == counts[support].sum()
  expected = rows * probs[support]
  assert np.sum((counts[support] - expected) ** 2 / expected) < 18.5  # 4: 1e-3
  np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=1e-5)


def test_uniforms_of_zero_and_nearly_one_give_tokens_that_have_weight():
  weights = jnp.array([0, 0, .3, 0, .7, 0] + [0] * 300, jnp.float32)[None]
  draw = lambda u: int(sampling._invert(weights, jnp.array([u], jnp.float32))
                       [0][0])
  assert draw(0.0) == 2
  assert draw(np.nextafter(np.float32(0.3), np.float32(0))) == 2
  assert draw(np.nextafter(np.float32(1), np.float32(0))) == 4
  assert draw(1.0) == 4  # a target that rounding brought up to the sum


def kept_oracle(logits, top_k, top_p, min_p):
  """The definition in float64: each rule on the whole distribution."""
  probs = np.exp(logits - logits.max())
  probs /= probs.sum()
  order = np.argsort(-probs, kind='stable')
  keep = np.ones(len(probs), bool)
  if top_k:
    keep &= probs >= probs[order[min(top_k, len(probs)) - 1]]
  if top_p < 1:
    enough = np.flatnonzero(np.cumsum(probs[order]) >= top_p)[0]
    keep &= probs >= probs[order[enough]]
  return keep & (probs >= min_p * probs.max())


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.integers(-12, 12), min_size=2, max_size=12), st.integers(0, 14),
    st.floats(0.02, 1), st.floats(0, 1), st.integers(0, 40))
def test_truncations_keep_what_their_definitions_keep(
    levels, top_k, top_p, min_p, copies):
  logits = np.array(levels * (1 + copies), np.float64) / 4  # with many ties
  probs = np.exp(logits) / np.exp(logits).sum()
  above = np.array([probs[probs >= p].sum() for p in np.unique(probs)])
  hypothesis.assume(np.abs(above - top_p).min() > 1e-5)  # no matter of rounding
  hypothesis.assume(np.abs(probs / probs.max() - min_p).min() > 1e-5)
  expected = kept_oracle(logits, top_k, top_p, min_p)
  padded = np.full(600, -np.inf)  # one shape for all cases
  padded[:len(logits)] = logits
  kept = _kept(jnp.exp(jnp.asarray(padded - logits.max(), jnp.float32))[None],
               Truncation(top_k, np.float32(top_p), np.float32(min_p)))
  np.testing.assert_array_equal(kept[0, :len(logits)], expected)
  assert kept[0, np.argmax(padded)]


_kept = jax.jit(sampling.allowed)


@pytest.mark.parametrize('truncation', [
    Truncation(top_k=3), Truncation(top_p=0.8), Truncation(min_p=0.3),
    Truncation(5, 0.9, 0.05)])
def test_log_probs_are_of_the_distribution_that_was_drawn_from(truncation):
  rows, temperature = 20_000, 0.7
  logits = np.random.default_rng(2).normal(size=150) * 2
  key = jnp.tile(jax.random.key_data(jax.random.key(2)), (rows, 1))
  tokens, logprobs = jax.jit(sampling.sample)(
      jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1)), key,
      jnp.arange(rows), jnp.float32(temperature), truncation)
  probs = np.where(kept_oracle(logits / temperature, *truncation),
                   np.exp(logits / temperature), 0)
  probs /= probs.sum()
  assert 1 < (probs > 0).sum() < 75
  np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=1e-5)
  counts = np.bincount(tokens, minlength=150)
  assert not counts[probs == 0].any()
  expected = rows * probs[probs > 0]
  chi2 = np.sum((counts[probs > 0] - expected) ** 2 / expected)
  assert chi2 < 2 * len(expected) + 20


def test_truncation_leaves_greedy_alone_and_off_means_off():
  logits = jnp.asarray(np.random.default_rng(4).normal(size=(50, 300)),
                       jnp.float32)
  key = jax.random.key_data(jax.random.split(jax.random.key(0), 50))
  draw = functools.partial(jax.jit(sampling.sample), logits, key,
                           jnp.arange(50))
  for temperature, on in ((0.0, Truncation(2, 0.5, 0.5)), (1.0, Truncation())):
    whole, some = draw(jnp.float32(temperature)), draw(
        jnp.float32(temperature), on)
    np.testing.assert_array_equal(whole[0], some[0])
    np.testing.assert_array_equal(whole[1], some[1])
  assert Truncation().is_off and not Truncation(top_p=0.9).is_off


@pytest.mark.parametrize('bad, message', [
    (Truncation(top_k=-1), 'rollout.top_k must be at least 0'),
    (Truncation(top_p=0.0), 'rollout.top_p must be above 0'),
    (Truncation(top_p=1.5), 'rollout.top_p must be above 0'),
    (Truncation(min_p=2.0), r'rollout.min_p must be in \[0, 1\]')])
def test_truncations_out_of_range_are_refused(bad, message):
  with pytest.raises(ValueError, match=message):
    bad.check()


def test_rows_that_draw_each_in_its_way_draw_as_if_all_drew_so():
  rng = np.random.default_rng(12)
  logits = jnp.asarray(3 * rng.normal(size=(24, 300)), jnp.float32)
  keys = jax.random.key_data(jax.random.split(jax.random.key(3), 24))
  place = jnp.arange(24)
  ways = [sampling.Draw(0.7), sampling.Draw(0.0),
          sampling.Draw(1.3, sampling.Truncation(5, 0.8, 0.01)),
          sampling.Draw(1.0, sampling.Truncation(top_p=0.3)),
          sampling.Draw(0.0, sampling.Truncation(top_k=2))]
  draws = [ways[row % len(ways)] for row in range(24)]
  temperatures, truncations = sampling.by_row(draws)
  assert truncations.top_k.tolist()[:5] == [0, 0, 5, 0, 2]
  tokens, logprobs = jax.jit(sampling.sample)(
      logits, keys, place, temperatures, truncations)
  for number, (temperature, truncation) in enumerate(ways):
    alike, its_logprobs = jax.jit(sampling.sample)(
        logits, keys, place, np.float32(temperature),
        None if truncation.is_off else truncation)
    rows = np.arange(number, 24, len(ways))
    np.testing.assert_array_equal(tokens[rows], alike[rows])
    np.testing.assert_array_equal(logprobs[rows], its_logprobs[rows])
  assert sampling.by_row(draws[:2])[1] is None  # costs nothing where none is
