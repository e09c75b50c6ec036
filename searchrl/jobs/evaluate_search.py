# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a search engine without a policy, by its answer recall.

The query is the text of the question, so that a question of several hops finds
its answer only by chance. Another metric measures the queries of an agent:
`search/answer_in_context_rate` of training and evaluation.
"""

import collections
from collections.abc import Sequence
import pathlib
import sys

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.evaluation import figures
from searchrl.experiment import build
from searchrl.experiment import config_checks
from searchrl.experiment import search as searches
from searchrl.runtime import atomic_files
from searchrl.runtime import folder_lock
from searchrl.runtime import processes
from searchrl.search import ir_metrics
from searchrl.trajectory import Question, SearchFn


def run(config, workdir: str) -> None:
  """Measures the answer recall of search engines, and writes retrieval.json.

  The recall is listed by set and number of hops; see `recall_by_hops`. All
  processes must call this and search. Only the first prints and writes.

  Args:
    config: Config of the job; see configs/evaluate_search.py.
    workdir: Directory for retrieval.json.

  Raises:
    ValueError: There are no questions, or another process uses the directory.
  """
  folder, search = pathlib.Path(workdir), config.search
  config_checks.check(config)
  config_checks.check_worlds(config)
  sets = datasets.shared(lambda: build.evaluation_sets(config, folder))
  if not sets:
    raise ValueError(
        f'data.evaluate must name questions for {search.engine!r}, whose '
        'corpus is remote, but is empty.')
  processes.on_first('workdir', lambda: _claim(folder))
  engines = searches.engines(search, sets, seed=config.seed)
  rows = [{'set': dataset.name, 'engine': search.engine} | row
          for dataset, engine in zip(sets, engines) for row in
          recall_by_hops(dataset.questions, engine, config.retrieval.top_ks)]
  processes.on_first('retrieval', lambda: atomic_files.write_json(
      folder / 'retrieval.json', rows))
  processes.say(figures.table(rows), file=sys.stdout)


def _claim(folder: pathlib.Path) -> None:
  """Makes a directory and locks it until this process ends."""
  folder.mkdir(parents=True, exist_ok=True)
  folder_lock.hold(folder)


def recall_by_hops(questions: Sequence[Question], search: SearchFn,
                   top_ks: Sequence[int]) -> list[dict[str, float]]:
  """Returns the answer recall of a search engine for each number of hops.

  The recall@k is the share of questions for which one of the first k passages
  contains a gold answer. Questions with an answer that is empty, 'yes' or 'no'
  are left out. The text of a question is the query.

  Args:
    questions: Questions of a set.
    search: Search engine that is measured.
    top_ks: Values of k.

  Returns:
    A row for each number of hops. It has this number as 'hops', the number of
    questions as 'n', with those that are left out, and shares such as
    'recall@3'.
  """
  by_hops = collections.defaultdict(list)
  for question in questions:
    by_hops[question.hops].append(question)
  rows = []
  for hops, group in sorted(by_hops.items()):
    recall = ir_metrics.answers(
        search, group, top_ks=top_ks, normalise=rewards.normalise)
    rows.append({'hops': hops, 'n': len(group)} | {
        key.removeprefix('retrieval/'): x for key, x in recall.items()})
  return rows
