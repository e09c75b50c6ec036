# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX module in, a pure function and its parameters out.

For models of other libraries: split once, and everything here that takes
`params` and a function of them works under jax.jit and jax.grad.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx


def from_nnx(
    module: nnx.Module, trained: Any = nnx.Param
) -> tuple[Callable[..., Any], Any]:
  """Splits a module once into what is trained and a function of it.

  Args:
    module: any NNX module; it is not changed, and later changes to it are not
      seen. Choose module.train() or module.eval() before.
    trained: the filter of the variables to train: a Variable type, such as
      nnx.LoRAParam, or any other NNX filter.

  Returns:
    apply(params, *args, **kwargs), what module(*args, **kwargs) returns with
    these parameters; and the parameters, a pytree, which nnx.update writes
    back. They share the module's arrays: copy them before you donate them.
    The other variables, of normalisation or dropout, are constants: whatever a
    call does to them is forgotten, so that the function is pure. Give dropout
    its rngs as an argument, or it drops the same units in every call.

  Raises:
    ValueError: nothing in the module is trained.
  """
  graph, params, rest = nnx.split(nnx.clone(module), trained, ...)
  if not params:
    name = getattr(trained, '__name__', trained)
    raise ValueError(
        f'the module must hold variables of {name}, but has none. Give the '
        'filter of those to train.')

  def apply(params, *args, **kwargs):
    # Copied, for a merged module writes into the variables that it is given.
    return nnx.merge(graph, params, rest, copy=True)(*args, **kwargs)

  return apply, params
