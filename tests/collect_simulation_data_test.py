# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""collect_simulation_data: files that tuning takes; a kill costs a round."""

import json
import pathlib

import pytest

from configs import collect_simulation_data as config_file
from searchrl.data import conversations
from searchrl.data import question_files
from searchrl.papers.zerosearch import collect_simulation_data as job
from searchrl.rollouts import sampler as samplers

FILES = ('train.jsonl', 'validation.jsonl')


def config_of(**options):
  config = config_file.get_config('smoke')
  config.rollout.max_num_seqs = 8
  config.collect.update(
      questions_a_round=6, validation_share=0.3, **options)
  return config


def lines(folder, name):
  return [json.loads(line) for line in
          (pathlib.Path(folder) / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_collection_goes_on_and_writes_the_same(tmp_path, monkeypatch):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  job.run(config_of(), str(whole))
  rollout, calls = samplers.Sampler.rollout, []

  def kill_in_the_second(self, *args, **kwargs):
    calls.append(kwargs['step'])
    if calls == [0, 1]:
      raise KeyboardInterrupt
    return rollout(self, *args, **kwargs)

  monkeypatch.setattr(samplers.Sampler, 'rollout', kill_in_the_second)
  with pytest.raises(KeyboardInterrupt):
    job.run(config_of(), str(killed))
  assert not (killed / FILES[0]).exists()
  job.run(config_of(), str(killed))
  assert calls == [0, 1, 1, 2, 0, 1, 2]  # two worlds
  for name in FILES:
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
    found = lines(whole, name)
    assert not question_files.has_questions(whole / name)  # for the tuning
    assert found and len(conversations.read(str(whole / name))) == len(found)
    for line in found:
      quality = 'Useful' if line['useful'] else 'Noisy'
      assert line['prompt'].startswith(f'{quality} documents: {line["query"]}')
      assert line['completion'].startswith('Doc 1: "')
  for name in ('questions', 'search'):  # other files than those it began with
    noted = (killed / f'{name}.json').read_text()
    (killed / f'{name}.json').write_text('{}')
    with pytest.raises(ValueError, match=f'whose {name} was another'):
      job.run(config_of(), str(killed))
    (killed / f'{name}.json').write_text(noted)
  train, aside = ({line['question']['uid'] for line in lines(whole, name)}
                  for name in FILES)
  assert not train & aside


@pytest.mark.parametrize('options, message', [
    (dict(worlds=0), 'collect.worlds must be at least 1'),
    (dict(samples=0), 'collect.samples must be at least 1'),
    (dict(validation_share=1.0), 'validation_share must be at least 0 and below 1'),
    (dict(temperature=-1.0), 'collect.temperature must be at least 0'),
    (dict(run='nowhere'), 'nowhere')])
def test_bad_options_are_refused_before_anything_is_written(
    tmp_path, options, message):
  config = config_file.get_config('smoke')
  config.collect.update(options)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    job.run(config, str(tmp_path / 'run'))
  assert not (tmp_path / 'run' / 'config.json').exists()
