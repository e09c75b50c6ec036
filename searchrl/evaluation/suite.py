# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: a policy and cases in; scores by set and records out.

A set has a row of its own, and a row a hop count where it has questions of
several. The mean over several sets, each weighing alike, is one more row; sets
about common knowledge, which can be answered from memory, are no part of it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from searchrl.agent import rewards as rewards_lib
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.rollouts import scoring
from searchrl.rollouts.sampler import Sampler
from searchrl.trajectory import Request, SearchFn, Trajectory, to_json

COLUMNS = ('set', 'engine', 'decoding', 'hops', 'n', 'em', '95% interval',
           'subem', 'f1', 'searches')
SCORES = ('em', 'subem', 'f1', 'searches')
ALL = 'all'  # the hops of a row of a whole set


@dataclasses.dataclass(frozen=True)
class EvalCase:
  """One data set, answered through one engine, decoded in one way."""

  dataset: datasets.Dataset
  engine: str
  search: SearchFn
  decoding: str  # 'greedy' or 'sampled'


def run(
    sampler: Sampler,
    params: Any,
    cases: Sequence[EvalCase],
    *,
    step: int = 0,
) -> tuple[list[dict], list[tuple[EvalCase, list[Trajectory]]]]:
  """Runs every case.

  Args:
    sampler: rolls the questions out.
    params: the policy.
    cases: what to run.
    step: seeds the sampled cases; equal steps give equal samples.

  Returns:
    Rows for `figures.table`, and the trajectories of each case. Searches that
    failed count as wrong here.
  """
  rows, records = [], []
  synced = sampler.sync(params)
  score = scoring.Scorer(rewards_lib.each(rewards_lib.em))
  for case in cases:
    trajectories = score(sampler.rollout(
        synced.weights, [Request(q, 0, n) for n, q in enumerate(
            case.dataset.questions)],
        search=case.search, step=step,
        temperature=0.0 if case.decoding == 'greedy' else 1.0).trajectories)
    records.append((case, trajectories))
    rows += _rows(case, trajectories)
  fresh = {case.dataset.name for case in cases if not case.dataset.is_common}
  return rows + _means([row for row in rows if row['set'] in fresh]), records


def limited(cases: Sequence[EvalCase], limit: int, seed: int, sets: int = 0
           ) -> list[EvalCase]:
  """The cases of an evaluation during training: greedy, on a few questions.

  Args:
    cases: of a whole evaluation; those with random passages are left out.
    limit: questions of a set, drawn by the seed; 0, or more than it has: all.
    seed: of the choice.
    sets: so many, from the first on; 0: all.
  """
  names = list(dict.fromkeys(case.dataset.name for case in cases))
  names = names[:sets or len(names)]

  def fewer(case):
    chosen = questions_lib.subset(
        case.dataset.questions, limit or len(case.dataset.questions), seed)
    return dataclasses.replace(case, dataset=dataclasses.replace(
        case.dataset, questions=chosen))

  return [fewer(case) for case in cases
          if case.decoding == 'greedy' and case.engine != 'noise'
          and case.dataset.name in names]


def _rows(case: EvalCase, trajectories: Sequence[Trajectory]) -> list[dict]:
  by_hops = defaultdict(list)
  for trajectory in trajectories:
    by_hops[trajectory.question.hops].append(trajectory)
  if len(by_hops) == 1:
    by_hops.clear()
  return [_row(case, hops, group) for hops, group in (
      *sorted(by_hops.items()), (ALL, trajectories))]


def _row(case: EvalCase, hops: int | str, trajectories: Sequence[Trajectory]
        ) -> dict:
  n = len(trajectories)
  scores = np.array([rewards_lib.em(t) for t in trajectories])
  low, high = wilson(int(scores.sum()), n)
  return {
      'set': case.dataset.name, 'engine': case.engine,
      'decoding': case.decoding, 'hops': hops, 'n': n,
      'em': float(scores.mean()),
      '95% interval': f'{low:.2f}-{high:.2f}',
      'subem': float(np.mean([rewards_lib.subem(t) for t in trajectories])),
      'f1': float(np.mean([rewards_lib.f1(t) for t in trajectories])),
      'searches': float(np.mean([t.searches for t in trajectories])),
      'search_errors': sum(
          t.stop_reason == 'search_error' for t in trajectories)}


def _means(rows: Sequence[dict]) -> list[dict]:
  """The mean of the whole sets, where there are several, of each decoding."""
  by_way = defaultdict(list)
  for row in rows:
    if row['hops'] == ALL and row['engine'] != 'noise':
      by_way[row['engine'], row['decoding']].append(row)
  return [{
      'set': datasets.MEAN, 'engine': engine, 'decoding': decoding, 'hops': ALL,
      'n': sum(row['n'] for row in group),
      **{score: float(np.mean([row[score] for row in group]))
         for score in SCORES},
      'search_errors': sum(row['search_errors'] for row in group)}
          for (engine, decoding), group in by_way.items() if len(group) > 1]


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
  """The score interval of a proportion (Wilson 1927), 95 % by default."""
  p = hits / n
  centre = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  return max(centre - half, 0.0), min(centre + half, 1.0)


def scalars(rows: Sequence[Mapping]) -> dict[str, float]:
  """Rows as metrics: 'val/<set>/em/greedy', 'val/<set>_2hop/em/greedy' ..."""
  result = {}
  for row in rows:
    name = row['set'] if row['engine'] != 'noise' else f'{row["set"]}_noise'
    prefix = f'val/{name}'
    if row['hops'] != ALL:
      prefix += f'_{row["hops"]}hop'
    for score in SCORES:
      result[f'{prefix}/{score}/{row["decoding"]}'] = row[score]
  return result


def save(folder: pathlib.Path, rows, records, tokenizer) -> None:
  """Writes table.json, and one line a question to records.jsonl."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'table.json').write_text(json.dumps(list(rows), indent=1) + '\n')
  with (folder / 'records.jsonl').open('w', encoding='utf-8') as file:
    for case, trajectories in records:
      for trajectory in trajectories:
        file.write(json.dumps({
            'set': case.dataset.name, 'engine': case.engine,
            'decoding': case.decoding, 'question': trajectory.question.text,
            'golds': trajectory.question.answers, 'answer': trajectory.answer,
            'em': rewards_lib.em(trajectory),
            'text': tokenizer.decode(trajectory.tokens),
            'trajectory': to_json(trajectory)}, ensure_ascii=False) + '\n')
