# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""past: what an evaluation takes from its run, and what it refuses."""

import pathlib
import shutil

from configs import ask as ask_config
from configs import evaluate as evaluate_config
from configs import export as export_config
from configs import grpo
from configs import predict as predict_config
from configs import sft
import pytest

from searchrl.experiment import run_defaults
from searchrl.jobs import export

CHECKPOINT = pathlib.Path(__file__).parent / 'golden' / 'checkpoint'
SEARCH_R1 = 'searchrl.agent.dialogue:search_r1'


@pytest.fixture
def run(tmp_path):
  """Records a run with changed fields, and returns its folder."""
  def record(**changes):
    config = grpo.get_config('smoke')
    config.update_from_flattened_dict(
        {name.replace('__', '.'): value for name, value in changes.items()})
    shutil.copytree(CHECKPOINT, tmp_path / 'run' / 'checkpoints')
    (tmp_path / 'run' / 'config.json').write_text(config.to_json())
    return str(tmp_path / 'run')
  return record


@pytest.mark.parametrize('module', [evaluate_config, predict_config])
def test_the_runs_model_dialogue_and_engine_are_taken(run, module):
  config = module.get_config()
  folder = run(dialogue=SEARCH_R1, model__path='tiny_raw',
               search__options={'encoder': 'tiny_e5'})
  config = run_defaults.complete(config, folder, 'evaluate.run')
  assert (config.dialogue, config.model.path) == (SEARCH_R1, 'tiny_raw')
  assert config.search.engine == 'dense'
  assert config.search.options.to_dict() == {'encoder': 'tiny_e5'}


@pytest.mark.parametrize('given', [{}, {'k1': 2.0}])
def test_options_that_are_set_are_those_of_the_runs_engine(run, given):
  config = evaluate_config.get_config()
  config.search.options = given
  folder = run(search__engine='bm25', search__options={'b': 0.0})
  for taken, options in (
      (run_defaults.complete(config, folder, 'evaluate.run'), {'b': 0.0}),
      (run_defaults.complete(config, '', 'evaluate.run'), {})):
    assert taken.search.engine == 'bm25'
    assert taken.search.options.to_dict() == (given or options)


@pytest.mark.parametrize(('module', 'field'), [
    (evaluate_config, 'evaluate.run'), (predict_config, 'evaluate.run'),
    (ask_config, 'ask.run')])
def test_products_are_rounded_as_in_the_run(run, module, field):
  config, folder = module.get_config(), run(model__matmul_dtype='bfloat16')
  assert config.model.matmul_dtype == ''
  taken = run_defaults.complete(config, folder, field)
  assert taken.model.matmul_dtype == 'bfloat16'


def test_without_a_run_they_are_those_of_the_tiny_base():
  config = run_defaults.complete(
      evaluate_config.get_config(), '', 'evaluate.run')
  assert config.dialogue == 'searchrl.agent.dialogue:laptop'
  assert (config.search.engine, config.model.path) == ('bm25', '')


def test_another_dialogue_than_the_runs_is_refused(run):
  config = evaluate_config.get_config()
  folder = run(dialogue='searchrl.agent.dialogue:laptop')
  config.dialogue = SEARCH_R1
  with pytest.raises(ValueError, match=f'^dialogue must be what {folder} was '
                     "trained with, 'searchrl.agent.dialogue:laptop', but is"):
    run_defaults.complete(config, folder, 'evaluate.run')


def test_budgets_are_the_runs_and_a_flag_wins_with_a_warning(run, capsys):
  config, folder = evaluate_config.get_config(), run(
      rollout__budgets__top_k=1, rollout__budgets__max_turns=9)
  taken = run_defaults.complete(config, folder, 'evaluate.run').rollout.budgets
  assert (taken.top_k, taken.max_turns) == (1, 9)
  assert not capsys.readouterr().err
  config.rollout.budgets.top_k = 2  # the default, but set
  taken = run_defaults.complete(config, folder, 'evaluate.run').rollout.budgets
  assert (taken.top_k, taken.max_turns) == (2, 9)
  assert capsys.readouterr().err == (
      f'Warning: not everything is as {folder} was trained: '
      'rollout.budgets.top_k=2 (there 1).\n')


OWN = dict(data__train='a.jsonl', data__per_hop=(), search__corpus='c.jsonl')


def test_a_run_on_own_data_is_judged_on_its_own_evaluation_data(run):
  config = evaluate_config.get_config()
  folder = run(**OWN, data__evaluate='nq=b.jsonl', data__question_mark=True)
  config = run_defaults.complete(config, folder, 'evaluate.run')
  run_defaults.judge_on_own_data(config, folder)
  assert config.data.evaluate == 'nq=b.jsonl' and config.data.question_mark
  assert config.search.corpus == 'c.jsonl'


def test_what_the_config_names_counts(run):
  config = evaluate_config.get_config()
  config.data.evaluate, config.search.corpus = 'mine.jsonl', 'd.jsonl'
  run_defaults.judge_on_own_data(config, run(**OWN, data__evaluate='b.jsonl'))
  assert (config.data.evaluate, config.search.corpus) == (
      'mine.jsonl', 'd.jsonl')


def test_worlds_are_generated_where_the_run_had_them_generated(run):
  config = evaluate_config.get_config()
  run_defaults.judge_on_own_data(config, run(**OWN, data__evaluate='worlds'))
  assert (config.data.evaluate, config.search.corpus) == ('worlds', '')


def test_a_run_on_own_data_without_any_to_judge_it_is_refused(run):
  with pytest.raises(ValueError, match='^data.evaluate must name test question'
                     's, but .* was trained on a.jsonl, and generated worlds'):
    run_defaults.judge_on_own_data(evaluate_config.get_config(), run(**OWN))


def test_a_run_is_not_judged_in_its_own_world(run):
  config, folder = evaluate_config.get_config(), run(data__world_seed=101)
  with pytest.raises(ValueError, match='^evaluate.worlds.world_seed must not '):
    run_defaults.judge_on_own_data(config, folder)
  config.evaluate.worlds.world_seed = 102
  run_defaults.judge_on_own_data(config, folder)
  assert config.data.evaluate == ''


@pytest.mark.parametrize('job', [
    lambda run: run_defaults.complete(
        predict_config.get_config(), run, 'evaluate.run'),
    lambda run: export.run(_exported(run), f'{run}/out')])
def test_a_run_of_tuning_names_its_model(job, tmp_path):
  shutil.copytree(CHECKPOINT, tmp_path / 'checkpoints')
  (tmp_path / 'config.json').write_text(sft.get_config('smoke').to_json())
  with pytest.raises(ValueError, match='must be a run that trained with roll.*'
                     f'searchrl.jobs.finetune:run.*{tmp_path}/model'):
    job(str(tmp_path))
  assert not (tmp_path / 'out').exists()


def _exported(run):
  config = export_config.get_config()
  config.export.run = run
  return config
