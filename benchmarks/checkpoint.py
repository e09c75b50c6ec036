# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Saving in the background against waiting for it: a step's time with each.

  python benchmarks/checkpoint.py --parameters 25

A state of parameters and two moments is saved after every `--every`-th of some
steps, which multiply matrices, and is waited for or goes on in the background.
Prints the mean seconds of all steps, and the median seconds that a save blocks.
"""

import argparse
import pathlib
import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from searchrl.runtime import checkpoint


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--parameters', type=float, default=25, help='millions')
  parser.add_argument('--steps', type=int, default=24)
  parser.add_argument('--every', type=int, default=6)
  parser.add_argument('--multiplications', type=int, default=60, help='a step')
  options = parser.parse_args()
  side = int((options.parameters * 1e6 / 8) ** 0.5)
  layers = {f'layer_{n}': jnp.ones((side, side)) for n in range(8)}
  state = {'params': layers, 'mu': jax.tree.map(jnp.copy, layers),
           'nu': jax.tree.map(jnp.copy, layers)}
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  print(f'{size / 1e9:.2f} GB on {jax.devices()[0].device_kind}, '
        f'{side} x {side} matrices')
  for name, background in (('waited for', False), ('in the background', True)):
    folder = pathlib.Path(tempfile.mkdtemp(prefix='checkpoint'))
    try:
      state, secs, blocked = loop(state, folder, background, options)
    finally:
      shutil.rmtree(folder)
    print(f'{name:18} {statistics.mean(secs):.3f} s a step, blocked '
          f'{statistics.median(blocked):.3f} s a save')


def loop(state, folder: pathlib.Path, background: bool, options):
  """The state after the steps, their seconds, and those that saves blocked."""
  step = jax.jit(lambda state: jax.tree.map(
      lambda x: _multiplied(x, options.multiplications), state),
                 donate_argnums=0)
  state = jax.block_until_ready(step(state))
  secs, blocked = [], []
  with checkpoint.Saver(folder, keep=2) as saver:
    for number in range(options.steps):
      began = time.perf_counter()
      state = jax.block_until_ready(step(state))
      if number % options.every == 0:
        before = time.perf_counter()
        saver.save(number, state, {})
        if not background:
          saver.wait()
        blocked.append(time.perf_counter() - before)
      secs.append(time.perf_counter() - began)
  return state, secs, blocked


def _multiplied(x, times: int):
  return jax.lax.fori_loop(
      0, times // 12, lambda _, y: jnp.tanh(y @ y / y.shape[0]) + 0.5, x)


if __name__ == '__main__':
  main()
