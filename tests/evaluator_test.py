# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""evaluator: intervals, rows, and names of metrics."""

import dataclasses
import json

import fakes
import numpy as np
import pytest
from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.evaluation import scores
from searchrl.evaluation import shards
from searchrl.evaluation import compare
from searchrl.evaluation import evaluator
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.trajectory import Action, Question, Scores, Trajectory, Turn


@pytest.mark.parametrize('hits, n', [(0, 10), (3, 10), (10, 10), (50, 200)])
def test_wilson_interval_solves_its_equation(hits, n):
  # The ends p of the interval are where |hits/n - p| = z sqrt(p (1-p) / n).
  for p in evaluator.wilson(hits, n):
    np.testing.assert_allclose(
        (hits / n - p) ** 2, 1.96 ** 2 * p * (1 - p) / n, atol=1e-12)


@pytest.mark.parametrize('rates', [(0.2, 0.5, 0.9), (0.01, 0.02, 0.1)])
def test_intervals_of_a_mean_over_sets_cover_it_as_often_as_they_say(rates):
  rng, hits, counts = np.random.default_rng(3), 0, (125, 300, 150)
  for _ in range(2000):
    right = rng.binomial(counts, rates)
    low, high = evaluator.interval_of_mean([
        (hits / n, *evaluator.wilson(hits, n))
        for hits, n in zip(right.tolist(), counts)])
    hits += low <= np.mean(rates) <= high
  assert 0.93 <= hits / 2000 <= 0.97


def test_the_interval_of_a_mean_by_hand():
  assert evaluator.interval_of_mean([(0.5, 0.25, 0.875)]) == (0.25, 0.875)
  for n in range(1, 400):  # no bound is beyond 0 or 1, not even by rounding
    for hits in (0, n):
      low, high = evaluator.interval_of_mean(
          [(hits / n, *evaluator.wilson(hits, n))])
      assert 0 <= low <= high <= 1 and not f'{low:.2f}'.startswith('-')
  low, high = evaluator.interval_of_mean([(0.5, 0.2, 0.9), (0.7, 0.3, 1.0)])
  assert (low, high) == pytest.approx((0.6 - 0.5 / 2, 0.6 + 0.5 / 2))
  low, high = evaluator.interval_of_mean([(0.0, *evaluator.wilson(0, 9))] * 4)
  assert low == 0 and high == pytest.approx(evaluator.wilson(0, 9)[1] / 2)


def answered():
  for i, (hops, answer) in enumerate(
      [(1, 'Elba'), (1, 'Oder'), (2, 'the elba')]):
    question = Question(f'q{i}', 'which?', ('Elba',), hops)
    turn = Turn((1,), (0.0,), Action('answer', (answer,)))
    yield Trajectory(question, 0, 0, (1,), (turn,), 'answer')


class Answers:
  """A sampler whose policy gives these three answers."""

  together = False

  def __init__(self):
    self.asked, self.tokenizer = [], fakes.TOKENIZER

  def sync(self, params):
    return weight_sync.Synced(params)

  def rollout(self, weights, requests, *, temperature, **_):
    assert weights == 'params' and temperature == 0.0
    by_uid = {t.question.uid: t for t in answered()}
    self.asked += [r.question.uid for r in requests]
    return samplers.Rollouts([by_uid[r.question.uid] for r in requests], [])


def test_rows_are_by_hops_and_scored_by_every_measure():
  case = evaluator.EvalCase(
      datasets.Dataset('known', [t.question for t in answered()], None),
      'bm25', None,
      'greedy')
  rows = evaluator.run(Answers(), 'params', [case])
  assert [(r['hops'], r['n'], r['em']) for r in rows] == [
      (1, 2, 0.5), (2, 1, 1.0), ('all', 3, 2 / 3)]
  assert rows[0]['f1'] == 0.5 and rows[0]['searches'] == 0
  values = evaluator.scalars(rows)
  assert values['val/known_2hop/em/greedy'] == 1.0
  assert values['val/known/em/greedy'] == 2 / 3
  assert not [name for name in values if 'mean' in name]


def test_a_judge_adds_columns_beside_its_agreement_with_em(capsys):
  def by_letter(trajectories):
    return [rewards.JudgeError('no_verdict') if t.question.uid == 'q2' else
            Scores(float(t.answer[0] in 'EO')) for t in trajectories]

  case = case_of('known', 'q0', 'q1', 'q2')
  rows = evaluator.run(Answers(), 'params', [case], judge=scoring.Scorer(
      rewards.Judge(by_letter)))
  assert [(r['judged'], r['agrees_with_em'], r['judge_error'])
          for r in rows if r['hops'] in (1, 'all')] == [
              (1, 0.5, 0), (1, 0.5, pytest.approx(1 / 3))]
  assert capsys.readouterr().err.count(
      'the judge failed on 1 of 3 answers, first with no_verdict: ') == 1
  assert [r for r in rows if r['hops'] == 2][0].keys() & {*scores.JUDGED} == {
      'judge_error'}
  assert {*scores.JUDGED} <= {*evaluator.columns(rows)}
  plain = evaluator.run(Answers(), 'params', [case])
  assert not {*scores.JUDGED} & {*evaluator.columns(plain)}
  for row, other in zip(rows, plain):
    assert other.items() <= row.items()


def test_failures_of_a_judge_do_not_change_the_expected_verdict():
  """The oracle is the mean over all ways in which the judge can fail."""
  def judged(fails, verdicts=(1, 0, 1, 1)):
    rows = [dataclasses.replace(score('q', em), values=score('q', em).values | {
        'answered': 1.0}) for em in (1, 0, 0, 1)] + [score('q', 0, '')] * 2
    whole = next(answered())
    return [scores.with_judgement(row, dataclasses.replace(
        whole, reward=float(verdict), judge_error='timeout: 9 s' * fail or None
        )) for row, verdict, fail in zip(
            rows, (*verdicts, 0, 0), (*fails, fails[0], 0))]

  ways = [[n == k or n == m for n in range(4)] for k in range(4)
          for m in range(k)]
  found = [scores.means(judged(way)) for way in ways]
  whole = scores.means(judged([False] * 4))
  assert whole['judged'] == np.mean([1, 0, 1, 1, 0, 0])
  assert whole['agrees_with_em'] == np.mean([1, 1, 0, 1, 1, 1])
  for name in ('judged', 'agrees_with_em'):
    assert np.mean([m[name] for m in found]) == pytest.approx(whole[name])
  assert {m['judge_error'] for m in found} == {2 / 6}
  down = scores.means(judged([True] * 4))
  assert down.keys() & {*scores.JUDGED} == {'judge_error'}
  assert scores.warnings(judged([False] * 4)) == []
  warning, = scores.warnings(judged(ways[0]))
  assert 'failed on 2 of 6 answers, first with timeout: 9 s.' in warning


def case_of(name, *uids, decoding='greedy', engine='bm25', **fields):
  by_uid = {t.question.uid: t.question for t in answered()}
  return evaluator.EvalCase(
      datasets.Dataset(name, [by_uid[uid] for uid in uids], None, **fields),
      engine, None, decoding)


def test_the_name_of_a_users_engine_fits_into_a_folders_name():
  assert case_of('nq', engine='my_engine:make').name == (
      'nq.my_engine.make.greedy')


def test_a_set_whose_name_has_a_slash_stays_in_its_folder(tmp_path):
  cases = [case_of(name, 'q0') for name in ('../../escaped', 'org/nq')]
  rows = evaluator.run(Answers(), 'params', cases, folder=tmp_path / 'a' / 'b')
  assert {path.name for path in (tmp_path / 'a/b/records').iterdir()} == {
      '......escaped.bm25.greedy', 'org.nq.bm25.greedy'}
  assert [*tmp_path.iterdir()] == [tmp_path / 'a']
  assert all('seconds' in row for row in evaluator.with_seconds(
      rows, tmp_path / 'a/b') if row['set'] != 'mean')
  with pytest.raises(ValueError, match='several have the records of org.nq.bm'):
    evaluator.run(Answers(), 'params', [*cases, case_of('org.nq', 'q0')],
                  folder=tmp_path / 'c')


def test_a_set_of_one_hop_count_has_its_name_alone():
  rows = evaluator.run(Answers(), 'params', [case_of('nq', 'q0', 'q1')])
  assert [(r['set'], r['hops'], r['em']) for r in rows] == [('nq', 'all', 0.5)]
  assert set(evaluator.scalars(rows)) == {
      f'val/nq/{score}/greedy' for score in ('em', 'subem', 'f1', 'searches')}


def test_the_mean_weighs_sets_alike_and_leaves_random_passages_out():
  rows = evaluator.run(Answers(), 'params', [
      case_of('nq', 'q0', 'q1'), case_of('hotpotqa', 'q2'),
      case_of('nq', 'q1', engine='noise')])
  mean = rows[-1]
  assert (mean['set'], mean['hops'], mean['n'], mean['em']) == (
      'mean', 'all', 3, 0.75)
  values = evaluator.scalars(rows)
  assert values['val/mean/em/greedy'] == 0.75
  assert values['val/nq_noise/em/greedy'] == 0.0
  assert values['val/hotpotqa/em/greedy'] == 1.0


def test_each_engine_has_its_metrics():
  rows = evaluator.run(Answers(), 'params', [
      case_of('nq', 'q0', engine='noise'), case_of('nq', 'q0', 'q1'),
      case_of('nq', 'q0', engine='my_engine:make')])
  values = evaluator.scalars(rows)
  assert values['val/nq/em/greedy'] == evaluator.headline(rows) == 0.5
  assert {name for name in values if name.endswith('/em/greedy')} == {
      'val/nq/em/greedy', 'val/nq_noise/em/greedy',
      'val/nq_my_engine.make/em/greedy'}


def test_during_training_few_questions_are_answered_greedily():
  cases = [case_of('nq', 'q0', 'q1', 'q2'),
           case_of('nq', 'q0', 'q1', 'q2', decoding='sampled'),
           case_of('nq', 'q0', engine='noise'), case_of('hotpotqa', 'q2')]
  few = evaluator.limited(cases, 2, seed=3)
  assert [(c.dataset.name, len(c.dataset.questions)) for c in few] == [
      ('nq', 2), ('hotpotqa', 1)]
  assert all(c.decoding == 'greedy' and c.engine == 'bm25' for c in few)
  assert few == evaluator.limited(cases, 2, seed=3)
  assert [len(c.dataset.questions) for c in evaluator.limited(cases, 0, 3)] == [
      3, 1]


def test_common_knowledge_is_no_part_of_the_mean():
  cases = [case_of('known', 'q0', 'q1'), case_of('unseen', 'q2'),
           case_of('famous', 'q1', is_common=True)]
  rows = evaluator.run(Answers(), 'params', cases)
  assert [(r['n'], r['em']) for r in rows if r['set'] == 'mean'] == [(3, 0.75)]
  rows = evaluator.run(Answers(), 'params', cases[1:])
  assert [r['set'] for r in rows] == ['unseen', 'famous']  # a mean of one


def test_the_first_sets_alone_may_be_asked_during_training():
  cases = [case_of(name, 'q0') for name in ('known', 'unseen', 'famous')]
  assert [[c.dataset.name for c in evaluator.limited(cases, 0, 3, sets)]
          for sets in (1, 2, 0, 9)] == [
              ['known'], ['known', 'unseen'],
              ['known', 'unseen', 'famous'], ['known', 'unseen', 'famous']]


def evaluated(folder, sampler=None, **options):
  sampler = sampler or Answers()
  rows = evaluator.run(sampler, 'params', [case_of('nq', 'q0', 'q1', 'q2')],
                   folder=folder, shard=2, **options)
  return sampler.asked, rows


def contents(folder):
  return {str(f.relative_to(folder)): f.read_bytes()
          for f in folder.glob('**/*')
          if f.is_file() and f.name != evaluator.SECONDS}


def test_records_are_written_shard_by_shard_and_hold_the_scores(tmp_path):
  asked, rows = evaluated(tmp_path)
  assert asked == ['q0', 'q1', 'q2']
  assert json.loads((tmp_path / evaluator.TABLE).read_text()) == rows
  assert {name for name in contents(tmp_path)} == {
      'table.json', 'records/nq.bm25.greedy/000000.jsonl.gz',
      'records/nq.bm25.greedy/000001.jsonl.gz',
      'records/nq.bm25.greedy/digests.json'}
  lines = [*shards.read_all(tmp_path / evaluator.RECORDS)]
  assert [line['answer'] for line in lines] == ['Elba', 'Oder', 'the elba']
  assert [line['em'] for line in lines] == [1, 0, 1]
  assert rows[-1]['em'] == np.mean([line['em'] for line in lines])


def test_a_shard_of_another_source_is_sampled_again(tmp_path):
  case = case_of('nq', 'q0', 'q1', 'q2')
  asked = []
  for source in ('a', 'a', 'b', 'b', 'a', ''):
    sampler = Answers()
    evaluator.run(sampler, 'params', [case], folder=tmp_path,
                  source=source and (lambda *_, source=source: source))
    asked.append(len(sampler.asked))
  assert asked == [3, 0, 3, 0, 3, 3]


def test_answers_are_of_the_source_of_their_set_and_engine(tmp_path):
  cases = [case_of('nq', 'q0'), case_of('hotpotqa', 'q1', engine='dense')]
  evaluator.run(Answers(), 'params', cases, folder=tmp_path,
                source='{} by {}'.format)
  assert {line['source'] for case in cases for line in shards.read_all(
      tmp_path / evaluator.RECORDS / case.name)} == {
          'nq by bm25', 'hotpotqa by dense'}


@pytest.mark.parametrize('change', [
    dict(text='whose?'), dict(answers=('Oder',)), dict(hops=3)])
def test_a_shard_of_other_questions_is_sampled_again(tmp_path, change):
  case, asked = case_of('nq', 'q0', 'q1', 'q2'), []
  other = dataclasses.replace(case, dataset=dataclasses.replace(
      case.dataset, questions=[
          *case.dataset.questions[:2],
          dataclasses.replace(case.dataset.questions[2], **change)]))

  class Asked(Answers):
    """Answers the questions that are asked, as they are."""

    def rollout(self, weights, requests, **options):
      trajectories = super().rollout(weights, requests, **options).trajectories
      return samplers.Rollouts([
          dataclasses.replace(trajectory, question=request.question)
          for trajectory, request in zip(trajectories, requests)], [])

  for one in (case, case, other, other, case):
    sampler = Asked()
    evaluator.run(sampler, 'params', [one], folder=tmp_path)
    asked.append(len(sampler.asked))
  assert asked == [3, 0, 3, 0, 3]


def test_a_shard_with_a_failed_search_is_sampled_again(tmp_path, capsys):
  class Failing(Answers):
    """Loses the search of its first question."""

    def rollout(self, weights, requests, **options):
      first, *rest = super().rollout(weights, requests, **options).trajectories
      return samplers.Rollouts([
          dataclasses.replace(first, stop_reason='search_error'), *rest], [])

  asked, case = [], case_of('nq', 'q0', 'q1', 'q2')
  for kind in (Failing, Answers, Answers):
    sampler = kind()
    *_, row = evaluator.run(sampler, 'params', [case], folder=tmp_path, shard=2)
    asked.append(sampler.asked)
  assert asked == [['q0', 'q1', 'q2'], ['q0', 'q1', 'q2'], []]
  assert capsys.readouterr().err.count('2 of 3 answers ended with a fail') == 1
  assert row['search_errors'] == 0


@pytest.mark.parametrize('kind, again', [
    ('unavailable', ['q0', 'q1']), ('no_verdict', [])])
def test_a_shard_whose_judge_failed_is_judged_again(
    tmp_path, capsys, kind, again):
  def failing(trajectories):
    return [rewards.JudgeError(kind) if t.question.uid == 'q1' else Scores(1)
            for t in trajectories]

  def right(trajectories):
    return [Scores(1)] * len(trajectories)

  asked, case = [], case_of('nq', 'q0', 'q1', 'q2')
  for judge in (failing, right, right):
    sampler = Answers()
    *_, row = evaluator.run(sampler, 'params', [case], folder=tmp_path, shard=2,
                            judge=scoring.Scorer(rewards.Judge(judge)))
    asked.append(sampler.asked)
  assert asked == [['q0', 'q1', 'q2'], again, []]
  failures = 1 if again else 3
  assert capsys.readouterr().err.count('judge failed on 1 of 3') == failures
  assert row['judge_error'] == (0 if again else 1 / 3)


def test_a_shard_that_is_there_is_not_sampled_again_a_damaged_one_is(tmp_path):
  evaluated(tmp_path)
  whole = contents(tmp_path)
  assert evaluated(tmp_path)[0] == [] and contents(tmp_path) == whole
  second = tmp_path / 'records/nq.bm25.greedy/000001.jsonl.gz'
  for damage in (second.unlink, lambda: second.write_bytes(b'x'),
                 lambda: second.write_bytes(second.read_bytes()[:-1])):
    damage()
    assert evaluated(tmp_path)[0] == ['q2'] and contents(tmp_path) == whole
  second.write_bytes(b'x')
  with pytest.raises(ValueError, match='000001.jsonl.gz has changed since'):
    list(shards.read_all(tmp_path / evaluator.RECORDS))


def test_seconds_are_shown_for_a_whole_set_of_any_engine(tmp_path):
  case = case_of('nq', 'q0', 'q2', engine='my_engine:make')
  rows = evaluator.run(Answers(), 'params', [case], folder=tmp_path)
  shown = evaluator.with_seconds(rows, tmp_path)
  assert [row['hops'] for row in shown if row.get('seconds', -1) >= 0] == ['all']


def test_seconds_are_those_of_all_questions_together(tmp_path):
  (tmp_path / evaluator.SECONDS).write_text(json.dumps({'nq.bm25.greedy': {
      '000000.jsonl.gz': [10.0, 1000], '000001.jsonl.gz': [2.0, 1]}}))
  row = {'set': 'nq', 'engine': 'bm25', 'decoding': 'greedy', 'hops': 'all'}
  shown, = evaluator.with_seconds([row], tmp_path)
  assert shown['seconds'] == pytest.approx(12 / 1001)


def score(uid, right, answer='a'):
  values = dict.fromkeys(scores.NAMES, 0.0) | {'em': float(right)}
  return scores.Score(uid, 1, answer, False, values)


def test_several_samples_by_hand():
  found = [score('a', 1, 'x'), score('a', 0, 'y'), score('a', 0, 'y'),
           score('b', 0, ''), score('b', 1, 'z'), score('b', 0, '')]
  assert scores.sample_statistics(found) == {
      'pass@3': 1.0, 'majority': 0.5,  # of a: y; of b: z, for '' is no answer
      'spread': pytest.approx(np.std([.5, .5, 0], ddof=1))}
  assert scores.sample_statistics(found[:1] + found[3:4]) == {}
  assert scores.sample_statistics([]) == {}


def test_a_long_evaluation_says_how_far_it_is(capsys):
  many = [t.question for t in answered()] * 40
  case = evaluator.EvalCase(
      datasets.Dataset('known', many, None), 'bm25', None, 'greedy')
  evaluator.run(Answers(), 'params', [case], shard=50)
  assert capsys.readouterr().err.splitlines() == [
      'known.bm25.greedy: 50 of 120 questions, exact match 0.660',
      'known.bm25.greedy: 100 of 120 questions, exact match 0.670',
      'known.bm25.greedy: 120 of 120 questions, exact match 0.667']


def test_the_headline_is_the_mean_of_sets_or_the_first_set():
  row = dict(hops='all', engine='bm25', decoding='greedy')
  rows = [row | dict(set='a', em=0.2), row | dict(set='b', em=0.4),
          row | dict(set='a', em=0.9, decoding='sampled'),
          row | dict(set='a', em=0.8, engine='noise'),
          row | dict(set='a', em=0.7, hops=1)]
  assert evaluator.headline(rows) == 0.2
  assert evaluator.headline([*rows, row | dict(set='mean', em=0.3)]) == 0.3
  assert evaluator.headline(rows[2:]) is None


@pytest.mark.parametrize('name', scores.ANSWERS)
def test_the_main_score_is_behind_interval_headline_and_samples(
    name, monkeypatch):
  def one(uid, em, subem, f1):
    values = dict(em=em, subem=subem, f1=f1)
    return scores.Score(uid, 1, 'a', False, dict.fromkeys(
        scores.NAMES, 0.0) | values)

  found = {'nq': [one('a', 0.0, 1.0, 0.5), one('b', 0.0, 1.0, 0.75),
                  one('c', 1.0, 1.0, 1.0), one('d', 0.0, 0.0, 0.0)],
           'eli5': [one('e', 0.0, 0.0, 0.25), one('f', 0.0, 1.0, 0.5)]}
  monkeypatch.setattr(evaluator, '_case', lambda play, case, *_: found[
      case.dataset.name])
  rows = evaluator.run(Answers(), 'params', [
      evaluator.EvalCase(datasets.Dataset(set_, [], None), 'bm25', None,
                         'greedy', score=name) for set_ in found])
  mean = {'em': (1 / 4 + 0) / 2, 'subem': (3 / 4 + 1 / 2) / 2,
          'f1': (2.25 / 4 + .75 / 2) / 2}[name]
  assert evaluator.headline(rows) == mean == rows[-1][name]
  assert {row.get('score', 'em') for row in rows} == {name}
  interval = {'em': evaluator.wilson(1, 4), 'subem': evaluator.wilson(3, 4),
              'f1': compare.bootstrap([.5, .75, 1.0, 0.0])}[name]
  low, high = interval
  assert rows[0]['95% interval'] == f'{low:.2f}-{high:.2f}'
  again = [one('a', 1.0, 1.0, 1.0), one('b', 0.0, 0.0, 0.25)]
  first = found['nq'][:2]
  assert scores.sample_statistics(first + again, name)['pass@2'] == {
      'em': 0.5, 'subem': 1.0, 'f1': (1.0 + 0.75) / 2}[name]
