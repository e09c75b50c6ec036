# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of an inference engine: jitted functions, by name."""

from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import os
from typing import Any

import jax
import numpy as np

Programs = dict[str, Callable[..., Any]]


def count(programs: Programs) -> int:
  """Returns how many programs are compiled: one for each set of shapes."""
  return sum(program._cache_size()  # type: ignore[attr-defined]
             for program in programs.values())


def compile_together(programs: Programs, run: Callable[[Programs], None]
                    ) -> set[Any]:
  """Compiles programs at the same time, in threads, without running them.

  XLA compiles without Python's GIL, so that one thread per core keeps all cores
  busy. More threads would only need more memory. A later call with the same
  shapes and shardings uses the compiled program.

  Args:
    programs: Jitted programs of `slots`, by name.
    run: Function that takes programs by name, and calls them with the arguments
      for which they are to be compiled. It is given substitutes, which compute
      nothing and return the state unchanged.

  Returns:
    A set with the name and the argument shapes of each compiled program.
  """
  shapes = set()
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    compiling = []

    def lower(name: str, *args: Any, **options: Any) -> Any:
      leaves, tree = jax.tree.flatten((args, options))
      shapes.add((name, tree, *((x.shape, x.dtype) for x in leaves)))
      lowered: Any = programs[name].lower(  # type: ignore[attr-defined]
          *args, **options)
      compiling.append(pool.submit(lowered.compile))
      state = options['state']
      return (state, None) if name == 'decode' else state

    run({name: functools.partial(lower, name) for name in programs})
    for program in compiling:
      program.result()
  return shapes


def rounding_alike(trial: Callable[[int], Any], rows: Sequence[int]
                  ) -> list[int]:
  """Returns the numbers of rows at which a decode rounds as at the largest one.

  On CPUs, XLA may multiply a small number of rows by another method, which adds
  in another order.

  Args:
    trial: Function from a number of rows n to the samples of a decode of the
      first n slots, as a tree of arrays [n ...].
    rows: Numbers of rows to try, in increasing order. The last number is always
      in the result. Another number is in the result if its samples equal the
      first samples for the last number.
  """
  *fewer, most = rows
  if not fewer:
    return [most]
  expected = jax.tree.leaves(trial(most))
  is_alike = lambda n: all(
      np.array_equal(x, y[:n])
      for x, y in zip(jax.tree.leaves(trial(n)), expected, strict=True))
  return [*filter(is_alike, fewer), most]
