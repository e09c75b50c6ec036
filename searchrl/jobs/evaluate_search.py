# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, how well its engine finds answers out, without a policy.

Questions are asked as they stand, so a question of several hops finds its
answer by luck alone; what an agent finds by its own queries is another number,
`search/answer_in_context_rate` of training and evaluation.
"""

from collections import defaultdict
import json
import pathlib

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.evaluation import figures
from searchrl.experiment import build
from searchrl.experiment import search as searches
from searchrl.search import ir_metrics


def run(config, workdir: str) -> None:
  """Prints recall by set and hops; writes it to retrieval.json.

  Raises:
    ValueError: there are no questions.
  """
  folder, search = pathlib.Path(workdir), config.search
  sets = build.evaluation_sets(config, folder)
  if not sets:
    raise ValueError(
        f'data.evaluate must name questions for {search.engine!r}, whose '
        'corpus lies elsewhere, but is empty.')
  rows = []
  for dataset in sets:
    engine = searches.engine(search, dataset.corpus, seed=config.seed)
    rows += judged(dataset, search.engine, engine, config.retrieval.top_ks)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'retrieval.json').write_text(json.dumps(rows, indent=1) + '\n')
  print(figures.table(rows, tuple(rows[0])))


def judged(dataset: datasets.Dataset, name: str, engine, top_ks) -> list[dict]:
  """A row for the questions of each hop count."""
  by_hops = defaultdict(list)
  for question in dataset.questions:
    by_hops[question.hops].append(question)
  rows = []
  for hops, questions in sorted(by_hops.items()):
    found = ir_metrics.answers(
        engine, questions, top_ks=top_ks, normalise=rewards.normalise)
    rows.append({
        'set': dataset.name, 'engine': name, 'hops': hops, 'n': len(questions)
    } | {key.removeprefix('retrieval/'): x for key, x in found.items()})
  return rows
