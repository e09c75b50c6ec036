# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""phases: each runs once, in order, with the directory in its texts."""

import ml_collections
import pytest

from configs import grpo
from searchrl.jobs import phases

RUN = []


def job(config, workdir):
  """Records its call; fails where the config says so."""
  RUN.append((config.name, config.reads, workdir))
  if config.fails:
    raise ValueError(f'{config.name} fails. Set --config.fails=False.')


def config(fails='', number=1):
  result = ml_collections.ConfigDict()
  result.allow_changes = False
  result.order = ('first', 'second', 'third')
  result.phases = {
      name: dict(job='phases_test:job', name=name, number=number,
                 reads=reads, fails=name == fails, allow_changes=False)
      for name, reads in (('first', ('nothing',)),
                          ('second', ('{workdir}/first/a', '{workdir}')),
                          ('third', ('nq={workdir}/second/b',)))}
  result.lock()
  return result


def names():
  made = [name for name, *_ in RUN]
  RUN.clear()
  return made


def test_phases_run_in_order_and_read_what_the_earlier_wrote(tmp_path):
  RUN.clear()
  phases.run(config(), str(tmp_path))
  assert RUN == [
      ('first', ('nothing',), f'{tmp_path}/first'),
      ('second', (f'{tmp_path}/first/a', str(tmp_path)), f'{tmp_path}/second'),
      ('third', (f'nq={tmp_path}/second/b',), f'{tmp_path}/third')]


def test_a_second_call_begins_with_the_phase_that_is_not_done(tmp_path):
  RUN.clear()
  with pytest.raises(ValueError, match='second fails'):
    phases.run(config(fails='second'), str(tmp_path))
  assert names() == ['first', 'second']
  phases.run(config(), str(tmp_path))
  assert names() == ['second', 'third']
  phases.run(config(), str(tmp_path))
  assert not names()


def test_a_changed_phase_and_all_after_it_run_again(tmp_path):
  RUN.clear()
  phases.run(config(), str(tmp_path))
  changed = config()
  changed.phases.second.number = 2
  names()
  phases.run(changed, str(tmp_path))
  assert names() == ['second', 'third']


def test_what_follows_a_phase_that_is_run_again_is_no_longer_done(tmp_path):
  """Also if the second call ends before it, or names the one phase alone."""
  RUN.clear()

  def changed(number, **fields):
    result = config()
    result.phases.first.number = number
    result.update(fields)
    return result

  phases.run(config(), str(tmp_path))
  broken = changed(2)
  broken.phases.second.fails = True
  with pytest.raises(ValueError, match='second fails'):
    phases.run(broken, str(tmp_path))
  names()
  phases.run(changed(2), str(tmp_path))
  assert names() == ['second', 'third']
  phases.run(changed(3, order=('first',)), str(tmp_path))
  names()
  phases.run(changed(3), str(tmp_path))
  assert names() == ['second', 'third']


def test_phases_are_in_the_order_of_the_field_not_of_their_names(tmp_path):
  def ordered(**fields):
    result = config()
    with result.unlocked():
      result.phases.apart = dict(result.phases.first, name='apart')
      result.phases.apply = dict(
          result.phases.third, name='apply', reads=('{workdir}/tune/b',))
      result.phases.tune = dict(
          result.phases.second, name='tune', reads=('{workdir}/first/a',))
      for name in ('second', 'third'):
        del result.phases[name]
      result.order = ('first', 'apart', 'tune', 'apply')
      result.update(fields)
    return result

  RUN.clear()
  phases.run(ordered(), str(tmp_path))
  assert names() == ['first', 'apart', 'tune', 'apply']
  phases.run(ordered(), str(tmp_path))
  assert not names()
  changed = ordered(order=('tune',))
  changed.phases.tune.number = 2
  phases.run(changed, str(tmp_path))
  assert names() == ['tune']
  changed.order = ordered().order
  phases.run(changed, str(tmp_path))
  assert names() == ['apply']  # `first` and `apart` are done


def test_the_error_of_a_phase_names_the_flag_that_it_has_here(tmp_path):
  with pytest.raises(ValueError, match=r'^second fails\. Set '
                     r'--config\.phases\.second\.fails=False\.$'):
    phases.run(config(fails='second'), str(tmp_path))


def test_an_unknown_phase_is_refused_before_any_runs(tmp_path):
  RUN.clear()
  wrong = config()
  wrong.order = ('first', 'fourth')
  with pytest.raises(ValueError, match='order must name phases, of first, sec'):
    phases.run(wrong, str(tmp_path))
  wrong = config()
  wrong.phases.third.job = 'phases_test:absent'
  with pytest.raises(ValueError, match='phases.third.job must be'):
    phases.run(wrong, str(tmp_path))
  assert not names()


def test_a_plan_takes_the_model_with_which_the_phases_begin():
  result = ml_collections.ConfigDict()
  result.order = ('tune', 'train')
  result.phases = {'tune': dict(job='searchrl.jobs.finetune:run',
                                model=dict(path='tiny_raw')),
                   'train': grpo.get_config('smoke')}
  train = result.phases.train
  train.model.path = '{workdir}/tune/model'
  train.data.train = '{workdir}/data/train.jsonl'
  train.search.corpus = '{workdir}/data/corpus.jsonl'
  found = phases.trainings(result)
  assert [*found] == ['train']
  assert found['train'].model.path == 'tiny_raw'
  assert found['train'].data.train == found['train'].search.corpus == ''
  assert train.model.path == '{workdir}/tune/model'  # the config is unchanged
