# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Step time if some devices sample while the others train.

  python benchmarks/overlap.py

Simulated devices of one thread each run the laptop's GRPO in three arms:

- shared: all devices sample, then all train (train.max_staleness=0);
- in turns: half of them sample and the others train, but never both at once;
- at once: the same, one step ahead (train.max_staleness=1).

"In turns" and "at once" compute the same bits. In the arms before "at once",
the CPU seconds of the process are those of the part that runs. Seconds mean
something only if the cores have no other work and there are as many as devices.
The learning rate is 1e-12, so that conversations keep their lengths, and the
number of slots is such that both parts cost about the same. The first steps
compile and are left out. Figures are means over steps, and medians over rounds.
"""

import argparse
import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ARMS = ('shared', 'in turns', 'at once')
_FIRST = 3  # steps that are left out


def child(arm: str, folder: str, options) -> None:
  """Trains; prints the clocks before and after each part of each step."""
  # pylint: disable=g-import-not-at-top
  from configs import grpo
  from searchrl.experiment import loop
  from searchrl.jobs import train
  from searchrl.rollouts import asynchronous
  from searchrl.rollouts import collect
  from searchrl.rollouts import weight_sync
  config, apart = grpo.get_config(), arm != 'shared'
  config.train.update(
      num_steps=options.steps, checkpoint_every=options.steps, progress=False,
      loggers=(), max_staleness=int(apart),
      rollout_devices=options.devices // 2 * apart)
  config.evaluate.update(initial=False, every=0)
  config.evaluate.worlds.kinds = ()
  config.optimizer.learning_rate = 1e-12
  config.rollout.max_num_seqs = options.slots
  config.search.engine = 'bm25'
  config.search.options = {}
  clocks = {}

  def measure(module, name):
    function = getattr(module, name)
    clocks[name] = []

    @functools.wraps(function)
    def timed(*args, **kwargs):
      before = time.perf_counter(), time.process_time()
      result = function(*args, **kwargs)
      clocks[name].append((before, (time.perf_counter(), time.process_time())))
      return result

    setattr(module, name, timed)

  measure(loop, 'step')
  measure(collect, 'collect')
  measure(weight_sync.WeightSync, '__call__')
  if arm == 'in turns':
    take = asynchronous.AsyncRollouts.take

    def take_and_wait(self, params, progress):
      collected = take(self, params, progress)
      self.settled(progress)
      return collected

    asynchronous.AsyncRollouts.take = take_and_wait
  train.run(config, folder)
  print(json.dumps(clocks))


def run(arm: str, options) -> dict[str, float]:
  """Runs an arm; returns the means of its seconds per step."""
  folder = options.work / arm.replace(' ', '_')
  shutil.rmtree(folder, ignore_errors=True)
  done = subprocess.run(
      [sys.executable, __file__, '--child', arm, str(folder),
       '--steps', str(options.steps), '--slots', str(options.slots),
       '--devices', str(options.devices)],
      check=True, text=True, stdout=subprocess.PIPE, cwd=ROOT,
      env=os.environ | {
          'JAX_PLATFORMS': 'cpu',
          'JAX_COMPILATION_CACHE_DIR': str(options.work / 'cache'),
          'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false '
          f'--xla_force_host_platform_device_count={options.devices}'})
  clocks = json.loads(done.stdout.splitlines()[-1])
  ends = [end for _, end in clocks['step']]
  secs, cpu = ([after[i] - before[i] for before, after in zip(ends, ends[1:])]
               for i in (0, 1))
  # From the second step on. Apart, a step samples the next one's data.
  first = 1 if arm == 'shared' else 2
  sampled, synced = (
      [end[1] - start[1] for start, end in clocks[name][first:]]
      for name, first in (('collect', first), ('__call__', 1)))
  kept = slice(_FIRST - 1, options.steps - 2)  # the last one samples nothing
  mean = lambda values: statistics.mean(list(values)[kept])
  return {
      'secs': mean(secs), 'cpu': mean(cpu), 'sampling': mean(sampled),
      # Sampling waits for the weights, and the rest of a step does not.
      'longer': mean(max(part, whole - part - sync) + sync for whole, part, sync
                     in zip(cpu, sampled, synced))}


def table(results: dict[str, list[dict[str, float]]], rounds: int) -> str:
  """Returns the table of all arms."""
  mean = lambda arm, name: statistics.median(
      result[name] for result in results[arm])
  ratio = lambda arm, name, of, other: statistics.median(
      result[name] / base[other]
      for result, base in zip(results[arm], results[of]))
  text = [f'Medians of {rounds} rounds.', '',
          '| arm | seconds per step | CPU seconds per step | of sampling | '
          'of all else | seconds / shared | seconds / in turns |',
          '|---|---|---|---|---|---|---|']
  for arm in ARMS:
    parts = ' | | ' if arm == 'at once' else (
        f' | {mean(arm, "sampling"):.2f} | '
        f'{mean(arm, "cpu") - mean(arm, "sampling"):.2f} | ')
    text.append(
        f'| {arm} | {mean(arm, "secs"):.2f} | {mean(arm, "cpu"):.2f}{parts}'
        f'{ratio(arm, "secs", "shared", "secs"):.2f} | '
        f'{ratio(arm, "secs", "in turns", "secs"):.2f} |')
  in_turns, shared = (ratio('in turns', 'longer', of, 'cpu')
                      for of in ('in turns', 'shared'))
  text += ['', 'By CPU seconds, the longer part of each step is '
           f'{in_turns:.2f} of both parts in turns, and {2 * shared:.2f} of '
           'the shared step, whose CPU seconds twice as many devices divide.']
  return '\n'.join(text)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=2)
  parser.add_argument('--steps', type=int, default=10)
  parser.add_argument('--devices', type=int, default=2)
  parser.add_argument('--slots', type=int, default=12)
  parser.add_argument('--work', type=pathlib.Path,
                      default=pathlib.Path('runs/overlap'))
  parser.add_argument('--child', nargs=2)
  options = parser.parse_args()
  if options.child:
    sys.path.insert(0, str(ROOT))
    child(*options.child, options)
    return
  options.work = options.work.resolve()
  results: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
  for _ in range(options.rounds):
    for arm in ARMS:
      results[arm].append(run(arm, options))
      print(arm, results[arm][-1], flush=True)
  print(table(results, options.rounds))


if __name__ == '__main__':
  main()
