# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Alerts: metrics of a run in, what is wrong with its last step out; pure.

A rule looks at one metric of a step, at the same metric of all steps before,
and at a limit. A run acts on its alerts (`searchrl.experiment.guards`), and the
report shows them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math

from jaxtyping import Float
import numpy as np

STEP = 'training/global_step'
_FEW = 5  # steps of a mean, and of a median at least
Line = Mapping[str, float]  # the metrics of a step
Past = Float[np.ndarray, 'N']  # a metric of the steps before, in order


@dataclasses.dataclass(frozen=True)
class Rule:
  """When a step is alarming.

  Attributes:
    says: what is wrong; {limit} stands for the limit.
    metric: that is looked at; a step without it is well.
    broken: (its value, those of the steps before, limit) -> whether it is.
    limit: the usual one.
    sampled: whether the metric is known before the update of its step.
    is_late: the policy may have begun to go wrong some steps before.
    is_of_time: no two machines agree about it.
    is_fatal: nothing of the step can be kept.
  """

  says: str
  metric: str
  broken: Callable[[float, Past, float], bool]
  limit: float
  sampled: bool = False
  is_late: bool = False
  is_of_time: bool = False
  is_fatal: bool = False


@dataclasses.dataclass(frozen=True)
class Alert:
  """A rule that a step has broken."""

  rule: str
  text: str


def _above(now: float, before: Past, limit: float) -> bool:
  del before
  return now > limit


def _at_most(now: float, before: Past, limit: float) -> bool:
  del before
  return now <= limit


def _far_above_median(now: float, before: Past, limit: float) -> bool:
  return len(before) >= _FEW and now > limit * np.median(before) > 0


def _far_below_first(now: float, before: Past, limit: float) -> bool:
  return len(before) > 0 and now < limit * before[0]


def _far_below_best(now: float, before: Past, limit: float) -> bool:
  """The mean of the last steps against the best mean of as many before.

  A fall by less than a tenth is no collapse, however low it began.
  """
  if len(before) < _FEW:
    return False
  means = np.convolve(before, np.full(_FEW, 1 / _FEW), 'valid')
  last = (before[1 - _FEW:].sum() + now) / _FEW
  return last < min(limit * means.max(), means.max() - 0.1)


def _again(now: float, before: Past, limit: float) -> bool:
  """All of the updates, in so many steps in a row."""
  last = [*before, now][-int(limit):]
  return len(last) >= limit and min(last) == 1


RULES = {
    'state': Rule(
        'parameters or the optimizer\'s state are no finite numbers',
        'guards/arrays_not_finite', _above, 0, is_fatal=True),
    'not_finite': Rule(
        'every update of {limit:g} steps in a row was left out, because a '
        'gradient was no finite number', 'actor/updates_left_out', _again, 2,
        is_late=True),
    'left_out': Rule(
        'updates were left out, because a gradient was no finite number',
        'actor/updates_left_out', _above, 0),
    'critic_left_out': Rule(
        'updates of the critic were left out, because a gradient was no finite '
        'number', 'critic/updates_left_out', _above, 0),
    'empty_batch': Rule(
        'there was no trajectory to train on', 'data/groups_trained', _at_most,
        0, sampled=True),
    'score': Rule(
        'the score, a mean of five steps, fell to less than {limit:g} of its '
        'best', 'critic/score/mean', _far_below_best, 0.5, sampled=True,
        is_late=True),
    'format': Rule(
        'valid turns, a mean of five steps, fell to less than {limit:g} of '
        'their best share', 'format/valid_rate', _far_below_best, 0.5,
        sampled=True, is_late=True),
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
    'unmixed': Rule(
        'no group had outcomes that differ, so nothing was learned',
        'data/frac_group_mixed', _at_most, 0, sampled=True),
    'slow_step': Rule(
        'the step took {limit:g} times the median', 'timing_s/step',
        _far_above_median, 5, is_of_time=True),
}


def of_step(lines: Sequence[Line], limits: Mapping[str, float] | None = None
           ) -> list[Alert]:
  """The rules that the last line breaks, in the order of the limits.

  Args:
    lines: of training steps, in order; what is no finite number is passed over.
    limits: by rule; only these rules are looked at. None: all, as usual.
  """
  limits = usual() if limits is None else limits
  found = []
  for name, limit in limits.items():
    steps, values = _values(lines, RULES[name].metric)
    if steps[-1:] == [len(lines) - 1] and RULES[name].broken(
        values[-1], values[:-1], limit):
      found.append(_alert(name, limit))
  return found


def usual() -> dict[str, float]:
  """The limits of all rules."""
  return {name: rule.limit for name, rule in RULES.items()}


def history(lines: Sequence[Line]) -> list[tuple[str, list[int]]]:
  """What was wrong in a run, and at which steps; what is no number first.

  Args:
    lines: of training steps, in order.
  """
  found = {f'{name} is not a finite number': steps
           for name, steps in _not_finite(lines).items()}
  for name, rule in RULES.items():
    steps, values = _values(lines, rule.metric)
    broken = [int(lines[step][STEP]) for n, step in enumerate(steps)
              if rule.broken(values[n], values[:n], rule.limit)]
    if broken:
      found[_alert(name, rule.limit).text] = broken
  return list(found.items())


def _values(lines: Sequence[Line], metric: str) -> tuple[list[int], Past]:
  """Which lines have a finite number of a metric, and these numbers."""
  values = np.array([line.get(metric, math.nan) for line in lines], float)
  where = np.isfinite(values)
  return np.flatnonzero(where).tolist(), values[where]


def _alert(name: str, limit: float) -> Alert:
  return Alert(name, RULES[name].says.format(limit=limit))


def _not_finite(lines: Sequence[Line]) -> dict[str, list[int]]:
  """{metric: steps}; a metric that is never a number is not meant to be one."""
  found = {}
  for line in lines:
    for name, value in line.items():
      if not math.isfinite(value):
        found.setdefault(name, []).append(int(line[STEP]))
  return {name: steps for name, steps in found.items()
          if len(steps) < len(lines)}


def said(steps: Iterable[int]) -> str:
  """'steps 3-5, 9' of 3, 4, 5 and 9."""
  ranges = []
  for step in sorted(steps):
    if ranges and step == ranges[-1][1] + 1:
      ranges[-1][1] = step
    else:
      ranges.append([step, step])
  texts = [str(a) if a == b else f'{a}-{b}' for a, b in ranges]
  many = len(ranges) > 1 or ranges[0][0] < ranges[0][1]
  return f'step{"s" * many} {", ".join(texts)}'
