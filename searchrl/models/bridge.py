# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of Flax NNX modules to a pure function and its parameters.

This is for models of other libraries. Split a module once. Every function of
this package that takes `params` and a function of them then works with it, also
under jax.jit and jax.grad.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx


def from_nnx(
    module: nnx.Module, trained: Any = nnx.Param
) -> tuple[Callable[..., Any], Any]:
  """Splits a module into its trained parameters and a function of them.

  Args:
    module: Any NNX module. It is not changed, and later changes to it have no
      effect. Call module.train() or module.eval() before.
    trained: Filter of the variables to train: a Variable type, such as
      nnx.LoRAParam, or any other NNX filter.

  Returns:
    A pair (apply, params). apply(params, *args, **kwargs) returns
    module(*args, **kwargs) with these parameters. `params` is a pytree, which
    nnx.update writes back into the module. It shares the module's arrays: copy
    them before you donate them. All other variables, such as those of
    normalisation or dropout, are constants: changes that a call makes to them
    are discarded, so that the function is pure. Pass rngs to dropout as an
    argument; else it drops the same units in every call.

  Raises:
    ValueError: The module has no variables to train.
  """
  graph, params, rest = nnx.split(  # type: ignore[misc]
      nnx.clone(module), trained, ...)
  if not params:
    name = getattr(trained, '__name__', trained)
    raise ValueError(
        f'the module must hold variables of {name}, but has none. Give the '
        'filter of those to train.')

  def apply(params, *args, **kwargs):
    # Copied, because a merged module writes into the variables it is given.
    return nnx.merge(graph, params, rest, copy=True)(*args, **kwargs)

  return apply, params
