# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The RL loop: samples, scores, packs, updates and saves until a run is done.

In each step, the sampler answers questions, and the trajectories are scored,
filtered and collated into a batch. The learner adds the old log-probs and
updates. Metrics are written at each step, and a checkpoint at some steps.
`health.Health` decides what happens after a step that failed.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

import numpy as np

from searchrl.agent import statistics
from searchrl.experiment import guards
from searchrl.experiment import health as health_lib
from searchrl.experiment import rollbacks
from searchrl.experiment import schedules
from searchrl.experiment.build import Experiment
from searchrl.models import weights
from searchrl.rollouts import asynchronous
from searchrl.rollouts import collect
from searchrl.rollouts import records
from searchrl.rollouts.collect import Collected, Progress
from searchrl.runtime import checkpoint
from searchrl.runtime import dispatch
from searchrl.runtime import host_memory
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.runtime import signals
from searchrl.runtime import watchdog
from searchrl.trajectory import Batch, Trajectory

_NEVER = 1e9  # seconds
_SAID = {  # name of a timer -> what the step does meanwhile
    'gen': 'sampling', 'old_log_prob': 'scoring',
    'ref': 'scoring by the reference', 'values': 'scoring by the critic',
    'update_actor': 'updating', 'checkpoint': 'saving'}
Take = Callable[[Any, Progress], Collected]  # params, progress -> a step's data


@dataclasses.dataclass(frozen=True)
class Source:
  """A source of sampled trajectories, in groups, for each step.

  Attributes:
    take: Function that returns the data of the next step, given the policy's
      params and the progress. A group is the samples of one question.
    settled: Function that returns the progress to save in a checkpoint. It
      includes rollouts of later steps that are sampled already.
    restart: Function that drops rollouts of later steps, after a rollback.
  """

  take: Take
  settled: Callable[[Progress], Progress] = lambda progress: progress
  restart: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Learned:
  """Data that an update used: the arguments of `records.write_learned`.

  Attributes:
    trajectories: Trajectories in the order of the batch's rows.
    batch: The batch with `old_logprobs`.
    advantages: Advantages of the algorithm, as numpy arrays.
    trained: True for the rows of the batch that have a gradient.
    contexts: Number of rows per trajectory.
  """

  trajectories: list[Trajectory]
  batch: Batch
  advantages: Any
  trained: np.ndarray
  contexts: int


@dataclasses.dataclass(frozen=True)
class StepResult:
  """The result of one step of RL.

  Attributes:
    state: State of the learner after the step.
    progress: Progress of the run after the step.
    metrics: Metrics of the step.
    trajectories: All trajectories that were sampled.
    learned: Data that the update used; None if there was no update.
  """

  state: Any
  progress: Progress
  metrics: dict[str, float]
  trajectories: list[Trajectory]
  learned: Learned | None = None


def restore(experiment: Experiment, folder: pathlib.Path, *, keep: int,
            keep_best: bool = False) -> tuple[Any, Progress]:
  """Returns the state and progress of the newest checkpoint, or initial ones.

  The initial state is also saved as a checkpoint.

  Args:
    experiment: Experiment whose learner makes the state.
    folder: Directory of the run.
    keep: Number of checkpoints that are kept on the disk.
    keep_best: Whether the checkpoint of the best validation is kept, too. If it
      is not there, its score is forgotten.

  Raises:
    ValueError: The run starts from parameters that are not finite numbers.
  """
  processes.on_first('rollback?', lambda: rollbacks.finish(folder))
  with progress_lib.phase('Looking for a checkpoint'):
    restored = checkpoint.restore(
        folder / 'checkpoints', experiment.learner.train_step.abstract_state(),
        warn=processes.warn)
  if restored:
    _, state, extra = restored
    progress = rollbacks.applied(folder, Progress.from_json(extra))
    if progress.best and keep_best and progress.best[0] not in checkpoint.steps(
        folder / 'checkpoints'):
      progress = dataclasses.replace(progress, best=None, best_of=())
    processes.say(f'Resumed at step {progress.step} of {folder}.')
    return state, progress
  with progress_lib.phase('Preparing and saving the first state'):
    state = experiment.start(experiment.learner.init(experiment.params))
    weights.check_finite(state['policy'].params, 'a policy that is trained')
    progress = Progress(position=experiment.stream.start)
    checkpoint.save(folder / 'checkpoints', 0, state, progress.to_json(),
                    keep=keep)
  return state, progress


def loop(experiment: Experiment, config, folder: pathlib.Path, state: Any,
         progress: Progress, writer: metrics.Writer,
         validate: health_lib.Validate = lambda *_: None
        ) -> tuple[Any, Progress]:
  """Runs steps until the run is done; returns the state and the progress.

  Args:
    experiment: Experiment that the config builds.
    config: Config whose `train`, `guards` and `rollout` are read.
    folder: Directory of the run.
    state: State of the learner.
    progress: Progress of the run.
    writer: Writer of the metrics.
    validate: Function that is called every `evaluate.every` steps, except at
      the end. It is called before the step is saved, so that every restored
      step has been validated. It returns a score or None.

  Raises:
    Stopped: A signal ended the loop. All finished steps are saved.
    ValueError: Too many steps were silent (see `health`), or a guard ends the
      run.
  """
  options, timer, stopping = config.train, progress_lib.Timer(_SAID), False
  with (signals.StopRequest(_log_stop) as stop,
        _progress_bar(progress, options) as show,
        rollouts(experiment, config) as source,
        watchdog.Watchdog(options.watchdog_secs or _NEVER) as heartbeat,
        checkpoint.Saver(folder / 'checkpoints',
                         keep=options.keep_checkpoints) as saver):
    health = health_lib.Health(
        config, folder, writer, _alone(source.settled, validate), heartbeat)
    learning = with_lr_scale(experiment, config, progress)
    if progress.step:  # may have been the last step of an earlier call
      progress = health.validated(state, progress)
    while not (stopping or health_lib.is_done(progress, options)):
      health.begin_step(progress)
      with timer('step'):
        result = step(learning, config, source.take, state, progress, timer,
                      health.guards.skips)
      values = _measured(config, learning, result, timer.pop())
      state, progress = result.state, health.count_silent(
          learning.algorithm, result.progress, values)
      _record(folder, writer, result, values)
      verdict = health.guards.verdict(progress, values)
      if verdict.rolls_back:
        source.restart()
        saver.wait()
        del result
        state = None  # makes room
        state, progress, learning = _rolled_back(
            experiment, config, folder, health, progress, verdict)
        continue
      progress = health.validated(
          state, health.guards.remember_collapse(progress, verdict))
      stopping = processes.stop_requested_anywhere(stop.is_requested)
      if stopping or _is_due(progress, options):
        with timer('checkpoint'):
          saver.save(progress.step, state, source.settled(progress).to_json(),
                     pinned=_pinned(progress, options))
      show(progress, values)
  _check_done(progress, options, folder)
  return state, progress


def step(experiment: Experiment, config, take: Take, state: Any,
         progress: Progress, timer: progress_lib.Timer,
         skips: Callable[[dict[str, float]], bool] = lambda values: False
        ) -> StepResult:
  """Takes one step of RL: samples trajectories, and updates the policy on them.

  Args:
    experiment: Experiment that the config builds.
    config: Config whose `rollout` is read.
    take: Function that samples the step's groups, already scored and filtered.
    state: State of the learner before the step; its memory is reused.
    progress: Progress of the run.
    timer: Timer of the phases.
    skips: Function from the metrics of the rollouts to True if the update must
      be omitted.

  Returns:
    The state and progress after the step, metrics, all sampled trajectories,
    and the data of the update. If the update was omitted, the state is the
    given one.
  """
  learner = experiment.learner
  with timer('gen'):
    collected = take(learner.policy(state, experiment.params), progress)
  progress = dataclasses.replace(collected.progress, step=progress.step + 1)
  values = collected.metrics | statistics.describe(collected.trajectories)
  values['training/rollouts'] = progress.rollouts
  values |= _staleness(config, collected, progress.step - 1)
  values['guards/rollbacks'] = progress.rollbacks
  values['guards/skipped'] = float(skips(values))
  if values['guards/skipped']:
    return StepResult(state, progress, values, collected.trajectories)
  contexts = experiment.sampler.budgets.contexts
  batch = collect.collate(
      collected.groups, experiment.algorithm, progress.step - 1,
      experiment.rounds, length=config.rollout.max_length,
      mask_truncated=config.rollout.mask_truncated, contexts=contexts)
  packed = learner.score(state, batch, experiment.params, timer)
  # Only now: the sampler's last program held the KV cache after its result.
  host_memory.give_back()
  updated = learner.update(state, packed, experiment.params, timer)
  values |= updated.metrics
  values['guards/arrays_not_finite'] = len(
      dispatch.Ordered(weights.not_finite, learner.train_step.mesh)(
          updated.state))
  experiment.lockstep.phase(f'step {progress.step - 1}')
  rows = [trajectory for group in collected.groups for trajectory in group]
  return StepResult(updated.state, progress, values, collected.trajectories,
                    Learned(rows, updated.batch, updated.advantages,
                            updated.trained, contexts))


def _staleness(config, collected: Collected, step: int) -> dict[str, float]:
  """Returns metrics of the age of a step's samples: its mean and maximum.

  The age is the number of steps since the policy that sampled them. Without
  asynchronous rollouts or samples, the result is {}.
  """
  ages = [step - trajectory.policy_step
          for group in collected.groups for trajectory in group]
  if not config.train.max_staleness or not ages:
    return {}
  return {'training/staleness/mean': float(np.mean(ages)),
          'training/staleness/max': float(max(ages))}


def rollouts(experiment: Experiment, config
            ) -> contextlib.AbstractContextManager[
                Source | asynchronous.AsyncRollouts]:
  """Returns a context manager of the source of each step's trajectories.

  If train.max_staleness is 0, the source samples when a step asks for its data.
  Otherwise a thread samples later steps during the training.
  """
  sampler = experiment.sampler
  collected = functools.partial(
      collect.collect, sampler, draw=experiment.stream.draw,
      keep=experiment.algorithm.keep, search=experiment.search,
      scorer=experiment.scorer, rounds=experiment.rounds)
  if not config.train.max_staleness:
    return contextlib.nullcontext(Source(lambda params, progress: collected(
        sampler.sync(params), dataclasses.replace(progress, in_flight=()),
        progress.step)))
  return contextlib.closing(asynchronous.AsyncRollouts(
      collected, sampler.sync, max_staleness=config.train.max_staleness,
      last_step=config.train.num_steps))


def _alone(settled: Callable[[Progress], Progress],
           validate: health_lib.Validate) -> health_lib.Validate:
  """Returns a `validate` that first waits for all asynchronous rollouts.

  A validation samples in the same engine, which no thread may use meanwhile.
  """
  def wait_and_validate(state: Any, step: int) -> float | None:
    settled(Progress())
    return validate(state, step)

  return wait_and_validate


def with_lr_scale(experiment: Experiment, config, progress: Progress
                 ) -> Experiment:
  """Returns the experiment, with learning rates lowered for past rollbacks.

  Each rollback multiplies the rates by `guards.rollback_rate`.
  """
  scale = config.guards.rollback_rate ** progress.rollbacks
  return dataclasses.replace(
      experiment, learner=experiment.learner.with_lr_scale(scale))


def _rolled_back(experiment: Experiment, config, folder: pathlib.Path,
                 health: health_lib.Health, progress: Progress,
                 verdict: guards.Verdict) -> tuple[Any, Progress, Experiment]:
  """Rolls a run back to a checkpoint.

  Returns:
    The restored state and progress, and the experiment with learning rates that
    are lowered for the rollback.
  """
  health.roll_back(progress, verdict)
  state, progress = restore(
      experiment, folder, keep=config.train.keep_checkpoints,
      keep_best=config.train.keep_best)
  health.forget_after(progress)
  return state, progress, with_lr_scale(experiment, config, progress)


def _record(folder: pathlib.Path, writer: metrics.Writer, result: StepResult,
            values: dict[str, float]) -> None:
  """Writes a step's metrics, its trajectories and the data of its update."""
  writer.write(result.progress.step, values)
  if not processes.is_first():
    return
  name = f'step_{result.progress.step:06d}.jsonl.gz'
  records.write(folder / 'trajectories' / name, result.trajectories)
  if result.learned:
    records.write_learned(folder / 'learned' / name, **vars(result.learned))


@contextlib.contextmanager
def _progress_bar(progress: Progress, options: Any) -> Iterator[
    Callable[[Progress, dict[str, float]], None]]:
  """Shows a bar on the first process; yields a function that updates it."""
  # A recipe that filters has a fixed number of rollouts, and not of steps.
  unit = 'rollouts' if options.max_rollouts else 'step'
  with contextlib.closing(progress_lib.ProgressBar(
      options.max_rollouts or options.num_steps, getattr(progress, unit),
      enabled=options.progress and processes.is_first(),
      unit=unit.removesuffix('s'))) as bar:
    yield lambda progress, values: bar.update(
        getattr(progress, unit), reward=values['critic/rewards/mean'],
        searches=values['search/calls_per_traj'],
        tokens_per_sec=values['perf/throughput'],
        mixed=values['data/frac_group_mixed'])


def _is_due(progress: Progress, options: Any) -> bool:
  """Returns whether a checkpoint is saved after this step."""
  is_best = progress.best is not None and progress.best[0] == progress.step
  return (progress.step % options.checkpoint_every == 0
          or health_lib.is_done(progress, options)
          or health_lib.is_silent(progress, options)
          or options.keep_best and is_best)


def _pinned(progress: Progress, options: Any) -> list[int]:
  """Returns the steps of checkpoints that are kept besides the newest one."""
  best = [progress.best[0]] if options.keep_best and progress.best else []
  before = [] if progress.before_collapse is None else [
      progress.before_collapse]
  return best + before


def _log_stop() -> None:
  if processes.is_first():
    signals.say('Stopping after this step; Ctrl-C stops at once and loses it.')


def _check_done(progress: Progress, options: Any, folder: pathlib.Path
               ) -> None:
  """Raises an error if the steps ended too early; see `loop`."""
  health_lib.check_not_silent(progress, options)
  if not health_lib.is_done(progress, options):
    raise signals.Stopped(
        f'Stopped after step {progress.step}; everything is saved in {folder}. '
        'Run the same command to go on.')


def _measured(config, experiment: Experiment, result: StepResult,
              secs: dict[str, float]) -> dict[str, float]:
  """Returns a step's metrics, its learning rates, seconds and tokens."""
  tokens = sum(len(t.tokens) for t in result.trajectories)
  return result.metrics | schedules.learning_rates(
      config, experiment.learner, result.state, result.progress.rollbacks
  ) | secs | {
          'perf/total_num_tokens': tokens,
          'perf/throughput': tokens / secs['timing_s/step'],
          'perf/cpu_seconds': time.process_time()}
