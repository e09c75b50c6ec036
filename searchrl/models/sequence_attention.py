# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over rows whose positions are split over devices.

This is the method of DeepSpeed-Ulysses (arXiv:2309.14509). An all-to-all
exchange gives each device all positions of some heads, so that any
implementation of `attention.causal` computes exact attention, with packed
documents and a sliding window. A second exchange splits the output over
positions again.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from searchrl.models import transformer


def check(shape: transformer.TransformerConfig, *, sequence: int, tensor: int,
          pack_length: int) -> None:
  """Raises a ValueError if the positions of rows cannot be split.

  Args:
    shape: Shape of the model.
    sequence: Value of config.mesh.sequence.
    tensor: Value of config.mesh.tensor.
    pack_length: Number of tokens of a row.
  """
  if sequence == 1:
    return
  heads = shape.num_attention_heads
  if shape.experts:
    raise ValueError(
        'mesh.sequence must be 1 for a model with experts, but is '
        f'{sequence}. Give the devices to mesh.expert or mesh.fsdp.')
  if heads % (sequence * tensor):
    raise ValueError(
        f'mesh.sequence * mesh.tensor must divide the {heads} query heads, but '
        f'is {sequence} * {tensor}. Choose a divisor, and give the other '
        'devices to mesh.fsdp.')
  if pack_length % sequence:
    raise ValueError(
        f'learner.pack_length must be a multiple of mesh.sequence, {sequence}, '
        f'but is {pack_length}. Set it to '
        f'{-(-pack_length // sequence) * sequence}.')


def over_whole_rows(attend: Callable[..., Array],
                    shardings: Callable[[Any], Any]) -> Callable[..., Array]:
  """Returns a function like `attend` for rows that are split over devices.

  The function's q, k, v and output are split by positions. While it computes,
  each device has all positions of some heads instead. The number of query heads
  must be a multiple of the number of devices that share a row. If the number of
  KV heads is not such a multiple, each KV head is repeated. The gradient of a
  head is then the sum over its copies.

  Args:
    attend: Function `attention.causal`, or a partial of it.
    shardings: Function that makes a NamedSharding from a tuple of the names of
      an array's axes.
  """
  split = shardings(('batch', 'length', 'heads', None))
  whole = shardings(('batch', None, 'attended', None))
  ways = math.prod(whole.mesh.shape[axis] for axis in whole.spec[2])

  def exchanged(x, before, after):
    for sharding in (before, after):
      x = jax.lax.with_sharding_constraint(x, sharding)
    return x

  def attend_split(
      q: Float[Array, 'B T H d'], k: Float[Array, 'B T K d'],
      v: Float[Array, 'B T K d'], **options: Any) -> Float[Array, 'B T H d']:
    copies = math.lcm(k.shape[2], ways) // k.shape[2]
    k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    q, k, v = (exchanged(x, split, whole) for x in (q, k, v))
    return exchanged(attend(q, k, v, **options), whole, split)

  return attend_split
