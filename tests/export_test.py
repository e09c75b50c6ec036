# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""export: a checkpoint of a run as a folder that can be loaded."""

import pathlib

import jax
import numpy as np
import pytest

import experiment_policy_test
from configs import export as export_config
from searchrl.jobs import export
from searchrl.models import weights


def configured(run, **fields):
  config = export_config.get_config()
  config.export.update(run=str(run), **fields)
  return config


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return experiment_policy_test.run_of_adapters(
      tmp_path_factory.mktemp('run') / '')


@pytest.mark.parametrize('step, dtype, atol', [
    (0, 'float32', 1e-6), (3, 'bfloat16', 0.02)])
def test_a_step_is_a_model_folder(run, tmp_path, capsys, step, dtype, atol):
  folder, merged = run
  export.run(configured(folder, step=step, dtype=dtype), str(tmp_path))
  written = tmp_path / f'{folder.name}_step_3'
  assert capsys.readouterr().out == f'{written}\n'
  shape = weights.read_config(str(written))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol),
               weights.load(str(written), shape), merged)
  assert (written / 'tokenizer.json').is_file()
  card = (written / 'README.md').read_text()
  for row in ('begun from | the tiny base model', 'recipe | grpo, seed 0',
              'steps, trajectories | 3, 0', 'search engine | dense',
              'adapters | LoRA of rank 4, merged'):
    assert f'| {row} |' in card
  assert 'The run was not evaluated at this step.' in card
  assert 'trained on generated worlds' in card.partition('## Limits')[2]


@pytest.mark.parametrize('run, name', [
    ('runs/dspo', 'dspo'), ('runs/sweep/low/seed_0', 'low_seed_0'),
    ('runs/a/iteration_2/solver', 'a_iteration_2_solver')])
def test_runs_of_a_common_name_are_exported_apart(run, name):
  assert export._name(pathlib.Path(run)) == name


def test_a_warning_about_checkpoints_is_a_message(
    run, tmp_path, capsys, recwarn):
  folder, _ = run
  unfinished = folder / 'checkpoints' / '9'
  unfinished.mkdir()
  try:
    export.run(configured(folder), str(tmp_path))
  finally:
    unfinished.rmdir()
  text = f'Checkpoint {unfinished} was never committed; skipped.'
  assert f'Warning: {text}\n' in capsys.readouterr().err
  assert text not in [str(warning.message) for warning in recwarn]


def test_a_step_that_is_not_kept_names_those_that_are(run, tmp_path):
  with pytest.raises(ValueError, match='has kept, one of 3, but is at 20'):
    export.run(configured(run[0], step=20), str(tmp_path))
  with pytest.raises(ValueError, match='export.step must be that of '
                     'export.run, 0, but is 20. Give one of them'):
    export.run(configured(f'{run[0]}@0', step=20), str(tmp_path))
  with pytest.raises(FileNotFoundError, match='export.run must be the folder'):
    export.run(configured(''), str(tmp_path))
