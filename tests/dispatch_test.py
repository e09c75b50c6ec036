# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""dispatch: threads that start programs of several devices do not hang."""

from concurrent import futures
import functools
import threading
import time

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from searchrl.experiment import policy
from searchrl.rollouts import driver
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.search.index import exact_device

DEVICES = 8


def programs(devices=None):
  """A decode-like program with a donated state, and one like a search."""
  devices = devices or jax.devices()
  mesh = Mesh(np.array(devices), ('x',))
  split, whole = PartitionSpec('x'), PartitionSpec()
  on_all = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

  @functools.partial(jax.jit, donate_argnums=0)
  @functools.partial(on_all, in_specs=split, out_specs=split)
  def decode(state):
    def token(_, state):
      return (state + jax.lax.psum(state, 'x')) % 1009
    return jax.lax.fori_loop(0, 2, token, state)

  @jax.jit
  @functools.partial(on_all, in_specs=(split, whole), out_specs=whole)
  def search(rows, query):
    return jax.lax.all_gather(rows * query, 'x', tiled=True)

  state, rows = (jax.device_put(
      np.arange(len(devices), dtype=np.int32), NamedSharding(mesh, split))
                 for _ in range(2))
  return (dispatch.Ordered(decode, mesh), dispatch.Ordered(search, mesh), state,
          rows)


@pytest.mark.parametrize('calls', [
    200, pytest.param(10_000, marks=pytest.mark.long)])
def test_collectives_of_two_threads_do_not_wait_for_each_other(calls):
  assert jax.device_count() == 8
  decode, search, state, rows = programs()

  def searches(thread):
    for number in range(thread, calls, 2):
      found = search(rows, np.int32(number))
      assert np.asarray(found).tolist() == [number * i for i in range(8)]

  expected = np.arange(8)
  with futures.ThreadPoolExecutor(2) as threads:
    searching = [threads.submit(searches, thread) for thread in (0, 1)]
    for _ in range(calls):
      state = decode(state)
    for search_thread in searching:
      search_thread.result()
  for _ in range(2 * calls):
    expected = (expected + expected.sum()) % 1009
  assert np.asarray(state).tolist() == expected.tolist()


def test_all_devices_get_the_programs_in_one_order():
  queues = [[] for _ in range(8)]  # programs of each device

  def start(number):
    for queue in queues:
      queue.append(number)
      time.sleep(0)  # another thread may run here

  with futures.ThreadPoolExecutor(4) as threads:
    for _ in threads.map(dispatch.Ordered(start), range(10_000)):
      pass
  assert sorted(queues[0]) == [*range(10_000)]
  assert all(queue == queues[0] for queue in queues)


def test_a_thread_waits_while_another_starts_a_program():
  events = []

  def program():
    other = futures.ThreadPoolExecutor(1)
    waiting = other.submit(dispatch.Ordered(events.append), 'second')
    assert not futures.wait([waiting], 0.05).done
    events.append('first')
    return waiting

  dispatch.Ordered(program)().result()
  assert events == ['first', 'second']


def halves():
  devices = jax.devices()
  return [meshes.make(devices=part) for part in (devices[:4], devices[4:])]


def test_programs_on_other_devices_start_at_the_same_time():
  both = threading.Barrier(2, timeout=60)  # broken if one waits for the other
  with futures.ThreadPoolExecutor(2) as threads:
    started = [threads.submit(dispatch.Ordered(both.wait, mesh))
               for mesh in halves()]
    assert sorted(program.result() for program in started) == [0, 1]
  assert not both.broken


@pytest.mark.parametrize('mesh', [0, 1])
def test_a_program_of_all_devices_waits_for_both_halves(mesh):
  events = []

  def program():
    other = futures.ThreadPoolExecutor(1)
    waiting = other.submit(dispatch.Ordered(events.append), 'all')
    assert not futures.wait([waiting], 0.05).done
    events.append('half')
    return waiting

  dispatch.Ordered(program, halves()[mesh])().result()
  assert events == ['half', 'all']


def test_collectives_of_both_halves_at_once_give_what_each_gives_alone():
  def work(mesh):
    decode, search, state, rows = programs([*mesh.devices.flat])
    found = []
    for number in range(100):
      state = decode(state)
      found.append(np.asarray(search(rows, np.int32(number))).tolist())
    return np.asarray(state).tolist(), found

  alone = [*map(work, halves())]
  with futures.ThreadPoolExecutor(2) as threads:
    assert [*threads.map(work, halves())] == alone
  assert alone[0][1] == [[n * i for i in range(4)] for n in range(100)]


def test_a_traced_program_may_call_another():
  inner = dispatch.Ordered(jax.jit(lambda x: x + 1))
  outer = dispatch.Ordered(jax.jit(lambda x: inner(x) * 2))
  assert outer(3) == 8
  assert outer.lower(3).compile()(3) == 8  # it has the program's attributes


def test_the_engine_and_exact_search_start_in_one_order():
  alone = meshes.make(devices=jax.devices()[:1])
  sampler, _ = policy.second(
      '', field='judge.model', mesh=alone, seed=0, slots=2, length=64,
      dialogue='searchrl.agent.dialogue:laptop', budgets=driver.Budgets(
          max_new_tokens=8, max_prompt_tokens=40))
  assert {type(program) for program in (
      exact_device.top_k, sampler.sync._move, sampler.engine._place,
      *sampler.engine._programs.values())} == {dispatch.Ordered}
