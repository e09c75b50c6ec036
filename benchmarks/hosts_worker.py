# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""One process of benchmarks/hosts.py: searchrl.main, counted; a slow engine.

  python -m hosts_worker FOLDER --config=...

At the end of each step, a line of FOLDER/counts_PROCESS.jsonl has the CPU
seconds of each part of the step, and the messages and bytes that this process
exchanged with the others through jax's coordination service since the last
line. CPU seconds are those of the whole process, its threads included, while
its main thread was in a part.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import statistics
import sys
import threading
import time
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src import compiler
from jax._src import distributed
from jax.experimental import multihost_utils

from searchrl import main
from searchrl.rollouts import sampler
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.search import engines
from searchrl.training import train_step

# Parts of a step, by the names that the loop's timer has for them.
PARTS = {'gen': 'rollout', 'old_log_prob': 'scoring', 'ref': 'scoring',
         'adv': 'update', 'update_actor': 'update', 'step': 'rest',
         'checkpoint': 'checkpoint'}
SENDS = ('key_value_set', 'key_value_set_bytes')
GATHERS = ('process_allgather', 'broadcast_one_to_all', 'sync_global_devices')
_SPREAD = 0.5  # standard deviation of a search's logarithmic latency


@engines.traits(inner='engine', is_remote=True)
def slow(corpus, *, parts, secs, process=-1, more_secs=0.0,
         stalled_step=-1, stalled_secs=0.0):
  """Returns an engine that answers late, as a search service does.

  Args:
    corpus: The passages; the inner engine has them.
    parts: The inner engine, which the option `engine` names.
    secs: Median latency of a query, which is log-normal and depends on its text
      alone. The queries of a call wait together.
    process: Process that is slower than the others.
    more_secs: Seconds that each of its calls takes longer.
    stalled_step: Step at whose first search it stalls.
    stalled_secs: Seconds that it then stalls.
  """
  del corpus
  stalls = [stalled_secs] * (processes.index() == process)

  def search(queries):
    wait = max(map(functools.partial(_latency, secs), queries))
    if processes.index() == process:
      wait += more_secs
    if any(query.step == stalled_step for query in queries) and stalls:
      wait += stalls.pop()
    time.sleep(wait)
    return parts[0](queries)

  return search


def _latency(median: float, query: Any) -> float:
  """Returns the latency of a query in seconds, drawn by its text."""
  drawn = int.from_bytes(hashlib.sha256(query.text.encode()).digest()[:6])
  normal = statistics.NormalDist().inv_cdf((drawn + 0.5) / 2**48)
  return median * math.exp(_SPREAD * normal)


class Ledger:
  """The CPU seconds of each part, and what was exchanged, since the last line.

  Parts are exclusive: a part within another one interrupts it.
  """

  def __init__(self, file: pathlib.Path):
    self._file, self._parts, self._mark = file, ['rest'], time.process_time()
    self._clear()

  def _clear(self) -> None:
    self._cpu = collections.Counter[str]()
    self.counts = collections.Counter[str]()

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Charges the body to a part, if it is the main thread's."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    self._charge()
    self._parts.append(name)
    try:
      yield
    finally:
      self._charge()
      self._parts.pop()

  def _charge(self) -> None:
    now = time.process_time()
    self._cpu[self._parts[-1]] += now - self._mark
    self._mark = now

  def write(self) -> None:
    """Writes a line and begins the next one."""
    self._charge()
    with self._file.open('a') as file:
      file.write(json.dumps({'cpu': self._cpu, 'counts': self.counts}) + '\n')
    self._clear()


class CountedClient:
  """The client of jax's coordination service; counts calls and bytes."""

  def __init__(self, client: Any, counts: Callable[[], collections.Counter]):
    self._client, self._counts = client, counts

  def __getattr__(self, name: str) -> Any:
    method = getattr(self._client, name)

    def call(*args, **options):
      result = method(*args, **options)
      self._counts().update({
          f'calls/{name}': 1, 'bytes_sent': _size(args[1:2]) * (name in SENDS),
          'bytes_received': _size(result)})
      return result

    return call if callable(method) else method


def _size(value: Any) -> int:
  """Returns the bytes of the strings in a nested value."""
  if isinstance(value, (bytes, str)):
    return len(value)
  return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def install(ledger: Ledger) -> None:
  """Counts from now on; must be called before `processes.initialize`."""
  def within(part, function):
    @functools.wraps(function)
    def wrapped(*args, **options):
      with ledger.part(part):
        return function(*args, **options)
    return wrapped

  def gather(name, function):
    def wrapped(*args, **options):
      result = function(*args, **options)
      ledger.counts.update({f'calls/{name}': 1, 'bytes_gathered': sum(
          leaf.nbytes for leaf in jax.tree.leaves(result))})
      return result
    return within('control', wrapped)

  def initialize(*args):
    start(*args)
    jax.devices()  # the backend takes no stand-in for the client
    state = distributed.global_state
    if state.client is not None:
      state.client = CountedClient(state.client, lambda: ledger.counts)

  @contextlib.contextmanager
  def phase(self, name):
    with ledger.part(PARTS.get(name, 'rest')), times(self, name):
      yield

  def pop(self):
    ledger.write()
    return take(self)

  start, times, take = (
      processes.initialize, progress.Timer.__call__, progress.Timer.pop)
  processes.initialize = initialize
  processes.meet = within('control', processes.meet)
  sampler._of_all_processes = within('control', sampler._of_all_processes)
  for name in GATHERS:
    setattr(multihost_utils, name,
            gather(name, getattr(multihost_utils, name)))
  progress.Timer.__call__, progress.Timer.pop = phase, pop


def keep_programs() -> None:
  """Lets every process write the compilation cache.

  jax's first process alone writes it. On CPUs, the keys of the others differ,
  so that they would compile all programs at every start.
  """
  write = compiler._cache_write

  def write_on_all(key, secs, name, backend, executable, callbacks):
    if processes.is_first():
      write(key, secs, name, backend, executable, callbacks)
    elif secs > 0.1 and not callbacks:
      compilation_cache.put_executable_and_time(
          key, name, executable, backend, int(secs))

  compiler._cache_write = write_on_all


def sum_as_accelerators() -> None:
  """Lets XLA sum gradients over devices, as it does on GPUs and TPUs.

  On CPUs, a run gathers the gradients of all devices and sums them in one
  order, so that its bits do not depend on the number of processes.
  """
  train_step.TrainStep._sums_need_order = False


if __name__ == '__main__':
  keep_programs()
  if os.environ.get('HOSTS_UNORDERED'):
    sum_as_accelerators()
  install(Ledger(pathlib.Path(sys.argv[1]) / (
      f'counts_{os.environ["JAX_PROCESS_ID"]}.jsonl')))
  main.run(sys.argv[2:])
