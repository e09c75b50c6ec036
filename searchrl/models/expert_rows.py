# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of many tokens: one row for each choice, with rows sorted by expert.

A choice is a pair of a token and one of its experts. The row of a choice is the
vector of the token, which is multiplied by the matrices of the expert.

If devices share the experts, each device gets the tokens of all these devices,
but most choices are of experts on other devices. A device has room for twice
its share of all choices. It computes the choices of its experts in as many
passes as they need, which is nearly always one, so that no choice is dropped.
Tokens and rows are moved by gathers alone, in the forward and the backward
pass. No result therefore depends on the order of a sum.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# A function (rows [P K], matrices [E K N], starts [E + 1]) -> [P N], which
# multiplies each row by the matrix of its expert. The rows of expert e are the
# blocks from starts[e] up to, but not including, starts[e + 1].
Product = Callable[[Array, Array, Array], Array]


class _Pass(NamedTuple):
  """The P rows that a device computes at the same time."""

  places: Int[Array, 'N k']  # row of each choice; out of range: not in the pass
  tokens: Int[Array, 'P']  # token of each row; out of range: the row is unused
  weights: Float[Array, 'P']  # weight of each row's choice; 0 for unused rows
  starts: Int[Array, 'E+1']  # first block of each expert, and the end of all


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def mixed(
    product: Product,
    block: int,
    unit: int,
    ways: int,
    x: Float[Array, 'N D'],
    ids: Int[Array, 'N k'],
    weights: Float[Array, 'N k'],
    kernels: tuple[Array, Array, Array],
) -> Float[Array, 'N D']:
  """Returns the weighted sum of the outputs of each token's experts.

  Args:
    product: Function that multiplies each row by the matrix of its expert.
    block: Number of rows in a block. Each expert has a whole number of blocks.
    unit: Number that divides the number of rows of a pass.
    ways: Number of devices that share the experts.
    x: Tokens of all the devices that share the experts.
    ids: Experts of each token. Ids of E or more are experts on other devices,
      whose outputs are left out of the sum.
    weights: Weights of the experts' outputs.
    kernels: Matrices of the experts on this device: the gates [E D F], the
      upward projections [E D F] and the downward projections [E F D].
  """
  def add(rows: _Pass):
    output = _outputs(product, rows.starts, _take(x, rows.tokens), *kernels)
    return _of_tokens(output, rows.places, weights)

  return _sum_over_passes(add, block, unit, ways, ids, weights, kernels).astype(
      x.dtype)


def _forward(product, block, unit, ways, x, ids, weights, kernels):
  return mixed(product, block, unit, ways, x, ids, weights, kernels), (
      x, ids, weights, kernels)


def _backward(product, block, unit, ways, inputs, gradient):
  """Returns the gradients of x, weights and kernels. Computes rows again."""
  x, ids, weights, kernels = inputs

  def add(rows: _Pass):
    output, pull = jax.vjp(
        functools.partial(_outputs, product, rows.starts),
        _take(x, rows.tokens), *kernels)
    of_rows = _take(gradient, rows.tokens)
    dweights = jnp.einsum('pd,pd->p', output, of_rows,
                          preferred_element_type=jnp.float32)
    dx, *dkernels = pull(of_rows * rows.weights[:, None].astype(x.dtype))
    return (_of_tokens(dx, rows.places, jnp.ones_like(weights)),
            _take(dweights, rows.places), tuple(dkernels))

  sums = _sum_over_passes(add, block, unit, ways, ids, weights, kernels)
  dx, dweights, dkernels = jax.tree.map(
      lambda total, like: total.astype(like.dtype), sums, (x, weights, kernels))
  return dx, None, dweights, dkernels


mixed.defvjp(_forward, _backward)


def _outputs(product: Product, starts, rows, gate, up, down):
  """Returns the rows after the gated MLP of each row's expert, [P D]."""
  hidden = jax.nn.silu(product(rows, gate, starts)) * product(rows, up, starts)
  return product(hidden, down, starts)


def _take(rows, index):
  """Returns the rows at an index, and 0 where it is out of range."""
  return jnp.take(rows, index, axis=0, mode='fill', fill_value=0)


def _of_tokens(rows, places, weights):
  """Returns the weighted sum of the k rows of each token, float32 [N D].

  Choice j of token n has the row places[n, j] and the weight weights[n, j]. A
  place out of range adds 0. The loop is over j, to use less memory.
  """
  return sum(_take(rows, places[:, j]).astype(jnp.float32) * weights[:, j, None]
             for j in range(places.shape[1]))


def _sum_over_passes(add: Callable[[_Pass], Any], block: int, unit: int,
                     ways: int, ids, weights, kernels) -> Any:
  """Returns the sum of the results of `add`; of several passes, in float32."""
  count = len(kernels[0])
  fits = lambda choices: -(-(choices // block + count) * block // unit) * unit
  full = fits(ids.size)
  room = min(full, fits(2 * ids.size // ways))
  places, starts = _places(ids, count, block, -(-full // room) * room)

  def of_pass(number):
    shifted = places - number * room
    free = room + jnp.arange(places.size, dtype=jnp.int32)
    inside = jnp.where((shifted >= 0) & (shifted < room), shifted,
                       free.reshape(places.shape))  # all are different
    choices = jnp.full(room, places.size, jnp.int32).at[inside.ravel()].set(
        jnp.arange(places.size, dtype=jnp.int32), mode='drop',
        unique_indices=True)
    return add(_Pass(
        inside, choices // places.shape[1], _take(weights.ravel(), choices),
        jnp.clip(starts - number * (room // block), 0, room // block)))

  if room == full:
    return of_pass(0)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32),
                       jax.eval_shape(of_pass, jnp.int32(0)))
  return jax.lax.fori_loop(
      0, _passes(starts[-1] * block, room),
      lambda number, sums: jax.tree.map(jnp.add, sums, of_pass(number)), zeros)


def _passes(rows, room: int):
  """Returns the number of passes for this many rows, at `room` rows each."""
  return (rows + room - 1) // room


def _places(ids, count: int, block: int, end: int):
  """Assigns a row of the experts' input to each choice of an expert.

  The rows are sorted by expert. The rows of each expert begin at a multiple of
  `block`. Choices of experts on other devices get the rows from `end` on, which
  are not computed.

  Args:
    ids: Numbers of the k experts of each token, [N k]. A number of `count` or
      more is an expert on another device.
    count: Number E of experts on this device.
    block: Number of rows of a block.
    end: First row that is not computed.

  Returns:
    The row of each choice, [N k]. The second array, [E + 1], has the first
    block of each expert, and then the first block after all experts.
  """
  flat = jnp.minimum(ids.ravel(), count)
  sizes = jnp.zeros(count, jnp.int32).at[flat].add(1, mode='drop')
  cumulated = lambda x: jnp.pad(jnp.cumsum(x), (1, 0))
  starts = cumulated((sizes + block - 1) // block)
  order = jnp.argsort(flat, stable=True)
  expert, rank = flat[order], jnp.arange(len(flat), dtype=jnp.int32)
  row = starts[expert] * block + rank - cumulated(sizes)[expert]
  row = jnp.where(expert < count, row, end + rank)
  return jnp.zeros_like(row).at[order].set(
      row, unique_indices=True).reshape(ids.shape), starts
