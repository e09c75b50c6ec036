# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: scores by set, and records, of a policy on cases.

Each set has a row, and one row per hop count if its questions have several. One
more row has the mean over several sets, with equal weights. It leaves out sets
about common knowledge, which can be answered from memory.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import pathlib
import re
import time
from typing import Any

import numpy as np

from searchrl.agent import prompts
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.evaluation import compare
from searchrl.evaluation import baselines
from searchrl.evaluation import scores as scores_lib
from searchrl.evaluation import shards
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.trajectory import (
    Question, Request, SearchFn, Trajectory, to_json)

AGENT = 'agent'  # method of a policy that answers by itself
COLUMNS = ('set', 'engine', 'decoding', 'hops', 'n', 'em', '95% interval',
           *scores_lib.NAMES[1:], 'search_errors')
SHOWN = ('em', 'subem', 'f1', 'searches')  # scores that are metrics of a run
ALL = 'all'  # value of `hops` in a row of a whole set
TABLE, RECORDS = 'table.json', 'records'  # names in an evaluation's folder
SECONDS = 'seconds.json'  # seconds per question by shard; not reproducible
SHARD = 1000  # trajectories that are in memory at once
_FEW = 100  # largest number of questions of a case without progress lines
Play = Callable[[Sequence[Question]], list[Trajectory]]


@dataclasses.dataclass(frozen=True)
class EvalCase:
  """A data set, answered through one engine and decoded in one way."""

  dataset: datasets.Dataset
  engine: str
  search: SearchFn
  decoding: str  # 'greedy' or 'sampled'
  method: str = AGENT  # or a key of `baselines.METHODS`; one per folder

  @property
  def name(self) -> str:
    """Name of the case in its records, which names a folder as well."""
    engine = re.sub('[:/]', '.', self.engine)
    return f'{self.dataset.name}.{engine}.{self.decoding}'


def run(
    sampler: Sampler,
    params: Any,
    cases: Sequence[EvalCase],
    *,
    step: int = 0,
    samples: int = 1,
    templates: Mapping[str, str] = prompts.PLAIN,
    fingerprint: str = '',
    folder: pathlib.Path | None = None,
    shard: int = SHARD,
) -> list[dict]:
  """Runs every case.

  Args:
    sampler: Sampler of the answers.
    params: Parameters of the policy.
    cases: Cases to run.
    step: Seed of the sampled cases; equal steps give equal samples.
    samples: Number of samples per question, in sampled cases of the agent.
    templates: Prompt templates of other methods; see `agent.prompts`.
    fingerprint: Fingerprint of everything that the scores depend on; it is
      written to rows and records.
    folder: Directory for the records, and then the table. Existing records are
      not sampled again. None keeps the scores alone.
    shard: Number of trajectories that are sampled, and then written, at once.

  Returns:
    Rows for `figures.table`. Searches that failed count as wrong here.
  """
  found = []
  synced = sampler.sync(params)
  for case in cases:
    alone = case.decoding == 'greedy' or case.method != AGENT
    count = 1 if alone else samples
    play = _player(sampler, synced.weights, case, count, step, templates)
    size, questions, scores = max(shard // count, 1), case.dataset.questions, []
    for number, first in enumerate(range(0, len(questions), size)):
      file = folder and folder / RECORDS / case.name / f'{number:06d}.jsonl.gz'
      scores += _shard(play, case, questions[first:first + size],
                       sampler.tokenizer, fingerprint, file)
      if len(questions) > _FEW:
        _say_so_far(case, first + size, scores)
    found.append((case, scores))
  rows = [row | _named(fingerprint) for row in (
      *(row for of in found for row in _rows(*of)), *_means(found))]
  if folder and processes.is_first():
    atomic_files.write_json(folder / TABLE, rows)
  return rows


def _say_so_far(case: EvalCase, asked: int,
                scores: Sequence[scores_lib.Score]) -> None:
  total = len(case.dataset.questions)
  exact = sum(score.values['em'] for score in scores) / len(scores)
  processes.say(f'{case.name}: {min(asked, total):,} of {total:,} questions, '
                f'exact match {exact:.3f}')


def _player(sampler: Sampler, weights: Any, case: EvalCase, samples: int,
            step: int, templates: Mapping[str, str]) -> Play:
  """Returns the function that answers the questions of a case."""
  temperature = 0.0 if case.decoding == 'greedy' else 1.0
  if case.method != AGENT:
    return functools.partial(baselines.METHODS[case.method], baselines.Player(
        sampler, weights, case.search, templates, step, temperature))
  return lambda questions: sampler.rollout(
      weights, [Request(question, sample, group)
                for group, question in enumerate(questions)
                for sample in range(samples)],
      search=case.search, step=step, temperature=temperature).trajectories


def _shard(play: Play, case: EvalCase, questions: Sequence[Question],
           tokenizer: Any, fingerprint: str, file: pathlib.Path | None
          ) -> list[scores_lib.Score]:
  """Returns scores of some questions; writes their records to a file."""
  found = file and processes.on_first(str(file), lambda: _recorded(file))
  if found:
    return [scores_lib.from_json(score) for score in found]
  began = time.perf_counter()
  trajectories = play(questions)
  secs = time.perf_counter() - began
  found = [scores_lib.of(one) for one in trajectories]
  if file and processes.is_first():
    _note_seconds(file, secs / len(questions))
    shards.write(file, [_named(fingerprint) | _record(
        case, one, score, tokenizer)
                        for one, score in zip(trajectories, found)])
  return found


def _named(fingerprint: str) -> dict[str, str]:
  return {'fingerprint': fingerprint} if fingerprint else {}


def _recorded(file: pathlib.Path) -> list[dict] | None:
  lines = shards.read(file)
  return lines and [line['score'] for line in lines]


def _record(case: EvalCase, trajectory: Trajectory, score: scores_lib.Score,
            tokenizer: Any) -> dict[str, Any]:
  """Returns a line of the records: an answer, its score and its trajectory."""
  return {
      'method': case.method, 'set': case.dataset.name, 'engine': case.engine,
      'decoding': case.decoding, 'question': trajectory.question.text,
      'golds': trajectory.question.answers, 'answer': trajectory.answer,
      'em': score.values['em'], 'score': scores_lib.to_json(score),
      'text': tokenizer.decode(trajectory.tokens) if (
          trajectory.prompt_tokens) else trajectory.response,
      'trajectory': to_json(trajectory)}


def recorded(folder: pathlib.Path) -> dict[str, list[scores_lib.Score]]:
  """Returns the scores in the records of a folder, by the names of cases."""
  return {path.name: [scores_lib.from_json(line['score'])
                      for line in shards.read_all(path)]
          for path in sorted((folder / RECORDS).iterdir())}


def limited(cases: Sequence[EvalCase], limit: int, seed: int, sets: int = 0
           ) -> list[EvalCase]:
  """Returns the cases of an evaluation during training: greedy, and smaller.

  Args:
    cases: Cases of a whole evaluation; those with random passages are left out.
    limit: Number of questions of a set, drawn by the seed. 0, or more than the
      set has: all.
    seed: Seed of the choice.
    sets: Number of sets, from the first on; 0: all.
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


def _rows(case: EvalCase, scores: Sequence[scores_lib.Score]) -> list[dict]:
  by_hops = defaultdict(list)
  for score in scores:
    by_hops[score.hops].append(score)
  if len(by_hops) == 1:
    by_hops.clear()
  return [_row(case, hops, group) for hops, group in (
      *sorted(by_hops.items()), (ALL, scores))]


def _row(case: EvalCase, hops: int | str, scores: Sequence[scores_lib.Score]
        ) -> dict:
  """Returns means over all samples, with an interval over questions."""
  values = scores_lib.means(scores)
  exact = list(compare.by_question(scores).values())
  low, high = compare.bootstrap(exact) if len(exact) < len(scores) else (
      wilson(sum(exact), len(exact)))
  return {
      'set': case.dataset.name, 'engine': case.engine,
      'decoding': case.decoding, 'hops': hops, 'n': len(exact),
      'em': values.pop('em'), '95% interval': f'{low:.2f}-{high:.2f}', **values,
      'search_errors': sum(score.failed for score in scores),
      **scores_lib.of_samples(scores)}


def _means(found: Sequence[tuple[EvalCase, Sequence[scores_lib.Score]]]
          ) -> list[dict]:
  """Returns the mean over several sets, for each engine and decoding.

  Sets of common knowledge, and those with random passages, are left out.
  """
  by_way = defaultdict(list)
  for case, scores in found:
    if case.engine != 'noise' and not case.dataset.is_common:
      by_way[case.engine, case.decoding].append(scores)
  rows = []
  for (engine, decoding), sets in by_way.items():
    if len(sets) == 1:
      continue
    each = [scores_lib.means(scores) for scores in sets]
    values = {name: float(np.mean([of[name] for of in each]))
              for name in scores_lib.NAMES}
    exact = [list(compare.by_question(scores).values()) for scores in sets]
    low, high = compare.bootstrap_of_sets(exact)
    rows.append({
        'set': datasets.MEAN, 'engine': engine, 'decoding': decoding,
        'hops': ALL, 'n': sum(map(len, exact)), 'em': values.pop('em'),
        '95% interval': f'{low:.2f}-{high:.2f}', **values,
        'search_errors': sum(score.failed for of in sets for score in of)})
  return rows


def _note_seconds(file: pathlib.Path, secs: float) -> None:
  """Writes a shard's seconds beside the table; records must be reproducible."""
  own = file.parents[2] / SECONDS
  known = json.loads(own.read_text()) if own.exists() else {}
  known.setdefault(file.parent.name, {})[file.name] = secs
  atomic_files.write_json(own, known)


def with_seconds(rows: Sequence[dict], folder: pathlib.Path) -> list[dict]:
  """Returns rows for display: whole sets with wall seconds per question."""
  file = folder / SECONDS
  known = json.loads(file.read_text()) if file.exists() else {}
  result = []
  for row in rows:
    shards_secs = known.get('.'.join(
        str(row.get(name)) for name in ('set', 'engine', 'decoding')))
    whole = shards_secs and row['hops'] == ALL
    result.append(row | ({'seconds': float(np.mean([*shards_secs.values()]))}
                         if whole else {}))
  return result


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
  """Returns the score interval of a proportion (Wilson 1927); default 95 %."""
  p = hits / n
  centre = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  return max(centre - half, 0.0), min(centre + half, 1.0)


def columns(rows: Sequence[Mapping]) -> list[str]:
  """Returns COLUMNS, and the columns of rows with several samples."""
  return list(dict.fromkeys((*COLUMNS, *(key for row in rows for key in row))))


def headline(rows: Sequence[Mapping]) -> float | None:
  """Returns greedy exact match: the mean over sets, or the first set's."""
  found = {row['set']: row['em'] for row in reversed(rows)
           if row['hops'] == ALL and row['decoding'] == 'greedy'
           and row['engine'] != 'noise'}
  return found.get(datasets.MEAN, next(reversed(found.values()), None))


def scalars(rows: Sequence[Mapping]) -> dict[str, float]:
  """Returns rows as metrics: 'val/<set>/em/greedy', 'val/<set>_2hop/em/...'."""
  result = {}
  for row in rows:
    name = row['set'] if row['engine'] != 'noise' else f'{row["set"]}_noise'
    prefix = f'val/{name}'
    if row['hops'] != ALL:
      prefix += f'_{row["hops"]}hop'
    for score in SHOWN:
      result[f'{prefix}/{score}/{row["decoding"]}'] = row[score]
  return result
