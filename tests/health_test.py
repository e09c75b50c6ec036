# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""health: which validation of a run is its best, and which steps are silent."""

import dataclasses
import types

import ml_collections
import pytest

from searchrl.experiment import health
from searchrl.rollouts.collect import Progress


def validated(scores, limits):
  """The steps that are the best so far, after each validation of a run."""
  progress, steps = Progress(), []
  for step, (score, limit) in enumerate(zip(scores, limits), 1):
    config = ml_collections.ConfigDict(dict(
        evaluate=dict(every=1, limit=limit, num_sets_during=0),
        train=dict(num_steps=99, max_rollouts=0)))
    made = health.Health.__new__(health.Health)
    made._config, made._validate = config, lambda *_, score=score: score
    made._heartbeat = types.SimpleNamespace(beat=lambda _: None)
    progress = Progress.from_json(
        made.validated(None, dataclasses.replace(
            progress, step=step)).to_json())
    steps.append(progress.best and progress.best[0])
  return steps


def test_the_first_of_equal_scores_is_the_best():
  assert validated([None, .5, .25, .5, .75], [9] * 5) == [None, 2, 2, 2, 5]


def test_scores_of_other_questions_are_not_compared():
  """One lucky question is no better than many."""
  assert validated([1., 1., .25, .25, .5], [1, 1, 0, 0, 0]) == [1, 1, 3, 3, 5]


def test_a_best_of_an_older_checkpoint_counts_on():
  record = Progress(step=1, best=(1, 0.5)).to_json()
  del record['best_of']
  assert Progress.from_json(record).best_of == ()


def counted(values, min_group_size=1):
  """The number of silent steps after one step, whose warning is printed."""
  made = health.Health.__new__(health.Health)
  made._config = ml_collections.ConfigDict(dict(train=dict(warn_after=1)))
  failed = {'data/frac_group_mixed': 0, 'data/frac_group_all_one': 0,
            'data/frac_group_failed': 0}
  algorithm = types.SimpleNamespace(min_group_size=min_group_size)
  return made.count_silent(algorithm, Progress(), failed | values).silent_steps


@pytest.mark.parametrize('outcome, reward, turn, silent', [
    (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)])
def test_without_groups_a_step_is_silent_if_no_reward_of_it_varies(
    outcome, reward, turn, silent):
  spans = {'critic/score': outcome, 'critic/rewards': reward}
  spans |= {'reward/turns': turn} if turn else {}
  assert counted({f'{name}/{end}': value for name, span in spans.items()
                  for end, value in (('max', span), ('min', 0))}) == silent


@pytest.mark.parametrize('values, name', [
    ({}, 'search/error_rate'),
    ({'reward/judge_error_rate': 1.0}, 'reward/judge_error_rate')])
def test_the_warning_names_what_failed(values, name, capsys):
  assert counted({'data/frac_group_failed': 1.0} | values, 2) == 1
  assert capsys.readouterr().err.endswith(f'Look at {name}.\n')
