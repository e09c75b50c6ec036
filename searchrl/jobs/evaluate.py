# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a policy: a run or a model folder in, a table and records out."""

from collections.abc import Sequence
import pathlib
from typing import Any

from searchrl.data import datasets
from searchrl.evaluation import figures
from searchrl.evaluation import suite
from searchrl.experiment import build
from searchrl.experiment import checks
from searchrl.experiment import policy
from searchrl.experiment import search as searches
from searchrl.runtime import processes
from searchrl.runtime import workdir as workdirs


def run(config, workdir: str) -> None:
  """Evaluates a model folder or a run's newest checkpoint; prints the table.

  Args:
    config: see configs/evaluate.py.
    workdir: gets table.json and records/.

  Raises:
    ValueError, FileNotFoundError: the config cannot be evaluated.
  """
  checks.check(config)
  checks.check_questions(config)
  checks.check_worlds(config)
  folder, options = pathlib.Path(workdir), config.evaluate
  if not config.search.engine:
    config.search.engine, config.search.options = policy.search_of_run(
        options.run)
  if options.run and not config.model.path:
    config.model.path = policy.model_of_run(options.run)
  _check_sets(config)
  sampler, params = policy.of_run(config, options.run)
  processes.on_first('workdir', lambda: workdirs.prepare(
      workdir, config.to_dict(), allow_changes=config.allow_changes))
  sets = datasets.shared(lambda: build.evaluation_sets(config, folder))
  processes.on_first('search', lambda: workdirs.note(
      folder, 'search', _described(config.search, sets),
      allow_changes=config.allow_changes))
  cases = searches.cases(config.search, sets, options, seed=config.seed)
  rows = suite.run(sampler, params, cases, step=options.step,
                   samples=options.samples, folder=folder)
  if processes.is_first():
    print(figures.table(rows, suite.columns(rows)))


def _check_sets(config) -> None:
  """Raises a ValueError if there is nothing to evaluate on."""
  generated = (config.evaluate.worlds.kinds and not config.data.train
               and searches.needs_corpus(config.search))
  if not config.data.evaluate and not generated:
    raise ValueError(
        'data.evaluate must name questions where no world is generated: with '
        'evaluate.worlds.kinds=(), data.train of your own or a remote engine; '
        'but it is empty. Give --config.data.evaluate=my_test.jsonl and '
        '--config.search.corpus.')


def _described(search, sets: Sequence[datasets.Dataset]) -> dict[str, Any]:
  """What each set is answered from; a corpus that several share, once."""
  corpora = {id(dataset.corpus): dataset.corpus for dataset in sets}
  facts = {key: searches.describe(search, corpus)
           for key, corpus in corpora.items()}
  return {dataset.name: facts[id(dataset.corpus)] for dataset in sets}
