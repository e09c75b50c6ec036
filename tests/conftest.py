# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Eight simulated CPU devices, a compilation cache; set before jax imports."""

import os
import pathlib

_DEVICES = '--xla_force_host_platform_device_count'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}=8'
os.environ.setdefault('NPROC', '64')  # searchrl.runtime.devices.make_threads
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_DIR',
    str(pathlib.Path.home() / '.cache' / 'searchrl-tests'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')


def pytest_addoption(parser):
  parser.addoption(
      '--ragged', action='store_true',
      help="engines attend by the kernel of TPUs, as plain XLA; the tiny model "
      'has heads of 128')


def pytest_configure(config):
  if config.getoption('--ragged'):
    import pallas  # pylint: disable=g-import-not-at-top  # imports jax
    config.add_cleanup(pallas.ragged_engines())
