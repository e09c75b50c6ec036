# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Alerts: pure functions that find problems of a training step in its metrics.

A rule compares one metric of a step with a limit, and may use the values of
that metric in earlier steps. A run acts on its alerts
(`searchrl.experiment.guards`), and the report shows them.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math

from jaxtyping import Float
import numpy as np

from searchrl.runtime.metrics import STEP

_FEW = 5  # steps that a mean is over, and the fewest for a median
_ROUNDING = 1e-3  # difference of advantages where all rewards are equal
Line = Mapping[str, float]  # the metrics of one training step
Past = Float[np.ndarray, 'N']  # one metric in the earlier steps, in order


@dataclasses.dataclass(frozen=True)
class Rule:
  """A condition on one metric under which a step raises an alert."""

  text: str  # says what is wrong; {limit} is replaced by the limit
  metric: str  # name; a step without this metric raises no alert
  broken: Callable[[float, Past, float], bool]  # (value, past values, limit)
  limit: float  # default limit
  sampled: bool = False  # whether the metric is known before the step's update
  is_late: bool = False  # whether the policy may have failed some steps earlier
  is_of_time: bool = False  # whether the metric is a time, different by machine
  is_fatal: bool = False  # whether nothing from the step can be kept
  # Function that says for a step's metrics whether the rule is about the step.
  applies: Callable[[Line], bool] = lambda line: True


@dataclasses.dataclass(frozen=True)
class Alert:
  """A rule that a step broke: the rule's name in RULES, and a message."""

  rule: str
  text: str


def _above(now: float, before: Past, limit: float) -> bool:
  return now > limit


def _at_most(now: float, before: Past, limit: float) -> bool:
  return now <= limit


def _far_above_median(now: float, before: Past, limit: float) -> bool:
  return len(before) >= _FEW and now > limit * np.median(before) > 0


def _far_below_first(now: float, before: Past, limit: float) -> bool:
  return len(before) > 0 and now < limit * before[0]


def _far_below_best(now: float, before: Past, limit: float) -> bool:
  """Returns whether a metric's mean over the last 5 steps has collapsed.

  It has if it is below `limit` times the best mean of 5 steps in a row, and
  also more than 0.1 below this best mean.

  Args:
    now: Value of the metric in this step.
    before: Values of earlier steps.
    limit: Fraction of the best mean.
  """
  if len(before) < _FEW:
    return False
  means = np.convolve(before, np.full(_FEW, 1 / _FEW), 'valid')
  last = (before[1 - _FEW:].sum() + now) / _FEW
  return last < min(limit * means.max(), means.max() - 0.1)


def _in_a_row(now: float, before: Past, limit: float) -> bool:
  """Returns whether the metric was 1 in each of the last `limit` steps."""
  last = [*before, now][-int(limit):]
  return len(last) >= limit and min(last) == 1


def _has_score(line: Line) -> bool:
  """Returns whether a trajectory of the step has a score.

  No trajectory has a score if all searches or the judge failed, or if the step
  sampled no groups because earlier steps had left enough groups over.
  """
  return (line.get('data/frac_group_failed', 0) < 1
          and line.get('data/groups_asked', 1) > 0)


def _has_turn(line: Line) -> bool:
  """Returns whether a trajectory of the step has a turn."""
  return line.get('num_turns/max', 1) > 0


def _has_no_advantage(line: Line) -> bool:
  """Returns whether groups have several samples, and all advantages are 0.

  Without groups, as in PPO, no group can have outcomes that differ.
  """
  return line.get('data/group_size/mean', 2) > 1 and is_flat(line)


def is_flat(line: Line) -> bool:
  """Returns whether a step's advantages are alike, up to rounding.

  It is True for a step without advantages, such as one before its update.
  """
  return (line.get('critic/advantages/max', 0)
          - line.get('critic/advantages/min', 0)) < _ROUNDING


RULES = {
    'state': Rule(
        "parameters or the optimizer's state are not finite",
        'guards/arrays_not_finite', _above, 0, is_fatal=True),
    'not_finite': Rule(
        'every update of {limit:g} steps in a row was left out, because a '
        'gradient was not finite', 'actor/updates_left_out', _in_a_row, 2,
        is_late=True),
    'left_out': Rule(
        'updates were left out, because a gradient was not finite',
        'actor/updates_left_out', _above, 0),
    'critic_left_out': Rule(
        'updates of the critic were left out, because a gradient was not '
        'finite', 'critic/updates_left_out', _above, 0),
    'empty_batch': Rule(
        'there was no trajectory to train on', 'data/groups_trained', _at_most,
        0, sampled=True),
    'score': Rule(
        'the score, a mean of five steps, fell to less than {limit:g} of its '
        'best', 'critic/score/mean', _far_below_best, 0.5, sampled=True,
        is_late=True, applies=_has_score),
    'format': Rule(
        'valid turns, a mean of five steps, fell to less than {limit:g} of '
        'their best share', 'format/valid_rate', _far_below_best, 0.5,
        sampled=True, is_late=True, applies=_has_turn),
    'entropy': Rule(
        'entropy fell below {limit:g} of what it was at first',
        'actor/entropy', _far_below_first, 0.1, is_late=True),
    'entropy_rise': Rule(
        'entropy was {limit:g} times its median', 'actor/entropy',
        _far_above_median, 5, is_late=True),
    'gradient': Rule(
        'the gradient was {limit:g} times its median', 'actor/grad_norm',
        _far_above_median, 10),
    'clip_fraction': Rule(
        'more than {limit:g} was at the clip', 'actor/pg_clipfrac', _above,
        0.5),
    'mismatch': Rule(
        'sampler and learner disagree about tokens (mean probability by more '
        'than {limit:g})', 'training/rollout_probs_diff_mean', _above, 0.02),
    'search_errors': Rule(
        'more than {limit:g} of the trajectories ended by a failed search',
        'search/error_rate', _above, 0.05, sampled=True),
    'search_timeouts': Rule(
        'more than {limit:g} of the queries ran out of time',
        'search/timeout_rate', _above, 0.05, sampled=True),
    'searches_empty': Rule(
        'more than {limit:g} of the queries found nothing',
        'search/empty_rate', _above, 0.5, sampled=True),
    'judge_errors': Rule(
        'the judge failed on more than {limit:g} of the trajectories (the '
        'reasons are in trajectories/, as judge_error)',
        'reward/judge_error_rate', _above, 0.05, sampled=True),
    'unmixed': Rule(
        'no group had outcomes that differ, so nothing was learned',
        'data/frac_group_mixed', _at_most, 0, sampled=True,
        applies=_has_no_advantage),
    'slow_step': Rule(
        'the step took {limit:g} times the median', 'timing_s/step',
        _far_above_median, 5, is_of_time=True),
}


def of_step(lines: Sequence[Line], limits: Mapping[str, float] | None = None
           ) -> list[Alert]:
  """Returns the alerts of the newest step: one for each rule that it breaks.

  A rule raises no alert if the step lacks its metric, or if the metric is not
  finite. Earlier values that are not finite are ignored.

  Args:
    lines: Metrics of the training steps, in order. The last line is checked.
    limits: Limit by rule name. Only these rules are checked, in this order.
      None: all rules, with their default limits.
  """
  alerts = []
  for name, limit in (default_limits() if limits is None else limits).items():
    rule = RULES[name]
    steps, values = _values(lines, rule)
    if steps[-1:] == [len(lines) - 1] and rule.broken(
        values[-1], values[:-1], limit):
      alerts.append(Alert(name, rule.text.format(limit=limit)))
  return alerts


def default_limits() -> dict[str, float]:
  """Returns the default limit of every rule."""
  return {name: float(rule.limit) for name, rule in RULES.items()}


def history(lines: Sequence[Line]) -> list[tuple[str, list[int]]]:
  """Returns the problems of a whole run, as (message, steps that have it).

  Metrics that were not finite come first. Then come the rules that some step
  breaks, with their default limits.
  """
  problems = {f'{name} is not a finite number': steps
              for name, steps in _not_finite(lines).items()}
  for rule in RULES.values():
    steps, values = _values(lines, rule)
    broken = [int(lines[step][STEP]) for n, step in enumerate(steps)
              if rule.broken(values[n], values[:n], rule.limit)]
    if broken:
      problems[rule.text.format(limit=rule.limit)] = broken
  return list(problems.items())


def _values(lines: Sequence[Line], rule: Rule) -> tuple[list[int], Past]:
  """Returns the finite values of a rule's metric, and their lines' indices.

  Lines to which the rule does not apply are left out.
  """
  values = np.array([line.get(rule.metric, math.nan) if rule.applies(line)
                     else math.nan for line in lines], float)
  where = np.isfinite(values)
  return np.flatnonzero(where).tolist(), values[where]


def _not_finite(lines: Sequence[Line]) -> dict[str, list[int]]:
  """Returns {metric: steps at which it was not finite}.

  A metric that is never finite is so by design, and is left out.
  """
  by_name = collections.defaultdict(list)
  for line in lines:
    for name, value in line.items():
      if not math.isfinite(value):
        by_name[name].append(int(line[STEP]))
  return {name: steps for name, steps in by_name.items()
          if len(steps) < len(lines)}


def format_steps(steps: Iterable[int]) -> str:
  """Returns the steps as text: 'steps 3-5, 9' for 3, 4, 5 and 9."""
  ranges: list[list[int]] = []
  for step in sorted(steps):
    if ranges and step == ranges[-1][1] + 1:
      ranges[-1][1] = step
    else:
      ranges.append([step, step])
  texts = [str(a) if a == b else f'{a}-{b}' for a, b in ranges]
  many = len(ranges) > 1 or ranges[0][0] < ranges[0][1]
  return f'step{"s" * many} {", ".join(texts)}'
