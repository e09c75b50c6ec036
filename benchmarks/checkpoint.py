# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Saving in the background, waiting for it, not saving: the time of a step.

  python benchmarks/checkpoint.py --parameters 25

Steps multiply matrices of a state of parameters and two moments. They are taken
in turns of `--every`: without a save; with one after the first step, which is
waited for; with one that goes on in the background, and is over within the
turn. CPUs save nothing in the background, so they have no such turn. Prints the
median seconds a step, its ratio to the turn without a save, the median seconds
that a save blocks, and the memory that saves added to the process at its peak.
"""

import argparse
import pathlib
import resource
import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from searchrl.runtime import checkpoint

WAYS = ('no save', 'waited for') + (
    ('in the background',) if jax.default_backend() != 'cpu' else ())


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--parameters', type=float, default=25, help='millions')
  parser.add_argument('--rounds', type=int, default=9)
  parser.add_argument('--every', type=int, default=6, help='steps of a turn')
  parser.add_argument('--multiplications', type=int, default=1,
                      help='of each matrix by itself, a step')
  options = parser.parse_args()
  side = int((options.parameters * 1e6 / 8) ** 0.5)
  layers = {f'layer_{n}': jnp.ones((side, side)) for n in range(8)}
  state = {'params': layers, 'mu': jax.tree.map(jnp.copy, layers),
           'nu': jax.tree.map(jnp.copy, layers)}
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  print(f'{size / 1e9:.2f} GB on {jax.devices()[0].device_kind}, '
        f'{side} x {side} matrices')
  folder = pathlib.Path(tempfile.mkdtemp(prefix='checkpoint'))
  try:
    secs, blocked = measure(state, folder, options)
  finally:
    shutil.rmtree(folder)
  for way in WAYS:
    ratio = statistics.median(
        a / b for a, b in zip(secs[way], secs['no save'], strict=True))
    print(f'{way:18} {statistics.median(secs[way]):.3f} s a step, '
          f'{ratio:.3f} of a step without a save, blocked '
          f'{statistics.median(blocked[way]):.3f} s a save')


def measure(state, folder: pathlib.Path, options):
  """Seconds a step of each turn, and those that each save blocks, by way."""
  step = jax.jit(lambda state: jax.tree.map(
      lambda x: _multiplied(x, options.multiplications), state),
                 donate_argnums=0)
  state = jax.block_until_ready(step(state))
  held = _peak_memory()
  secs, blocked = {way: [] for way in WAYS}, {way: [] for way in WAYS}
  number = 0
  with checkpoint.Saver(folder, keep=2) as saver:
    for _ in range(options.rounds):
      for way in WAYS:
        began = time.perf_counter()
        state = jax.block_until_ready(step(state))
        before = time.perf_counter()
        if way != 'no save':
          number += 1
          saver.save(number, state, {})
        if way == 'waited for':
          saver.wait()
        blocked[way].append(time.perf_counter() - before)
        for _ in range(options.every - 1):
          state = jax.block_until_ready(step(state))
        saver.wait()
        secs[way].append((time.perf_counter() - began) / options.every)
  print(f'The process held at most {held:.2f} GB before the first save, and '
        f'{_peak_memory():.2f} GB after the last one.')
  return secs, blocked


def _peak_memory() -> float:
  """Largest resident memory of the process so far, in GB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _multiplied(x, times: int):
  return jax.lax.fori_loop(
      0, times, lambda _, y: jnp.tanh(y @ y / y.shape[0]) + 0.5, x)


if __name__ == '__main__':
  main()
