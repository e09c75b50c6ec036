# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the matrices of their groups, for GPUs (Triton).

A group is the rows that are multiplied by one matrix, such as the tokens of one
expert. Rows are sorted by group, and each group begins at a new block of `ROWS`
rows. A GPU program computes some columns of a block's output, with one matrix.
The output of a block without a group is 0 and is not computed.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS = 64  # rows of a block
_WIDTH = 128  # largest width of a tile
_INNER = 64  # largest number of terms of a sum that a program reads at a time


@jax.custom_vjp
def product(
    x: Float[Array, 'P K'],
    matrices: Float[Array, 'E K N'],
    starts: Int[Array, 'E+1'],
) -> Float[Array, 'P N']:
  """Returns the product of each row with the matrix of its group, [P N].

  Args:
    x: P rows of width K, sorted by group. Each group is filled up to whole
      blocks with rows that are 0.
    matrices: Matrices of the groups.
    starts: Index of the first block of each group, and then the index of the
      first block after all groups.
  """
  return _by_row(x, matrices, starts, is_transposed=False)


def _forward(x, matrices, starts):
  return product(x, matrices, starts), (x, matrices, starts)


def _backward(inputs, gradient):
  x, matrices, starts = inputs
  return (_by_row(gradient, matrices, starts, is_transposed=True),
          _by_group(x, gradient, starts).astype(matrices.dtype), None)


product.defvjp(_forward, _backward)


def _call(kernel, grid, shape, block, *arrays, **options) -> Any:
  """Runs a kernel that reads whole inputs, and returns its output.

  Each program in the grid writes the block of the output with its own index.
  """
  from jax.experimental.pallas import triton  # slow to import
  return pl.pallas_call(
      functools.partial(kernel, **options), grid=grid,
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
      out_specs=pl.BlockSpec(block, lambda *index: index),
      out_shape=jax.ShapeDtypeStruct(shape, arrays[1].dtype),
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
      name='grouped_product')(*arrays)


def _by_row(x, matrices, starts, *, is_transposed: bool):
  width = matrices.shape[1 if is_transposed else 2]
  tile = math.gcd(width, _WIDTH)
  blocks = len(x) // ROWS
  owner = jnp.searchsorted(starts[1:], jnp.arange(blocks), side='right').astype(
      jnp.int32)
  return _call(
      _row_kernel, (blocks, width // tile), (len(x), width), (ROWS, tile),
      owner, x, matrices, is_transposed=is_transposed)


def _product(x, y):
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=precision)


def _row_kernel(owner_ref, x_ref, matrices_ref, out_ref, *, is_transposed: bool):
  row, column = pl.program_id(0), pl.program_id(1)
  owner, (rows, tile) = owner_ref[row], out_ref.shape
  inner = math.gcd(x_ref.shape[1], _INNER)
  columns = pl.ds(column * tile, tile)

  def add(i, total):
    part = pl.ds(i * inner, inner)
    matrix = (matrices_ref[owner, columns, part].T if is_transposed else
              matrices_ref[owner, part, columns])
    return total + _product(x_ref[pl.ds(row * rows, rows), part], matrix)

  is_owned = (owner < matrices_ref.shape[0]).astype(jnp.int32)
  parts = is_owned * (x_ref.shape[1] // inner)
  out_ref[...] = jax.lax.fori_loop(
      0, parts, add, jnp.zeros((rows, tile), jnp.float32)).astype(out_ref.dtype)


def _by_group(x, gradient, starts):
  """Returns the gradient of each group's matrix, [E K N].

  It is the sum of the outer products of x[p] and gradient[p] over the rows p of
  the group.
  """
  count, shape = len(starts) - 1, (x.shape[1], gradient.shape[1])
  block = math.gcd(shape[0], _INNER), math.gcd(shape[1], _WIDTH)
  return _call(
      _group_kernel, (count, shape[0] // block[0], shape[1] // block[1]),
      (count, *shape), (None, *block), starts, x, gradient)


def _group_kernel(starts_ref, x_ref, gradient_ref, out_ref):
  group, row, column = (pl.program_id(i) for i in range(3))
  height, width = out_ref.shape

  def add(i, total):
    rows = pl.ds(i * ROWS, ROWS)
    return total + _product(
        x_ref[rows, pl.ds(row * height, height)].T,
        gradient_ref[rows, pl.ds(column * width, width)])

  out_ref[...] = jax.lax.fori_loop(
      starts_ref[group], starts_ref[group + 1], add,
      jnp.zeros((height, width), jnp.float32)).astype(out_ref.dtype)
