# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""alerts: each rule fires where it should, in a run and in its history."""

import math

import pytest

from searchrl.runtime import alerts

CASES = [
    ('unmixed', [1, 0, 0, 1], 'steps 2-3'),
    ('search_errors', [0, 0.05, 0.06], 'step 3'),
    ('search_timeouts', [0.05, 0.06], 'step 2'),
    ('searches_empty', [0.5, 0.51], 'step 2'),
    ('judge_errors', [0.05, 0.06], 'step 2'),
    ('entropy', [1, 0.5, 0.09], 'step 3'),
    ('entropy_rise', [1, 1, 1, 1, 1, 5, 5.1], 'step 7'),
    ('clip_fraction', [0.5, 0.6], 'step 2'),
    ('gradient', [1, 1, 1, 1, 1, 11, 10], 'step 6'),
    ('gradient', [0, 0, 0, 0, 0, 11], ''),  # ten times nothing is nothing
    ('score', [1, 1, 1, 1, 1, 0, 0, 0], 'step 8'),
    ('score', [1, 0, 1, 0, 1, 0, 1, 0], ''),
    ('format', [1, 1, 1, 1, 1, 0, 0, 0], 'step 8'),
    ('score', [0.09] * 5 + [0] * 8, ''),  # it had never begun
    ('state', [0, 2, 0], 'step 2'),
    ('mismatch', [0.02, 0.03], 'step 2'),
    ('slow_step', [1, 1, 1, 1, 1, 6], 'step 6'),
    ('slow_step', [1, 1, 1, 1, 6], ''),  # too few to say what is usual
    ('empty_batch', [3, 0, 1], 'step 2'),
    ('left_out', [0, 0.5, 1], 'steps 2-3'),
    ('critic_left_out', [0, 1], 'step 2'),
    ('not_finite', [1, 0.5, 1, 1, 1], 'steps 4-5'),
]


def lines_of(metric, values):
  return [{alerts.STEP: n, metric: value} for n, value in enumerate(values, 1)]


@pytest.mark.parametrize('name, values, steps', CASES)
def test_a_rule_fires_where_it_should(name, values, steps):
  rule = alerts.RULES[name]
  lines = lines_of(rule.metric, values)
  text = rule.text.format(limit=rule.limit)
  found = dict(alerts.history(lines))
  assert (alerts.format_steps(found[text]) if text in found else '') == steps
  one_by_one = [n for n in range(1, len(lines) + 1) if alerts.of_step(
      lines[:n], {name: rule.limit}) == [alerts.Alert(name, text)]]
  assert (alerts.format_steps(one_by_one) if one_by_one else '') == steps


def test_every_rule_has_a_case():
  assert {name for name, _, steps in CASES if steps} == {*alerts.RULES}


def test_limits_choose_rules_and_move_them():
  lines = lines_of('actor/entropy', [1, 0.3])
  assert not alerts.of_step(lines)
  alert, = alerts.of_step(lines, {'entropy': 0.4})
  assert alert.text == 'entropy fell below 0.4 of what it was at first'
  assert not alerts.of_step(lines, {'score': 0.9})


def test_what_is_no_number_is_passed_over_and_named():
  lines = lines_of('actor/entropy', [1, math.nan, 0.05, math.nan])
  assert [a.rule for a in alerts.of_step(lines[:3])] == ['entropy']
  assert not alerts.of_step(lines)  # of the last step nothing is known
  assert alerts.history(lines) == [
      ('actor/entropy is not a finite number', [2, 4]),
      ('entropy fell below 0.1 of what it was at first', [3])]
  assert not alerts.history(lines_of('critic/x', [math.nan] * 3))


def test_steps_are_said_as_ranges():
  assert alerts.format_steps([9, 3, 4, 5]) == 'steps 3-5, 9'
  assert alerts.format_steps([3]) == 'step 3'
  assert alerts.format_steps([3, 4]) == 'steps 3-4'


def test_groups_that_need_not_be_mixed_are_no_problem():
  line = {alerts.STEP: 1, 'data/frac_group_mixed': 0, 'data/group_size/mean': 6}
  assert alerts.history([line])
  assert not alerts.history([line | {'data/group_size/mean': 1}])  # as in PPO
  flat = {'critic/advantages/max': 1e-7, 'critic/advantages/min': -1e-7}
  assert alerts.history([line | flat])
  assert not alerts.history([line | flat | {'critic/advantages/max': 0.4}])


def test_steps_without_scores_are_no_collapse_and_in_no_mean():
  """A judge is down for 6 steps of 18; without them the score is constant."""
  up = {'critic/score/mean': 0.8, 'data/frac_group_failed': 0.1}
  down = {'critic/score/mean': 0.0, 'data/frac_group_failed': 1.0}
  carried = {'critic/score/mean': 0.0, 'data/frac_group_failed': 0.0,
             'data/groups_asked': 0}

  def broken(steps):
    lines = [{alerts.STEP: n} | step for n, step in enumerate(steps, 1)]
    return [n for n in range(1, len(lines) + 1)
            if alerts.of_step(lines[:n], {'score': 0.5})]

  assert not broken([up] * 6 + [down] * 6 + [up] * 6)
  assert not broken([up] * 6 + [carried] * 6 + [up] * 6)
  # Means of five that fall from 0.8 by 0.16 a step: 0.32 < 0.4 in the third.
  fell = up | {'critic/score/mean': 0.0}
  assert broken([up] * 6 + [down, fell, down, fell, down, fell, down]) == [12]


def test_steps_without_turns_have_no_valid_share():
  lines = [{alerts.STEP: n, 'format/valid_rate': float(n < 7),
            'num_turns/max': 3.0 * (n < 7)} for n in range(1, 13)]
  assert not alerts.history(lines)
  assert alerts.history([line | {'num_turns/max': 1} for line in lines])
