# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packed rows in, attention through a kernel that knows no segments out.

All but attention runs on rows without padding. While it attends, each document
stands in a row of its own, so that a kernel such as cuDNN's, which takes the
length of a row but no segment ids, does no work across documents.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchrl.packing import Layout


def causal(
    q: Float[Array, 'R L H d'],
    k: Float[Array, 'R L K d'],
    v: Float[Array, 'R L K d'],
    *,
    segment_ids: Int[Array, 'R L'],
    layout: Layout,
    length: int,
    attend: Callable[..., Array],
    **options,
) -> Float[Array, 'R L H d']:
  """`attention.causal` with segments, by way of one without.

  Args:
    q, k, v: see there.
    segment_ids: those of the layout.
    layout: which document lies where.
    length: T, tokens of the longest document.
    attend: `attention.causal`; called without segments, with lengths.
    **options: passed on to it.
  """
  rows, places = layout.starts.shape
  tokens = layout.starts[..., None] + jnp.arange(length)
  tokens = jnp.minimum(tokens, q.shape[1] - 1).reshape(rows, -1)
  inside = jnp.arange(length) < layout.lengths[..., None]
  inside = inside.reshape(-1, length, 1, 1)

  def apart(x):
    x = jnp.take_along_axis(x, tokens[..., None, None], axis=1)
    return jnp.where(inside, x.reshape(-1, length, *x.shape[2:]), 0)

  seen = attend(apart(q), apart(k), apart(v),
                lengths=layout.lengths.reshape(-1), **options)
  seen = jnp.where(inside, seen, 0)  # behind a document may be NaN
  seen = seen.reshape(rows, places * length, *seen.shape[2:])
  back = jnp.maximum(segment_ids - 1, 0) * length + layout.positions
  seen = jnp.take_along_axis(seen, back[..., None, None], axis=1)
  return jnp.where(segment_ids[..., None, None] > 0, seen, 0)
