# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Studies what is learned by recipe, size of updates, engine and reward.

  python benchmarks/study/learning.py --plan
  python benchmarks/study/learning.py --parallel 2 --limit_minutes 60   # and again
  python benchmarks/study/learning.py --table

The experiments are in experiments.py. A run is an arm with a seed: it trains,
is evaluated by configs/evaluate.py on worlds that it has never seen, and gets a
line in benchmarks/study/learning.jsonl. A run with a line is not repeated, one that
was interrupted goes on, so that the same command continues the study until
nothing is missing. `--table` prints the tables, and draws the figures.

Each run computes with one thread, so that it gives the same bits alone and
beside others; with two threads it gives others. All share the compilation cache
of main, whose programs are the same for any number of threads.
"""

import argparse
from collections.abc import Mapping, Sequence
import concurrent.futures
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import experiments  # pylint: disable=g-import-not-at-top  # beside this file
import outcomes
import report
from searchrl.runtime import workdir

RECORDS = pathlib.Path(__file__).with_name('learning.jsonl')
THREADS = {  # of each library that splits a sum among them
    'NPROC': '1',  # XLA's, on CPUs
    'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}
SECONDS = {  # CPU, on a core; before a run of the kind is recorded
    'start': 15, 'step': 3.5, 'question': 0.025}  # of main; of 72 trajectories

Run = tuple[experiments.Arm, int]  # and its seed
_running: set[int] = set()  # process ids


def main() -> None:
  names = list(experiments.all_of({}))
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--experiment', nargs='+', default=names, choices=names)
  parser.add_argument('--arms', nargs='+', default=[],
                      help='record these alone; by default, all')
  parser.add_argument('--seeds', nargs='+', type=int,
                      default=list(experiments.SEEDS))
  parser.add_argument('--parallel', type=int, default=1, help='runs at a time')
  parser.add_argument('--limit_minutes', type=float, default=float('inf'),
                      help='begin no run that is expected to end later')
  parser.add_argument('--runs', type=pathlib.Path, default=ROOT / 'runs/study')
  parser.add_argument('--records', type=pathlib.Path, default=RECORDS)
  parser.add_argument('--plan', action='store_true', help='only count and cost')
  parser.add_argument('--table', action='store_true', help='print and draw')
  options = parser.parse_args()
  known = [arm.name for arm in experiments.distinct(
      experiments.all_of({}).values())]
  if unknown := set(options.arms) - set(known):
    parser.error(f'no arms: {sorted(unknown)}; there are {known}')
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  if options.plan:
    print(plan(options.experiment, options.seeds, read(options.records)))
    return
  if not options.table:
    study(options)
  found = read(options.records)
  chosen = {name: experiments.all_of(found)[name]
            for name in options.experiment}
  print(report.text(chosen, found))
  report.draw(found, options.records.parent)


def read(file: pathlib.Path) -> experiments.Records:
  """{(arm, seed): record}, of a file that may not be there yet."""
  lines = file.read_text().splitlines() if file.exists() else []
  records = map(json.loads, lines)
  return {(record['arm'], record['seed']): record for record in records}


def study(options) -> None:
  """Makes the records that are missing, as far as the time allows."""
  end = time.monotonic() + 60 * options.limit_minutes
  while wanted := [run for run in missing(
      options.experiment, options.seeds, read(options.records))
                   if not options.arms or run[0].name in options.arms]:
    print(f'{len(wanted)} runs are missing.', flush=True)
    if not _all(wanted, end, options):
      break  # calibration, once it has its records, adds arms


def _all(wanted: Sequence[Run], end: float, options) -> bool:
  """Does runs side by side; returns whether all of them were begun.

  Raises:
    RuntimeError: a run failed; those beside it have ended, and are recorded.
  """
  found, began, failed = read(options.records), [], []

  def one(arm, seed):
    late = time.monotonic() + expected(arm, found, 'wall_secs') > end
    if late or failed:
      return None
    try:
      return record(arm, seed, options)
    except Exception as error:  # pylint: disable=broad-exception-caught
      failed.append(error)  # no other begins; those beside it end
      return None

  with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
    running = [pool.submit(one, *run) for run in wanted]
    try:
      for finished in concurrent.futures.as_completed(running):
        began.append(finished.result())
        if began[-1]:
          _append(began[-1], options.records)
    except KeyboardInterrupt:
      pool.shutdown(wait=False, cancel_futures=True)
      for process in list(_running):
        os.kill(process, signal.SIGTERM)  # saves after its step
      raise
  if failed:
    raise failed[0]
  return all(began)


def _append(made: dict, file: pathlib.Path) -> None:
  with file.open('a') as lines:
    lines.write(json.dumps(made) + '\n')
  cost = sum(made['cpu_secs'].values())
  print(f'{made["arm"]}, seed {made["seed"]}: {cost:.0f} CPU seconds',
        flush=True)


def missing(names: Sequence[str], seeds: Sequence[int],
            found: experiments.Records) -> list[Run]:
  """The runs without a record, all arms of a seed before the next seed's.

  Raises:
    ValueError: a record was made by another command than its arm has today.
  """
  chosen = [experiments.all_of(found)[name] for name in names]
  arms = list(experiments.distinct(chosen))
  runs = [(arm, seed) for arm in arms for seed in arm.seeds]
  runs += [(arm, seed) for seed in seeds for arm in arms if not arm.seeds]
  for arm, seed in runs:
    past = found.get((arm.name, seed))
    if past and past['commands'] != experiments.commands(arm, seed):
      raise ValueError(
          f'the record of {arm.name!r}, seed {seed}, was made by commands '
          f'{past["commands"]}, but they are {experiments.commands(arm, seed)} '
          'now. Give the arm another name, or take its lines out of the '
          'records.')
  return [(arm, seed) for arm, seed in runs if (arm.name, seed) not in found]


def record(arm: experiments.Arm, seed: int, options) -> dict:
  """Does what is left of a run, and returns its record."""
  folder = (options.runs / f'{arm.name}_seed{seed}'.replace(' ', '_')).resolve()
  folder.mkdir(parents=True, exist_ok=True)
  commands = experiments.commands(arm, seed)
  for part, arguments in commands.items():
    if not outcomes.is_done(folder / part):
      _command([*arguments, *_of_folder(arm, seed, part, folder)], folder, part,
               arm.devices if part == 'train' else 1)
  return {
      'arm': arm.name, 'seed': seed, 'commands': commands,
      **workdir.environment(), 'cores': os.cpu_count(),
      'parallel': options.parallel, **outcomes.of(folder)}


def _of_folder(arm: experiments.Arm, seed: int, part: str, folder: pathlib.Path
              ) -> list[str]:
  """The arguments that name folders and files of a run."""
  result = [f'--workdir={folder / part}']
  if part != 'train' and arm.recipe:
    run = folder / 'train' / arm.solver
    result.append(f'--config.evaluate.run={run}')
  if arm.reads:
    import reading  # pylint: disable=g-import-not-at-top  # imports jax
    result += reading.prepare(experiments.evaluation_options(arm, seed)[part],
                              folder / 'questions' / part)
  return result


def _command(arguments: Sequence[str], folder: pathlib.Path, part: str,
             devices: int = 1) -> None:
  """Runs main; what it prints and what it cost stay in the folder.

  Raises:
    RuntimeError: it failed, or was stopped before its end.
  """
  began = time.monotonic()
  with (folder / 'log.txt').open('a') as log:
    process = subprocess.Popen(
        [sys.executable, '-m', 'searchrl.main', *arguments], cwd=ROOT,
        stdout=log, stderr=log, env=environment(devices))
    _running.add(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    _running.discard(process.pid)
  outcomes.add_cost(folder, part, cpu=usage.ru_utime + usage.ru_stime,
                    wall=time.monotonic() - began)
  if status or not outcomes.is_done(folder / part):
    raise RuntimeError(
        f'{part} in {folder} ended before its time, with status {status}; '
        f'{folder / "log.txt"} says why. The same command goes on.')


def environment(devices: int = 1) -> dict[str, str]:
  """Returns the environment of a run: its CPU devices, and one thread."""
  inherited = {name: value for name, value in os.environ.items()
               if name != 'XLA_FLAGS'}
  return inherited | THREADS | {'JAX_PLATFORMS': 'cpu'} | ({
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'
  } if devices > 1 else {})


# Costs ------------------------------------------------------------------------

def expected(arm: experiments.Arm, found: experiments.Records,
             clock: str = 'cpu_secs') -> float:
  """Seconds of a run: the median of the arm's others, else an estimate."""
  past = [sum(record[clock].values())
          for (name, _), record in found.items() if name == arm.name]
  if past:
    return statistics.median(past)
  cells = [*(experiments.EVALUATIONS[name] for name in arm.evaluations),
           *(experiments.JUDGED for _ in arm.judges)]
  asked = sum(map(questions, cells))
  if arm.recipe and arm.evaluations:
    asked += questions(experiments.CURVE) * (
        arm.steps // experiments.CURVE['evaluate.every'] + 1)
  return (SECONDS['start'] * (bool(arm.recipe) + len(cells)) +
          SECONDS['step'] * arm.steps + SECONDS['question'] * asked)


def questions(cell: Mapping[str, Any]) -> int:
  """Returns the maximum number of questions, greedy and sampled, of a cell."""
  worlds = {name.rpartition('.')[2]: value for name, value in cell.items()}
  hops, fresh = worlds['max_hops'], worlds['questions_per_hop']
  common = sum(kind in ('famous', 'outdated') for kind in worlds['kinds'])
  greedy = common * worlds.get('common_per_hop', 0) + (
      len(worlds['kinds']) - common) * fresh
  sampled = 0 if worlds.get('decodings') == ('greedy',) else (
      len(worlds['kinds']) * worlds['sampled_per_hop'])
  return hops * (greedy + sampled)


def plan(names: Sequence[str], seeds: Sequence[int],
         found: experiments.Records) -> str:
  """Runs and CPU hours by experiment; an arm of several counts in the first."""
  every = experiments.all_of(found)
  lines = ['| experiment | runs | of them recorded | CPU seconds a run '
           '| CPU hours | missing |', '|---' * 6 + '|']
  seen, totals = set(), [0, 0, 0.0, 0.0]
  for name in names:
    row = [0, 0, 0.0, 0.0]
    for arm in experiments.distinct([every[name]]):
      if arm.name in seen:
        continue
      seen.add(arm.name)
      wanted = arm.seeds or tuple(seeds)
      here = sum((arm.name, seed) in found for seed in wanted)
      hours = expected(arm, found) / 3600
      row = [a + b for a, b in zip(row, (
          len(wanted), here, hours * len(wanted),
          hours * (len(wanted) - here)))]
    totals = [a + b for a, b in zip(totals, row)]
    lines.append(_plan_row(name, row))
  return '\n'.join([*lines, _plan_row('all', totals)])


def _plan_row(name: str, row: Sequence[float]) -> str:
  runs, here, hours, left = row
  seconds = 3600 * hours / max(runs, 1)
  return (f'| {name} | {runs} | {here} | {seconds:.0f} | {hours:.1f} '
          f'| {left:.1f} |')


if __name__ == '__main__':
  main()
