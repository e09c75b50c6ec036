# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Commands announce all that may last: each compilation, loading, evaluation.

No time is measured. A command announces every phase at once here, and jax
reports each program that it compiles with the phases that were open.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = '''
import json, sys
import jax
from searchrl.runtime import progress

def report(event, secs, fun_name='', **_):
  if event.endswith('backend_compile_duration'):
    open_phases = [phase.what for phase in progress.DISPLAY._phases
                   if not phase.is_run]
    print('COMPILED', json.dumps([fun_name, secs, open_phases]), flush=True)

phases = progress.DISPLAY.begin
def begin(what, **facts):
  print('PHASE', json.dumps(what), flush=True)
  return phases(what, **facts)

jax.monitoring.register_event_duration_secs_listener(report)
progress.DISPLAY.begin = begin
from searchrl import main
main.run(sys.argv[1:])
'''
LARGE = ('decode', 'append', 'update', 'score_all', '_update')  # programs


def command(cache, *arguments) -> tuple[list[str], list[list], str]:
  """Phases, compiled programs with their open phases, and stderr."""
  done = subprocess.run(
      [sys.executable, '-c', PROGRAM, *arguments], cwd=ROOT, check=True,
      text=True, capture_output=True, env=os.environ | {
          'JAX_COMPILATION_CACHE_DIR': str(cache), 'XLA_FLAGS': '',
          'SEARCHRL_ANNOUNCE_SECS': '1e9'})
  lines = done.stdout.splitlines()
  return ([json.loads(line[6:]) for line in lines if line.startswith('PHASE ')],
          [json.loads(line[9:]) for line in lines
           if line.startswith('COMPILED ')], done.stderr)


def check_compiled(programs, names) -> None:
  """Checks that the named programs were compiled, and in a phase."""
  large = {name: phases for name, _, phases in programs
           if any(part in name for part in names)}
  assert len(large) >= len(names)
  for name, phases in large.items():
    assert phases, f'{name} is compiled without a word'


@pytest.mark.slow
@pytest.mark.long
def test_a_training_run_announces_what_it_compiles_loads_and_evaluates(
    tmp_path):
  phases, programs, _ = command(
      tmp_path / 'cache', '--config=configs/dspo.py:smoke',
      f'--workdir={tmp_path / "run"}')
  assert {'Importing searchrl.jobs.train', 'Reading the tokenizer',
          'Starting the devices',
          'Reading questions and passages', 'Looking for a checkpoint',
          'Preparing and saving the first state', 'Evaluating before training',
          'Evaluating after training', 'Copying the weights to the sampler',
          'Compiling the programs that sample',
          'First step, which compiles: sampling',
          'First step, which compiles: updating', 'sampling', 'updating',
          'Writing the model', 'Drawing the curves', 'step'} <= {*phases}
  assert any(what.startswith('Loading the weights of') for what in phases)
  assert any(what.startswith('Building the search engine') for what in phases)
  check_compiled(programs, ('decode', 'append', 'update'))
  phases, programs, _ = command(
      tmp_path / 'cache', '--config=configs/evaluate.py',
      f'--config.evaluate.run={tmp_path / "run"}',
      f'--workdir={tmp_path / "scores"}')
  assert {'Evaluating', 'Compiling the programs that sample'} <= {*phases}
  assert any(what.startswith('Loading the policy of') for what in phases)
  check_compiled(programs, ('decode', 'append'))


@pytest.mark.slow
def test_tuning_announces_its_data_its_first_update_and_its_losses(tmp_path):
  phases, programs, _ = command(
      tmp_path / 'cache', '--config=configs/sft.py:smoke',
      f'--workdir={tmp_path / "run"}')
  assert {'Reading the tokenizer', 'Computing the validation loss',
          'Writing demonstrations for train', 'First update, which compiles',
          'updating', 'Writing the model', 'update'} <= {*phases}
  check_compiled(programs, ('update', 'score_all'))
