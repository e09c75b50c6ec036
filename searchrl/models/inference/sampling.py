# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling of one token per row, with its log-prob, from logits and row keys.

The CDF is inverted with one uniform number per row, in two levels. Sums over
blocks of the vocabulary give the block, and cumulative sums within the block
give the token. No array of the vocabulary's size is accumulated or normalised.
If the vocabulary is sharded, only the blocks' sums cross devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32
import numpy as np

_BLOCKS = (128, 64, 32, 16)  # possible block sizes in tokens
_DEVICES = 8  # number of devices that get whole blocks of a large vocabulary
_BITS_OF_ONE = 0x3F800000  # bits of 1.0 in float32
# Positive floats are ordered like their bits, so that 30 halvings find a
# threshold in [0, 1].
_HALVINGS = 30


Number = float | np.ndarray | Array


class Truncation(NamedTuple):
  """Rules for which tokens may be drawn. Each applies to the full distribution.

  The likeliest token is always kept. Tokens of equal probability are kept or
  dropped together. The distribution is renormalised over the kept tokens.
  """

  top_k: Number = 0  # number of likeliest tokens that are kept; 0: all
  top_p: Number = 1.0  # least total probability of the kept tokens; 1: all
  min_p: Number = 0.0  # share of the largest probability that a token must have

  @property
  def is_off(self) -> bool:
    """True if every token may be drawn."""
    return self == Truncation()

  def as_arrays(self) -> 'Truncation':
    """Returns a copy with arrays as fields, which jitted functions trace."""
    return Truncation(
        np.array(self.top_k, np.int32), np.array(self.top_p, np.float32),
        np.array(self.min_p, np.float32))

  def check(self) -> None:
    """Raises a ValueError if a field is out of its range."""
    for name, legal, rule in (
        ('top_k', self.top_k >= 0, 'at least 0, which is off'),
        ('top_p', 0 < self.top_p <= 1, 'above 0 and at most 1, which is off'),
        ('min_p', 0 <= self.min_p <= 1, 'in [0, 1]; 0 is off')):
      if not legal:
        raise ValueError(
            f'rollout.{name} must be {rule}, but is {getattr(self, name)}.')


class Draw(NamedTuple):
  """Settings of the distribution from which one slot's tokens are drawn."""

  temperature: float = 1.0  # 0 is greedy
  truncation: Truncation = Truncation()


def by_row(draws: Sequence[Draw]) -> tuple[
    Float[np.ndarray, 'B'], Truncation | None]:
  """Returns the settings of several rows as arrays, for `sample`.

  Returns:
    The temperatures, [B], and a Truncation whose fields are arrays [B]. The
    truncation is None if every row may draw all tokens.
  """
  temperatures = np.array([d.temperature for d in draws], np.float32)
  if all(d.truncation.is_off for d in draws):
    return temperatures, None
  columns: Any = zip(*(d.truncation for d in draws))
  return temperatures, Truncation(*columns).as_arrays()


def sample(
    logits: Float[Array, 'B V'],
    row_key: UInt32[Array, 'B 2'],
    position: Int[Array, 'B'],
    temperature: Float[Array, ''] | Float[Array, 'B'],
    truncation: Truncation | None = None,
) -> tuple[Int[Array, 'B'], Float[Array, 'B']]:
  """Draws one token per row.

  Args:
    logits: Logits before they are divided by the temperature.
    row_key: Data of each row's random key, before the position is folded in.
    position: Position of the drawn token.
    temperature: Temperature of all rows, or one per row. 0 takes the likeliest
      token.
    truncation: Rules for which tokens may be drawn. Its fields may be traced
      and may have one value per row. None costs nothing.

  Returns:
    The tokens, and their log-probs in nats under the distribution that they
    were drawn from. If greedy, this is the distribution at temperature 1
    without truncation.
  """
  greedy = temperature == 0
  over_tokens = (lambda x: x[:, None]) if jnp.ndim(temperature) else (
      lambda x: x)
  scaled = logits / over_tokens(jnp.where(greedy, 1.0, temperature))
  best = jnp.argmax(scaled, -1).astype(jnp.int32)
  largest = jnp.take_along_axis(scaled, best[:, None], -1)
  weights = jnp.exp(scaled - largest)  # in [0, 1]
  if truncation is not None:
    weights = jnp.where(
        over_tokens(greedy) | allowed(weights, truncation), weights, 0)
  uniform = jax.vmap(lambda data, position: jax.random.uniform(
      jax.random.fold_in(jax.random.wrap_key_data(data), position)))(
          row_key, position)
  drawn, total = _invert(weights, uniform)
  token = jnp.where(greedy, best, drawn)
  score = jnp.take_along_axis(scaled, token[:, None], -1)
  return token, (score - largest)[:, 0] - jnp.log(total)


def _invert(weights: Float[Array, 'B V'], uniform: Float[Array, 'B']
           ) -> tuple[Int[Array, 'B'], Float[Array, 'B']]:
  """Returns the first token whose cumulative weight exceeds uniform * total.

  The second result is the total weight of each row.
  """
  rows, size = weights.shape
  width = _width(size)
  blocks = -(-size // width)
  weights = jnp.pad(weights, ((0, 0), (0, blocks * width - size)))
  weights = weights.reshape(rows, blocks, width)
  sums = weights.sum(-1)
  below = jnp.cumsum(sums, -1)
  total = below[:, -1]
  target = uniform * total
  block = _first_above(below, target, sums)
  inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0]
  before = jnp.take_along_axis(below - sums, block[:, None], -1)
  token = _first_above(before + jnp.cumsum(inside, -1), target, inside)
  return block * width + token, total


def _width(size: int) -> int:
  """Returns the number of tokens per block of a vocabulary of `size` tokens.

  If a large vocabulary is split over devices, each device should have whole
  blocks. Otherwise the weights of all tokens would be gathered before they are
  cut into blocks.
  """
  whole = [width for width in _BLOCKS if size % (width * _DEVICES) == 0]
  return whole[0] if whole and size > _BLOCKS[0]**2 else _BLOCKS[0]


def _first_above(cumulative, target, weights) -> Int[Array, 'B']:
  """Returns the first index whose cumulative weight exceeds the target, [B].

  An index with weight 0 is never returned.

  Args:
    cumulative: Sums of the weights up to each index, [B, n].
    target: Number that the sum must exceed, [B].
    weights: Weight of each index, [B, n].
  """
  first = jnp.sum(cumulative <= target[:, None], -1)
  column = jnp.arange(weights.shape[-1])
  last = jnp.max(jnp.where(weights > 0, column, 0), -1)
  # Because of rounding, it can happen that no sum exceeds the target; then the
  # last index with weight is right. Or the first index that exceeds it may have
  # no weight; then the next index with weight is right.
  later = jnp.where((weights > 0) & (column >= first[:, None]), column,
                    weights.shape[-1])
  return jnp.minimum(jnp.min(later, -1), last).astype(jnp.int32)


def allowed(weights: Float[Array, 'B V'], truncation: Truncation
        ) -> Bool[Array, 'B V']:
  """Returns True for the tokens that may be drawn, [B, V].

  Top-k and top-p each set a threshold: the largest one that keeps enough
  tokens, or enough probability. It is found by halving, without sorting the
  vocabulary. The largest of these thresholds and min_p holds.

  Args:
    weights: Probability of each token divided by the largest one of its row.
    truncation: Rules for which tokens may be drawn.
  """
  size = weights.shape[-1]
  count = jnp.where(jnp.asarray(truncation.top_k) > 0, truncation.top_k, size)
  share = truncation.top_p * weights.sum(-1)
  all_of_it = jnp.asarray(truncation.top_p) >= 1

  def halve(_, bounds):
    low, high = bounds  # bits, [2 B]; `low` keeps enough, `high` does not
    middle = (low + high) // 2
    threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
    above = weights >= threshold[..., None]
    tokens = above[0].sum(-1) >= count
    mass = jnp.sum(jnp.where(above[1], weights, 0), -1) >= share
    good = jnp.stack([tokens, mass])
    return jnp.where(good, middle, low), jnp.where(good, high, middle)

  low = jnp.zeros((2, len(weights)), jnp.int32)
  low, _ = jax.lax.fori_loop(
      0, _HALVINGS, halve, (low, jnp.full_like(low, _BITS_OF_ONE + 1)))
  low = low.at[1].set(jnp.where(all_of_it, 0, low[1]))
  threshold = jax.lax.bitcast_convert_type(low, jnp.float32)
  threshold = jnp.maximum(threshold.max(0), truncation.min_p)
  return weights >= threshold[:, None]
