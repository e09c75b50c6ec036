# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Masked means and sums; a `Mean` stays a total and a count until the end.

Conventions: a mask, `where`, has the shape of its values, else a ValueError is
raised. Entries outside it may hold anything, infinities and NaN included: they
reach neither a value nor a gradient. The divisor of a mean is the number of
entries in a second mask, `counted`, which is `where` by default.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

_MASKS = frozenset(('where', 'counted', 'loss_mask', 'mask', 'in_baseline'))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A sum and its divisor; micro-batches and hosts add up both."""

  total: Float[Array, '']  # in the unit of the entries
  count: Float[Array, '']  # number of entries in the total

  @classmethod
  def of(cls, x: Num[Array, '...'], where: Bool[Array, '...'],
         counted: Bool[Array, '...'] | None = None) -> Mean:
    """The mean of numbers, or of booleans as a fraction, inside the mask.

    Returns:
      A Mean in float32, or float64 if `x` is.
    """
    counted = where if counted is None else counted
    check_shapes(x=x, where=where, counted=counted)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    kept = jnp.where(where, x, 0).astype(dtype)
    return cls(jnp.sum(kept), jnp.sum(counted, dtype=dtype))

  @property
  def value(self) -> Float[Array, '']:
    """total / count; 0 if nothing was counted."""
    return self.total / jnp.maximum(self.count, 1)

  def __add__(self, other: Mean) -> Mean:
    """The mean over both sets of entries."""
    return Mean(self.total + other.total, self.count + other.count)


def mean(x: Num[Array, '...'], where: Bool[Array, '...']) -> Float[Array, '']:
  """sum(x) / count over the entries inside the mask; 0 if there are none."""
  return Mean.of(x, where).value


def row_sum(
    x: Float[Array, 'B T'], where: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """The sum of each row's entries inside the mask; 0 if there are none."""
  check_shapes(x=x, where=where)
  return jnp.where(where, x, 0).sum(-1)


def row_mean(
    x: Float[Array, 'B T'], where: Bool[Array, 'B T'],
    counted: Bool[Array, 'B T'] | None = None) -> Float[Array, 'B']:
  """The mean of each row's entries inside the mask; 0 if there are none."""
  counted = where if counted is None else counted
  check_shapes(where=where, counted=counted)
  return row_sum(x, where) / jnp.maximum(counted.sum(-1), 1)


def check_shapes(**arrays: Array) -> None:
  """Checks that all arrays have the shape of the first, and masks are masks.

  Raises:
    ValueError: one differs, or one of the names that masks have is not of
      booleans. Both are static, so this works while tracing.
  """
  (first, model), *others = arrays.items()
  for name, array in arrays.items():
    if name in _MASKS and array.dtype != bool:
      raise ValueError(
          f'{name} must be a mask of booleans, but is of {array.dtype}, in '
          'which ~1 is -2, and true. Compare it with 0 first.')
  for name, array in others:
    if array.shape != model.shape:
      raise ValueError(
          f'{name} must have the shape of {first}, {model.shape}, but has '
          f'{array.shape}. Align them entry by entry.')
