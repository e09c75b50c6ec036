# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sums over micro-batches in one compiled loop, and over devices in one order.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
import jax.numpy as jnp
from jaxtyping import Array, Int

from searchrl.runtime import mesh as meshes


def accumulate(function: Callable[[Any], tuple[Any, Any]], stack: Any,
               count: Int[Array, ''],
               constrain: Callable[[Any], Any] = lambda x: x
              ) -> tuple[Any, Any]:
  """Applies a function to the first `count` micro-batches of a stack.

  Args:
    function: Function from a micro-batch to two trees: one to sum over the
      micro-batches, and one to keep for each.
    stack: Tree of arrays whose first axis numbers the micro-batches.
    count: Number of micro-batches that are not empty.
    constrain: Function that is applied to the sum after each addition, to set
      its sharding.

  Returns:
    The sum of the function's first results, and its second results stacked,
    with 0 for the micro-batches from `count` on.
  """
  def apply(n):
    return function(jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), stack))

  def add(n, carry):
    sums, items = carry
    terms, item = apply(n)
    return (constrain(jax.tree.map(jnp.add, sums, terms)),
            jax.tree.map(lambda all_, x: all_.at[n].set(x), items, item))

  size = jax.tree.leaves(stack)[0].shape[0]
  zeros = lambda x, *leading: jnp.zeros((*leading, *x.shape), x.dtype)
  terms, item = jax.eval_shape(apply, 0)
  return jax.lax.fori_loop(0, count, add, (
      jax.tree.map(zeros, terms),
      jax.tree.map(lambda x: zeros(x, size), item)))


def summed_in_order(of_micro: Callable[..., Any], mesh: Mesh
                   ) -> Callable[..., Any]:
  """Returns a function like `of_micro` that sums over devices in one order.

  `of_micro` maps four arguments and a micro-batch to sums and results per row.
  Each device computes its rows of the micro-batch. The devices' sums are then
  gathered and added in the order of the devices, so that the rounding is always
  the same. The mesh has data parallelism only.
  """
  def of_device(*args):
    sums, rows = of_micro(*args)
    return jax.tree.map(lambda x: x[None], sums), rows

  whole, rows = PartitionSpec(), PartitionSpec('data')
  of_devices = jax.shard_map(
      of_device, mesh=mesh, in_specs=(whole, whole, whole, whole, rows),
      out_specs=rows, check_vma=False)

  def in_order(*args):
    sums, rows = of_devices(*args)
    gathered = jax.lax.with_sharding_constraint(
        sums, meshes.sharding(mesh, ()))
    return jax.tree.map(lambda x: jnp.sum(x, 0), gathered), rows

  return in_order
