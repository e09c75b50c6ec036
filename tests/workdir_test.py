# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""workdir: the same command goes on in its folder, another one is refused."""

import json
import os
import shutil

import pytest

from searchrl.runtime import folder_lock
from searchrl.runtime import workdir
import loopback


def read(folder):
  return json.loads((folder / 'config.json').read_text())


def test_a_run_folder_keeps_its_config_and_refuses_another(tmp_path):
  config = dict(a=dict(b=1, c=(1, 2)), steps=2, allow_changes=True)
  workdir.prepare(tmp_path, config, free=('steps',))
  assert read(tmp_path) == workdir.read_config(tmp_path) == config | {
      'a': dict(b=1, c=[1, 2])}
  # The flag is no part of the run; and a tuple is read back as a list.
  config |= dict(steps=3, allow_changes=False)
  workdir.prepare(tmp_path, config, free=('steps',))
  assert read(tmp_path)['steps'] == 3
  config['a']['b'] = 2
  with pytest.raises(ValueError, match='another config: a.b: 1 -> 2. Use'):
    workdir.prepare(tmp_path, config)
  assert read(tmp_path)['a']['b'] == 1
  workdir.prepare(tmp_path, config, allow_changes=True)
  assert read(tmp_path)['a']['b'] == 2


PREPARES = r'''
import pathlib, sys
import ml_collections
from searchrl.runtime import processes, shared_folder, workdir

processes.initialize()
shared_folder._WAIT_SECS = 0
shared, own = pathlib.Path(sys.argv[1]), sys.argv[2]
config = ml_collections.ConfigDict(dict(a=1, allow_changes=False))
prepare = lambda folder: workdir.Workdir(folder, config).prepare()
out('shared', message(prepare, shared))
processes.barrier('prepared')  # the first has removed its mark
out('files', sorted(file.name for file in shared.iterdir()))
out('own', message(prepare, pathlib.Path(f'{own}_{processes.index()}')))
'''


def test_a_folder_that_some_processes_do_not_see_is_refused(tmp_path):
  outputs = loopback.outputs(2, PREPARES, tmp_path / 'run', tmp_path / 'own')
  assert outputs['shared'] == ['no error, but None'] * 2
  assert outputs['files'] == [['.lock', 'config.json', 'environment.json']] * 2
  for number, text in enumerate(outputs['own']):
    assert text == (
        'ValueError: --workdir must be a folder that all processes share, but '
        f'they do not all see {tmp_path}/own_{number}. Set it to one on a '
        'shared file system.')


def test_another_spelling_of_a_path_is_no_change(tmp_path):
  workdir.prepare(tmp_path, dict(path='runs/a', engine='bm25'))
  for path in ('runs//a', 'runs/a/', './runs/a', os.path.abspath('runs/a')):
    workdir.prepare(tmp_path, dict(path=path, engine='bm25'))
  with pytest.raises(ValueError, match="path: '.*runs/a' -> 'runs/b'"):
    workdir.prepare(tmp_path, dict(path='runs/b', engine='bm25'))


def test_files_beside_a_run_may_move_with_it(tmp_path):
  def prepare(top, path='tune/model'):
    with folder_lock.release_at_end():
      workdir.prepare(top / 'grpo', dict(path=str(top / path)))

  old, new = tmp_path / 'old', tmp_path / 'new'
  (old / 'tune' / 'model').mkdir(parents=True)
  prepare(old)
  old.rename(new)
  prepare(new)
  (new / 'other').mkdir()
  with pytest.raises(ValueError, match='new/tune/model. -> .*new/other'):
    prepare(new, 'other')


@pytest.mark.parametrize('change', [
    lambda model: (model / 'weights').write_bytes(b'xy'),
    lambda model: (model / 'weights').unlink(),
    lambda model: (model / 'other').touch(),
    lambda model: (shutil.rmtree(model), model.touch())])
def test_files_beside_a_run_may_be_copied_with_it(tmp_path, change):
  def prepare(top, path):
    with folder_lock.release_at_end():
      workdir.prepare(top / 'grpo', dict(path=str(top / path)))

  old, new = tmp_path / 'old', tmp_path / 'new'
  (old / 'tune' / 'model').mkdir(parents=True)
  (old / 'tune' / 'model' / 'weights').write_bytes(b'xx')
  (old / 'data.jsonl').write_bytes(b'{}')
  for path in ('tune/model', 'data.jsonl'):
    prepare(old, path)
    shutil.copytree(old, new)
    prepare(new, path)
    assert read(new / 'grpo') == dict(path=str(new / path))
    shutil.rmtree(new)
    shutil.rmtree(old / 'grpo')
  prepare(old, 'tune/model')
  shutil.copytree(old, new)
  change(new / 'tune' / 'model')
  with pytest.raises(ValueError, match='old/tune/model. -> .*new/tune/model'):
    prepare(new, 'tune/model')


def test_an_error_puts_the_files_of_a_run_back(tmp_path):
  config = dict(a=1)
  with pytest.raises(ValueError, match='no fit'):
    with workdir.unchanged_on_error(tmp_path):  # a new run
      workdir.prepare(tmp_path, config)
      raise ValueError('no fit')
  assert not [*tmp_path.glob('*.json')]  # the folder is free for another
  workdir.prepare(tmp_path, config)
  (tmp_path / 'checkpoints').mkdir()
  workdir.note(tmp_path, 'search', {'digest': 'x'})
  with pytest.raises(ValueError, match='no fit'):
    with workdir.unchanged_on_error(tmp_path):
      workdir.prepare(tmp_path, dict(a=2), allow_changes=True)
      workdir.note(tmp_path, 'search', {'digest': 'y'}, allow_changes=True)
      workdir.note(tmp_path, 'base', {'digest': 'z'})
      assert read(tmp_path) == dict(a=2)
      raise ValueError('no fit')
  assert read(tmp_path) == config
  assert json.loads((tmp_path / 'search.json').read_text()) == {'digest': 'x'}
  assert not (tmp_path / 'base.json').exists()


def test_added_and_removed_options_are_named(tmp_path):
  workdir.prepare(tmp_path, dict(old=1, same=0))
  with pytest.raises(ValueError, match='new: None -> 2; old: 1 -> None'):
    workdir.prepare(tmp_path, dict(new=2, same=0))


def test_a_field_that_is_new_and_unset_is_no_change(tmp_path):
  workdir.prepare(tmp_path, dict(a=dict(old=1)))
  workdir.prepare(tmp_path, dict(a=dict(old=1, new=2)), unset=('a.new',))
  assert read(tmp_path) == dict(a=dict(old=1, new=2))
  with pytest.raises(ValueError, match='a.new: 2 -> 3'):  # is new no more
    workdir.prepare(tmp_path, dict(a=dict(old=1, new=3)), unset=('a.new',))


def test_the_environment_is_that_of_the_beginning(tmp_path):
  workdir.prepare(tmp_path, {})
  file = tmp_path / 'environment.json'
  assert json.loads(file.read_text())['packages']['jax']
  file.write_text('{}')
  workdir.prepare(tmp_path, {})
  assert file.read_text() == '{}'


def test_a_note_that_became_another_is_refused(tmp_path):
  workdir.note(tmp_path, 'search', {'index': {'count': 3}})
  workdir.note(tmp_path, 'search', {'index': {'count': 3}})
  with pytest.raises(ValueError, match='whose search was another: '
                                       'index.count: 3 -> 4'):
    workdir.note(tmp_path, 'search', {'index': {'count': 4}})
  workdir.note(tmp_path, 'search', {'index': {'count': 4}}, allow_changes=True)
  assert json.loads((tmp_path / 'search.json').read_text()) == {
      'index': {'count': 4}}


def test_a_text_that_became_empty_is_a_change(tmp_path):
  workdir.prepare(tmp_path, dict(dtype='auto'))
  with pytest.raises(ValueError, match="another config: dtype: 'auto' -> ''"):
    workdir.prepare(tmp_path, dict(dtype=''))


def test_many_changes_are_counted(tmp_path):
  workdir.prepare(tmp_path, {f'a{n:02}': 0 for n in range(25)})
  with pytest.raises(ValueError, match='a19: 0 -> 1; and 5 more. Use'):
    workdir.prepare(tmp_path, {f'a{n:02}': 1 for n in range(25)})


@pytest.mark.parametrize('content', [b'', b'{', b'[]', b'\xff'])
def test_a_damaged_config_is_named(content, tmp_path):
  (tmp_path / 'config.json').write_bytes(content)
  with pytest.raises(ValueError, match='config.json must be the JSON object'):
    workdir.read_config(tmp_path)
