# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Flax NNX modules as a pure function and its parameters.

For models of other libraries: split once, then use every function here that
takes `params` and a function of them, under jax.jit and jax.grad.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx


def from_nnx(
    module: nnx.Module, trained: Any = nnx.Param
) -> tuple[Callable[..., Any], Any]:
  """Splits a module into its trained parameters and a function of them.

  Args:
    module: any NNX module. It is not changed, and later changes to it have no
      effect. Call module.train() or module.eval() before.
    trained: the filter of the variables to train: a Variable type, such as
      nnx.LoRAParam, or any other NNX filter.

  Returns:
    apply(params, *args, **kwargs), which returns module(*args, **kwargs) with
    these parameters; and the parameters, a pytree, which nnx.update writes
    back. They share the module's arrays: copy them before you donate them.
    Other variables, of normalisation or dropout, are constants: changes by a
    call are discarded, so that the function is pure. Pass rngs to dropout as an
    argument, else it drops the same units in every call.

  Raises:
    ValueError: the module has no variables to train.
  """
  graph, params, rest = nnx.split(nnx.clone(module), trained, ...)
  if not params:
    name = getattr(trained, '__name__', trained)
    raise ValueError(
        f'the module must hold variables of {name}, but has none. Give the '
        'filter of those to train.')

  def apply(params, *args, **kwargs):
    # Copied, because a merged module writes into the variables it is given.
    return nnx.merge(graph, params, rest, copy=True)(*args, **kwargs)

  return apply, params
