# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a policy on cases: writes records, and scores for each set.

A case is a set of questions with one search engine and one way of decoding.
Each set has a row of scores, and one row per hop count if its questions have
several. One more row has the mean over several sets, with equal weights. Sets
about common knowledge are left out of the mean, because they can be answered
from memory.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
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
from searchrl.rollouts import records
from searchrl.rollouts import scoring
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import atomic_files
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.trajectory import Question, Request, SearchFn, Trajectory

NAMED = {'em': 'exact match', 'subem': 'subEM', 'f1': 'F1'}  # in prints
AGENT = 'agent'  # method of a policy that answers by itself
COLUMNS = ('set', 'engine', 'decoding', 'hops', 'n', 'em', '95% interval',
           *scores_lib.NAMES[1:], 'search_errors')
KEYS = COLUMNS[:4]  # columns that identify a row
SHOWN = ('em', 'subem', 'f1', 'searches')  # scores that are metrics of a run
ALL = 'all'  # value of `hops` in a row of a whole set
TABLE, RECORDS = 'table.json', 'records'  # names in an evaluation's folder
# File of the seconds and questions of each shard, by case; not reproducible.
SECONDS = 'seconds.json'
SHARD = 1000  # trajectories that are in memory at once
_FEW = 100  # largest number of questions of a case without progress lines
Play = Callable[[Sequence[Question]], list[Trajectory]]


@dataclasses.dataclass(frozen=True)
class EvalCase:
  """A set of questions, with a search engine and a way of decoding."""

  dataset: datasets.Dataset
  engine: str
  search: SearchFn
  decoding: str  # 'greedy' or 'sampled'
  method: str = AGENT  # or a key of `baselines.METHODS`; one per folder
  score: str = 'em'  # the main score, one of `scores.ANSWERS`
  # Keywords of the sampler for sampled answers: temperature and truncation.
  drawing: Mapping[str, Any] = dataclasses.field(
      default_factory=lambda: {'temperature': 1.0})

  @property
  def name(self) -> str:
    """Name of the case in its records, which is also the name of a folder."""
    return _case_name(self.dataset.name, self.engine, self.decoding)


def _case_name(dataset: str, engine: str, decoding: str) -> str:
  dataset = dataset.replace('/', '.')  # verl's sources have it: org/nq
  return f'{dataset}.{re.sub("[:/]", ".", engine)}.{decoding}'


def run(
    sampler: Sampler,
    params: Any,
    cases: Sequence[EvalCase],
    *,
    step: int = 0,
    samples: int = 1,
    templates: Mapping[str, str] = prompts.PLAIN,
    fingerprint: str = '',
    source: Callable[[str, str], str] | None = None,
    folder: pathlib.Path | None = None,
    shard: int = SHARD,
    title: str = 'Evaluating',
    judge: scoring.Scorer | None = None,
) -> list[dict]:
  """Evaluates a policy on every case and returns a table of scores.

  Args:
    sampler: Sampler of the answers.
    params: Parameters of the policy.
    cases: Cases to run. If there is a folder, their names must differ.
    step: Seed of the sampled cases; equal steps give equal samples.
    samples: Number of samples per question, in sampled cases of the agent.
    templates: Prompt templates of other methods; see `agent.prompts`.
    fingerprint: Fingerprint of everything that the scores depend on; it is
      written to rows and records.
    source: Function of the names of a set and an engine. It returns a digest of
      what answers depend on, which is written to their records.
    folder: Directory for the records, and then the table. Existing records are
      not sampled again, unless they have another `source` or are of other
      questions. None: nothing is written.
    shard: Number of trajectories that are sampled and then written together.
    title: Text beside the progress bar.
    judge: Judge whose verdicts are further columns; None: no judge.

  Returns:
    Rows for `figures.table`. Questions whose search failed count as wrong.
  """
  label = {'fingerprint': fingerprint} if fingerprint else {}
  names, results = [case.name for case in cases], []
  if folder and len({*names}) < len(names):
    raise ValueError(
        'the sets of data.evaluate must have different names, also with . for '
        f'/, but several have the records of {max(names, key=names.count)}. '
        'Rename one.')
  synced = sampler.sync(params)
  counts = [_samples(case, samples) for case in cases]
  with progress.phase(title, unit='answer', total=sum(
      count * len(case.dataset.questions)
      for case, count in zip(cases, counts))) as reach:
    tally = _Tally(reach, 1 if sampler.together else processes.count())
    for case, count in zip(cases, counts):
      play = _player(
          sampler, synced.weights, case, count, step, templates, tally)
      results.append((case, _case(
          play, case, max(shard // count, 1), count, sampler.tokenizer,
          label | ({'source': source(case.dataset.name, case.engine)}
                   if source else {}), folder, tally, judge)))
  rows = [row | label for row in (
      *(row for case, scores in results for row in _rows(case, scores)),
      *_means(results))]
  for warning in scores_lib.warnings(
      [one for _, scores in results for one in scores]):
    processes.say(warning)
  if folder and processes.is_first():
    atomic_files.write_json(folder / TABLE, rows)
  return rows


def _samples(case: EvalCase, samples: int) -> int:
  """Returns the number of samples of each question of a case."""
  is_sampled = case.decoding != 'greedy' and case.method == AGENT
  return samples if is_sampled else 1


class _Tally:
  """A count of finished answers, for the progress bar of an evaluation.

  Args:
    reach: Function that sets the number that the bar shows.
    processes: Number of processes that share the answers. All are assumed to
      be as fast as this one.
  """

  def __init__(self, reach: Callable[[int], None], processes: int):
    self._reach, self._processes = reach, processes
    self._done = self._in_shard = 0

  def watch(self, trajectory: Trajectory) -> None:
    """Counts a trajectory of this process if it has finished."""
    if trajectory.stop_reason:
      self._in_shard += self._processes
      self._reach(self._done + self._in_shard)

  def end_shard(self, answers: int) -> None:
    """Sets the count to the number of answers in all shards so far."""
    self._done, self._in_shard = self._done + answers, 0
    self._reach(self._done)


def _case(play: Play, case: EvalCase, size: int, samples: int, tokenizer: Any,
          label: Mapping[str, str], folder: pathlib.Path | None, tally: _Tally,
          judge: scoring.Scorer | None) -> list[scores_lib.Score]:
  """Returns the scores of a case's answers, in the order of its questions.

  The questions are answered in shards, `size` of them at a time. If there is a
  folder, the records of each shard are then written to one file.
  """
  questions = case.dataset.questions
  scores: list[scores_lib.Score] = []
  for number, first in enumerate(range(0, len(questions), size)):
    file = folder and folder / RECORDS / case.name / f'{number:06d}.jsonl.gz'
    shard = questions[first:first + size]
    scores += _shard(
        play, case, shard, samples, tokenizer, label, file, judge)
    tally.end_shard(samples * len(shard))
    if len(questions) > _FEW:
      mean = sum(score.values[case.score] for score in scores) / len(scores)
      processes.say(
          f'{case.name}: {min(first + size, len(questions)):,} of '
          f'{len(questions):,} questions, {NAMED[case.score]} {mean:.3f}')
  return scores


def _player(sampler: Sampler, weights: Any, case: EvalCase, samples: int,
            step: int, templates: Mapping[str, str], tally: _Tally) -> Play:
  """Returns a function that samples trajectories for questions of a case."""
  drawing = {'temperature': 0.0} if case.decoding == 'greedy' else case.drawing
  if case.method != AGENT:
    model = baselines.PromptedModel(
        sampler, weights, case.search, templates, step,
        drawing['temperature'])
    return functools.partial(baselines.METHODS[case.method], model)
  return lambda questions: sampler.rollout(
      weights, [Request(question, sample, group)
                for group, question in enumerate(questions)
                for sample in range(samples)],
      search=case.search, step=step, watch=tally.watch, **drawing
  ).trajectories


def _shard(play: Play, case: EvalCase, questions: Sequence[Question],
           samples: int, tokenizer: Any, label: Mapping[str, str],
           file: pathlib.Path | None, judge: scoring.Scorer | None
           ) -> list[scores_lib.Score]:
  """Returns the scores of a shard, which is a part of a case's questions.

  If `file` already has records of the same source and questions, and none of a
  failed search or judge, the scores are read from it. Else the questions are
  answered, and the records are written to `file` if it is not None.
  """
  asked = [question for question in questions for _ in range(samples)]
  recorded_scores = file and processes.on_first(
      str(file), lambda: shards.read_scores(file, asked, label.get('source')))
  if recorded_scores:
    return [scores_lib.Score(**score) for score in recorded_scores]
  began = time.perf_counter()
  trajectories = play(questions)
  secs = time.perf_counter() - began
  scores = [scores_lib.score_trajectory(t) for t in trajectories]
  if judge:
    trajectories = judge(trajectories)
    scores = [*map(scores_lib.with_judgement, scores, trajectories)]
  if file and processes.is_first():
    _note_seconds(file, secs, len(questions))
    shards.write(file, [{**label, **_record(case, t, score, tokenizer)}
                        for t, score in zip(trajectories, scores)])
  return scores


def _record(case: EvalCase, trajectory: Trajectory, score: scores_lib.Score,
            tokenizer: Any) -> dict[str, Any]:
  """Returns a line of the records: an answer, its score and its trajectory."""
  return {
      'method': case.method, 'set': case.dataset.name, 'engine': case.engine,
      'decoding': case.decoding, 'question': trajectory.question.text,
      'golds': trajectory.question.answers, 'answer': trajectory.answer,
      'em': score.values['em'], 'score': dataclasses.asdict(score),
      'text': tokenizer.decode(trajectory.tokens) if (
          trajectory.prompt_tokens) else trajectory.response,
      'trajectory': records.to_json(trajectory)}


def read_table(folder: pathlib.Path) -> list[dict[str, Any]] | None:
  """Returns the rows in an evaluation's folder, or None if it has no table."""
  return atomic_files.read_json(folder / TABLE)


def recorded(folder: pathlib.Path) -> dict[str, list[scores_lib.Score]]:
  """Returns the scores in a folder's records, by the names of cases."""
  return {path.name: [scores_lib.Score(**line['score'])
                      for line in shards.read_all(path)]
          for path in sorted((folder / RECORDS).iterdir())}


def limited(cases: Sequence[EvalCase], limit: int, seed: int, sets: int = 0
           ) -> list[EvalCase]:
  """Returns the greedy cases, with fewer questions, for use during training.

  Args:
    cases: Cases of a full evaluation. Cases that search random passages are
      left out.
    limit: Number of questions of each data set, which are chosen at random. All
      are kept if it is 0 or larger than the data set.
    seed: Seed of the choice.
    sets: Number of data sets to keep, from the first on. 0: all.
  """
  names = [*dict.fromkeys(case.dataset.name for case in cases)][:sets or None]
  return [
      dataclasses.replace(case, dataset=dataclasses.replace(
          case.dataset, questions=questions_lib.subset(
              case.dataset.questions, limit or len(case.dataset.questions),
              seed)))
      for case in cases if case.decoding == 'greedy'
      and case.engine != 'noise' and case.dataset.name in names]


def _rows(case: EvalCase, scores: Sequence[scores_lib.Score]) -> list[dict]:
  """Returns a row of scores for each hop count, and then one for the set.

  If all questions have the same hop count, only the row of the set is returned.
  """
  by_hops: dict[int | str, list[scores_lib.Score]] = defaultdict(list)
  for score in scores:
    by_hops[score.hops].append(score)
  groups = sorted(by_hops.items()) if len(by_hops) > 1 else []
  return [_row(case.dataset.name, case.engine, case.decoding, hops, [group],
               case.score)
          for hops, group in (*groups, (ALL, scores))]


def _means(results: Sequence[tuple[EvalCase, Sequence[scores_lib.Score]]]
          ) -> list[dict]:
  """Returns a row of means for each engine and decoding with several sets."""
  by_way = defaultdict(list)
  for case, scores in results:
    if case.engine != 'noise' and not case.dataset.is_common:
      by_way[case.engine, case.decoding, case.score].append(scores)
  return [_row(datasets.MEAN, engine, decoding, ALL, sets, score)
          for (engine, decoding, score), sets in by_way.items()
          if len(sets) > 1]


def _row(name: str, engine: str, decoding: str, hops: int | str,
         sets: Sequence[Sequence[scores_lib.Score]], score: str) -> dict:
  """Returns a row of the table: means over each set, averaged over the sets."""
  means = [scores_lib.means(scores) for scores in sets]
  values = {key: float(np.mean([of_set[key] for of_set in means]))
            for key in (*scores_lib.NAMES, *scores_lib.JUDGED)
            if all(key in of_set for of_set in means)}
  by_set = [list(compare.by_question(scores, score).values())
            for scores in sets]
  low, high = interval_of_mean([
      (float(np.mean(values)), *(
          wilson(sum(values), len(values))
          if score != 'f1' and len(values) == len(scores)
          else compare.bootstrap(values)))
      for values, scores in zip(by_set, sets)])
  is_alone = len(sets) == 1
  return {
      'set': name, 'engine': engine, 'decoding': decoding, 'hops': hops,
      'n': sum(map(len, by_set)), 'em': values.pop('em'),
      '95% interval': f'{low:.2f}-{high:.2f}', **values,
      'search_errors': sum(one.failed for scores in sets for one in scores),
      **(scores_lib.sample_statistics(sets[0], score) if is_alone else {}),
      **({} if score == 'em' else {'score': score})}


def _note_seconds(file: pathlib.Path, secs: float, questions: int) -> None:
  """Writes a shard's seconds, and its number of questions, beside the table.

  They are not in the records, because records must be reproducible.
  """
  folder = file.parents[2]
  seconds = atomic_files.read_json(folder / SECONDS) or {}
  seconds.setdefault(file.parent.name, {})[file.name] = [secs, questions]
  atomic_files.write_json(folder / SECONDS, seconds)


def with_seconds(rows: Sequence[dict], folder: pathlib.Path) -> list[dict]:
  """Returns rows, with seconds per question added to rows of whole sets."""
  by_case = atomic_files.read_json(folder / SECONDS) or {}
  result = []
  for row in rows:
    by_shard = by_case.get(
        _case_name(row['set'], row['engine'], row['decoding']), {})
    # A folder of an earlier version has the seconds of a question alone.
    secs, questions = np.sum([[0, 0], *(
        shard if isinstance(shard, list) else [shard, 1]
        for shard in by_shard.values())], axis=0)
    result.append(row | ({'seconds': float(secs / questions)}
                         if questions and row['hops'] == ALL else {}))
  return result


def wilson(hits: float, n: int) -> tuple[float, float]:
  """Returns the 95 % interval (low, high) of a share hits / n (Wilson 1927)."""
  p, z = hits / n, 1.96
  centre = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  return max(centre - half, 0.0), min(centre + half, 1.0)


def interval_of_mean(sets: Sequence[tuple[float, float, float]]
                    ) -> tuple[float, float]:
  """Returns the 95 % interval of a mean over independent sets.

  Args:
    sets: Score of each set, from 0 to 1, and the bounds of its 95 % interval.

  Source: Zou and Donner 2008, who call it MOVER.
  """
  mean = sum(score for score, *_ in sets) / len(sets)
  below = math.hypot(*(score - low for score, low, _ in sets)) / len(sets)
  above = math.hypot(*(high - score for score, _, high in sets)) / len(sets)
  return max(mean - below, 0.0), min(mean + above, 1.0)


def columns(rows: Sequence[Mapping]) -> list[str]:
  """Returns COLUMNS, and further columns that the rows have."""
  return list(dict.fromkeys((*COLUMNS, *(key for row in rows for key in row))))


def main_score(row: Mapping) -> float:
  """Returns the main score of a row, to which its interval belongs.

  The main score is exact match unless the row names another score.
  """
  return row[row.get('score', 'em')]


def score_name(row: Mapping) -> str:
  """Returns the name of a row's main score, for texts."""
  return NAMED[row.get('score', 'em')]


def headline(rows: Sequence[Mapping]) -> float | None:
  """Returns the greedy main score of a table; None if it has no greedy row."""
  row = headline_row(rows)
  return None if row is None else main_score(row)


def headline_row(rows: Sequence[Mapping]) -> Mapping | None:
  """Returns the greedy row with the headline of a table; None if it has none.

  It is the row of the mean over all sets or, if there is none, the row of the
  first set, with the first engine. Rows with random passages are left out.
  """
  by_set = {row['set']: row for row in reversed(rows)
            if row['hops'] == ALL and row['decoding'] == 'greedy'
            and row['engine'] != 'noise'}
  return by_set.get(datasets.MEAN, next(reversed(by_set.values()), None))


def scalars(rows: Sequence[Mapping]) -> dict[str, float]:
  """Returns the scores of a table as metrics of a run, {name: value}.

  Names are such as 'val/<set>/em/greedy' and 'val/<set>_2hop/em/greedy'. For
  every engine but the first, the engine's name follows the name of the set.
  """
  result = {}
  first = next((row['engine'] for row in rows if row['engine'] != 'noise'), '')
  for row in rows:
    engine = '' if row['engine'] == first else (
        f'_{row["engine"].replace(":", ".")}')
    hops = '' if row['hops'] == ALL else f'_{row["hops"]}hop'
    prefix = f'val/{row["set"]}{engine}{hops}'
    for score in SHOWN:
      result[f'{prefix}/{score}/{row["decoding"]}'] = row[score]
  return result
