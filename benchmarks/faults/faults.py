# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Faults in, one table out: fault, what happened, steps lost, bits equal.

  python benchmarks/faults/faults.py --parallel 2              # and again: it goes on
  python benchmarks/faults/faults.py --only kills --kills 200
  python benchmarks/faults/faults.py --only apart  # 4 of 8 devices sample
  python benchmarks/faults/faults.py --table

A run is a few steps of a laptop recipe, evaluated before and after; "equal"
means the digests of its last checkpoint (parameters, optimizer, progress) and
its metrics, times left out (and requests, where search fails), against a run of
the same command that nothing disturbed. The collapse is `--only collapse`: five
seeds of the laptop's GRPO, whose learning rate is 50 times as high in three
steps.

Hypothesis of the collapse, before its first run: with
guards.actions.score=rollback the mean greedy exact match of five seeds, 1 to 3
hops, is within one standard deviation of the undisturbed runs'; without, it is
below by more than .3.
"""

import argparse
import collections
from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import faulty_proxy

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = pathlib.Path(__file__).with_name('faults.jsonl')
TIMED = ('timing_s/', 'perf/throughput', 'perf/cpu_seconds',
         'search/latency_ms/', 'search/remote/')
ASKED = ('search/batch_size', 'search/failed_queries', 'search/queries',
         'search/retries')  # requests: a failed one is asked again
SHORT = ('--config.train.num_steps=4', '--config.train.checkpoint_every=1',
         '--config.train.progress=False', '--config.train.loggers=()')
EVALUATED = ("--config.evaluate.worlds.kinds=('known',)",
             '--config.evaluate.worlds.questions_per_hop=1')
RECIPES = {  # name: command line
    'dspo': ('--config=configs/dspo.py:smoke', '--config.rollout.max_rounds=2',
             *EVALUATED),
    'ppo': ('--config=configs/ppo.py:smoke', *EVALUATED),
    'ahead': ('--config=configs/grpo.py:smoke',
              '--config.train.max_staleness=1', *EVALUATED),
    'apart': ('--config=configs/grpo.py:smoke',
              '--config.train.max_staleness=1',
              '--config.train.rollout_devices=4', *EVALUATED),
    'remote': ('--config=configs/grpo.py:smoke',
               '--config.search.engine=remote',
               '--config.rollout.search_order=deterministic',
               '--config.evaluate.worlds.kinds=()'),
}
DEVICES = {'apart': 8}  # simulated; otherwise 1
KILLS = {'kills': 200, 'apart': 20}  # kills after which a scenario ends
MOMENTS = {  # what is on the disk when the kill comes; below the folder
    'time': '', 'checkpoint': 'checkpoints/[1-9]/state',
    'evaluation': 'evaluation/after/records/*/*', 'export': '.model.unfinished',
    'metrics': 'metrics.jsonl'}
_PATIENCE = 900  # seconds for one process


@dataclasses.dataclass
class Outcome:
  """The end of a disturbed run."""

  fault: str
  happened: str
  faults: int = 1  # that were injected
  lost: int = 0  # steps that were done twice
  equal: bool | None = None  # None: there is nothing to compare

  def record(self) -> dict:
    return dataclasses.asdict(self)


def command(recipe: str, folder: pathlib.Path, *more: str) -> list[str]:
  return [sys.executable, '-m', 'searchrl.main', *RECIPES[recipe], *SHORT,
          f'--workdir={folder}', *more]


def devices(count: int) -> dict[str, str]:
  """Returns the environment of a process with simulated devices."""
  return {'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}'}


def start(words: Sequence[str], **options) -> subprocess.Popen:
  return subprocess.Popen(
      words, cwd=ROOT, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', **options.pop(
          'env', {})}, **options)


def finish(words: Sequence[str], **options) -> tuple[int, str]:
  process = start(words, **options)
  try:
    text, _ = process.communicate(timeout=_PATIENCE)
  finally:
    process.kill()
  return process.returncode, text


def lines(folder: pathlib.Path, without: tuple[str, ...] = TIMED
         ) -> list[dict]:
  """The metrics, by default without those that measure time."""
  file = folder / 'metrics.jsonl'
  found = file.read_text().split('\n')[:-1] if file.exists() else []
  return [{k: v for k, v in json.loads(line).items()
           if not k.startswith(without)} for line in found]


def step_of(folder: pathlib.Path) -> int:
  return max((line['training/global_step'] for line in lines(folder)
              if 'critic/score/mean' in line), default=0)


def digest(folder: pathlib.Path) -> tuple:
  path = folder / 'checkpoints'
  newest = path / str(max(int(p.name) for p in path.iterdir()
                          if p.name.isdecimal()))
  return (json.loads((newest / 'integrity.json').read_text())['leaves'],
          (newest / 'extra.json').read_text())


def equals(folder: pathlib.Path, whole: pathlib.Path,
           without: tuple[str, ...] = TIMED) -> bool:
  return digest(folder) == digest(whole) and (
      lines(folder, without) == lines(whole, without))


class Bench:
  """The scenarios; each method yields outcomes, and is resumed by its name."""

  def __init__(self, work: pathlib.Path, options):
    self._work, self._options = work, options
    self._wholes, self._lock = {}, threading.Lock()

  def whole(self, recipe: str, *more: str) -> pathlib.Path:
    """An undisturbed run; made once."""
    with self._lock:
      folder = self._work / f'whole_{recipe}'
      if not (folder / 'summary.txt').exists():
        shutil.rmtree(folder, ignore_errors=True)
        code, text = finish(command(recipe, folder, *more),
                            env=devices(DEVICES.get(recipe, 1)))
        if code:
          raise RuntimeError(f'the undisturbed run of {recipe} failed:\n{text}')
      return folder

  def kills(self, number: int) -> Iterator[Outcome]:
    """A run that is killed at random, again and again, until it finishes."""
    rng = random.Random(number)
    recipe = rng.choice(['dspo', 'ppo', 'ahead', 'remote'])
    yield from self._killed(number, recipe, rng)

  def apart(self, number: int) -> Iterator[Outcome]:
    """Yields outcomes like `kills`; in its runs, some devices only sample."""
    yield from self._killed(number, 'apart', random.Random(number))

  def _killed(self, number: int, recipe: str, rng: random.Random
             ) -> Iterator[Outcome]:
    with self.served(recipe) as more:
      whole = self.whole(recipe, *more)
      folder = self._work / f'kills_{recipe}_{number}'
      shutil.rmtree(folder, ignore_errors=True)
      killed, lost, moments = 0, 0, []
      while True:
        moment = rng.choice([*MOMENTS]) if killed < 8 else ''
        process = start(command(recipe, folder, *more),
                        env=devices(DEVICES.get(recipe, 1)))
        before = step_of(folder)
        reached, text = _until(process, folder, moment, rng)
        if process.returncode == 0:
          break
        if process.returncode != -signal.SIGKILL:
          yield Outcome(f'SIGKILL ({recipe})', f'failed: {text[-300:]}',
                        killed, lost, False)
          return
        killed += 1
        lost += max(0, before - _resumed(text)) if before else 0
        moments.append(reached)
      yield Outcome(f'SIGKILL ({recipe})', ', '.join(sorted(moments)), killed,
                    lost, equals(folder, whole))
      shutil.rmtree(folder)

  def damages(self, number: int) -> Iterator[Outcome]:
    """The newest checkpoint is damaged; the run goes on from the one before."""
    kinds = ['bit', 'cut', 'gone', 'extra.json', 'integrity.json', 'empty']
    kind, whole = kinds[number % len(kinds)], self.whole('dspo')
    folder = self._work / f'damages_{number}'
    shutil.rmtree(folder, ignore_errors=True)
    finish(command('dspo', folder, '--config.train.num_steps=3'))
    _damage(folder / 'checkpoints' / '3', kind)
    code, text = finish(command('dspo', folder))
    yield Outcome(f'damaged checkpoint: {kind}',
                  (_sentence(text, 'Checkpoint') if 'is damaged' in text or
                     'never committed' in text else 'every leaf is whole')
                  + f'; exit code {code}', 1,
                  3 - _resumed(text), code == 0 and equals(folder, whole))
    shutil.rmtree(folder)

  def disk(self, number: int) -> Iterator[Outcome]:
    """No file may grow beyond some size; later it may again."""
    limit, whole = [3_000, 30_000, 300_000, 1_000_000][number % 4], (
        self.whole('dspo'))
    folder = self._work / f'disk_{number}'
    shutil.rmtree(folder, ignore_errors=True)
    code, text = finish(command('dspo', folder), preexec_fn=lambda: (
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))
    short = 'Traceback' not in text
    again, _ = finish(command('dspo', folder))
    yield Outcome(f'files limited to {limit:,} bytes',
                  f'exit code {code}, '
                  f'{"a sentence" if short else "traceback"}: '
                  f'{_sentence(text, "Error")}', 1, 0,
                  again == 0 and equals(folder, whole) and short)
    shutil.rmtree(folder)

  def readonly(self, number: int) -> Iterator[Outcome]:
    """Nothing can be written, from the start or in its midst; later it can."""
    whole, folder = self.whole('dspo'), self._work / f'readonly_{number}'
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with contextlib.ExitStack() as stack:
      if number == 0:
        stack.enter_context(_unwritable(folder))
      process = start(command('dspo', folder))
      while number and step_of(folder) < 2 and process.poll() is None:
        time.sleep(0.01)
      if number:
        stack.enter_context(_unwritable(folder / 'checkpoints'))
      text, _ = process.communicate(timeout=_PATIENCE)
    short = 'Traceback' not in text
    again, more = finish(command('dspo', folder))
    yield Outcome(
        'a folder that is read-only ' + ('at first', 'after step 2')[number],
        f'exit code {process.returncode}, '
        f'{"a sentence" if short else "traceback"}: {_sentence(text, "Error")}',
        1, 2 - _resumed(more) if number else 0,
        again == 0 and process.returncode == 1 and short
        and equals(folder, whole))
    shutil.rmtree(folder)

  def signals(self, number: int) -> Iterator[Outcome]:
    """SIGTERM, again and again; exit code 75 each time until the end."""
    recipe, rng = ['dspo', 'ppo', 'ahead'][number % 3], random.Random(number)
    whole, folder = self.whole(recipe), self._work / f'signals_{number}'
    shutil.rmtree(folder, ignore_errors=True)
    codes = []
    while not codes or codes[-1] == 75 and len(codes) < 12:
      process = start(command(recipe, folder))
      text = _storm(process, rng, len(codes))
      codes.append(process.returncode)
    stopped = codes.count(75)
    yield Outcome(f'SIGTERM storm ({recipe})',
                  f'exit codes {", ".join(map(str, codes))}'
                  + ('' if codes[-1] == 0 else f': {text[-200:]}'), stopped, 0,
                  codes[-1] == 0 and equals(folder, whole))
    shutil.rmtree(folder)

  def processes(self, number: int) -> Iterator[Outcome]:
    """One of several processes is killed; all are started again."""
    count = [2, 4][number % 2]
    rng, folders = random.Random(number), [
        self._work / f'processes_{number}_{name}' for name in ('whole', 'one')]
    for folder in folders:
      shutil.rmtree(folder, ignore_errors=True)
    codes = _group(count, folders[0], None)
    _group(count, folders[1], rng.randrange(count))
    again = _group(count, folders[1], None)
    yield Outcome(f'one of {count} processes is killed',
                  f'the others end; started again: exit codes {again}', 1, 0,
                  not any([*codes, *again]) and equals(folders[1], folders[0]))
    for folder in folders:
      shutil.rmtree(folder)

  def search(self, number: int) -> Iterator[Outcome]:
    """A search server behind a proxy that spoils, delays or drops requests."""
    name, options = [
        ('a quarter of the requests fail, mixed', dict(share=0.25)),
        ('an outage of 20 s', dict(out=(2, 22))),
        ('each request takes .5 s', dict(slow_secs=0.5))][number % 3]
    folder = self._work / f'search_{number}'
    shutil.rmtree(folder, ignore_errors=True)
    with self.served('remote') as more:
      whole = self.whole('remote', *more)
    with self.served('remote', **options) as more:
      code, text = finish(command('remote', folder, *more))
    steps = [line for line in lines(folder) if 'critic/score/mean' in line]
    errors = [line['search/error_rate'] for line in steps]
    searches = min((line['search/calls_per_traj'] for line in steps), default=0)
    yield Outcome(f'search: {name}', f'exit code {code}; trajectories that '
                  f'ended by an error {max(errors, default=1):.0%} at most; '
                  'searches '
                  f'{searches:.2f} at least'
                  + ('; paused' if 'is paused' in text else ''), 1, 0,
                  code == 0 and searches > 0
                  and equals(folder, whole, TIMED + ASKED)
                  if not any(errors) else None)
    shutil.rmtree(folder)

  def collapse(self, number: int) -> Iterator[Outcome]:
    """The learning rate is 50 times as high in three steps."""
    seed, arm = divmod(number, 3)
    name = ('undisturbed', 'rolled back', 'let run')[arm]
    folder = self._work / f'collapse_{number}'
    code, text = finish([
        sys.executable, __file__, '--child', name, str(seed), str(folder)])
    rolled = text.count('is rolled back')
    table = json.loads((folder / 'evaluation/after/table.json').read_text())
    score = statistics.mean(row['em'] for row in table if row['hops'] in (
        1, 2, 3) and row['decoding'] == 'greedy')
    yield Outcome(f'learning rate x 50 in three steps: {name}',
                  f'seed {seed}: exit code {code}, {rolled} rollbacks, greedy '
                  f'exact match {score:.3f}', int(arm > 0))

  @contextlib.contextmanager
  def served(self, recipe: str, **faults) -> Iterator[tuple[str, ...]]:
    """The options of a search server's address, if the recipe needs one."""
    if recipe != 'remote':
      yield ()
      return
    port = _free_port()
    server = start([sys.executable, '-m', 'searchrl.main',
                    '--config=configs/serve_search.py',
                    '--config.serve.top_k=2',
                    f'--config.serve.port={port}',
                    f'--workdir={self._work / f"served_{port}"}'])
    url = f'http://127.0.0.1:{port}/retrieve'
    try:
      while 'Serving' not in server.stdout.readline():
        if server.poll() is not None:
          raise RuntimeError('the search server did not start')
      with faulty_proxy.Proxy(url, **faults) as proxy:
        address = proxy.url if faults else url
        yield (f"--config.search.options={{'urls': ('{address}',), "
               "'try_secs': 2.0, 'deadline_secs': 20.0, 'tries': 5}",
               '--allow_changes')  # of the port
    finally:
      server.terminate()
      server.communicate(timeout=60)


def child(name: str, seed: int, folder: str) -> None:
  """A run whose learner is disturbed from inside."""
  from configs import grpo  # pylint: disable=g-import-not-at-top
  from searchrl.jobs import train
  from searchrl.training import learner as learners
  config = grpo.get_config()
  config.seed = seed
  config.data.world_seed = 1 + seed
  config.evaluate.worlds.world_seed = 101 + seed
  config.train.update(checkpoint_every=2, keep_checkpoints=6, progress=False,
                      loggers=())
  config.evaluate.update(initial=False, every=0, noise=False,
                         decodings=('greedy',))
  config.evaluate.worlds.update(kinds=('known',), questions_per_hop=50)
  if name == 'rolled back':
    config.guards.actions.score = 'rollback'
  update, calls, fast = learners.Learner.update, [], []

  def disturbed(self, *args, **kwargs):
    calls.append(1)
    if name != 'undisturbed' and 11 <= len(calls) <= 13:
      fast[:] = fast or [self.with_lr_scale(50)]
      self = fast[0]
    return update(self, *args, **kwargs)

  learners.Learner.update = disturbed
  train.run(config, pathlib.Path(folder))


def _until(process: subprocess.Popen, folder: pathlib.Path, moment: str,
           rng: random.Random) -> tuple[str, str]:
  """Kills a process at a moment, or lets it finish; returns also its text."""
  texts = []
  reader = threading.Thread(
      target=lambda: texts.append(process.stdout.read()), daemon=True)
  reader.start()
  began, wait = time.monotonic(), rng.uniform(2, 30)
  before = set(folder.glob(MOMENTS.get(moment) or '*'))
  size = _size(folder / 'metrics.jsonl')
  while process.poll() is None and moment:
    if moment == 'time':
      hit = time.monotonic() - began > wait
    elif moment == 'metrics':
      hit = _size(folder / 'metrics.jsonl') != size
    else:
      hit = bool(set(folder.glob(MOMENTS[moment])) - before)
    if hit:
      time.sleep(rng.uniform(0, 0.02))
      process.kill()
      break
    time.sleep(0.001)
  process.wait(timeout=_PATIENCE)
  reader.join()
  return moment, ''.join(texts)


def _size(file: pathlib.Path) -> int:
  return file.stat().st_size if file.exists() else -1


def _resumed(text: str) -> int:
  found = re.search(r'Resumed at step (\d+)', text)
  return int(found[1]) if found else 0


def _sentence(text: str, word: str) -> str:
  return next((line[:110] for line in text.splitlines() if word in line),
              text.strip()[-110:])


def _damage(path: pathlib.Path, kind: str) -> None:
  data = max((path / 'state').rglob('d/*'), key=lambda p: p.stat().st_size)
  if kind == 'bit':
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
  elif kind == 'cut':
    data.write_bytes(data.read_bytes()[:-9])
  elif kind == 'gone':
    data.unlink()
  elif kind == 'empty':
    shutil.rmtree(path)
    path.mkdir()
  else:
    (path / kind).write_text((path / kind).read_text()[:-20])


@contextlib.contextmanager
def _unwritable(folder: pathlib.Path) -> Iterator[None]:
  """Makes a folder read-only; root, whom modes do not stop, mounts another."""
  if os.geteuid():
    folder.chmod(0o500)
  else:
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'tmpfs', str(folder)],
                   check=True)
  try:
    yield
  finally:
    if os.geteuid():
      folder.chmod(0o700)
    else:
      subprocess.run(['umount', str(folder)], check=True)


def _storm(process: subprocess.Popen, rng: random.Random, done: int) -> str:
  """SIGTERM every moment, after a while that grows so that the run ends."""
  time.sleep(rng.uniform(0, 6) + 4 * done)
  while process.poll() is None:
    process.terminate()
    time.sleep(rng.uniform(0.01, 0.4))
  return process.communicate()[0]


def _group(count: int, folder: pathlib.Path, victim: int | None) -> list[int]:
  """Exit codes of processes that make one run; one may be killed in it."""
  address = f'127.0.0.1:{_free_port()}'
  members = [start(command('dspo', folder), env={
      **devices(4 // count), 'NPROC': '16',
      'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(count),
      'JAX_PROCESS_ID': str(number), 'SEARCHRL_HEARTBEAT_SECS': '10',
      'SEARCHRL_SHUTDOWN_SECS': '20'}) for number in range(count)]
  readers = [threading.Thread(target=member.stdout.read, daemon=True)
             for member in members]
  for reader in readers:
    reader.start()
  while victim is not None and members[victim].poll() is None:
    if step_of(folder) >= 2:
      members[victim].kill()
    time.sleep(0.05)
  for member in members:
    member.wait(timeout=_PATIENCE)
  return [member.returncode for member in members]


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


NUMBERS = {'damages': 6, 'disk': 4, 'readonly': 2, 'signals': 6,
           'processes': 2, 'search': 3, 'collapse': 15}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--only', nargs='+', default=[*KILLS, *NUMBERS])
  parser.add_argument('--kills', type=int, help=f'default: {KILLS}')
  parser.add_argument('--parallel', type=int, default=1)
  parser.add_argument('--minutes', type=float, default=1e9,
                      help='then it begins nothing more')
  parser.add_argument('--work', type=pathlib.Path,
                      default=pathlib.Path('runs/faults'))
  parser.add_argument('--table', action='store_true')
  parser.add_argument('--child', nargs=3)
  options = parser.parse_args()
  if options.child:
    sys.path.insert(0, str(ROOT))
    child(options.child[0], int(options.child[1]), options.child[2])
  elif options.table:
    print(table(read()))
  else:
    run(options)


def read() -> list[dict]:
  return [json.loads(line) for line in RECORDS.read_text().splitlines()
          ] if RECORDS.exists() else []


def run(options) -> None:
  """Does what is not recorded yet."""
  bench = Bench(options.work.resolve(), options)
  options.work.mkdir(parents=True, exist_ok=True)
  deadline, lock = time.monotonic() + 60 * options.minutes, threading.Lock()
  done = {(row['scenario'], row['number']) for row in read()}
  kills = {name: options.kills or count for name, count in KILLS.items()}
  killed = collections.Counter()
  for row in read():
    killed[row['scenario']] += row['faults']

  def one(scenario: str, number: int) -> None:
    if time.monotonic() > deadline or (
        killed[scenario] >= kills.get(scenario, math.inf)):
      return
    for outcome in getattr(bench, scenario)(number):
      row = {'scenario': scenario, 'number': number, **outcome.record()}
      row['happened'] = ' '.join(row['happened'].split())
      with lock:
        killed[scenario] += row['faults']
        with RECORDS.open('a') as file:
          file.write(json.dumps(row) + '\n')
      print(json.dumps(row), flush=True)

  wanted = [(scenario, number) for scenario in options.only for number in range(
      NUMBERS.get(scenario) or kills[scenario])]
  with futures.ThreadPoolExecutor(options.parallel) as pool:
    for result in [pool.submit(one, *each) for each in wanted
                   if each not in done]:
      result.result()


def table(rows: Sequence[dict]) -> str:
  """The rows of one fault together."""
  text = ['| fault | times | what happened | steps lost | bits equal |',
          '|---|---|---|---|---|']
  order = [*KILLS, *NUMBERS]
  rows = sorted(rows, key=lambda row: order.index(row['scenario']))
  for fault in dict.fromkeys(row['fault'] for row in rows):
    own = [row for row in rows if row['fault'] == fault]
    told = [row['equal'] for row in own if row['equal'] is not None]
    happened = (
        _scored(own) if own[0]['scenario'] == 'collapse' else
        _counted(own) if own[0]['scenario'] in KILLS else
        '; '.join(dict.fromkeys(row['happened'] for row in own)))
    text.append(
        f'| {fault} | {sum(row["faults"] for row in own)} | {happened} | '
        f'{sum(row["lost"] for row in own)} | '
        + (f'{sum(told)} of {len(told)} runs' if told else '') + ' |')
  return '\n'.join(text)


def _counted(rows: Sequence[dict]) -> str:
  """How often runs were killed at each moment."""
  moments = [moment for row in rows for moment in row['happened'].split(', ')
             if moment]
  return ', '.join(f'{moment} {moments.count(moment)}'
                   for moment in sorted({*moments}))


def _scored(rows: Sequence[dict]) -> str:
  """Rollbacks of the seeds, and mean and standard deviation of their scores."""
  found = [re.search(r'(\d+) rollbacks, greedy exact match ([\d.]+)',
                     row['happened']) for row in rows]
  scores = [float(one[2]) for one in found]
  return (f'{len(rows)} seeds, rollbacks '
          f'{", ".join(one[1] for one in found)}; greedy exact match '
          f'{statistics.mean(scores):.3f} ± '
          f'{statistics.stdev(scores) if rows[1:] else 0:.3f}')


if __name__ == '__main__':
  main()
