# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights in the form that an engine's programs read.

A learner stacks the layers of its params; an engine reads layer by layer. If
the operands of products are rounded, an engine holds the matrices rounded. On
CPUs it may hold them transposed.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import numpy as np

from searchrl.models import lora
from searchrl.models import transformer
from searchrl.models.transformer import Params


class Conversion:
  """A function from the params of a decoder to an engine's weights.

  Args:
    dtype: Data type of the weights.
    matmul_dtype: Data type of the matrices. '': that of the weights.
    ordered: Function that wraps each jitted program; see `runtime.dispatch`.
    is_transposed: Flag that stores the matrices transposed; see `transposed`.
  """

  def __init__(self, dtype: Any, matmul_dtype: str,
               ordered: Callable[[Any], Any], is_transposed: bool):
    self._cast, self._layer = (
        ordered(jax.jit(functools.partial(program, dtype=dtype)))
        for program in (_cast, _layer_at))
    self._rounded: Any = matmul_dtype and ordered(jax.jit(
        functools.partial(rounded, dtype=matmul_dtype)))
    self._transposed: Any = is_transposed and ordered(jax.jit(transposed))

  def __call__(self, params: Params) -> Params:
    """Returns the weights. `params` may be `unstacked` already, in `dtype`."""
    if not isinstance(params['layers'], tuple):
      params = _unstack(params, self._cast, self._layer)
    if self._rounded:
      params = self._rounded(params)
    if self._transposed:
      others = {k: v for k, v in params.items() if k != 'layers'}
      params = self._transposed(others) | {
          'layers': tuple(map(self._transposed, params['layers']))}
    return params


def unstacked(params: Params, dtype: Any) -> Params:
  """Returns params in `dtype`, with a tuple of layers: one tree per layer.

  In the argument `params`, layers are stacked on axis 0 of each array.
  """
  return _unstack(params, functools.partial(_cast, dtype=dtype),
                  functools.partial(_layer_at, dtype=dtype))


def unstacked_axes(axes: dict[str, Any], layers: int) -> dict[str, Any]:
  """Returns the logical axes of `unstacked` params, given stacked axes."""
  return {**axes, 'layers': (transformer.layer_axes(axes),) * layers}


def rounded(params: Params, dtype: Any) -> Params:
  """Returns params whose projection matrices and head are cast to `dtype`.

  An engine multiplies them in this dtype, and would otherwise convert them in
  each call. `params` is a result of `unstacked`. The embedding is not cast. A
  head that is tied to it becomes a matrix of its own.
  """
  def cast(path, leaf):
    is_projection = path[-2].key in lora.TARGETS and path[-1].key == 'kernel'
    return leaf.astype(dtype) if is_projection else leaf

  return {**params, 'head': {'kernel': transformer.head(params).astype(dtype)},
          'layers': jax.tree.map_with_path(cast, params['layers'])}


def transposed(tree: dict[str, Any]) -> dict[str, Any]:
  """Returns weights with the matrices of projections, or of the head, as [F D].

  The key of such a matrix is 'transposed' instead of 'kernel'. XLA's CPU
  compiler then adds in one order for any number of rows but 1. With kernels
  [D F] it adds in another order for few rows, if D is small.

  Args:
    tree: Weights of one layer, or all weights outside the layers.
  """
  return {name: _renamed(leaves, 'kernel', 'transposed')
          if name in (*lora.TARGETS, 'head') else leaves
          for name, leaves in tree.items()}


def upright(tree: dict[str, Any]) -> dict[str, Any]:
  """Returns weights with kernels [D F] again, if `transposed` made them [F D].

  XLA makes the transpositions a part of the products.
  """
  return {name: _renamed(leaves, 'transposed', 'kernel')
          if 'transposed' in leaves else leaves
          for name, leaves in tree.items()}


def _renamed(leaves: dict[str, Any], old: str, new: str) -> dict[str, Any]:
  """Returns a module's weights with its matrix transposed and renamed."""
  return {new if name == old else name: leaf.T if name == old else leaf
          for name, leaf in leaves.items()}


def _unstack(params: Params, cast: Callable[..., Any],
             layer_at: Callable[..., Any]) -> Params:
  """Returns `unstacked` params, one layer after the other.

  A single program with all layers would take seconds to compile.

  Args:
    params: Parameters of the decoder, with layers stacked.
    cast: Function from a tree to the tree in another dtype.
    layer_at: Function from the stacked layers and an index to a layer.
  """
  others = {k: v for k, v in params.items() if k != 'layers'}
  count = jax.tree.leaves(params['layers'])[0].shape[0]
  return {**cast(others), 'layers': tuple(
      layer_at(params['layers'], np.int32(i)) for i in range(count))}


def _cast(tree, dtype):
  return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def _layer_at(layers, index, dtype):
  return _cast(jax.tree.map(
      lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
      layers), dtype)
