# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""loopback: the harness of the tests with several processes."""

import pytest

import loopback


def test_harness_shows_logs_and_kills():
  code = 'import os, sys; print("up"); sys.exit(os.environ["JAX_PROCESS_ID"])'
  with pytest.raises(AssertionError, match='1, exit code 1, out:\nup'):
    loopback.run(2, code)
  done = loopback.run(2, code, check=False)
  assert [d.stderr for d in done] == ['0\n', '1\n']
  with loopback.start(1, 'import time; print("up", flush=True); time.sleep(60)'
                      ) as group:
    with pytest.raises(TimeoutError, match='not all ended within 0.5 s'):
      group.wait(0.5)
  assert group.popen[0].returncode == -9


def test_harness_takes_another_port_if_the_first_is_taken(monkeypatch):
  code = ('import os, sys, time\n'
          'if os.environ["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1":\n'
          '  if os.environ["JAX_PROCESS_ID"] == "1": time.sleep(60)\n'
          '  sys.exit("E1121 add_port.cc:83] Failed to add port to server: No '
          'address added")')  # what jax 0.10.2 and 0.12.0.1 say
  ports = [2, 1]
  monkeypatch.setattr(loopback, '_free_port', ports.pop)
  loopback.run(2, code)
  assert not ports
