# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A cache of compiled programs, from which the next run starts faster.

JAX lets all processes of a run read the cache, but only the first one write it.
On CPUs, the key of a program names the process, so that the others would find
nothing and compile anew in every run. Here they write their programs, too.

On GPUs, all processes have the same keys. On TPUs, JAX's rule is kept: a read
of a program for devices without the first one may crash (JAX issue 38004).
"""

from collections.abc import Callable
import functools
import os
import pathlib
import time
from typing import Any

import jax
from jax._src import compilation_cache  # private; used only in this file
from jax._src import compiler

from searchrl.runtime import log
from searchrl.runtime import processes


def start() -> None:
  """Starts the cache in the folder JAX_COMPILATION_CACHE_DIR.

  By default it is ~/.cache/searchrl/xla.

  Raises:
    ValueError: The folder cannot be made.
  """
  cache = pathlib.Path(os.environ.get(
      'JAX_COMPILATION_CACHE_DIR',
      pathlib.Path.home() / '.cache' / 'searchrl' / 'xla'))
  try:
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
  except OSError as error:
    raise ValueError(
        'JAX_COMPILATION_CACHE_DIR must be a folder that can be written, by '
        f'default one in your home, but {cache} is none: {error}. Set it to '
        'another.') from error
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  _write_own_programs()


@functools.cache
def _write_own_programs() -> None:
  compiler._compile_and_write_cache = _and_written(
      compiler._compile_and_write_cache)


def _and_written(compile_program: Callable[..., Any]) -> Callable[..., Any]:
  """Returns JAX's function that compiles a program and writes it to the cache.

  It writes in every process on CPUs, and not only in the first.
  """
  def compile_and_write(backend, computation, devices, options, callbacks, name,
                        key):
    started = time.monotonic()
    program = compile_program(
        backend, computation, devices, options, callbacks, name, key)
    if processes.index() and backend.platform == 'cpu' and not callbacks:
      try:
        compilation_cache.put_executable_and_time(
            key, name, program, backend, int(time.monotonic() - started))
      except (OSError, jax.errors.JaxRuntimeError) as error:
        log.say(f'Warning: {name} cannot be written to the compilation cache: '
                f'{error}')
    return program

  return compile_and_write
