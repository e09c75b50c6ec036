# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""sweep: a run for each seed and setting, one table, by hand."""

import importlib
import json

import pytest

from configs import grpo
from searchrl.jobs import sweep

DONE = []


def job(config, workdir):
  """A run whose exact match is its seed over ten."""
  import pathlib
  DONE.append((config.seed, config.rollout.questions_per_step))
  table = pathlib.Path(workdir) / 'evaluation/after/table.json'
  table.parent.mkdir(parents=True, exist_ok=True)
  table.write_text(json.dumps([
      {'set': 'known', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 1,
       'em': config.seed / 10, 'f1': config.rollout.questions_per_step / 8,
       'searches': 1.0},
      {'method': 'lost', 'note': 'runs/lost is not there'}]))


def nothing(config, workdir):
  """A run that leaves no table."""
  del config, workdir


def config(name='job'):
  result = grpo.get_config('smoke')
  result.job = f'sweep_test:{name}'
  result.lock()
  return result


def test_each_seed_has_a_folder_and_the_table_their_spread(tmp_path, capsys):
  DONE.clear()
  sweep.run(config(), str(tmp_path), [1, 2, 6])
  assert [seed for seed, _ in DONE] == [1, 2, 6]
  row, = json.loads((tmp_path / sweep.FILE).read_text())
  assert row['seeds'] == 3 and row['em'] == pytest.approx(0.3)
  assert row['em ±'] == pytest.approx(((.04 + .01 + .09) / 2) ** 0.5)
  assert row['f1 ±'] == 0.0
  assert 'Means over 3 seeds' in capsys.readouterr().out
  sweep.run(config(), str(tmp_path), [4])
  row, = json.loads((tmp_path / sweep.FILE).read_text())
  assert row['em'] == .4 and 'em ±' not in row


@pytest.mark.parametrize('given', [[1, 1], [-1, 2]])
def test_seeds_that_are_none_are_refused(given, tmp_path):
  with pytest.raises(ValueError, match='--seeds must be different numbers'):
    sweep.run(config(), str(tmp_path), given)


def test_runs_without_an_evaluation_are_made_and_no_table(tmp_path, capsys):
  sweep.run(config('nothing'), str(tmp_path), [0, 1])
  text = capsys.readouterr().err
  assert 'seed_1' in text and 'No table: runs of sweep_test:nothing' in text
  assert not (tmp_path / sweep.FILE).exists()


def swept(**runs):
  result = config()
  with result.unlocked():
    result.sweep = dict(job=result.job, order=tuple(runs), across='hops',
                        runs=runs)
    result.job = 'searchrl.jobs.sweep:run'
  return result


def test_each_setting_has_a_run_of_each_seed_and_a_row(tmp_path, capsys):
  DONE.clear()
  sweep.run(swept(two=dict(rollout=dict(questions_per_step=2)),
                  eight=dict(rollout=dict(questions_per_step=8),
                             search=dict(engine='noise', options={'a': 1}))),
            str(tmp_path), [1, 3])
  assert DONE == [(1, 2), (3, 2), (1, 8), (3, 8)]
  assert (tmp_path / 'eight/seed_3/evaluation/after/table.json').exists()
  rows = json.loads((tmp_path / sweep.FILE).read_text())
  assert [(row['run'], row['f1'], row['seeds']) for row in rows] == [
      ('two', 0.25, 2), ('eight', 1.0, 2)]
  assert all(row['em'] == pytest.approx(.2) for row in rows)
  text = capsys.readouterr().out
  assert 'runs by hops' in text and text.count('0.200') == 4


@pytest.mark.parametrize('runs, words', [
    (dict(a=dict(rollouts=dict(questions=2))),
     "sweep.runs.a must name fields of the config, but 'rollouts' is none"),
    (dict(a=dict(rollout=dict(question=2))),
     "sweep.runs.a.rollout must name fields of the config, but 'question'")])
def test_a_setting_of_no_field_is_refused_before_the_first_run(
    runs, words, tmp_path):
  DONE.clear()
  with pytest.raises(ValueError, match=words):
    sweep.run(swept(fine={}, **runs), str(tmp_path))
  assert not DONE


@pytest.mark.parametrize('name', ['engines', 'data_scaling', 'backbones'])
@pytest.mark.parametrize('size', ['laptop', 'qwen2.5-7b', 'study/qwen2.5-3b'])
@pytest.mark.parametrize('recipe', ['', 'grpo', 'ppo'])
def test_the_runs_of_our_sweeps_are_configs(name, size, recipe, tmp_path):
  made = importlib.import_module(f'configs.{name}').get_config(
      f'{recipe}/{size}' if recipe else size).lock()
  assert made.algorithm.name.endswith(recipe)
  assert all(run.startswith(recipe) for run in made.sweep.order)
  assert len([*made.sweep.order]) >= 3
  runs = [*sweep._runs(made, tmp_path, ())]
  assert len({str(own) for _, own, _ in runs}) == len(runs)
  for _, own, _ in runs:
    assert own.job == 'searchrl.jobs.train:run' and 'sweep' not in own
