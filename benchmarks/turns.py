# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Programs in environments of their own, one of them at work at a time.

A worker is the benchmark's own file, started by a peer's Python with
`--worker=NAME`. It does one piece of work when it is told to, says what that
took, and waits: so peers take turns piece by piece, whatever else the machine
does meanwhile, and none shares a process with another. Only the standard
library: this file is imported in every peer's environment.

On cores that other work keeps busy, torch's threads spin while they wait for
one another, and a step takes 40 times as long: OMP_WAIT_POLICY=PASSIVE in the
environment keeps them from it.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

_MARK = 'turn: '  # before what a worker tells, among what libraries print


class Clock:
  """The worker's side: waits for its turn; a call ends it.

  Attributes:
    asked: what the turn is about, as the other side named it.
  """

  def __init__(self):
    self._wait()

  def __call__(self, **facts: float) -> None:
    """Tells what the turn took, in seconds and CPU seconds, and the facts."""
    taken = (time.perf_counter() - self._start[0],
             time.process_time() - self._start[1])
    print(_MARK + json.dumps(dict(secs=taken[0], cpu_secs=taken[1], **facts)),
          flush=True)
    self._wait()

  def _wait(self) -> None:
    self.asked = sys.stdin.readline().strip()
    if not self.asked:  # nobody will ask again
      os._exit(0)
    self._start = time.perf_counter(), time.process_time()


def serve(work: Callable[[str], Mapping[str, float]]) -> None:
  """Does what is asked until nobody asks; the work returns facts."""
  clock = Clock()
  while True:
    clock(**work(clock.asked))


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
    """Lets it work once; `secs`, `cpu_secs` and facts.

    Raises:
      SystemExit: the worker ended instead.
    """
    try:
      self._process.stdin.write(case + '\n')
      self._process.stdin.flush()
    except BrokenPipeError:
      pass  # it says why
    said = []
    for line in self._process.stdout:
      if line.startswith(_MARK):
        return json.loads(line[len(_MARK):])
      said.append(line)
    code = self._process.wait()  # below 0: ended by that signal
    self._errors.seek(0)
    raise SystemExit(
        f'{self.name} ended with code {code} in {case!r}:\n'
        f'{"".join(said)[-2000:]}\n{self._errors.read()[-4000:]}')

  def close(self) -> None:
    """Ends it."""
    self._process.stdin.close()
    self._process.wait()


WARM = 2  # turns of each that are not counted: they compile


def play(workers: Sequence[Worker], case: str = 'go', *, rounds: int
        ) -> dict[str, list[dict[str, float]]]:
  """Each worker's turns but the warm-up: in order, and then in reverse."""
  taken = {worker.name: [] for worker in workers}
  for number in range(WARM + rounds):
    for worker in workers if number % 2 == 0 else workers[::-1]:
      turn = worker.turn(case)
      if number >= WARM:
        taken[worker.name].append(turn)
  return taken


def median(turns: Sequence[Mapping[str, float]], name: str = 'secs') -> float:
  """The middle one of what turns took, or of a fact that they told."""
  return statistics.median(turn[name] for turn in turns)


def load() -> str:
  """How busy the machine is; to stand beside any timing."""
  return (f'{os.cpu_count()} cores, load average '
          f'{os.getloadavg()[0]:.1f} of the last minute, nice {os.nice(0)}')
