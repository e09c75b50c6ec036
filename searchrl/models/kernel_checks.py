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
  """Returns the tested implementation that a run uses, and a sentence to log.

  'auto' uses the implementation that `choose` returns. If its test fails, it
  uses the simpler implementation that `simpler` names, or else 'xla', with a
  warning. An implementation that is named must pass its test. Let one process
  call this function, and broadcast the result.

  Raises:
    RuntimeError: The named implementation fails its test.
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
  """Raises a RuntimeError if `run` fails or its differences are too large."""
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
