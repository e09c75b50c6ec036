# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of a kernel: one that passes its test."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

# Largest allowed difference from the float32 reference, relative to the
# reference's largest entry. It is several times the rounding error. A mask or
# a context that is wrong by one token exceeds 0.1.
TOLERANCE = {'float32': 1e-4, 'float16': 4e-3, 'bfloat16': 3e-2}


def resolve(
    title: str, implementation: str, choose: Callable[[], tuple[str, str]],
    test: Callable[[str], None], simpler: Mapping[str, str] = {},
) -> tuple[str, str]:
  """Returns the implementation that a run uses, and a sentence to log.

  The implementation has passed its test, unless it is 'xla', which needs none.
  With 'auto', an implementation that fails is replaced by a simpler one, which
  is tested in turn. The sentence then has a warning. Let one process call this
  function, and broadcast the result.

  Args:
    title: Name of what is implemented, for the sentence.
    implementation: Name of an implementation, which must pass its test, or
      'auto', which starts with the implementation that `choose` returns.
    choose: Function that returns an implementation and the reason for it.
    test: Function that raises a RuntimeError if an implementation is wrong.
    simpler: Map from an implementation to its replacement. An implementation
      without an entry is replaced by 'xla'.

  Raises:
    RuntimeError: `implementation` is not 'auto' and fails its test.
  """
  is_auto, warnings = implementation == 'auto', ''
  name, why = choose() if is_auto else (implementation, 'as configured')
  while name != 'xla':
    try:
      test(name)
      break
    except RuntimeError as error:
      if not is_auto:
        raise
      name, warnings = simpler.get(name, 'xla'), f'{warnings} {error}'
  if warnings:
    return name, f'Warning: {title} falls back to {name}.{warnings}'
  return name, f'{title}: {name} ({why})'


def check(failed: str, way_out: str, dtype: Any,
          run: Callable[[], Mapping[str, float]]) -> None:
  """Raises a RuntimeError if a kernel fails or differs from its reference.

  Args:
    failed: Beginning of the error message: which kernel failed where.
    way_out: Last sentence of the error message: what a user can do.
    dtype: Data type of the kernel, which decides the `TOLERANCE`.
    run: Function that runs the kernel and returns the largest difference of
      each result, as a fraction of the reference's largest entry, by name.
  """
  limit = TOLERANCE[jnp.dtype(dtype).name]
  try:
    errors = run()
  except Exception as error:  # kernels raise errors of any kind
    raise RuntimeError(
        f'{failed}: {type(error).__name__}: {error} {way_out}') from error
  worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=9))
  if not errors[worst] <= limit:
    raise RuntimeError(
        f'{failed}: {worst} is off by {errors[worst]:.2g} of its largest '
        f'entry, more than {limit}. {way_out}')
