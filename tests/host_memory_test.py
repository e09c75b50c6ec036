# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of freed arrays stays with the process, or goes back to the system."""

import gc
import os
import pathlib
import platform
import subprocess
import sys
import types
import weakref

import pytest

from searchrl.runtime import host_memory

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != 'glibc',
                           reason='other C libraries are left as they are')

PROGRAM = '''
import pathlib, resource
import numpy as np
from searchrl.runtime import host_memory

def held():  # MiB that the process holds
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * resource.getpagesize() / 2**20

np.ones(30 * 2**20, np.int8)  # glibc then keeps arrays of up to this size
begin = held()
arrays = [np.ones(20 * 2**20, np.int8) for _ in range(20)]
last = np.ones(2**20, np.int8)  # what is before it is not at the end
del arrays
freed = held() - begin
host_memory.give_back()
print(freed, held() - begin)
'''

# XLA's threads allocate large arrays, too, so another thread does here.
PROGRAM_OF_A_THREAD = '''
import ctypes, pathlib, resource, threading
from searchrl.runtime import host_memory

SIZE = 64 * 2**20
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def allocate():
  for _ in range(5):
    array = ctypes.c_void_p(c.malloc(SIZE))
    c.memset(array, 1, SIZE)
    c.free(array)

def held():  # arrays that would fit into the memory that the process holds
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * resource.getpagesize() / SIZE

def freed():  # what it holds of arrays that a thread has freed
  thread = threading.Thread(target=allocate)
  thread.start()
  thread.join()
  return held() - begin

host_memory.keep()
begin = held()
first, second = freed(), freed()
host_memory.give_back()
print(first, second, held() - begin)
'''


def run(program: str, **environ: str) -> list[float]:
  """Returns the numbers that a Python program prints."""
  root = pathlib.Path(__file__).resolve().parents[1]
  done = subprocess.run(
      [sys.executable, '-c', program], cwd=root, env={**os.environ, **environ},
      check=True, capture_output=True, text=True)
  return [*map(float, done.stdout.split())]


@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_what_glibc_keeps_is_given_back():
  kept, left = run(PROGRAM)
  assert kept > 300 and left < 50


@GLIBC
def test_on_cpus_the_memory_of_freed_arrays_is_kept_until_it_is_given_back():
  first, second, afterwards = run(PROGRAM_OF_A_THREAD, JAX_PLATFORMS='cpu')
  assert .9 < first < 1.1 and .9 < second < 1.1 and afterwards < .1


@GLIBC
def test_on_accelerators_it_is_given_back_at_once():
  assert max(run(PROGRAM_OF_A_THREAD, JAX_PLATFORMS='cuda,cpu')) < .1


def test_garbage_is_collected_after_imports_alone(monkeypatch):
  class Cycle:
    """An object that refers to itself."""

    def __init__(self):
      self.itself = self

  monkeypatch.setattr(host_memory, '_collected', set())
  gc.disable()
  try:
    host_memory.give_back()  # after the imports so far
    garbage = weakref.ref(Cycle())
    host_memory.give_back()
    assert garbage() is not None  # a collection takes a tenth of a second
    monkeypatch.setitem(sys.modules, 'late', types.ModuleType('late'))
    host_memory.give_back()
    assert garbage() is None
  finally:
    gc.enable()
