# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""lockstep: where processes part is named, by call and by phase."""

import numpy as np
import pytest

from searchrl.runtime import lockstep as locksteps
import loopback


def test_alone_nothing_is_compared():
  lockstep = locksteps.LockstepCheck('call')
  lockstep('update', object())
  lockstep.phase('train')
  assert lockstep._calls == 0
  with pytest.raises(ValueError, match="'off', 'phase' or 'call', but is 'on'"):
    locksteps.LockstepCheck('on')


def test_facts_are_dtypes_shapes_and_statics():
  batch = {'tokens': np.zeros((2, 3), np.int32), 'mask': None}
  assert locksteps._describe((batch, 4, 'mean', np.float32(1), abs)) == [
      "['mask']=None", "['tokens']=int32[2,3]", '4', "'mean'", 'float32[]',
      '<built-in function abs>']
  text, = locksteps._describe((test_facts_are_dtypes_shapes_and_statics,))
  assert '0x' not in text


# One program of two processes; `out` and `message` are loopback's.
CALLS = r'''
import jax
import jax.numpy as jnp
from searchrl.runtime import processes
from searchrl.runtime.lockstep import LockstepCheck

processes.initialize()
me = processes.index()
batch = {'tokens': jax.ShapeDtypeStruct((4, 8 + me), jnp.int32)}
lockstep = LockstepCheck('call', timeout_secs=30)
lockstep('score', (2, 3)); lockstep('score', (2, 3)); lockstep.phase('equal')
out('shape', message(lockstep, 'update', batch, 'mean'))
lockstep = LockstepCheck('call', timeout_secs=30)
lockstep('decode', 1)
out('tag', message(lockstep, 'decode' if me else 'prefill', 1))
lockstep = LockstepCheck('call', timeout_secs=30)
if me == 0:
  out('call or meeting', message(lockstep, 'decode', 7))
else:
  out('call or meeting', message(processes.barrier, 'rollout ends', 30))
lockstep = LockstepCheck('phase', timeout_secs=30)
lockstep('decode', 1); lockstep('decode', 2); lockstep.phase('first')
for i in range(3 + me):
  lockstep('decode', i)
out('phase', message(lockstep.phase, 'rollout'))
lockstep = LockstepCheck('off')
lockstep('decode', me)
out('off', message(lockstep.phase, 'rollout'))
'''


@pytest.fixture(scope='module')
def outputs():
  """{check: [output of process 0, of process 1]}."""
  return loopback.outputs(2, CALLS)


def test_the_call_at_which_processes_part_is_named(outputs):
  for i, text in enumerate(outputs['shape']):
    assert 'differ at call 2. ' in text
    assert (f"process {i}, which calls update(['tokens']=int32[4,{8 + i}], "
            "'mean')") in text
    assert "process 0: update(['tokens']=int32[4,8], 'mean'); process 1" in text
    assert 'Last call in common: score(' in text
  for text in outputs['tag']:
    assert 'differ at call 1. ' in text
    assert 'process 0: prefill(1); process 1: decode(1)' in text
    assert 'Last call in common: decode(1).' in text


def test_a_call_against_another_meeting_is_an_error_on_both_sides(outputs):
  calling, meeting = outputs['call or meeting']
  assert "process 1: nothing, but is at 'rollout ends'" in calling
  assert "process 0: 'call 0: decode'; process 1: 'rollout ends'" in meeting


def test_a_phase_is_named_with_the_way_on(outputs):
  for text in outputs['phase']:
    assert "end of phase 'rollout': process 0: 5 calls of digest" in text
    assert 'last decode(3).' in text
    assert "Rerun with LockstepCheck('call')" in text


def test_off_compares_nothing(outputs):
  assert outputs['off'] == ['no error, but None'] * 2
