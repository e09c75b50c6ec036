# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""collect: what is counted of the groups asked, kept and carried over."""

import dataclasses
import json

import fakes
import numpy as np
import pytest

from searchrl.agent import rewards
from searchrl.rl import algorithms
from searchrl.rollouts import collect
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import scoring
from searchrl.runtime import alerts
from searchrl.trajectory import Question, Request, Scores, Trajectory


def collected(outcomes, *, questions=None, max_rounds=1,
              keep=algorithms.keep_all, surplus=(), stop_when_full=False,
              sampler=None, progress=None, scorer=fakes.SCORER):
  """One step over questions with these outcomes."""
  return collect.collect(
      sampler or fakes.Sampler(lambda n, sample: outcomes[n][sample]),
      fakes.SYNCED, progress or collect.Progress(surplus=tuple(surplus)), 0,
      draw=fakes.draw, keep=keep, search=None, scorer=scorer,
      rounds=collect.Rounds(questions or len(outcomes), len(outcomes[0]),
                            max_rounds, stop_when_full))


def counts(outcomes, **options):
  return collected(outcomes, **options).metrics


def kinds(found):
  return {name.removeprefix('data/frac_group_'): value
          for name, value in found.items() if 'frac_group' in name}


def test_groups_are_counted_by_what_their_outcomes_teach():
  found = counts([(0, 0, 0), (1, 1, 1), (0, 1, 0), (None,) * 3, (0, None, 1),
                  (None, 1, None), (0, 0, None), (0.5, 0.5, 0.5)])
  assert kinds(found) == {
      'mixed': 2 / 8, 'all_zero': 2 / 8, 'all_one': 2 / 8, 'failed': 1 / 8}
  assert found['data/group_size/mean'] == (5 * 3 + 2 + 1 + 2 - 2 * 3 + 3) / 8
  assert found['data/group_size/min'] == 0


@pytest.mark.parametrize('group, kind', [
    ((-0.5, -0.2), 'mixed'), ((1.0, 1.5), 'mixed'),  # an own reward's range
    ((0.1 + 0.2 - 0.3, 0.0), 'all_zero'), ((1.0, 1 - 1e-9), 'all_one'),
    ((-1.0, -1.0), 'constant'), ((2.0, 2.0), 'constant'), ((0.0, 1.0), 'mixed'),
    ((None, 0.0), 'all_zero'), ((None, None), 'failed')])
def test_a_group_is_of_one_kind(group, kind):
  found = kinds(counts([group]))
  assert found == {k: float(k == kind) for k in found}
  assert (kind == 'mixed') == (counts([group], keep=algorithms.keep_mixed)[
      'data/groups_trained'] == 1)  # the filter's own rule


def test_a_step_of_failed_searches_alone_is_not_all_zero():
  found = counts([(None, None)] * 3)
  assert kinds(found) == {
      'mixed': 0, 'all_zero': 0, 'all_one': 0, 'failed': 1}
  assert found['data/group_size/mean'] == found['data/group_size/min'] == 0


def test_groups_without_a_score_are_nothing_to_train_on():
  found = counts([(None, None)] * 3)
  assert found['data/groups_asked'] == 3 and found['data/groups_trained'] == 0
  alert, = alerts.of_step([{alerts.STEP: 1} | found], {'empty_batch': 0})
  assert alert.text == 'there was no trajectory to train on'
  assert counts([(None, None), (None, 0)])['data/groups_trained'] == 1


def test_tries_count_what_this_step_asked_for_and_kept():
  mixed, zero = (0, 1), (0, 0)
  outcomes = [zero, mixed, zero, mixed, mixed, mixed, zero, zero]
  # 4 asked, 2 kept; then 2 / .5 = 4 asked, 2 kept: 8 tries for 4 groups.
  found = counts(outcomes, questions=4, max_rounds=9,
                 keep=algorithms.keep_mixed)
  assert found['data/groups_asked'] == 8
  assert found['data/tries_per_kept_group'] == 2
  old = [[Trajectory(Question('old', 'x', ('y',)), 0, 0, (1,), (), 'answer',
                     1.0, 1.0)]]
  # One is carried in: 3 asked, 1 kept; then 2 / (1/3) > 4 asked, 3 kept.
  found = counts(outcomes, questions=4, max_rounds=9,
                 keep=algorithms.keep_mixed, surplus=old)
  assert found['data/groups_carried_in'] == 1
  assert found['data/groups_carried_out'] == 1
  assert found['data/tries_per_kept_group'] == 7 / 4


def test_none_kept_and_none_asked_are_no_division_by_zero():
  found = counts([(0, 0)] * 2, keep=algorithms.keep_mixed)
  assert found['data/tries_per_kept_group'] == 2
  old = [[Trajectory(Question('old', 'x', ('y',)), 0, 0, (1,), (), 'answer',
                     1.0, 1.0)]]
  found = counts([(0, 0)], surplus=old)
  assert found['data/tries_per_kept_group'] == found['data/groups_asked'] == 0
  assert set(kinds(found).values()) == {0}
  assert found['data/group_size/min'] == 0


class Impatient(fakes.Sampler):
  """Samples the last requests first, and asks after each whether to go on."""

  def rollout(self, weights, requests, *, enough, **_):
    trajectories = []
    for request in requests[::-1]:
      trajectories.append(self.trajectory(request))
      if enough(trajectories):
        break
    return samplers.Rollouts(trajectories[::-1], [])


def test_a_step_may_end_with_its_batch_full_and_others_unfinished():
  outcomes = [(0, 1), (0, 0), (1, 0), (0, 1), (0, 1)]
  found = counts(outcomes, questions=2, keep=algorithms.keep_mixed,
                 max_rounds=3, stop_when_full=True,
                 sampler=Impatient(lambda n, sample: outcomes[n][sample]))
  assert found['data/groups_trained'] == 2
  # 2 asked: one mixed. Then 2 asked, of which one was needed and sampled.
  assert found['data/groups_asked'] == 3
  assert found['data/groups_carried_out'] == 0


def test_a_round_that_may_end_early_scores_each_trajectory_once():
  asked = []
  scorer = scoring.Scorer(rewards.each(
      lambda t: asked.append((t.question.uid, t.sample)) or t.outcome_reward))
  scorer = dataclasses.replace(scorer, outcome=lambda t: t.outcome_reward)
  outcomes = [(0, 1), (0, 0), (1, 0), (0, 1), (0, 1)]
  found = collected(
      outcomes, questions=2, keep=algorithms.keep_mixed, max_rounds=3,
      stop_when_full=True, scorer=scorer,
      sampler=Impatient(lambda n, sample: outcomes[n][sample]))
  assert sorted(asked) == [
      (t.question.uid, t.sample) for t in found.trajectories]


def test_a_round_that_may_end_early_is_refused_to_a_judge_of_rounds():
  judge = rewards.format_em(mixed_only=True)
  with pytest.raises(ValueError, match=(
      'stop_when_full is for rewards of one trajectory, .* is mine:judge. T')):
    collected([(0, 1)], stop_when_full=True, sampler=fakes.Sampler(None),
              scorer=scoring.Scorer(judge, name='mine:judge'))


def test_a_judge_scores_each_round_before_the_filter():
  rounds = []

  def judge(trajectories):
    rounds.append([t.question.uid for t in trajectories])
    return [Scores(2.0, t.outcome_reward, {'part': 3.0}) for t in trajectories]

  outcomes = [(0, 0), (0, 1), (1, 0), (1, 1)]
  found = collected(outcomes, questions=2, keep=algorithms.keep_mixed,
                    max_rounds=2, scorer=scoring.Scorer(rewards.Judge(judge)))
  assert rounds == [['q0', 'q0', 'q1', 'q1'], ['q2', 'q2', 'q3', 'q3']]
  assert [g[0].question.uid for g in found.groups] == ['q1', 'q2']
  for trajectory in found.trajectories:
    assert trajectory.reward == 2.0 and trajectory.parts == {'part': 3.0}


def test_the_filter_keeps_groups_in_their_order_and_counts():
  odd_first = lambda n, sample: float(sample == 0 and n % 2)
  step = lambda progress: collected(
      [(0, 0, 0)], questions=5, max_rounds=4, keep=algorithms.keep_mixed,
      sampler=fakes.Sampler(odd_first), progress=progress)
  found = step(collect.Progress())
  # Odd questions pass: q1 q3 of q0-q4; then ceil(3 / .4) > 5 asks 5: q5-q9
  # gives q5 q7 q9.
  assert [g[0].question.uid for g in found.groups] == [
      'q1', 'q3', 'q5', 'q7', 'q9']
  assert found.progress.surplus == () and found.progress.rollouts == 30
  assert found.metrics['data/groups_asked'] == 10
  assert len(found.trajectories) == 30
  again = step(found.progress)
  assert len(again.groups) == 5
  assert again.metrics['data/groups_carried_out'] == 0
  assert again.metrics['data/tries_per_kept_group'] == pytest.approx(2.0)


@pytest.mark.parametrize('keep', [
    lambda outcomes, ids: np.asarray(outcomes) > 0,
    lambda outcomes, ids: [True]])
def test_a_filter_that_divides_a_group_is_refused(keep):
  groups = [[Trajectory(Question(f'q{group}', 'q', ()), sample, group, (1,),
                        (), outcome_reward=float(sample))
             for sample in range(2)] for group in range(2)]
  with pytest.raises(ValueError, match='keep must return one bool for each '
                     'row, the same for all rows of a question, but returned'):
    collect._accepted(groups, keep)
  kept = collect._accepted(groups, lambda outcomes, ids: list(ids == 1))
  assert kept == groups[1:]


def test_every_round_of_a_step_draws_for_this_step():
  asked = []
  def draw(position, count, step):
    asked.append(step)
    return fakes.draw(position, count)
  collect.collect(
      fakes.Sampler(lambda n, sample: 0.0), fakes.SYNCED,
      collect.Progress(step=4), 3, draw=draw, keep=algorithms.keep_mixed,
      search=None, scorer=fakes.SCORER, rounds=collect.Rounds(2, 3, 2))
  assert asked == [4, 4]  # not the step of the policy, which may be older


def test_a_group_keeps_its_number_from_the_request_to_the_loss():
  """A question that is asked twice has two groups, and neither mixes."""
  same = lambda position, count, step: (
      [fakes.draw((0,), 1)[0][0]] * count, (0,))
  found = collect.collect(
      fakes.Sampler(lambda n, sample: float(sample % 2)), fakes.SYNCED,
      collect.Progress(groups=7), 0, draw=same, keep=algorithms.keep_mixed,
      search=None, scorer=fakes.SCORER, rounds=collect.Rounds(2, 3))
  assert [[t.group for t in group] for group in found.groups] == [
      [7] * 3, [8] * 3]
  assert [[t.sample for t in group] for group in found.groups] == [
      [0, 1, 2], [3, 4, 5]]  # the second time with randomness of its own
  assert found.progress.groups == 9
  rounds = collect.Rounds(2, 3)
  batch = collect.collate(found.groups, algorithms.grpo(), 0, rounds, length=4,
                       mask_truncated=False)
  assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
  assert batch.question_ids.tolist() == [0] * 6
  hops = collect.collate(found.groups, algorithms.hrpo(), 0, rounds, length=4,
                      mask_truncated=False)
  assert hops.group_ids.tolist() == [0] * 6  # one hop count, one baseline


def test_progress_survives_json():
  sampler = fakes.Sampler(lambda *_: 1.0)
  left = [[sampler.trajectory(Request(fakes.draw((n,), 1)[0][0], 0, n))]
          for n in (5, 6, 7)]
  progress = collected([(0, 1)], questions=1, surplus=left).progress
  assert progress.surplus
  record = json.loads(json.dumps(progress.to_json()))
  assert collect.Progress.from_json(record) == progress


def test_a_question_that_occurs_again_is_asked_for_other_samples():
  a, b = (Question(uid, '?', ('x',)) for uid in 'ab')
  requests = collect.requests([a, b, a], 2)
  assert [(r.question.uid, r.sample, r.group) for r in requests] == [
      ('a', 0, 0), ('a', 1, 0), ('b', 0, 1), ('b', 1, 1), ('a', 2, 2),
      ('a', 3, 2)]
