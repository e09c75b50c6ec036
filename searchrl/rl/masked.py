# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Masked means and sums; a `Mean` stays a total and a count until the end.

A mask, `where`, must have the shape of its values, and otherwise a ValueError
is raised. Entries outside the mask may be anything, including infinities and
NaN: they affect neither values nor gradients. The divisor of a mean is the
number of entries in a second mask, `count_mask`, which is `where` by default.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

_MASKS = frozenset(('where', 'count_mask', 'loss_mask', 'mask', 'in_baseline'))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A mean, kept as a sum and a divisor, which micro-batches and hosts add."""

  total: Float[Array, '']  # sum of the entries, in their unit
  count: Float[Array, '']  # divisor: number of entries that are counted

  @classmethod
  def of(cls, x: Num[Array, '...'], where: Bool[Array, '...'],
         count_mask: Bool[Array, '...'] | None = None) -> Mean:
    """Returns the mean of numbers or booleans inside the mask.

    Returns:
      A Mean in float32, or in float64 if `x` has that type. Its divisor is the
      number of True entries in `count_mask`, by default `where`. The mean of
      booleans is the fraction that is True.
    """
    count_mask = where if count_mask is None else count_mask
    check_shapes(x=x, where=where, count_mask=count_mask)
    selected = at_least_float32(jnp.where(where, x, 0))
    return cls(jnp.sum(selected), jnp.sum(count_mask, dtype=selected.dtype))

  @property
  def value(self) -> Float[Array, '']:
    """Mean, total / count; 0 if nothing was counted."""
    return self.total / jnp.maximum(self.count, 1)

  def __add__(self, other: Mean) -> Mean:
    """Returns the mean over both sets of entries."""
    return Mean(self.total + other.total, self.count + other.count)


def mean(x: Num[Array, '...'], where: Bool[Array, '...']) -> Float[Array, '']:
  """Returns the mean of the entries inside the mask; 0 if there are none."""
  return Mean.of(x, where).value


def row_sum(
    x: Float[Array, 'B T'], where: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """Returns each row's sum over the mask `where`, [B]; 0 for an empty row."""
  check_shapes(x=x, where=where)
  return jnp.where(where, x, 0).sum(-1)


def row_mean(
    x: Float[Array, 'B T'], where: Bool[Array, 'B T'],
    count_mask: Bool[Array, 'B T'] | None = None) -> Float[Array, 'B']:
  """Returns each row's sum over `where` divided by its count of `count_mask`.

  Without a `count_mask`, this is the mean inside `where`. A row without entries
  inside `where` has 0.
  """
  count_mask = where if count_mask is None else count_mask
  check_shapes(where=where, count_mask=count_mask)
  return row_sum(x, where) / jnp.maximum(count_mask.sum(-1), 1)


def at_least_float32(x: Num[Array, '...']) -> Float[Array, '...']:
  """Returns an array in float32, or in float64 if it has that type."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def check_shapes(**arrays: Array) -> None:
  """Checks that arrays have the same shape, and that masks are boolean.

  Shapes and dtypes are static, so this works while JAX traces.

  Raises:
    ValueError: A shape differs from the first one, or an array whose keyword is
      the name of a mask is not of booleans.
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
