# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Sets up eight simulated CPU devices and a compilation cache before jax."""

import gc
import os
import pathlib

import pytest

pytest_plugins = ('cpu_times',)

_DEVICES = '--xla_force_host_platform_device_count'
# A compiled program holds dozens of memory maps, and a process crashes in XLA
# when it has 65,530, the most that Linux grants (vm.max_map_count).
_MOST_MAPS = 20_000
_level = 0  # the OPTIMIZATION_LEVEL of the latest file

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
_FLAGS = os.environ.get('XLA_FLAGS', '')  # those of child processes
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}=8'
os.environ.setdefault('NPROC', '64')  # searchrl.runtime.devices.make_threads
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_DIR',
    str(pathlib.Path.home() / '.cache' / 'searchrl-tests'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')


# What a command prints, in a test, must not depend on how long it takes.
os.environ.setdefault('SEARCHRL_ANNOUNCE_SECS', '1e9')


@pytest.fixture(scope='session', autouse=True)
def _one_device_in_child_processes():
  """Sets up the simulated devices here, and none in child processes."""
  import jax  # pylint: disable=g-import-not-at-top
  jax.devices()
  os.environ['XLA_FLAGS'] = _FLAGS


@pytest.fixture(scope='module', autouse=True)
def _devices_of_a_run(request):
  """Gives runs of a file DEVICES simulated devices, by default one.

  Two cores train on eight devices at less than half the speed of one.
  """
  from searchrl.runtime import mesh  # pylint: disable=g-import-not-at-top
  devices = mesh.all_devices()[:getattr(request.module, 'DEVICES', 1)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh, 'all_devices', lambda: devices)
    yield


@pytest.fixture(scope='module', autouse=True)
def _programs_of_a_file(request):
  """Compiles a file's programs fast, as most are called once or twice.

  A file whose programs run for longer sets OPTIMIZATION_LEVEL to 1, or to 3 for
  the programs of a real run. Child processes are not affected. No file calls
  programs that a file of another level has compiled, so that results do not
  depend on the order of the files.
  """
  import jax  # pylint: disable=g-import-not-at-top
  from jax._src import compiler  # pylint: disable=g-import-not-at-top
  global _level
  level = getattr(request.module, 'OPTIMIZATION_LEVEL', 0)
  if level != _level:  # programs of another level may round differently
    jax.clear_caches()
  _level = level
  fast = {'xla_backend_optimization_level': str(level)}
  if jax.__version__.startswith('0.10.'):  # later versions have no such flag
    fast['xla_cpu_use_fusion_emitters'] = 'False'
  options = compiler.get_compile_options

  def fast_options(*args, env_options_overrides=None, **kwargs):
    return options(*args, env_options_overrides=fast | (
        env_options_overrides or {}), **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    if level < 3:
      patch.setattr(compiler, 'get_compile_options', fast_options)
    yield
  if _memory_maps() > _MOST_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def no_silent_broadcasting():
  """Makes an error of a sum of arrays of different ranks."""
  import jax  # pylint: disable=g-import-not-at-top
  with jax.numpy_rank_promotion('raise'):
    yield


def _memory_maps() -> int:
  """Returns the number of this process's memory maps, 0 where unknown."""
  try:
    with open('/proc/self/maps', 'rb') as file:
      return sum(1 for _ in file)
  except OSError:  # systems other than Linux have no such file
    return 0


def pytest_addoption(parser):
  parser.addoption(
      '--ragged', action='store_true',
      help="engines attend by the kernel of TPUs, as plain XLA; the tiny model "
      'has heads of 128')
  parser.addoption(
      '--fuzz_cases', type=int, default=41_000,
      help='cases of a property in the long form of fuzzing; by default they '
      'are a million together')


def pytest_collection_finish():
  """Leaves the collected tests out of the searches for garbage."""
  gc.collect()
  gc.freeze()


def pytest_itemcollected(item):
  if item.get_closest_marker('long'):
    item.add_marker('slow')  # else `-m "not slow"` would run it


def pytest_configure(config):
  if config.getoption('--ragged'):
    import pallas  # pylint: disable=g-import-not-at-top  # imports jax
    config.add_cleanup(pallas.ragged_engines())


def pytest_terminal_summary(terminalreporter):
  """Says how many cases fuzzing has checked."""
  found = [(report.nodeid, *value) for report in
           terminalreporter.getreports('passed') + terminalreporter.getreports(
               'failed') for name, value in report.user_properties
           if name == 'fuzzed' and report.when == 'call']
  if found:
    terminalreporter.section('fuzzing')
    for node, cases, secs in found:
      if node.endswith('[long]'):
        terminalreporter.write_line(
            f'{cases:9,} cases, {1e3 * secs / cases:6.2f} CPU ms each: {node}')
    terminalreporter.write_line(
        f'{sum(cases for _, cases, _ in found):9,} cases of {len(found)} '
        f'properties in {sum(secs for *_, secs in found):.0f} CPU seconds')
