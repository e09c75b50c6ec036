# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""moved: an old name ends in one sentence with the new one; old runs go on."""

import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from configs import ask as ask_config
from configs import dspo
from searchrl.experiment import policy
from searchrl.models import weights
from searchrl.runtime import moved
from searchrl.runtime import plugins
from searchrl.runtime import workdir

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'config_0acfcdd.json'
MAIN = (sys.executable, '-m', 'searchrl.main', '--config=configs/dspo.py:smoke')


@pytest.mark.parametrize('old, new', moved.MODULES.items())
def test_an_old_module_names_the_new_one_which_is_there(old, new):
  with pytest.raises(ModuleNotFoundError, match=f'^{old} is now {new}.$'):
    importlib.import_module(old)
  assert importlib.util.find_spec(new)


@pytest.mark.parametrize('statement', [
    'import searchrl.player', 'from searchrl import player',
    'from searchrl.player import Player'])
def test_every_form_of_import_ends_in_the_sentence(statement):
  with pytest.raises(ModuleNotFoundError) as error:
    exec(statement)
  assert str(error.value) == 'searchrl.player is now searchrl.rollouts.sampler.'


def test_what_never_was_is_missed_as_usual():
  with pytest.raises(ModuleNotFoundError, match="module named 'searchrl.no'"):
    importlib.import_module('searchrl.no')


@pytest.mark.parametrize('old, new', [
    *moved.JOBS.items(),
    ('searchrl.train:run', 'searchrl.jobs.train:run'),
    ('searchrl.plan:run', 'searchrl.jobs.plan:run')])
def test_an_old_job_names_the_new_one_which_is_there(old, new):
  sentence = f'^job names {old}, which is now {new}.$'
  with pytest.raises(ValueError, match=sentence):
    plugins.resolve(old, field='job', ours='')
  assert callable(plugins.resolve(new, field='job', ours=''))


def test_importing_the_package_imports_no_jax():
  code = 'import sys, searchrl; assert not {"jax", "numpy"} & set(sys.modules)'
  subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize('flag, sentence', [
    ('--config.rollout.ahead=1',
     '--config.rollout.ahead is now --config.rollout.decodes_in_flight.\n'),
    ('--config.job=searchrl.train:run',
     'ValueError: job names searchrl.train:run, which is now '
     'searchrl.jobs.train:run.\n(SEARCHRL_TRACEBACK=1 shows where.)\n')])
def test_a_command_line_with_an_old_name_ends_in_the_new_one(
    tmp_path, flag, sentence):
  done = subprocess.run([*MAIN, flag, f'--workdir={tmp_path / "run"}'],
                        capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (1, '', sentence)


def test_flags_are_compared_whole():
  moved.refuse_flags(['--config.rollout.ahead_of=1', 'rollout.ahead'])
  with pytest.raises(ValueError, match='rollout.ahead is now'):
    moved.refuse_flags(['-config.rollout.ahead', '1'])


def test_an_old_option_in_a_config_of_your_own_is_refused():
  options = dspo.get_config('smoke')
  moved.refuse_options(options.to_dict())
  options.rollout.ahead = 1
  with pytest.raises(ValueError, match='now --config.rollout.decodes_in'):
    moved.refuse_options(options.to_dict())


def as_of_old():
  """Today's config with the worlds that there were before common knowledge."""
  config = dspo.get_config('smoke')
  config.model.path = 'tiny_base_1'
  config.world.common = False
  config.data.update(common=0.0, per_hop=(500, 500, 400, 300), mix=(4, 4, 2, 2))
  config.evaluate.worlds.update(
      kinds=('known', 'unseen'), common_per_hop=0, few_per_hop=0)
  return config


def test_an_old_config_is_read_under_the_new_names():
  recorded = json.loads(GOLDEN.read_text())
  before = json.dumps(recorded)
  config = moved.config(recorded)
  assert json.dumps(recorded) == before  # read, not changed
  assert recorded['job'] == 'searchrl.train:run'
  assert 'ahead' in recorded['rollout']
  assert config == moved.config(config) != recorded
  today = json.loads(as_of_old().to_json())
  assert moved.completed(config, today) == today


def test_options_that_a_config_cannot_have_are_not_added_to_it():
  assert moved.completed({'data': {}}, {'data': {'limit': 3}}) == {
      'data': {'limit': 0}}
  assert moved.completed({'job': 'x'}, {'job': 'x'}) == {'job': 'x'}


def test_an_old_runs_folder_is_asked_and_judged_with_its_own_options(tmp_path):
  recorded = json.loads(GOLDEN.read_text())
  recorded['rollout']['ahead'] = 1
  recorded['search'].update(engine='noise', options={'seed': 3})
  (tmp_path / 'config.json').write_text(json.dumps(recorded))
  config = ask_config.get_config(str(tmp_path))
  assert config.rollout.decodes_in_flight == 1 and 'ahead' not in config.rollout
  assert policy.search_of_run(str(tmp_path)) == ('noise', {'seed': 3})
  recorded['evaluate']['search'] = dict(engine='web', options={'mode': 'live'})
  (tmp_path / 'config.json').write_text(json.dumps(recorded))
  assert policy.search_of_run(str(tmp_path)) == ('web', {'mode': 'live'})
  search = ask_config.get_config(str(tmp_path)).search
  assert (search.engine, search.options.mode) == ('web', 'live')


def test_an_old_run_goes_on_and_is_then_recorded_under_the_new_names(tmp_path):
  recorded = json.loads(GOLDEN.read_text())
  recorded['rollout']['ahead'] = 1
  (tmp_path / 'config.json').write_text(json.dumps(recorded))
  config = as_of_old()
  with pytest.raises(ValueError, match='another config: '
                     'rollout.decodes_in_flight: 1 -> 0. Use'):
    workdir.prepare(tmp_path, config.to_dict())
  config.rollout.decodes_in_flight = 1
  workdir.prepare(tmp_path, config.to_dict())
  written = json.loads((tmp_path / 'config.json').read_text())
  assert written == json.loads(config.to_json())


def test_an_old_run_is_judged_with_the_tiny_base_that_it_began_with(tmp_path):
  (tmp_path / 'config.json').write_text(GOLDEN.read_text())
  path = policy.model_of_run(str(tmp_path))
  assert path == 'tiny_base_1'
  shape = weights.read_config(weights.locate(path))
  assert shape.vocab_size == 1792
  assert weights.read_config(weights.locate('tiny_base')).vocab_size != 1792
  (tmp_path / 'config.json').write_text(
      dspo.get_config('smoke').to_json())
  assert policy.model_of_run(str(tmp_path)) == ''


def test_an_old_run_in_a_world_of_today_is_refused(tmp_path):
  (tmp_path / 'config.json').write_text(GOLDEN.read_text())
  with pytest.raises(ValueError, match='data.common: 0.0 -> 0.4; .*'
                     'world.common: False -> True. Use another --workdir'):
    workdir.prepare(tmp_path, dspo.get_config('smoke').to_dict())
