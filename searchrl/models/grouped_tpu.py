# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the matrices of their groups, for TPUs.

A group is the rows that are multiplied by one matrix, such as the tokens of one
expert. `jax.lax.ragged_dot` computes the products. For the gradient of the
matrices, however, the TPU's compiler would multiply all rows for each group and
mask the result. The megablox kernel, which is part of jax, computes this
gradient instead.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS = 512  # rows that the kernel reads at a time
_WIDTH = 1024  # largest width of a tile


@jax.custom_vjp
def product(
    x: Float[Array, 'P K'],
    matrices: Float[Array, 'E K N'],
    starts: Int[Array, 'E+1'],
) -> Float[Array, 'P N']:
  """Returns each row's product with the matrix of its group, [P N].

  Args:
    x: P rows of width K, sorted by group. P is a multiple of `ROWS`.
    matrices: Matrices of the groups.
    starts: First row of each group, and the first row after all groups.
  """
  return jax.lax.ragged_dot(x, matrices, jnp.diff(starts))


def _forward(x, matrices, starts):
  return product(x, matrices, starts), (x, matrices, starts)


def _backward(inputs, gradient):
  x, matrices, starts = inputs
  sizes = jnp.diff(starts)
  return (
      jax.lax.ragged_dot(gradient, matrices.swapaxes(1, 2), sizes),
      jax.lax.platform_dependent(
          x, gradient, sizes, tpu=sums, default=functools.partial(
              _transposed, matrices)), None)


product.defvjp(_forward, _backward)


def sums(x, gradient, sizes, interpret: bool = False):
  """Returns the gradient of each group's matrix, [E K N].

  It is the sum of the outer products of x[p] and gradient[p] over the rows p of
  the group. `sizes` has the number of rows of each group. `interpret` runs the
  TPU's kernel on any device, slowly, for tests.
  """
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
  tile = ROWS, min(x.shape[1], _WIDTH), min(gradient.shape[1], _WIDTH)
  return tgmm(x.T, gradient, sizes, x.dtype, tile, interpret=interpret)


def _transposed(matrices, x, gradient, sizes):
  """Returns the same as `sums`, by the transpose of `ragged_dot`."""
  _, pull = jax.vjp(lambda y: jax.lax.ragged_dot(x, y, sizes), matrices)
  return pull(gradient)[0]
