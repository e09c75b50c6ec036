# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""evaluate_simulator: the oracle and an untuned model, beside what was found."""

import json

import pytest

from configs import collect_simulation_data
from configs import evaluate_simulator as config_file
from searchrl.papers.zerosearch import collect_simulation_data as collecting
from searchrl.papers.zerosearch import evaluate_simulator as job
from searchrl.runtime import processes


@pytest.fixture(scope='module')
def collected(tmp_path_factory):
  config = collect_simulation_data.get_config('smoke')
  config.rollout.max_num_seqs = 8
  config.collect.update(worlds=1, validation_share=0)
  folder = tmp_path_factory.mktemp('collected')
  collecting.run(config, str(folder))
  return folder / 'train.jsonl'


def config_of(size, data, **options):
  config = config_file.get_config(size)
  config.simulator.update(data=str(data), samples=3)
  config.search.options.update(options)
  return config


def report(folder):
  return json.loads((folder / 'report.json').read_text())


def test_several_processes_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, 'count', lambda: 2)
  with pytest.raises(ValueError, match='needs one process, but there are 2'):
    job.run(config_of('smoke', tmp_path / 'none.jsonl'), str(tmp_path))


@pytest.mark.slow
def test_the_oracle_finds_answers_when_asked_for_useful_documents(
    tmp_path, collected, capsys):
  config = config_of('oracle', collected)
  config.search.corpus = str(
      collected.parent / 'world_0/data/train/corpus.jsonl')
  job.run(config, str(tmp_path))
  found = report(tmp_path)
  last = found['answers'][-2]
  assert last['search'] == 'the last hop' and last['n'] > 3
  assert last['useful'] > 0.5 > last['noisy']
  assert [row['well-formed'] for row in found['qualities']] == [1, 1, 1]
  noise = {quality: metrics['simulated/noisy_rate']
           for quality, metrics in found['writer'].items()}
  assert noise == {'useful': 0, 'noisy': 1}
  samples = (tmp_path / 'samples.md').read_text().splitlines()
  assert len(samples) == 2 + 3
  assert 'the last hop' in capsys.readouterr().out
  assert 'the last hop' in (tmp_path / 'report.txt').read_text()


@pytest.mark.slow
def test_an_untuned_model_is_asked_every_query_and_costs_tokens(
    tmp_path, collected):
  config = config_of('smoke', collected, slots=8, max_tokens=8,
                     max_prompt_tokens=96)
  config.simulator.limit = 5
  job.run(config, str(tmp_path))
  found = report(tmp_path)
  assert sum(row['n'] for row in found['answers'][:-2]) <= 5
  assert 0 < found['writer']['useful']['simulated/tokens'] <= 5 * 8
  job.run(config, str(tmp_path / 'again'))
  for name in ('samples.md', 'report.txt'):
    assert (tmp_path / name).read_bytes() == (
        tmp_path / 'again' / name).read_bytes()


def test_what_cannot_be_compared_is_refused(tmp_path, collected):
  with pytest.raises(FileNotFoundError, match='simulator.data must be a file'):
    job.run(config_of('oracle', tmp_path / 'none.jsonl'), str(tmp_path))
  config = config_of('oracle', collected)
  config.search.corpus = ''
  with pytest.raises(ValueError, match='search.corpus must be the corpus'):
    job.run(config, str(tmp_path))
  config.search.engine = 'bm25'
  with pytest.raises(ValueError, match="simulated:make', but is 'bm25'"):
    job.run(config, str(tmp_path))
  config = config_of('smoke', collected, max_prompt_tokens=4, max_tokens=8)
  with pytest.raises(ValueError, match='failed, the first with too_long'):
    job.run(config, str(tmp_path))
  assert not (tmp_path / 'report.json').exists()
