# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Two checkouts in turns: rollouts, a GRPO step, a training step, start-up.

  git worktree add ../old REVISION
  python benchmarks/revisions.py --old ../old --new .

Each measurement is a process of its own in its checkout, the order of the two
reversed every second round; one warm-up of each, with a compilation cache for
each checkout, is not counted. The ratios are new over old: of the minima, of
the medians, and the median of the rounds' pairs.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROLLOUTS = '''
import argparse, json, sys
sys.path.insert(0, 'benchmarks')
import rollout
questions, samples, slots, repeats = map(int, sys.argv[1:])
bench = rollout.Bench(argparse.Namespace(slots=slots, steps=4, patience=32))
rollout.measure(bench, rollout.Script(4, 2, 0), 'slots')
for repeat in range(repeats):
  found = rollout.measure(
      bench, rollout.Script(questions, samples, repeat), 'slots')
  print(json.dumps(found))
'''


def process(root, arguments, cache):
  """Runs Python in a checkout; returns stdout, seconds and CPU seconds."""
  env = dict(os.environ, PYTHONPATH=str(root), JAX_PLATFORMS='cpu',
             JAX_COMPILATION_CACHE_DIR=str(cache),
             JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0.1')
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], cwd=root, env=env,
                             text=True, stdout=out, stderr=err)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    out.seek(0), err.seek(0)
    out, err = out.read(), err.read()
  if status:
    raise SystemExit(f'{root}: {arguments} ended with {status}:\n{err[-3000:]}')
  return out, wall, usage.ru_utime + usage.ru_stime


def row(out):
  """Seconds and CPU seconds of our row in a benchmark's table."""
  found = re.search(r'^\| searchrl \| ([\d.]+) \| ([\d.]+) \|', out, re.M)
  return float(found[1]), float(found[2])


def rollouts(root, cache, quick):
  """The way 'slots' of benchmarks/rollout.py, without its decode programs."""
  size = ['8', '2', '16', '1'] if quick else ['64', '5', '128', '3']
  out, _, _ = process(root, ['-c', ROLLOUTS, *size], cache)
  found = [json.loads(line) for line in out.splitlines() if line[:1] == '{']
  return {'rollouts (rollout.py)': [
      statistics.median(r[name] for r in found)
      for name in ('wall_secs', 'cpu_secs')]}


def grpo(root, cache, quick):
  """Score and update of 64 trajectories; see benchmarks/peers.py."""
  out = process(root, ['benchmarks/peers.py', '--rounds',
                       '2' if quick else '30'], cache)[0]
  return {'GRPO step (peers.py)': row(out)}


def train(root, cache, quick):
  """An update of the toy size; see benchmarks/train_step.py."""
  size = (['--trajectories', '16', '--length', '128', '--steps', '2'] if quick
          else ['--steps', '7'])
  out = process(root, ['benchmarks/train_step.py', '--size', 'toy', *size],
                cache)[0]
  return {'training step (train_step.py)': row(out)}


def startup(root, cache, quick):
  """A whole process: imports, checks, building, compiling, one step."""
  del quick
  with tempfile.TemporaryDirectory() as folder:
    _, wall, cpu = process(root, [
        '-m', 'searchrl.main', '--config=configs/dspo.py:smoke',
        f'--workdir={folder}/run', '--config.train.num_steps=1',
        '--config.evaluate.worlds.kinds=()', '--config.train.progress=False',
        '--config.train.loggers=()'], cache)
  return {'start-up, one step (main)': (wall, cpu)}


MEASUREMENTS = dict(rollouts=rollouts, grpo=grpo, train=train, startup=startup)


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--old', required=True, help='a checkout')
  parser.add_argument('--new', required=True, help='a checkout')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--only', nargs='+', choices=MEASUREMENTS,
                      default=[*MEASUREMENTS])
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--no-warm-up', action='store_true')
  options = parser.parse_args()
  roots = {name: pathlib.Path(getattr(options, name)).resolve()
           for name in ('old', 'new')}
  caches = {name: pathlib.Path(tempfile.mkdtemp(prefix=f'turns-{name}-'))
            for name in roots}
  taken = {}
  try:
    for measure in options.only:
      for number in range(-(not options.no_warm_up), options.rounds):
        for name in [*roots][::1 if number % 2 == 0 else -1]:
          began = time.perf_counter()
          found = MEASUREMENTS[measure](
              roots[name], caches[name], options.quick)
          print(f'round {number} {name} {measure}: '
                f'{time.perf_counter() - began:.0f} s, load '
                f'{os.getloadavg()[0]:.1f}: {found}', file=sys.stderr)
          if number >= 0:
            for key, pair in found.items():
              taken.setdefault(key, dict(old=[], new=[]))[name].append(pair)
      report(taken)
  finally:
    for cache in caches.values():
      shutil.rmtree(cache)


def report(taken):
  """Prints a table of all measurements so far."""
  print('\n| what | | old min | old median | new min | new median '
        '| new / old: min | median | median of pairs |\n' + '|---' * 9 + '|')
  for key, by_name in taken.items():
    for i, unit in enumerate(('seconds', 'CPU seconds')):
      old, new = ([pair[i] for pair in by_name[n]] for n in ('old', 'new'))
      middle = statistics.median
      print(f'| {key} | {unit} | {min(old):.3f} | {middle(old):.3f} '
            f'| {min(new):.3f} | {middle(new):.3f} | {min(new) / min(old):.2f} '
            f'| {middle(new) / middle(old):.2f} '
            f'| {middle(b / a for a, b in zip(old, new)):.2f} |', flush=True)


if __name__ == '__main__':
  main()
