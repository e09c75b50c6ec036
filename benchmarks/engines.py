# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""What a policy learns through each search engine, as a table and a picture.

  python benchmarks/engines.py --seeds 0 1 2

Trains GRPO with random passages, with BM25 and with the shipped encoder (every
passage compared), on a world of each seed, and evaluates it on worlds that it
has never seen, through the engine that it was trained with. The question is of
Jin et al. 2025, arXiv:2505.15117, section 4: does a better engine make a better
agent, and one that searches more? One record a run is appended to
benchmarks/engines.jsonl: a run with a record is not repeated, and one that was
interrupted goes on. `--table` only prints the table and draws
benchmarks/engines.png.
"""

import argparse
import json
import os
import pathlib
import platform

import learning  # beside this file
import matplotlib
import numpy as np
from searchrl.runtime import metrics
from searchrl.runtime import workdir

matplotlib.use('Agg')
from matplotlib import pyplot  # pylint: disable=g-import-not-at-top

RECORDS = learning.ROOT / 'benchmarks' / 'engines.jsonl'
ENGINES = {  # name -> engine and options
    'noise': ('noise', {}),
    'bm25': ('bm25', {}),
    'tiny_e5': ('dense', {'encoder': 'tiny_e5', 'backend': 'exact'}),
}
CURVES = {'critic/score/mean': 'exact match in training',
          'search/calls_per_traj': 'searches a question'}
_SMOOTH = 5  # steps


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--engines', nargs='+', default=list(ENGINES),
                      choices=list(ENGINES))
  parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2])
  parser.add_argument('--questions', type=int, default=200, help='a hop count')
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--size', default='laptop', help='of configs/grpo.py')
  parser.add_argument('--runs', default='runs/engines', help='a folder')
  parser.add_argument('--records', type=pathlib.Path, default=RECORDS)
  parser.add_argument('--table', action='store_true',
                      help='only print and draw')
  options = parser.parse_args()
  if not options.table:
    done = {_key(r) for r in records(options.records)}
    for seed in options.seeds:
      for engine in options.engines:
        wanted = dict(config=engine, seed=seed, questions=options.questions,
                      asked_steps=options.steps, size=options.size)
        if _key(wanted) not in done:
          record = wanted | one(engine, seed, options)
          with options.records.open('a') as file:
            file.write(json.dumps(record) + '\n')
  found = records(options.records)
  print(f'{learning.table(found)}\n{progress(found)}')
  draw(found, options.records.with_suffix('.png'))


def _key(record: dict) -> tuple:
  return tuple(record[name] for name in (
      'config', 'seed', 'questions', 'asked_steps', 'size'))


def one(engine: str, seed: int, options) -> dict:
  """Trains through an engine with a seed, and evaluates through the same."""
  folder = pathlib.Path(options.runs) / f'{engine}_seed{seed}'
  name, keywords = ENGINES[engine]
  search = [f'--config.search.engine={name}',
            f'--config.search.options={keywords}',
            '--config.evaluate.noise=False']
  used = learning._command([
      f'--config=configs/grpo.py:{options.size}', f'--config.seed={seed}',
      f'--config.data.world_seed={seed + 1}', '--allow_changes',
      f'--config.train.num_steps={options.steps}', f'--workdir={folder}',
      '--config.evaluate.initial=False', *search])
  learning._command([
      '--config=configs/evaluate.py', f'--config.evaluate.run={folder}',
      f'--config.evaluate.worlds.questions_per_hop={options.questions}',
      f'--workdir={folder}_evaluation', *search])
  steps = [line for line in metrics.read(learning.ROOT / folder / metrics.FILE)
           if 'timing_s/step' in line]
  rows = json.loads((learning.ROOT / f'{folder}_evaluation' / 'table.json')
                    .read_text())
  return {
      **workdir.environment(), 'cores': os.cpu_count(),
      'processor': platform.processor(), **used, 'steps': len(steps),
      'search': json.loads((learning.ROOT / folder / 'search.json')
                           .read_text()),
      'curves': {key: [round(s[key], 4) for s in steps] for key in CURVES},
      'rows': [{key: row[key] for key in (
          'set', 'decoding', 'hops', 'n', 'em', 'searches')} | {
              'engine': 'its own engine'}
               for row in rows if row['hops'] != 'all']}


def records(file: pathlib.Path) -> list[dict]:
  if not file.exists():
    return []
  return [json.loads(line) for line in file.read_text().splitlines()]


def progress(found: list[dict]) -> str:
  """The first and last steps of training, means over steps and seeds."""
  lines = ['| engine | seeds | exact match, first and last steps '
           '| searches a question, first and last steps | CPU seconds a run |',
           '|---' * 5 + '|']
  for engine in _engines(found):
    runs = [r for r in found if r['config'] == engine]
    cells = []
    for key in CURVES:
      curves = np.array([r['curves'][key] for r in runs])
      cells.append(f'{curves[:, :_SMOOTH].mean():.2f} -> '
                   f'{curves[:, -_SMOOTH:].mean():.2f}')
    cost = np.mean([r['cpu_secs'] for r in runs])
    lines.append(f'| {engine} | {len(runs)} | {" | ".join(cells)} '
                 f'| {cost:.0f} |')
  return '\n'.join(lines)


def draw(found: list[dict], file: pathlib.Path) -> None:
  """Draws curves over steps: the mean of the seeds, and least to most."""
  figure, axes = pyplot.subplots(1, len(CURVES), figsize=(9, 3.5))
  for axis, (key, title) in zip(axes, CURVES.items()):
    for engine in _engines(found):
      curves = np.array([smooth(r['curves'][key]) for r in found
                         if r['config'] == engine])
      steps = np.arange(1, curves.shape[1] + 1)
      line, = axis.plot(steps, curves.mean(0), label=engine)
      axis.fill_between(steps, curves.min(0), curves.max(0), alpha=.2,
                        color=line.get_color())
    axis.set(title=title, xlabel='step', ylim=(0, None))
  axes[0].legend()
  figure.tight_layout()
  figure.savefig(file, dpi=150)
  pyplot.close(figure)


def smooth(values: list[float]) -> np.ndarray:
  """The mean of the last few steps at each; of fewer at the start."""
  return np.array([np.mean(values[max(i - _SMOOTH + 1, 0):i + 1])
                   for i in range(len(values))])


def _engines(found: list[dict]) -> list[str]:
  return [engine for engine in ENGINES
          if any(r['config'] == engine for r in found)]


if __name__ == '__main__':
  main()
