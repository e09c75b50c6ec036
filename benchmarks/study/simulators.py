# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Makes the simulators that benchmarks/study/learning.py trains against, and reports.

  python benchmarks/study/simulators.py

A policy, trained by configs/dspo.py, collects queries in sixty worlds; the tiny
base model is tuned on them, with the answer in its prompt and without. Each
writer is then compared with BM25 on the queries of a world that nothing else
has. All is in runs/simulators; what is there is not made again, and what was
interrupted goes on.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import experiments  # pylint: disable=g-import-not-at-top  # beside this file
from searchrl.runtime import workdir

FOLDER = ROOT / experiments.SIMULATORS
TEST_WORLD = 90  # trained on in no run, and no test of one
TEST = ('--config.collect.worlds=1', '--config.collect.validation_share=0',
        f'--config.data.world_seed={TEST_WORLD}',
        '--config.data.per_hop=(300,300,300)')


def main() -> None:
  _main('dspo', FOLDER / 'dspo', done='summary.txt')
  _collect(FOLDER / 'collected', told=True)
  unseeing = FOLDER / 'collected_unseeing'
  if not unseeing.exists():  # the same searches, in other prompts
    shutil.copytree(FOLDER / 'collected', unseeing,
                    ignore=shutil.ignore_patterns('train.jsonl'))
  _collect(unseeing, told=False)
  _collect(FOLDER / 'asked', told=True, test=TEST)
  for name, data in (('tuned', 'collected'),
                     ('unseeing', 'collected_unseeing')):
    _main('finetune_simulator', FOLDER / name, done='model/README.md',
          options=[f'--config.data.{part}={FOLDER / data / part}.jsonl'
                   for part in ('train', 'validation')])
  for name, options in {
      'oracle': [f'--config.search.corpus={FOLDER}/asked/world_0/data/train/'
                 'corpus.jsonl'],
      'prompted': [],
      'tuned': [f'--config.search.options.path={FOLDER}/tuned/model'],
      'unseeing': [
          f'--config.search.options.path={FOLDER}/unseeing/model',
          f'--config.search.options.prompts={experiments.simulator_prompts(False)}'
      ]}.items():
    size = ':oracle' * (name == 'oracle')
    _main(f'evaluate_simulator{size}', FOLDER / f'report_{name}',
          done='report.json', options=[
              f'--config.simulator.data={FOLDER}/asked/train.jsonl', *options])
    print(f'\n{name}\n\n{(FOLDER / f"report_{name}/report.txt").read_text()}')
  print(json.dumps(workdir.environment()))


def _collect(folder: pathlib.Path, *, told: bool,
             test: tuple[str, ...] = ()) -> None:
  options = [f'--config.collect.run={FOLDER / "dspo"}', *test]
  if not told:
    options += [f'--config.collect.prompts={experiments.simulator_prompts(told)}',
                '--allow_changes']
  _main('collect_simulation_data', folder, done='train.jsonl', options=options)


def _main(config: str, folder: pathlib.Path, *, done: str,
          options: list[str] = ()) -> None:
  """Runs main, unless it has left the file that it ends with."""
  if (folder / done).exists():
    return
  name, _, size = config.partition(':')
  subprocess.run(
      [sys.executable, '-m', 'searchrl.main',
       f'--config=configs/{name}.py{":" * bool(size)}{size}',
       f'--workdir={folder}', *options], cwd=ROOT, check=True,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'})


if __name__ == '__main__':
  main()
