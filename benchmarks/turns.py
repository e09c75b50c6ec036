# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Workers in environments of their own, of which one works at a time.

A worker is the benchmark's own file, started by a peer's Python with
`--worker=NAME`. It does one piece of work on request, reports what that took,
and waits: so the peers take turns piece by piece, whatever else the machine
does meanwhile, and none shares a process with another. Only the standard
library is used: this file is imported in every peer's environment.

On cores that other work keeps busy, torch's threads spin while they wait for
one another, and a step takes 40 times as long: OMP_WAIT_POLICY=PASSIVE in the
environment keeps them from it.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

_MARK = 'turn: '  # starts a worker's report, among what libraries print


class Clock:
  """The worker's side: waits for its turn; a call ends the turn.

  Attributes:
    case: of the turn, as the other side named it.
  """

  def __init__(self):
    self._wait()

  def __call__(self, **facts: float) -> None:
    """Reports seconds, CPU seconds, GiB of memory at most, and the facts."""
    taken = (time.perf_counter() - self._start[0],
             time.process_time() - self._start[1])
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux
    print(_MARK + json.dumps(dict(
        secs=taken[0], cpu_secs=taken[1], gib=gib, **facts)), flush=True)
    self._wait()

  def _wait(self) -> None:
    self.case = sys.stdin.readline().strip()
    if not self.case:  # the other side has closed the pipe
      os._exit(0)
    self._start = time.perf_counter(), time.process_time()


def serve(work: Callable[[str], Mapping[str, float]]) -> None:
  """Works through cases until the other side ends; the work returns facts."""
  clock = Clock()
  while True:
    clock(**work(clock.case))


class Worker:
  """The other side of one worker."""

  def __init__(self, python: str, file: str, name: str, *more: str):
    self.name = name
    self._errors = tempfile.TemporaryFile('w+')
    self._process = subprocess.Popen(
        [python, file, f'--worker={name}', *more], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        env={'JAX_PLATFORMS': 'cpu', **os.environ,
             'TOKENIZERS_PARALLELISM': 'false', 'HF_HUB_OFFLINE': '1'})

  def turn(self, case: str = 'go') -> dict[str, float]:
    """Lets it work once; returns `secs`, `cpu_secs` and facts.

    Raises:
      SystemExit: the worker ended instead.
    """
    try:
      self._process.stdin.write(case + '\n')
      self._process.stdin.flush()
    except BrokenPipeError:
      pass  # it has ended; below is why
    printed = []
    for line in self._process.stdout:
      if line.startswith(_MARK):
        return json.loads(line[len(_MARK):])
      printed.append(line)
    code = self._process.wait()  # below 0: ended by that signal
    self._errors.seek(0)
    raise SystemExit(
        f'{self.name} ended with code {code} in {case!r}:\n'
        f'{"".join(printed)[-2000:]}\n{self._errors.read()[-4000:]}')

  def close(self) -> None:
    """Ends it."""
    self._process.stdin.close()
    self._process.wait()


WARM = 2  # turns of each that are not counted: they compile


def run(workers: Sequence[Worker], case: str = 'go', *, rounds: int
       ) -> dict[str, list[dict[str, float]]]:
  """Each worker's turns but the warm-up; every other round is in reverse."""
  taken = {worker.name: [] for worker in workers}
  for number in range(WARM + rounds):
    for worker in workers if number % 2 == 0 else workers[::-1]:
      turn = worker.turn(case)
      if number >= WARM:
        taken[worker.name].append(turn)
  return taken


def median(turns: Sequence[Mapping[str, float]], name: str = 'secs') -> float:
  """The median of what the turns took, or of a fact that they reported."""
  return statistics.median(turn[name] for turn in turns)


def load() -> str:
  """How busy the machine is, to stand beside any timing."""
  return (f'{os.cpu_count()} cores, load average '
          f'{os.getloadavg()[0]:.1f} of the last minute, nice {os.nice(0)}')
