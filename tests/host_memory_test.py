# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of freed arrays goes back to the system."""

import pathlib
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(sys.platform != 'linux', reason='it reads /proc')
def test_what_glibc_keeps_is_given_back():
  root = pathlib.Path(__file__).resolve().parents[1]
  done = subprocess.run([sys.executable, '-c', PROGRAM], cwd=root, check=True,
                        capture_output=True, text=True)
  kept, left = map(float, done.stdout.split())
  assert kept > 300 and left < 50
