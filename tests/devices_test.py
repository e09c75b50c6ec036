# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""devices: threads of simulated devices; kinds are tested with the plan."""

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
