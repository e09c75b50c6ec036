# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Alarms: what the metrics of a run say that somebody should look at."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import statistics

_STEP = 'training/global_step'
_FEW = 5  # steps of a mean
Lines = Sequence[Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Rule:
  """When a step is alarming: `broken` of it and of all steps before it."""

  says: str
  metric: str
  broken: Callable[[float, Sequence[float]], bool]


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)


RULES = (
    Rule('no group had outcomes that differ, so nothing was learned',
         'data/frac_group_mixed', lambda now, before: now == 0),
    Rule('more than 5 % of the trajectories ended by a failed search',
         'search/error_rate', lambda now, before: now > 0.05),
    Rule('entropy fell below a tenth of what it was',
         'actor/entropy', lambda now, before: bool(before) and (
             now < 0.1 * before[0])),
    Rule('more than half was at the clip', 'actor/pg_clipfrac',
         lambda now, before: now > 0.5),
    Rule('the gradient was ten times its median', 'actor/grad_norm',
         lambda now, before: len(before) > 4 and (
             now > 10 * statistics.median(before) > 0)),
    Rule('sampler and learner disagree about tokens (mean probability by more '
         'than .02)', 'training/rollout_probs_diff_mean',
         lambda now, before: now > 0.02),
    Rule('the step took five times the median', 'timing_s/step',
         lambda now, before: len(before) > 4 and (
             now > 5 * statistics.median(before))),
    Rule('the score, a mean of five steps, fell to less than half of its best',
         'critic/score/mean', lambda now, before: len(before) >= _FEW and (
             _mean([*before[-_FEW + 1:], now]) < 0.5 * max(
                 _mean(before[n:n + _FEW])
                 for n in range(len(before) - _FEW + 1)))),
)


def of(lines: Lines) -> list[tuple[str, list[int]]]:
  """What is alarming, and at which steps; metrics that are no numbers first.

  Args:
    lines: of training steps, in order.
  """
  found = [(f'{name} is not a finite number', steps)
           for name, steps in _not_finite(lines).items()]
  for rule in RULES:
    seen, steps = [], []
    for line in lines:
      value = line.get(rule.metric, math.nan)
      if math.isfinite(value):
        if rule.broken(value, seen):
          steps.append(int(line[_STEP]))
        seen.append(value)
    if steps:
      found.append((rule.says, steps))
  return found


def _not_finite(lines: Lines) -> dict[str, list[int]]:
  """{metric: steps}; a metric that is never a number is not meant to be one."""
  found = {}
  for line in lines:
    for name, value in line.items():
      if not math.isfinite(value):
        found.setdefault(name, []).append(int(line[_STEP]))
  return {name: steps for name, steps in found.items()
          if len(steps) < len(lines)}


def said(steps: Sequence[int]) -> str:
  """'steps 3-5, 9' of 3, 4, 5 and 9."""
  ranges = []
  for step in sorted(steps):
    if ranges and step == ranges[-1][1] + 1:
      ranges[-1][1] = step
    else:
      ranges.append([step, step])
  texts = [str(a) if a == b else f'{a}-{b}' for a, b in ranges]
  return f'step{"s" * (len(steps) > 1)} {", ".join(texts)}'
