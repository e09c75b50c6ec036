# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The RL loop: an Experiment and its state in, a trained state out.

Each step: the sampler answers questions, trajectories are scored, filtered and
packed; the learner adds the old log-probs and updates; metrics are written, and
now and then a checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import pathlib
import shutil
import time
from typing import Any

from searchrl.agent import statistics
from searchrl.experiment import guards
from searchrl.experiment import rollbacks
from searchrl.experiment.build import Experiment
from searchrl.models import weights
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

DURING = 'step_'  # training: the folders of an evaluation
_NEVER = 1e9  # seconds
_say = processes.say
Take = Callable[[Any, Progress], Collected]  # params, progress -> a step's data


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a step's groups come from."""

  take: Take
  settled: Callable[[Progress], Progress] = lambda progress: progress
  restart: Callable[[], None] = lambda: None  # forgets what is in flight


def restore(experiment: Experiment, folder: pathlib.Path, *, keep: int
           ) -> tuple[Any, Progress]:
  """Returns the state and progress of the newest checkpoint, or fresh ones.

  A fresh start is checkpointed, too.

  Args:
    experiment: its learner makes the state.
    folder: of the run.
    keep: checkpoints that are kept on the disk.

  Raises:
    ValueError: the run starts from parameters that are no finite numbers.
  """
  processes.on_first('rollback?', lambda: rollbacks.finish(folder))
  found = checkpoint.restore(
      folder / 'checkpoints', experiment.learner.train_step.abstract_state(),
      warn=lambda text: _say(f'Warning: {text}'))
  if found:
    _, state, extra = found
    progress = rollbacks.applied(folder, Progress.from_json(extra))
    _say(f'Resumed at step {progress.step} of {folder}.')
    return state, progress
  state = experiment.start(experiment.learner.init(experiment.params))
  weights.check_finite(state['policy'].params, 'a policy that is trained')
  progress = Progress(position=experiment.stream.start)
  checkpoint.save(folder / 'checkpoints', 0, state, progress.to_json(),
                  keep=keep)
  return state, progress


def loop(experiment: Experiment, config, folder: pathlib.Path, state: Any,
         progress: Progress, writer: metrics.Writer,
         validate: Callable[[Any, int], float | None] = lambda *_: None
        ) -> tuple[Any, Progress]:
  """Steps until the run is done.

  Args:
    experiment: what the config builds.
    config: its `train`, `guards` and `rollout` are read.
    folder: of the run.
    state: of the learner.
    progress: of the run.
    writer: of the metrics.
    validate: called every `evaluate.every` steps but the last, before these are
      saved: what is restored has been validated. Returns a score, if it can.

  Returns:
    The state and the progress.

  Raises:
    Stopped: a signal ended it; what was done is saved.
    ValueError: too many steps taught nothing, and what was done is saved; or a
      guard ends the run.
  """
  options = config.train
  timer, watch = progress_lib.Timer(), guards.Guards(config.guards, folder)
  own = at_rate(experiment, config, progress)
  with (signals.StopRequest(_log_stop) as stop,
        _progress_bar(progress, options) as show,
        rollouts(experiment, config) as source,
        watchdog.Watchdog(options.watchdog_secs or _NEVER) as heartbeat,
        checkpoint.Saver(folder / 'checkpoints',
                         keep=options.keep_checkpoints) as saver):
    if progress.step:  # which may have been the last, until now
      progress = _validated(progress, config, heartbeat,
                            functools.partial(validate, state))
    while not is_done(progress, options):
      _check_not_silent(progress, options)
      heartbeat.beat(f'step {progress.step + 1}')
      with timer('step'):
        state, progress, values, sampled, learned = step(
            own, config, source.take, state, progress, timer, watch.skips)
      values |= timer.pop() | _learning_rates(config, own, state, progress)
      values |= _throughput(sampled, values['timing_s/step'])
      progress = _warn_if_silent(
          own.algorithm, progress, values, options.warn_after)
      writer.write(progress.step, values)
      _record(folder, progress.step, sampled, learned)
      verdict = watch.verdict(progress, values)
      if verdict.action == guards.ROLLBACK:
        source.restart()
        saver.wait()
        state = None  # makes room
        state, progress = _roll_back(
            own, config, folder, writer, progress, verdict, watch)
        own = at_rate(experiment, config, progress)
        continue
      best = progress.best
      progress = _validated(watch.remembers(progress, verdict), config,
                            heartbeat, functools.partial(validate, state))
      stopping = processes.stop_requested_anywhere(stop.asked)
      if stopping or _is_due(progress, options, progress.best != best):
        with timer('checkpoint'):
          saver.save(progress.step, state, source.settled(progress).to_json(),
                     pinned=_pinned(progress, options))
      show(progress, values)
      if stopping:
        break
  _check_not_silent(progress, options)
  if not is_done(progress, options):
    raise signals.Stopped(
        f'Stopped after step {progress.step}; everything is saved in {folder}. '
        'Run the same command to go on.')
  return state, progress


def step(experiment: Experiment, config, take: Take, state: Any,
         progress: Progress, timer: progress_lib.Timer,
         skips: Callable[[dict[str, float]], bool] = lambda values: False
        ) -> tuple[Any, Progress, dict[str, float], list[Trajectory],
                   tuple | None]:
  """One step of RL: sample, keep, pack, score, update.

  Args:
    experiment: what the config builds.
    config: its `rollout` is read.
    take: samples.
    state: of the learner; donated.
    progress: of the run.
    timer: of the phases.
    skips: whether the update is to be left out, by what was sampled.

  Returns:
    The new state and progress, metrics, all trajectories sampled, and, for
    `records.write_learned`, those trained on with their batch and advantages;
    None without an update.
  """
  learner, seen = experiment.learner, []
  with timer('gen'):
    found = take(learner.policy(state, experiment.params), progress)
  progress = dataclasses.replace(found.progress, step=progress.step + 1)
  values = found.metrics | statistics.describe(found.trajectories)
  values['training/rollouts'] = progress.rollouts
  values['guards/rollbacks'] = progress.rollbacks
  values['guards/skipped'] = float(skips(values))
  if values['guards/skipped']:
    return state, progress, values, found.trajectories, None
  batch = collect.pack(
      found.groups, experiment.algorithm, progress.step - 1, experiment.rounds,
      length=config.rollout.length,
      mask_truncated=config.rollout.mask_truncated)
  batch = learner.score(state, batch, experiment.params, timer)
  state, learned = learner.update(
      state, batch, experiment.params, timer, see=lambda *of: seen.append(of))
  values |= learned
  values['guards/arrays_not_finite'] = len(weights.not_finite(state))
  experiment.lockstep.phase(f'step {progress.step - 1}')
  trained = [one for group in found.groups for one in group]
  return state, progress, values, found.trajectories, (trained, *seen[0])


def rollouts(experiment: Experiment, config
            ) -> contextlib.AbstractContextManager[Source]:
  """The source of a step's groups: synchronous or asynchronous rollouts."""
  sampler = experiment.sampler
  collected = functools.partial(
      collect.collect, sampler, draw=experiment.stream.draw,
      keep=experiment.algorithm.keep, search=experiment.search,
      scorer=experiment.scorer, rounds=experiment.rounds)
  if not config.train.max_staleness:
    return contextlib.nullcontext(Source(lambda params, progress: collected(
        sampler.sync(params), dataclasses.replace(progress, in_flight=()),
        progress.step)))
  return _open(asynchronous.AsyncRollouts(
      collected, sampler.sync, max_staleness=config.train.max_staleness,
      last_step=config.train.num_steps))


@contextlib.contextmanager
def _open(source: asynchronous.AsyncRollouts):
  with contextlib.closing(source):
    yield Source(source.take, source.settled, source.restart)


def at_rate(experiment: Experiment, config, progress: Progress) -> Experiment:
  """The experiment at the learning rate that rollbacks have left."""
  return dataclasses.replace(experiment, learner=experiment.learner.at_rate(
      config.guards.rollback_rate ** progress.rollbacks))


def _roll_back(experiment: Experiment, config, folder: pathlib.Path,
               writer: metrics.Writer, progress: Progress,
               verdict: guards.Verdict, watch: guards.Guards
              ) -> tuple[Any, Progress]:
  """The state and progress of a checkpoint from before, and other questions."""
  to = processes.on_first('to', lambda: watch.before(progress.step, verdict))
  _say(f'Step {progress.step} is rolled back to the checkpoint of step {to}.')
  processes.on_first('rollback', lambda: rollbacks.note(
      folder, progress, to, verdict.text))
  state, progress = restore(
      experiment, folder, keep=config.train.keep_checkpoints)
  writer.truncate(progress.step)
  watch.forget()
  processes.on_first('forget', lambda: forget_after(progress.step, folder))
  return state, progress


def forget_after(step: int, folder: pathlib.Path) -> None:
  """Deletes evaluations of steps after a restored one: they are made again."""
  for path in (folder / 'evaluation').glob(f'{DURING}*'):
    if int(path.name.removeprefix(DURING)) > step:
      shutil.rmtree(path)


def _record(folder: pathlib.Path, number: int, sampled: Sequence[Trajectory],
            learned: tuple | None) -> None:
  """Keeps the trajectories of a step, and what it learned from."""
  if processes.is_first():
    name = f'step_{number:06d}.jsonl.gz'
    records.write(folder / 'trajectories' / name, sampled)
    if learned:
      records.write_learned(folder / 'learned' / name, *learned)


def _validated(progress: Progress, config, heartbeat: watchdog.Watchdog,
               validate: Callable[[int], float | None]) -> Progress:
  """Validates if it is due; the progress with the best validation so far.

  Of equal ones the first is the best. The last step is evaluated as a whole.
  """
  every, step = config.evaluate.every, progress.step
  if not every or step % every or is_done(progress, config.train):
    return progress
  heartbeat.beat(f'validation after step {step}')
  score = validate(step)
  if score is None or progress.best and score <= progress.best[1]:
    return progress
  return dataclasses.replace(progress, best=(step, score))


@contextlib.contextmanager
def _progress_bar(progress: Progress, options: Any) -> Iterator[
    Callable[[Progress, dict[str, float]], None]]:
  """A bar on the first process; yields what shows a step on it."""
  # A recipe that filters has no fixed number of steps, but of trajectories.
  unit = 'rollouts' if options.max_rollouts else 'step'
  with contextlib.closing(progress_lib.ProgressBar(
      options.max_rollouts or options.num_steps, getattr(progress, unit),
      enabled=options.progress and processes.is_first(),
      unit=unit.removesuffix('s'))) as bar:
    yield lambda progress, values: bar.update(
        getattr(progress, unit), outcome=values['critic/score/mean'],
        mixed=values['data/frac_group_mixed'],
        searches=values['search/calls_per_traj'],
        tokens_per_sec=values['perf/throughput'])


def _is_due(progress: Progress, options: Any, is_best: bool) -> bool:
  """Whether a step is saved."""
  return (progress.step % options.checkpoint_every == 0
          or is_done(progress, options) or _is_silent(progress, options)
          or options.keep_best and is_best)


def _pinned(progress: Progress, options: Any) -> list[int]:
  """Checkpoints that are kept besides the newest."""
  best = [progress.best[0]] if options.keep_best and progress.best else []
  before = [] if progress.before_collapse is None else [
      progress.before_collapse]
  return best + before


def is_done(progress: Progress, options: Any) -> bool:
  """Whether a run has reached its end; options: config.train."""
  return (progress.step >= options.num_steps or
          0 < options.max_rollouts <= progress.rollouts)


def _log_stop() -> None:
  if processes.is_first():
    signals.say('Stopping after this step; press Ctrl-C again to stop at once '
                'and lose it.')


def _throughput(trajectories: Sequence[Trajectory], secs: float
               ) -> dict[str, float]:
  tokens = sum(len(t.tokens) for t in trajectories)
  return {'perf/total_num_tokens': tokens, 'perf/throughput': tokens / secs,
          'perf/cpu_seconds': time.process_time()}


def _learning_rates(config, experiment: Experiment, state, progress: Progress
                   ) -> dict[str, float]:
  """Learning rates of the last update; 0 before the first."""
  factor = config.guards.rollback_rate ** progress.rollbacks

  def last(optimizer, updates):
    if not updates:
      return 0.0
    return factor * optimizers.learning_rate(optimizer.learning_rate, **{
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
                     'ask easier questions, or raise rollout.group_size; with '
                     'a reward of your own see config.outcome, too')
    if values['data/frac_group_all_one'] > 0.5:
      cause, remedy = 'is 1 in most groups', 'Ask harder questions'
    elif values['data/frac_group_failed'] > 0.5:
      cause, remedy = 'is none: searches fail', 'Look at search/error_rate'
    _say(f'Warning: outcomes were alike for {steps} steps (the outcome '
         f'{cause}), so nothing is learned. {remedy}.')
  return dataclasses.replace(progress, silent_steps=steps)
