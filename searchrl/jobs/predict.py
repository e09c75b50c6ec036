# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts answers, with trajectories, to questions without gold answers."""

import collections
from collections.abc import Mapping
import json
import pathlib
import sys
from typing import Any

from searchrl.data import datasets
from searchrl.evaluation import shards
from searchrl.evaluation import evaluator
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import fingerprint
from searchrl.experiment import run_defaults
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs
from searchrl.trajectory import is_search

FILE = 'predictions.jsonl'


def run(config, workdir: str) -> None:
  """Answers the questions of data.evaluate; a killed job can be resumed.

  Args:
    config: Config of the job; see configs/predict.py.
    workdir: Directory for predictions.jsonl, with one line per answer, and
      records/, with the trajectories.

  Raises:
    ValueError, FileNotFoundError: The config cannot be used.
  """
  config_checks.check(config)
  folder = pathlib.Path(workdir)
  config = run_defaults.complete(
      config, config.evaluate.run, 'evaluate.run', folder)
  options = config.evaluate
  run_defaults.judge_on_own_data(config, options.run)
  if not config.data.evaluate or config.data.evaluate == datasets.WORLDS:
    raise ValueError(
        'data.evaluate must name the file of the questions to answer, but is '
        f'{config.data.evaluate!r}. Add --config.data.evaluate=questions.jsonl'
        + (' and --config.search.corpus.' if not options.run else '.'))
  config_checks.check(config)  # again, with the filled-in values
  config_checks.check_questions(config)
  config_checks.check_samples(options)
  model = policy.folder_of(config)
  directory = workdirs.Workdir(folder, config)
  directory.check()
  sets = datasets.shared(lambda: build.evaluation_sets(
      config, folder, golds=False, admit=model.admit(
          policy.budgets_of(config))))
  sampler, params = policy.of_run(
      config, options.run, folder=model,
      limit=max(len(data.questions) for data in sets))
  directory.prepare()
  directory.note('questions', lambda: fingerprint.questions(sets),
                 alike=True)
  through = searches.of_evaluation(config)
  searched = processes.on_first(
      'searched', lambda: searches.describe_all(through, sets))
  directory.note('search', lambda: searched, alike=True)
  cases = searches.cases(
      through, sets, options, seed=config.seed,
      rollout=config.rollout, bind=toolsets.of_sampler(sampler, config.seed))
  facts = processes.on_first('facts', lambda: fingerprint.facts(
      config, sampler, sets, searched, options.run))
  evaluator.run(
      sampler, params, cases, step=options.step, samples=options.samples,
      source=fingerprint.sources(facts, options.step), folder=folder,
      title='Predicting')
  processes.on_first('predictions', lambda: _write(folder))
  processes.say(f'wrote {folder / FILE}', file=sys.stdout)


def _write(folder: pathlib.Path) -> None:
  """Writes a line per answer: id, answer or null, searches, stop reason.

  Where several engines, decodings or samples answer a question, each line also
  says which of them it is.
  """
  (folder / evaluator.TABLE).unlink()  # scores without gold answers
  several = _several(folder)
  with (folder / FILE).open('w', encoding='utf-8') as file:
    for record in shards.read_all(folder / evaluator.RECORDS):
      trajectory = record['trajectory']
      file.write(json.dumps({
          'id': trajectory['question']['uid'], 'set': record['set'],
          **{name: _ways(record)[name] for name in several},
          'question': record['question'], 'answer': record['answer'],
          'searches': [query for turn in trajectory['turns']
                       if is_search(turn['action']['kind'])
                       for query in turn['action']['texts']],
          'stop_reason': trajectory['stop_reason']}, ensure_ascii=False) + '\n')


def _several(folder: pathlib.Path) -> list[str]:
  """Returns the keys of `_ways` that have several values in the records."""
  values: dict[str, set[Any]] = collections.defaultdict(set)
  for record in shards.read_all(folder / evaluator.RECORDS):
    for name, value in _ways(record).items():
      values[name].add(value)
  return [name for name, of_name in values.items() if len(of_name) > 1]


def _ways(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns how a record's question was answered: engine, decoding, sample."""
  return {'engine': record['engine'], 'decoding': record['decoding'],
          'sample': record['trajectory']['sample']}
