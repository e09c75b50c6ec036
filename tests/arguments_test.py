# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""arguments: one grammar after a config's colon, and what is refused."""

import importlib

import pytest


def config_of(recipe, text):
  return importlib.import_module(f'configs.{recipe}').get_config(text)


@pytest.mark.parametrize('text, message', [
    ('qwen2.5-70b', "'qwen2.5-70b' is no value of these. The nearest: "
     'qwen2.5-7b,'),
    ('study/qwen2.5-70b', "'qwen2.5-70b' is no value of these"),
    ('model=qwen2.5-70b', "model cannot be 'qwen2.5-70b'. The nearest: "),
    ('studdy/qwen2.5-7b', 'The nearest: study,'),
    ('setting=studdy,model=qwen2.5-7b', 'The nearest: study,'),
    ('study', 'a setting needs a model. The nearest: study/qwen2.5-7b'),
    ('setting=study', 'a setting needs a model'),
    ('study/', "'' is no value"), ('/qwen2.5-7b', "'' is no value"),
    ('stress_9', 'The nearest: stress_'),
    ('study/stress_1', 'a setting needs a model'),
    ('smoke,model=qwen2.5-7b', 'size does not go with a model'),
    ('smoke,size=laptop', 'size is given twice'),
    ('modle=qwen2.5-7b', "there is no key 'modle'. The nearest: model,"),
    ('a/b/c', "'a' is no value"), ('Qwen2.5-7B', 'The nearest: qwen2.5-7b,'),
])
def test_wrong_arguments_name_the_legal_the_nearest_and_the_page(
    text, message):
  for recipe in ('common', 'dspo', 'evaluate', 'ask'):
    with pytest.raises(ValueError) as caught:
      config_of(recipe, text)
    error = str(caught.value)
    if recipe in ('ask', 'evaluate'):  # which also takes a run
      assert error.startswith('run must be the folder of a run, ')
      error = error.partition('Without a run: ')[2]
    assert error.startswith("The text after the config's colon must be pairs ")
    assert message in error and 'docs/settings.md' in error
    assert 'setting=' in error or 'model=' in error or 'size=' in error


def test_a_run_that_is_not_there_names_the_nearest_one(tmp_path):
  for name in ('mine', 'other', 'no_run'):
    (tmp_path / name).mkdir()
    if name != 'no_run':
      (tmp_path / name / 'config.json').write_text('{}')
  for recipe in ('ask', 'evaluate', 'predict'):
    with pytest.raises(ValueError) as caught:
      config_of(recipe, f'{tmp_path}/mien')
    assert str(caught.value) == (
        f"run must be the folder of a run, with its config.json, but "
        f"'{tmp_path}/mien' is none. The nearest: {tmp_path}/mine, "
        f'{tmp_path}/other.')


def test_without_any_run_it_is_said_to_train_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="'runs/dspo' is none. Train it first, or "
                     'go to the folder in which runs/ is.'):
    config_of('ask', 'runs/dspo')


@pytest.mark.parametrize('recipe, short, pairs', [
    ('grpo', 'smoke', 'size=smoke'), ('grpo', '', 'size=laptop'),
    ('dspo', 'qwen2.5-7b', 'model=qwen2.5-7b'),
    ('grpo', 'study/qwen2.5-7b', 'model=qwen2.5-7b,setting=study'),
    ('zerosearch', 'tuned', 'writer=tuned'),
    ('evaluate', 'methods', 'suite=methods'),
    ('evaluate', 'trained', 'size=laptop,suite=trained'),
    ('evaluate_simulator', 'oracle', 'writer=oracle'),
    ('drzero_rivals', 'r_zero/qwen2.5-3b', 'rival=r_zero,model=qwen2.5-3b'),
    ('drzero_rivals', 'longer/smoke', 'size=smoke,rival=longer'),
    ('finetune_simulator', 'qwen3-4b', 'model=qwen3-4b'),
    ('sft', 'smoke', 'size=smoke'),
])
def test_a_short_form_is_its_pairs(recipe, short, pairs):
  config = config_of(recipe, pairs)
  assert config.to_dict() == config_of(recipe, short).to_dict()


@pytest.mark.parametrize('recipe, text', [
    ('zerosearch', 'writer=tuned,model=qwen3-4b'),
    ('evaluate_simulator', 'oracle/qwen3-4b'),
    ('drzero', 'study/qwen3-4b'), ('sft', 'study/qwen3-4b'),
    ('finetune_simulator', 'stress_1')])
def test_a_key_that_a_config_does_not_take_is_refused(recipe, text):
  with pytest.raises(ValueError, match='The text after the config'):
    config_of(recipe, text)
