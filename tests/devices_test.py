# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""devices: threads of simulated devices; kinds are tested with the plan."""

import os
import subprocess
import sys

import pytest

from searchrl.runtime import devices

SIMULATED = '--xla_force_host_platform_device_count'


@pytest.mark.parametrize('before, threads', [
    ({}, None), ({'XLA_FLAGS': ''}, None),
    ({'XLA_FLAGS': f'{SIMULATED}=1'}, None),  # none waits for another
    ({'XLA_FLAGS': f'--xla_dump_to=/tmp {SIMULATED}=8'}, '64'),
    ({'XLA_FLAGS': f'{SIMULATED}=8', 'NPROC': '3'}, '3')])
def test_simulated_devices_get_threads_to_wait_in(before, threads):
  environ = dict(before)
  devices.make_threads(environ)
  assert environ == before | ({'NPROC': threads} if threads else {})


@pytest.mark.slow
@pytest.mark.parametrize('platforms', ['', 'cpu'])  # both find a CPU alone
def test_programs_compile_for_gpus_on_a_machine_without_one(platforms):
  pytest.importorskip('jax_cuda12_plugin', reason="needs '.[compile]'")
  program = (
      'import jax\n'
      'from searchrl.runtime import devices\n'
      'assert jax.devices()[0].platform == "cpu"\n'
      'found = devices.to_compile_for(devices.KINDS["h200"], 8)\n'
      'print(len(found), found[0].platform)\n')
  environment = {name: value for name, value in os.environ.items()
                 if name not in ('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', 'XLA_FLAGS')}
  printed = subprocess.run(
      [sys.executable, '-c', program], env=environment | {
          'JAX_PLATFORMS': platforms}, check=True, capture_output=True, text=True)
  assert printed.stdout.split() == ['8', 'gpu']
