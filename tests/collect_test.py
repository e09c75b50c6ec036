# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""collect: what is counted of the groups asked, kept and carried over."""

import types

import pytest

from searchrl.rl import algorithms
from searchrl.rollouts import collect
from searchrl.trajectory import Question, Trajectory


class Stream:
  """Deals questions q0, q1, ..."""

  def __init__(self):
    self.position = [0]

  def draw(self, count):
    start = self.position[0]
    self.position[0] += count
    return [Question(f'q{start + i}', 'x', ('y',)) for i in range(count)]


class Sampler:
  """Gives each question the outcomes that stand for it; None: it failed."""

  def __init__(self, outcomes):
    self._outcomes = outcomes  # question -> sample -> outcome

  def play(self, params, requests, **_):
    trajectories = []
    for question, sample in requests:
      outcome = self._outcomes[int(question.uid[1:])][sample]
      trajectories.append(Trajectory(
          question, sample, 0, (1,), (),
          'search_error' if outcome is None else 'answer', outcome, outcome))
    return trajectories


def counts(outcomes, *, questions=None, max_rounds=1, keep=algorithms.keep_all,
           surplus=(), end_when_full=False, sampler=None):
  """The metrics of one step."""
  options = types.SimpleNamespace(
      questions=questions or len(outcomes), group_size=len(outcomes[0]),
      max_rounds=max_rounds, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
      end_when_full=end_when_full)
  return collect.collect(
      sampler or Sampler(outcomes), None, Stream(), collect.Progress(surplus=[*surplus]),
      types.SimpleNamespace(keep=keep), None, None, None, options, 0)[2]


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


class Impatient(Sampler):
  """Plays last samples first and asks after each whether there is enough."""

  def play(self, params, requests, *, enough, **_):
    trajectories = []
    for request in requests[::-1]:
      trajectories += super().play(params, [request])
      if enough(trajectories):
        break
    return trajectories[::-1]


def test_a_step_may_end_with_its_batch_full_and_others_unfinished():
  outcomes = [(0, 1), (0, 0), (1, 0), (0, 1), (0, 1)]
  found = counts(outcomes, questions=2, keep=algorithms.keep_mixed,
                 max_rounds=3, end_when_full=True, sampler=Impatient(outcomes))
  assert found['data/groups_trained'] == 2
  # 2 asked: one mixed. Then 2 asked, of which one was needed and played.
  assert found['data/groups_asked'] == 3
  assert found['data/groups_carried_out'] == 0
