# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ZeroSearch from end to end: collect, tune, train on it, die, go on."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from searchrl.runtime import checkpoint
from searchrl.runtime import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMED = ('timing_s/', 'perf/throughput', 'perf/cpu_seconds',
         'search/latency_ms/', 'simulated/secs')


def start(*arguments):
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  return subprocess.Popen(
      [sys.executable, '-m', 'searchrl.main', *map(str, arguments)], cwd=ROOT,
      env=environment, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE)


def finish(*arguments):
  process = start(*arguments)
  output, error = process.communicate(timeout=900)
  assert process.returncode == 0, error
  return output


@pytest.fixture(scope='module')
def simulator(tmp_path_factory):
  """A model folder that has barely learned the form of a list of documents."""
  folder = tmp_path_factory.mktemp('simulator')
  finish('--config=configs/collect_simulation_data.py:smoke',
         f'--workdir={folder / "collected"}',
         '--config.data.per_hop=(30, 30)', '--config.collect.worlds=1')
  finish('--config=configs/finetune_simulator.py:smoke',
         f'--workdir={folder / "tuned"}',
         f'--config.data.train={folder / "collected/train.jsonl"}',
         f'--config.data.validation={folder / "collected/validation.jsonl"}',
         '--config.train.epochs=0', '--config.train.steps=60',
         '--config.batch.documents=16', '--config.train.validate_every=0',
         '--config.train.save_every=60',
         '--config.optimizer.learning_rate=2e-3')
  return folder / 'tuned' / 'model'


def lines(folder):
  return [{name: x for name, x in line.items() if not name.startswith(TIMED)}
          for line in metrics.read(folder / metrics.FILE)]


def seals(folder):
  """A SHA-256 of every leaf of the newest checkpoint."""
  path = folder / 'checkpoints'
  newest = path / str(checkpoint.steps(path)[-1])
  return json.loads((newest / 'integrity.json').read_text())['leaves']


@pytest.mark.slow
def test_a_run_killed_with_its_simulator_in_the_process_goes_on_bit_for_bit(
    simulator, tmp_path):
  arguments = [
      '--config=configs/zerosearch.py:smoke', '--config.train.num_steps=3',
      '--config.evaluate.worlds.questions_per_hop=1',
      "--config.evaluate.worlds.kinds=('known',)",
      '--config.search.options=' + repr(dict(
          writer='model', path=str(simulator), titled=True, max_tokens=110,
          max_prompt_tokens=96, slots=16, prompts=dict(
              useful='Useful documents: {query}\nQuestion: {problem}\n'
                     'Answer: {ground_truth}\n',
              noisy='Noisy documents: {query}\nQuestion: {problem}\n'
                    'Answer: {ground_truth}\n'),
          curriculum=dict(start=0.2, end=0.8, steps=4)))]
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  finish(*arguments, f'--workdir={whole}')
  process = start(*arguments, f'--workdir={broken}')
  file = broken / metrics.FILE
  while process.poll() is None and not (
      file.exists() and '"training/global_step": 1,' in file.read_text()):
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL
  finish(*arguments, f'--workdir={broken}')
  assert lines(broken) == lines(whole) and seals(broken) == seals(whole)
  steps = [line for line in lines(whole) if 'simulated/noise' in line]
  assert [round(line['simulated/noise'], 3) for line in steps] == [
      0.2, 0.283, 0.4]
  # Its documents were read: what is equal above depends on them.
  assert max(line['search/obs_tokens'] for line in steps) > 5
  assert min(line['simulated/malformed_rate'] for line in steps) < 0.9
  assert all(line['simulated/tokens'] > 0 for line in steps)
