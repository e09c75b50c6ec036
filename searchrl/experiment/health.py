# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The health of a run: validation, silent steps, guards and rollbacks.

A step is silent if nothing can be learned from it, because the outcomes within
each group are equal. If the algorithm has no groups, a step is silent if all
its outcomes are equal, and all its rewards. The loop calls `Health` before and
after each step. The module `guards` makes the decisions. The module `rollbacks`
makes rollbacks that are completed even if the process is killed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
import shutil
from typing import Any

from searchrl.experiment import guards
from searchrl.experiment import rollbacks
from searchrl.rl import algorithms
from searchrl.rollouts.collect import Progress
from searchrl.runtime import alerts
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.runtime import watchdog

DURING = 'step_'  # prefix of the folders of evaluations during training
Validate = Callable[[Any, int], float | None]  # state, step -> a score


class Health:
  """A monitor of a run, which the RL loop calls before and after each step.

  It runs validations, stops the run if it no longer learns, and carries out
  rollbacks. Its attribute `guards` decides when there is an alert, and what to
  do about it.

  Args:
    config: Config whose `train`, `guards` and `evaluate` are read.
    folder: Directory of the run.
    writer: Writer of the metrics.
    validate: Function that evaluates the state of a step, and returns a score
      or None.
    heartbeat: Watchdog, which is notified of each activity of the run.
  """

  def __init__(self, config: Any, folder: pathlib.Path,
               writer: metrics.Writer, validate: Validate,
               heartbeat: watchdog.Watchdog):
    self._config, self._folder, self._writer = config, folder, writer
    self._validate, self._heartbeat = validate, heartbeat
    self.guards = guards.Guards(config.guards, folder)

  def begin_step(self, progress: Progress) -> None:
    """Notifies the watchdog that a step begins.

    Raises:
      ValueError: The last `train.stop_after` steps were silent.
    """
    check_not_silent(progress, self._config.train)
    self._heartbeat.beat(f'step {progress.step + 1}')

  def count_silent(self, algorithm: algorithms.Algorithm, progress: Progress,
                   values: Mapping[str, float]) -> Progress:
    """Returns the progress with a new count of the latest silent steps.

    Every `train.warn_after` silent steps, it prints a warning.
    """
    if algorithm.min_group_size > 1:
      silent = values['data/frac_group_mixed'] == 0 and alerts.is_flat(values)
    else:  # the algorithm has no group baseline
      silent = all(
          values.get(f'{name}/max') == values.get(f'{name}/min')
          for name in ('critic/score', 'critic/rewards', 'reward/turns'))
    steps = progress.silent_steps + 1 if silent else 0
    if silent and steps % self._config.train.warn_after == 0:
      _warn_of_silence(steps, values)
    return dataclasses.replace(progress, silent_steps=steps)

  def validated(self, state: Any, progress: Progress) -> Progress:
    """Validates the state if it is due, and returns the new progress.

    The progress records the step and the score of the best validation so far.
    Of equal scores, the first is the best. Scores of other questions, before
    a change of evaluate.limit or num_sets_during, do not count. The last step
    is not validated, since the evaluation at the end of the run follows it.
    """
    options, step = self._config.evaluate, progress.step
    every, of = options.every, (options.limit, options.num_sets_during)
    if not every or step % every or is_done(progress, self._config.train):
      return progress
    self._heartbeat.beat(f'validation after step {step}')
    score = self._validate(state, step)
    if score is None or (progress.best and progress.best_of in ((), of)
                         and score <= progress.best[1]):
      return progress
    return dataclasses.replace(progress, best=(step, score), best_of=of)

  def roll_back(self, progress: Progress, verdict: guards.Verdict) -> None:
    """Records a rollback and deletes the checkpoints after the trusted one.

    The caller then restores the newest checkpoint that is left.
    """
    step = processes.on_first(
        'to', lambda: self.guards.before(progress.step, verdict))
    processes.say(f'Step {progress.step} is rolled back to the checkpoint of '
                  f'step {step}.')
    processes.on_first('rollback', lambda: rollbacks.note(
        self._folder, progress, step, verdict.text))

  def forget_after(self, progress: Progress) -> None:
    """Deletes the metrics and files of steps after the restored progress."""
    self._writer.truncate(progress.step)
    self.guards.forget()
    processes.on_first(
        'forget', lambda: forget_after(progress.step, self._folder))


def is_done(progress: Progress, options: Any) -> bool:
  """Returns whether a run has reached its end, given config.train."""
  return bool(reached(progress, options))


def reached(progress: Progress, options: Any) -> list[str]:
  """Returns the limits of config.train that a run has reached, by field."""
  limits = {'num_steps': progress.step >= options.num_steps,
            'max_rollouts': 0 < options.max_rollouts <= progress.rollouts}
  return [f'train.{name} (now {options[name]})'
          for name, is_reached in limits.items() if is_reached]


def is_silent(progress: Progress, options: Any) -> bool:
  """Returns whether the last `train.stop_after` steps were silent."""
  return 0 < options.stop_after <= progress.silent_steps


def forget_after(step: int, folder: pathlib.Path) -> None:
  """Deletes evaluations and samples of steps after a restored one.

  They are made again when the run reaches these steps.
  """
  for path in (folder / 'evaluation').glob(f'{DURING}*'):
    if int(path.name.removeprefix(DURING)) > step:
      shutil.rmtree(path)
  for name in ('trajectories', 'learned'):
    for file in (folder / name).glob(f'{DURING}*.jsonl.gz'):
      if int(file.name.removeprefix(DURING).partition('.')[0]) > step:
        file.unlink()


def check_not_silent(progress: Progress, options: Any) -> None:
  """Raises a ValueError if the last `train.stop_after` steps were silent.

  A step is silent if all outcomes of each of its groups are alike. Without a
  group baseline, all outcomes and rewards of the step count as one group.
  """
  if is_silent(progress, options):
    raise ValueError(
        f'the last {progress.silent_steps} steps, up to step {progress.step}, '
        'must not all have alike outcomes, at least within each group '
        f'(train.stop_after is {options.stop_after}), but did, so nothing is '
        'learned. What was sampled is in the folder trajectories/. Change the '
        'reward, the questions or the model. To go on all the same, raise '
        'train.stop_after, or set it to 0.')


def _warn_of_silence(steps: int, values: Mapping[str, float]) -> None:
  """Warns of a series of silent steps, with the cause and a remedy."""
  cause, remedy = ('is 0', 'Start from a model that is right now and then, ask '
                   'easier questions, or raise rollout.group_size; with a '
                   'reward of your own see config.outcome, too')
  if values['data/frac_group_all_one'] > 0.5:
    cause, remedy = 'is 1 in most groups', 'Ask harder questions'
  elif values['data/frac_group_failed'] > 0.5:
    by_judge = values.get('reward/judge_error_rate', 0) > 0
    cause, remedy = (
        ('is none: the judge fails', 'Look at reward/judge_error_rate')
        if by_judge else
        ('is none: searches fail', 'Look at search/error_rate'))
  processes.say(f'Warning: outcomes were alike for {steps} steps (the outcome '
                f'{cause}), so nothing is learned. {remedy}.')
