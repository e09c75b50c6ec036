# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Guards: on an alert, a run warns, skips an update, rolls back or stops.

A step raises an alert if one of its metrics breaks a rule of `runtime.alerts`.
`config.guards` gives each rule a limit and an action. An alert is printed once,
when it begins. `skip` omits the update of the step, and says so at each such
step. `rollback` returns to an earlier checkpoint and continues with other
questions.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
from typing import Any

from searchrl.runtime import alerts
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.rollouts.collect import Progress

OFF, WARN, SKIP, ROLLBACK, STOP = ACTIONS = (
    'off', 'warn', 'skip', 'rollback', 'stop')


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The alerts of a step, and the action that follows."""

  broken: tuple[alerts.Alert, ...] = ()  # alerts of the step
  action: str = ''  # ROLLBACK, STOP or '' for none

  @property
  def text(self) -> str:
    """Texts of all alerts, on one line."""
    return '; '.join(alert.text for alert in self.broken)

  @property
  def rolls_back(self) -> bool:
    """True if this verdict sends the run back to an earlier checkpoint."""
    return self.action == ROLLBACK

  @property
  def is_late(self) -> bool:
    """True if the policy may have begun to fail some steps before the alert."""
    return any(alerts.RULES[alert.rule].is_late for alert in self.broken)


class Guards:
  """A monitor that raises alerts on a run's steps and decides what follows.

  Args:
    options: Options of config.guards.
    folder: Directory of the run. Past steps are read from its metrics.
  """

  def __init__(self, options: Any, folder: pathlib.Path):
    self._options, self._folder = options, folder
    self._actions = {name: action for name, action in options.actions.items()
                     if action != OFF}
    self._limits = {name: options.limits[name] for name in self._actions}
    self.forget()

  def forget(self) -> None:
    """Replaces the remembered metrics by those that the run's file has now.

    After a rollback, the file has no metrics of the steps that were undone.
    """
    file = self._folder / metrics.FILE
    self._lines = [line for line in (
        metrics.read(file) if processes.is_first() and file.exists() else ())
                   if 'critic/score/mean' in line]

  def skips(self, values: Mapping[str, float]) -> bool:
    """Returns whether to omit the update of a step, and prints the reason.

    Args:
      values: Metrics of the step's rollouts, equal on all processes.
    """
    limits = {name: self._limits[name] for name, action in
              self._actions.items() if action == SKIP}
    reasons = processes.on_first('skip?', lambda: [
        alert.text for alert in alerts.of_step([*self._lines, values], limits)])
    if reasons:
      processes.say(
          f'Warning: {"; ".join(reasons)}, so the step makes no update.')
    return bool(reasons)

  def verdict(self, progress: Progress, values: Mapping[str, float]) -> Verdict:
    """Returns the verdict on a step, and prints new alerts.

    Args:
      progress: Progress after the step.
      values: Metrics of the step.

    Raises:
      ValueError: A rule with the action `stop` is broken, or the run was rolled
        back as often as guards.most_rollbacks allows.
    """
    judged = processes.on_first('alerts', lambda: self._judge(values))
    verdict = Verdict(tuple(alerts.Alert(*fields) for fields in judged['all']),
                      judged['action'])
    for text in judged['new']:
      processes.say(f'Warning: step {progress.step}: {text}.')
    if verdict.action == ROLLBACK and (
        progress.rollbacks >= self._options.most_rollbacks):
      raise self._error(progress, verdict, 'it was rolled back '
                        f'{progress.rollbacks} times already '
                        '(guards.most_rollbacks)')
    if verdict.action == STOP:
      raise self._error(progress, verdict, 'guards.actions says so')
    return verdict

  def remember_collapse(self, progress: Progress, verdict: Verdict) -> Progress:
    """Returns the progress with the step of a checkpoint before a collapse.

    Some rules notice a collapse of the policy only some steps later. If a step
    breaks such a rule and the step before did not, `before_collapse` becomes
    the result of `before`. `collapsing` is True after such a step.
    """
    if not verdict.is_late or progress.collapsing:
      return dataclasses.replace(progress, collapsing=verdict.is_late)
    return dataclasses.replace(
        progress, collapsing=True, before_collapse=processes.on_first(
            'before', lambda: self.before(progress.step, verdict)))

  def before(self, step: int, verdict: Verdict) -> int | None:
    """Returns the step of the newest checkpoint that can be trusted.

    This checkpoint is older than `step`. If the verdict says that the failure
    may have begun earlier, it is older by more than `guards.trusted_steps`
    steps. If no checkpoint is old enough, the step of the oldest checkpoint is
    returned. None means that there are no checkpoints.
    """
    steps = checkpoint.steps(self._folder / 'checkpoints')
    last = step - 1 - self._options.trusted_steps * verdict.is_late
    return max((step for step in steps if step <= last),
               default=min(steps, default=None))

  def _judge(self, values: Mapping[str, float]) -> dict[str, Any]:
    """Returns all alerts, new texts and the action of a step, for JSON."""
    line = {name: float(value) for name, value in values.items()}
    earlier = {alert.rule for alert in alerts.of_step(
        self._lines, self._limits)} if self._lines else {}
    self._lines.append(line)
    broken = alerts.of_step(self._lines, self._limits)
    actions = {self._actions[alert.rule] for alert in broken}
    return {
        'all': [dataclasses.astuple(alert) for alert in broken],
        'new': [alert.text for alert in broken if alert.rule not in earlier
                and self._actions[alert.rule] != SKIP]
        + [f'{name} is not a finite number' for name, value in line.items()
           if not math.isfinite(value) and _was_finite(self._lines, name)],
        'action': next((action for action in (STOP, ROLLBACK)
                        if action in actions), '')}

  def _error(self, progress: Progress, verdict: Verdict, why: str
            ) -> ValueError:
    steps = checkpoint.steps(self._folder / 'checkpoints')
    causes = Verdict(tuple(
        alert for alert in verdict.broken
        if self._actions[alert.rule] == verdict.action))
    fatal = [alerts.RULES[alert.rule].is_fatal for alert in causes.broken]
    ways_out = []
    if verdict.action == STOP or not any(fatal):
      ways_out = [' and '.join(
          f'guards.actions.{alert.rule}={ROLLBACK if is_fatal else WARN}'
          for alert, is_fatal in zip(causes.broken, fatal))]
    if verdict.action == ROLLBACK:
      ways_out.append('a larger guards.most_rollbacks')
    return ValueError(
        f'the run ends at step {progress.step}, as {why}: {causes.text}. Its '
        f'checkpoints, of {alerts.format_steps(steps)}, are whole. Look at '
        f'{self._folder} by configs/report.py. To go on, lower '
        'optimizer.learning_rate with --allow_changes, or set '
        f'{" or ".join(ways_out)}.')


def check(options: Any) -> None:
  """Raises a ValueError if config.guards gives a rule an impossible action."""
  for name, action in options.actions.items():
    rule = alerts.RULES[name]
    legal = [allowed for allowed in ACTIONS if not (
        allowed == SKIP and not rule.sampled or
        rule.is_of_time and allowed not in (OFF, WARN) or
        rule.is_fatal and allowed not in (ROLLBACK, STOP))]
    if action not in legal:
      raise ValueError(
          f'guards.actions.{name} must be one of {", ".join(legal)}, but is '
          f'{action!r}: '
          + ('no two machines agree about time.' if rule.is_of_time else
             'nothing of such a step can be kept.' if rule.is_fatal else
             'its metric is known after the update alone.' if action == SKIP
             else 'docs/guards.md says what each does.'))


def _was_finite(lines: Sequence[Mapping[str, float]], name: str) -> bool:
  """Returns whether a metric was finite in the step before the last."""
  return len(lines) > 1 and math.isfinite(lines[-2].get(name, math.nan))
