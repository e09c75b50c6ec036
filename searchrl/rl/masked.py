# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Values and a mask in, means out: a mean stays two sums until the end.

What lies outside a mask may be anything, infinities and NaN included: it
reaches neither a value nor a gradient.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A sum and what it is divided by; micro-batches and hosts add both up."""

  total: Float[Array, '']  # in the unit of what is averaged
  count: Float[Array, '']  # how many entries the total has

  @classmethod
  def of(cls, x: Num[Array, '...'], where: Bool[Array, '...']) -> Mean:
    """The mean of `x` over the entries where `where` holds.

    Args:
      x: numbers or booleans; a boolean's mean is a fraction.
      where: True where an entry counts; of the shape of `x`.

    Returns:
      A Mean in float32, or float64 if `x` is.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes(x=x, where=where)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    kept = jnp.where(where, x, 0).astype(dtype)
    return cls(jnp.sum(kept), jnp.sum(where, dtype=dtype))

  @property
  def value(self) -> Float[Array, '']:
    """total / count; 0 where nothing was counted."""
    return self.total / jnp.maximum(self.count, 1)

  def __add__(self, other: Mean) -> Mean:
    """The mean over both sets of entries."""
    return Mean(self.total + other.total, self.count + other.count)


def mean(x: Num[Array, '...'], where: Bool[Array, '...']) -> Float[Array, '']:
  """sum(x) / count over the entries where `where` holds; 0 without any."""
  return Mean.of(x, where).value


def row_sum(
    x: Float[Array, 'B T'], where: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """The sum of each row's entries where `where` holds; 0 without any."""
  check_shapes(x=x, where=where)
  return jnp.where(where, x, 0).sum(-1)


def row_mean(
    x: Float[Array, 'B T'], where: Bool[Array, 'B T']) -> Float[Array, 'B']:
  """The mean of each row's entries where `where` holds; 0 without any."""
  return row_sum(x, where) / jnp.maximum(where.sum(-1), 1)


def check_shapes(**arrays: Array) -> None:
  """Refuses arrays that are not aligned with the first one, entry by entry.

  Raises:
    ValueError: one differs in shape; shapes are static, so also while tracing.
  """
  (first, model), *others = arrays.items()
  for name, array in others:
    if array.shape != model.shape:
      raise ValueError(
          f'{name} must have the shape of {first}, {model.shape}, but has '
          f'{array.shape}. Align them entry by entry.')
