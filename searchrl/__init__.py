# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""searchrl: trains, evaluates and serves LLM search agents in JAX.

`from searchrl import losses, advantages, algorithms` gives the pure functions.
Importing the package touches no device, so `jax.distributed` can be initialized
afterwards.
"""

import importlib

__version__ = '0.2.0'

_PUBLIC = {
    'advantages': 'searchrl.rl.advantages',
    'algorithms': 'searchrl.rl.algorithms',
    'bridge': 'searchrl.models.bridge',
    'losses': 'searchrl.rl.losses',
    'masked': 'searchrl.rl.masked',
    'trajectory': 'searchrl.trajectory',
}


def __getattr__(name):
  if name in _PUBLIC:
    return importlib.import_module(_PUBLIC[name])
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return sorted([*globals(), *_PUBLIC])
