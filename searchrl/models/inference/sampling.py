# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Samples one token a row, with its log-prob, from logits and row keys.

The CDF is inverted with one uniform a row, in two levels: the sums of blocks of
the vocabulary give the block, and cumulative sums in the block the token.
Nothing of the vocabulary's size is accumulated or normalised; if the vocabulary
is sharded, only the blocks' sums cross devices.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32
import numpy as np

_BLOCKS = (128, 64, 32, 16)  # tokens
_DEVICES = 8  # that have whole blocks of a large vocabulary
_BITS_OF_ONE = 0x3F800000  # float32: positive floats are ordered like their
# bits, so that a threshold in [0, 1] is found by halving 30 times.
_HALVINGS = 30


class Truncation(NamedTuple):
  """Which tokens may be drawn; each rule applies to the whole distribution.

  The likeliest token is always kept, ties are kept or dropped together, and the
  distribution is renormalised over the kept tokens.
  """

  top_k: int = 0  # the k likeliest; 0: all
  top_p: float = 1.0  # the fewest likeliest with this total probability
  min_p: float = 0.0  # those with this share of the largest probability

  @property
  def is_off(self) -> bool:
    return self == Truncation()

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
  """How the tokens of one slot are drawn."""

  temperature: float = 1.0  # 0 is greedy
  truncation: Truncation = Truncation()


def by_row(draws: Sequence[Draw]) -> tuple[
    Float[np.ndarray, 'B'], Truncation | None]:
  """Temperatures and truncations, one per row; None if no row truncates."""
  temperatures = np.array([d.temperature for d in draws], np.float32)
  if all(d.truncation.is_off for d in draws):
    return temperatures, None
  top_k, top_p, min_p = zip(*(d.truncation for d in draws))
  return temperatures, Truncation(
      np.array(top_k, np.int32), np.array(top_p, np.float32),
      np.array(min_p, np.float32))


def sample(
    logits: Float[Array, 'B V'],
    row_key: UInt32[Array, 'B 2'],
    position: Int[Array, 'B'],
    temperature: Float[Array, ''] | Float[Array, 'B'],
    truncation: Truncation | None = None,
) -> tuple[Int[Array, 'B'], Float[Array, 'B']]:
  """Draws one token a row.

  Args:
    logits: unscaled.
    row_key: data of the row's key; the position is folded in last.
    position: of the drawn token.
    temperature: one for all rows, or one per row; 0 takes the likeliest token.
    truncation: its fields may be traced, and one per row; None is free.

  Returns:
    Tokens, and their log-probs in nats under the distribution that they were
    drawn from, at the temperature (not truncated, and at 1, if greedy).
  """
  greedy = temperature == 0
  over_tokens = (lambda x: x[:, None]) if jnp.ndim(temperature) else (
      lambda x: x)
  scaled = logits / over_tokens(jnp.where(greedy, 1.0, temperature))
  best = jnp.argmax(scaled, -1).astype(jnp.int32)
  of_best = jnp.take_along_axis(scaled, best[:, None], -1)
  weights = jnp.exp(scaled - of_best)  # in [0, 1]
  if truncation is not None:
    weights = jnp.where(
        over_tokens(greedy) | kept(weights, truncation), weights, 0)
  uniform = jax.vmap(lambda data, at: jax.random.uniform(
      jax.random.fold_in(jax.random.wrap_key_data(data), at)))(
          row_key, position)
  drawn, total = _invert(weights, uniform)
  token = jnp.where(greedy, best, drawn)
  of_token = jnp.take_along_axis(scaled, token[:, None], -1)
  return token, (of_token - of_best)[:, 0] - jnp.log(total)


def _invert(weights: Float[Array, 'B V'], uniform: Float[Array, 'B']
           ) -> tuple[Int[Array, 'B'], Float[Array, 'B']]:
  """The first token whose cumulative weight exceeds uniform * total."""
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
  """Tokens of a block.

  Devices among which a large vocabulary is split should each have whole blocks:
  else all weights would be gathered to be cut.
  """
  whole = [width for width in _BLOCKS if size % (width * _DEVICES) == 0]
  return whole[0] if whole and size > _BLOCKS[0]**2 else _BLOCKS[0]


def _first_above(cumulative, target, weights) -> Int[Array, 'B']:
  """The first index whose sum exceeds the target, among those with weight."""
  first = jnp.sum(cumulative <= target[:, None], -1)
  column = jnp.arange(weights.shape[-1])
  last = jnp.max(jnp.where(weights > 0, column, 0), -1)
  # By rounding, no sum may exceed the target, or one without weight may be the
  # first: then the next index with weight is right.
  later = jnp.where((weights > 0) & (column >= first[:, None]), column,
                    weights.shape[-1])
  return jnp.minimum(jnp.min(later, -1), last).astype(jnp.int32)


def kept(weights: Float[Array, 'B V'], truncation: Truncation
        ) -> Bool[Array, 'B V']:
  """Tokens that may be drawn; weights are p / max p, so 1 is the largest.

  Top-k and top-p are each a threshold: the largest one that keeps enough
  tokens, or enough probability. It is found by halving, without sorting the
  vocabulary.
  """
  size = weights.shape[-1]
  count = jnp.where(jnp.asarray(truncation.top_k) > 0, truncation.top_k, size)
  share = truncation.top_p * weights.sum(-1)
  all_of_it = jnp.asarray(truncation.top_p) >= 1

  def halve(_, bounds):
    low, high = bounds  # bits [2 B]: `low` keeps enough, `high` does not
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
