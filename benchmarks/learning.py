# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""What configs learn, by seeds, as a table.

  python benchmarks/learning.py --config configs/grpo.py configs/dspo.py \
      --seeds 0 1 2

Trains each config with each seed, on a world of that seed, and evaluates the
policy on worlds that it has never seen. One record a run is appended to
benchmarks/learning.jsonl, so that the table can grow: a run with a record is
not repeated, and one that was interrupted goes on. `--table` only prints.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from searchrl.runtime import metrics  # pylint: disable=g-import-not-at-top
from searchrl.runtime import workdir

RECORDS = ROOT / 'benchmarks' / 'learning.jsonl'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--config', nargs='+', default=[])
  parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2])
  parser.add_argument('--questions', type=int, default=200, help='a hop count')
  parser.add_argument('--runs', default='runs/learning', help='a folder')
  parser.add_argument('--parallel', type=int, default=1, help='runs at a time')
  parser.add_argument('--table', action='store_true', help='only print')
  options = parser.parse_args()
  if not options.table:
    done = {(r['config'], r['seed'], r['questions']) for r in records()}
    wanted = [('base', 0), *((c, s) for s in options.seeds
                             for c in options.config)]
    wanted = [(c, s) for c, s in wanted
              if (_name(c), s, options.questions) not in done]
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
      running = [pool.submit(one, *w, options) for w in wanted]
      for finished in concurrent.futures.as_completed(running):
        record = finished.result()
        with RECORDS.open('a') as file:
          file.write(json.dumps(record) + '\n')
  print(f'{table(records())}\n\n{costs(records())}')


def one(config: str, seed: int, options) -> dict:
  """Trains and evaluates a config with a seed; 'base' is not trained."""
  folder = pathlib.Path(options.runs) / f'{_name(config)}_seed{seed}'
  record = {'config': _name(config), 'seed': seed,
            'questions': options.questions, **workdir.environment(),
            'cores': os.cpu_count(), 'processor': platform.processor()}
  evaluate = ['--config=configs/evaluate.py',
              f'--config.evaluate.worlds.questions_per_hop={options.questions}',
              f'--workdir={folder}_evaluation']
  if config != 'base':
    run = [f'--config={config}', f'--config.seed={seed}', '--allow_changes',
           f'--config.data.world_seed={seed + 1}', f'--workdir={folder}']
    record |= _command(run)
    lines = metrics.read(folder / metrics.FILE)
    steps = [line for line in lines if 'timing_s/step' in line]
    record['parallel'] = options.parallel
    record['steps'] = len(steps)
    record['rollouts'] = int(steps[-1]['training/rollouts'])
    record['step_secs'] = round(sum(s['timing_s/step'] for s in steps), 1)
    rewards = [s['critic/score/mean'] for s in steps]
    record['reward'] = [round(float(np.mean(part)), 4)
                        for part in np.array_split(rewards, 8)]
    evaluate.append(f'--config.evaluate.run={folder}')
  _command(evaluate)
  rows = json.loads((pathlib.Path(f'{folder}_evaluation') / 'table.json')
                    .read_text())
  record['rows'] = [{k: row[k] for k in (
      'set', 'engine', 'decoding', 'hops', 'n', 'em', 'searches')}
                    for row in rows if row['hops'] != 'all']
  return record


def _command(arguments) -> dict[str, float]:
  """Runs main; returns what its process alone cost."""
  began = time.monotonic()
  process = subprocess.Popen(
      [sys.executable, '-m', 'searchrl.main', *arguments], cwd=ROOT)
  _, status, usage = os.wait4(process.pid, 0)
  if status:
    raise RuntimeError(f'{" ".join(arguments)} ended with status {status}.')
  return {'wall_secs': round(time.monotonic() - began, 1),
          'cpu_secs': round(usage.ru_utime + usage.ru_stime, 1)}


def records() -> list[dict]:
  if not RECORDS.exists():
    return []
  return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def table(found: list[dict]) -> str:
  """Mean over seeds of exact match, and its spread: a table a case."""
  cells = collections.defaultdict(list)
  seeds = collections.defaultdict(set)
  for record in found:
    seeds[record['config']].add(record['seed'])
    for row in record['rows']:
      case = (row['set'], row['engine'], row['decoding'])
      cells[case, record['config'], row['hops']].append(
          (row['em'], row['searches']))
  cases = list(dict.fromkeys(case for case, _, _ in cells))
  hops = sorted({h for _, _, h in cells})
  lines = []
  for case in cases:
    lines += [f'{", ".join(case)}:', '',
              '| recipe | seeds | ' + ' | '.join(
                  f'{h} hop{"s" * (h > 1)}' for h in hops) + ' | searches |',
              '|---' * (3 + len(hops)) + '|']
    for config in sorted(seeds, key=lambda c: (c != 'base', c)):
      values = [np.array(cells[case, config, h]) for h in hops]
      searches = ' '.join(f'{v[:, 1].mean():.1f}' for v in values)
      lines.append(f'| {config} | {len(seeds[config])} | ' + ' | '.join(
          _cell(v[:, 0]) for v in values) + f' | {searches} |')
    lines.append('')
  return '\n'.join(lines)


def _cell(values: np.ndarray) -> str:
  spread = f' ± {values.std(ddof=1):.3f}' if len(values) > 1 else ''
  return f'{values.mean():.3f}{spread}'


def costs(found: list[dict]) -> str:
  """The cost of each run."""
  lines = ['| config | seed | steps | trajectories | seconds of training steps '
           '| CPU seconds in all | runs side by side | revision |',
           '|---' * 8 + '|']
  for r in sorted(found, key=lambda r: (r['config'], r['seed'])):
    if 'steps' in r:
      lines.append(f'| {r["config"]} | {r["seed"]} | {r["steps"]} '
                   f'| {r["rollouts"]} | {r["step_secs"]:.0f} '
                   f'| {r["cpu_secs"]:.0f} | {r["parallel"]} | {r["git"]} |')
  return '\n'.join(lines)


def _name(config: str) -> str:
  return pathlib.Path(config).stem


if __name__ == '__main__':
  main()
