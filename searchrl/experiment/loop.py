# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The RL loop: an Experiment and its state in, a trained state out.

Each step: the sampler answers questions, trajectories are scored, filtered and
packed; the learner adds the old log-probs and updates; metrics are written, and
now and then a checkpoint.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

from searchrl.agent import statistics
from searchrl.experiment.build import Experiment
from searchrl.rollouts import asynchronous
from searchrl.rollouts import collect
from searchrl.rollouts import records
from searchrl.rollouts.collect import Collected, Progress
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.runtime import signals
from searchrl.runtime import watchdog
from searchrl.training import optimizer as optimizers
from searchrl.trajectory import Trajectory

_NEVER = 1e9  # seconds
_say = processes.say
Take = Callable[[Any, Progress], Collected]  # params, progress -> a step's data


def restore(experiment: Experiment, folder: pathlib.Path, *, keep: int
           ) -> tuple[Any, Progress]:
  """Returns the state and progress of the newest checkpoint, or fresh ones.

  A fresh start is checkpointed, too.

  Args:
    experiment: its learner makes the state.
    folder: of the run.
    keep: checkpoints that are kept on the disk.
  """
  state = experiment.learner.init(experiment.params)
  found = checkpoint.restore(folder / 'checkpoints', state,
                             warn=lambda text: _say(f'Warning: {text}'))
  if found:
    _, state, extra = found
    progress = Progress.from_json(extra)
    _say(f'Resumed at step {progress.step} of {folder}.')
    return state, progress
  state = experiment.start(state)
  progress = Progress(position=experiment.stream.start)
  checkpoint.save(folder / 'checkpoints', 0, state, progress.to_json(),
                  keep=keep)
  return state, progress


def loop(experiment: Experiment, config, folder: pathlib.Path, state: Any,
         progress: Progress, writer: metrics.Writer,
         validate: Callable[[Any, int], None] = lambda state, step: None
        ) -> tuple[Any, Progress, bool]:
  """Steps until the run is done, or a signal stops it.

  Args:
    experiment: what the config builds.
    config: its `train` and `rollout` are read.
    folder: of the run.
    state: of the learner.
    progress: of the run.
    writer: of the metrics.
    validate: called every `evaluate.every` steps but the last, before these are
      saved: what is restored has been validated.

  Returns:
    The state, the progress, and whether the run was stopped before its end.

  Raises:
    ValueError: too many steps taught nothing; what was done is saved.
  """
  options = config.train
  # A recipe that filters has no fixed number of steps, but of trajectories.
  unit = 'rollouts' if options.max_rollouts else 'step'
  bar = progress_lib.ProgressBar(
      options.max_rollouts or options.num_steps, getattr(progress, unit),
      enabled=options.progress and processes.is_first(),
      unit=unit.removesuffix('s'))
  timer = progress_lib.Timer()
  with (signals.StopRequest(_log_stop) as stop, contextlib.closing(bar),
        rollouts(experiment, config) as take,
        watchdog.Watchdog(options.watchdog_secs or _NEVER) as heartbeat):
    while not is_done(progress, options):
      _check_not_silent(progress, options)
      heartbeat.beat(f'step {progress.step + 1}')
      with timer('step'):
        state, progress, values, sampled, learned = step(
            experiment, config, take, state, progress, timer)
      values |= timer.pop() | _learning_rates(config, experiment, state)
      values |= _throughput(sampled, values['timing_s/step'])
      progress = _warn_if_silent(
          experiment.algorithm, progress, values, options.warn_after)
      writer.write(progress.step, values)
      if processes.is_first():
        name = f'step_{progress.step:06d}.jsonl.gz'
        records.write(folder / 'trajectories' / name, sampled)
        records.write_learned(folder / 'learned' / name, *learned)
      done = is_done(progress, options)
      every = config.evaluate.every
      if every and progress.step % every == 0 and not done:
        heartbeat.beat(f'validation after step {progress.step}')
        validate(state, progress.step)
      stopping = processes.stop_requested_anywhere(stop.asked)
      if (progress.step % options.checkpoint_every == 0 or stopping or done
          or _is_silent(progress, options)):
        checkpoint.save(folder / 'checkpoints', progress.step, state,
                        progress.to_json(), keep=options.keep_checkpoints)
      bar.update(getattr(progress, unit), reward=values['critic/score/mean'],
                 mixed=values['data/frac_group_mixed'],
                 searches=values['search/calls_per_traj'],
                 tokens_per_sec=values['perf/throughput'])
      if stopping:
        return state, progress, not done
  _check_not_silent(progress, options)
  return state, progress, False


def step(experiment: Experiment, config, take: Take, state: Any,
         progress: Progress, timer: progress_lib.Timer
        ) -> tuple[Any, Progress, dict[str, float], list[Trajectory], tuple]:
  """One step of RL: sample, keep, pack, score, update.

  Returns:
    The new state and progress, metrics, all trajectories sampled, and, for
    `records.write_learned`, those trained on with their batch and advantages.
  """
  learner, seen = experiment.learner, []
  with timer('gen'):
    found = take(learner.policy(state, experiment.params), progress)
  batch = collect.pack(
      found.groups, experiment.algorithm, progress.step, experiment.rounds,
      length=config.rollout.length,
      mask_truncated=config.rollout.mask_truncated)
  batch = learner.score(state, batch, experiment.params, timer)
  state, learned = learner.update(
      state, batch, experiment.params, timer, see=lambda *of: seen.append(of))
  experiment.lockstep.phase(f'step {progress.step}')
  progress = dataclasses.replace(found.progress, step=progress.step + 1)
  values = found.metrics | statistics.describe(found.trajectories) | learned
  values['training/rollouts'] = progress.rollouts
  trained = [one for group in found.groups for one in group]
  return state, progress, values, found.trajectories, (trained, *seen[0])


def rollouts(experiment: Experiment, config
            ) -> contextlib.AbstractContextManager[Take]:
  """The source of a step's groups: synchronous or asynchronous rollouts."""
  sampler = experiment.sampler
  collected = functools.partial(
      collect.collect, sampler, draw=experiment.stream.draw,
      keep=experiment.algorithm.keep, search=experiment.search,
      scorer=experiment.scorer, rounds=experiment.rounds)
  if not config.train.max_staleness:
    return contextlib.nullcontext(lambda params, progress: collected(
        sampler.sync(params), progress, progress.step))
  return _open(asynchronous.AsyncRollouts(
      collected, sampler.sync, max_staleness=config.train.max_staleness,
      last_step=config.train.num_steps))


@contextlib.contextmanager
def _open(source: asynchronous.AsyncRollouts):
  with contextlib.closing(source):
    yield source.take


def is_done(progress: Progress, options: Any) -> bool:
  """Whether a run has reached its end; options: config.train."""
  return (progress.step >= options.num_steps or
          0 < options.max_rollouts <= progress.rollouts)


def _log_stop() -> None:
  _say('Stopping after this step; press Ctrl-C again to stop at once and lose '
       'it.')


def _throughput(trajectories: Sequence[Trajectory], secs: float
               ) -> dict[str, float]:
  tokens = sum(len(t.tokens) for t in trajectories)
  return {'perf/total_num_tokens': tokens, 'perf/throughput': tokens / secs,
          'perf/cpu_seconds': time.process_time()}


def _learning_rates(config, experiment: Experiment, state) -> dict[str, float]:
  """Learning rates of the last update; 0 before the first."""
  def last(optimizer, updates):
    if not updates:
      return 0.0
    return optimizers.learning_rate(optimizer.learning_rate, **{
        k: v for k, v in optimizer.items() if k in (
            'warmup_steps', 'total_steps', 'schedule', 'final_fraction')
    })(updates - 1)

  updates = experiment.learner.updates(state)
  rates = {'actor/lr': last(config.optimizer, updates['policy'])}
  if 'critic' in updates:
    rates['critic/lr'] = last(config.critic.optimizer, updates['critic'])
  return rates


def _is_silent(progress: Progress, options: Any) -> bool:
  return 0 < options.stop_after <= progress.silent_steps


def _check_not_silent(progress: Progress, options: Any) -> None:
  """Raises a ValueError after too many steps that taught nothing."""
  if _is_silent(progress, options):
    raise ValueError(
        f'the last {progress.silent_steps} steps, up to step {progress.step}, '
        'must not all have outcomes that are alike (train.stop_after is '
        f'{options.stop_after}), but they had, so nothing is learned. What was '
        'sampled is in the folder trajectories/. To go on all the same raise '
        'train.stop_after, or set it to 0.')


def _warn_if_silent(algorithm, progress: Progress, values, warn_after: int
                   ) -> Progress:
  """Counts steps whose outcomes are all alike, and warns of them."""
  if algorithm.min_group_size > 1:
    silent = values['data/frac_group_mixed'] == 0
  else:  # the baseline is not of a group
    silent = values['critic/score/max'] == values['critic/score/min']
  steps = progress.silent_steps + 1 if silent else 0
  if silent and steps % warn_after == 0:
    cause, remedy = ('is 0', 'Start from a model that is right now and then, '
                     'ask easier questions, or raise rollout.group_size')
    if values['data/frac_group_all_one'] > 0.5:
      cause, remedy = 'is 1 in most groups', 'Ask harder questions'
    elif values['data/frac_group_failed'] > 0.5:
      cause, remedy = 'is none: searches fail', 'Look at search/error_rate'
    _say(f'Warning: outcomes were alike for {steps} steps (the reward '
         f'{cause}), so nothing is learned. {remedy}.')
  return dataclasses.replace(progress, silent_steps=steps)
