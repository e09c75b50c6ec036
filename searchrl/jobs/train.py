# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, a trained policy and the record of its training out: the RL loop.

Each step: questions are played by the policy, scored, filtered and packed; the
learner adds the old log-probs and updates; metrics are written, and now and
then a checkpoint. What a run is made of is built in `parts`.
"""

import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

from searchrl.agent import statistics
from searchrl.evaluation import suite
from searchrl.evaluation import summary
from searchrl.experiment import build as builds
from searchrl.models import weights
from searchrl.rl import algorithms
from searchrl.rollouts import asynchronous
from searchrl.rollouts import collect as collecting
from searchrl.rollouts import sampler as samplers
from searchrl.runtime import checkpoint
from searchrl.runtime import metrics
from searchrl.runtime import processes
from searchrl.runtime import progress as progress_lib
from searchrl.runtime import signals
from searchrl.runtime import watchdog
from searchrl.training import optimizer as optimizers
from searchrl import trajectory as trajectory_lib

_NEVER = 1e9  # seconds
_say = processes.say


def run(config, workdir: str) -> None:
  """Trains; the same call goes on where an earlier one stopped.

  On many hosts every process calls it, on a file system that they share; the
  first one writes and speaks for all.
  """
  folder = pathlib.Path(workdir)
  parts = builds.build(config, folder)
  done = processes.on_first('done?', (folder / summary.FILE).exists)
  if done:
    _say((folder / summary.FILE).read_text(), file=sys.stdout)
    _say(f'{folder} is finished. Use another --workdir for another run.',
         file=sys.stdout)
    return
  state, progress = restore(parts, config, folder)
  if not parts.learner.needs_base:
    parts = dataclasses.replace(parts, params=None)  # room on the devices
  with contextlib.closing(_writer(config, folder)) as writer:
    writer.truncate(progress.step)
    examine = _Examiner(parts, folder, writer)
    policy = lambda: parts.learner.policy(state, parts.params)
    if progress.step == 0 and config.evaluate.initial:
      examine('before', policy(), 0)
    state, stopped = loop(parts, config, folder, state, progress, writer)
    if stopped:
      _say(f'Stopped after step {progress.step}; everything is saved in '
           f'{folder}. Run the same command to go on.')
      return
    examine('after', policy(), progress.step)
  weights.save(folder / 'model', policy(), parts.sampler.shape,
               tokenizer_from=config.model.path or samplers.TINY_BASE,
               eos_id=parts.sampler.tokenizer.eos_ids[0])
  recipe = config.algorithm.name.partition(':')[2]
  processes.on_first('finish', lambda: summary.finish(
      folder, f'{recipe}, seed {config.seed}'))


def restore(parts: builds.Parts, config, folder: pathlib.Path):
  """The newest checkpoint's (state, progress); a fresh start is one, too."""
  state = parts.learner.init(parts.params)
  found = checkpoint.restore(folder / 'checkpoints', state,
                             warn=lambda text: _say(f'Warning: {text}'))
  if found:
    _, state, extra = found
    progress = collecting.Progress.from_json(extra)
    parts.stream.position = list(progress.position)
    _say(f'Resumed at step {progress.step} of {folder}.')
    return state, progress
  progress = collecting.Progress(position=list(parts.stream.position))
  checkpoint.save(folder / 'checkpoints', 0, state, progress.to_json(),
                  keep=config.train.keep_checkpoints)
  return state, progress


def loop(parts: builds.Parts, config, folder, state, progress, writer):
  """Steps until the run is done, or someone asks to stop.

  Returns:
    The state, and whether the run was stopped before it was done.
  """
  options = config.train
  # A recipe that filters cannot tell its last step, but its last trajectory.
  unit = 'rollouts' if options.max_rollouts else 'step'
  bar = progress_lib.ProgressBar(
      options.max_rollouts or options.num_steps, getattr(progress, unit),
      enabled=options.progress and processes.is_first(),
      unit=unit.removesuffix('s'))
  timer = progress_lib.Timer()
  with (signals.StopRequest(_tell_of_stop) as stop, contextlib.closing(bar),
        contextlib.closing(_source(parts, config)) as source,
        watchdog.Watchdog(options.watchdog_secs or _NEVER) as dog):
    while not _done(progress, options):
      dog.beat(f'step {progress.step + 1}')
      with timer('step'):
        state, values, played = step(
            parts, config, source, state, progress, timer)
      values |= timer.pop() | _rates(config, parts.learner.updates(state))
      tokens = sum(len(trajectory.tokens) for trajectory in played)
      values['perf/total_num_tokens'] = tokens
      values['perf/throughput'] = tokens / values['timing_s/step']
      values['perf/cpu_seconds'] = time.process_time()
      writer.write(progress.step, values)
      if processes.is_first():
        _save_trajectories(folder, progress.step, played)
      _warn_if_silent(parts.algorithm, progress, values, options.warn_after)
      over = _done(progress, options)
      stopping = processes.stop_requested_anywhere(stop.asked)
      if progress.step % options.checkpoint_every == 0 or stopping or over:
        checkpoint.save(folder / 'checkpoints', progress.step, state,
                        progress.to_json(), keep=options.keep_checkpoints)
      bar.update(getattr(progress, unit), reward=values['critic/score/mean'],
                 mixed=values['data/frac_group_mixed'],
                 searches=values['search/calls_per_traj'],
                 tokens_per_sec=values['perf/throughput'])
      if stopping:
        return state, not over
  return state, False


def step(parts: builds.Parts, config, source, state, progress, timer):
  """One step of RL: play, keep, pack, score, update.

  Returns:
    The new state, metrics, and all trajectories that were played.
  """
  with timer('gen'):
    groups, played, counts = source.take(
        parts.learner.policy(state, parts.params), progress)
  batch = pack(groups, parts.algorithm, progress.step, config.rollout)
  batch = parts.learner.score(state, batch, parts.params, timer)
  state, learned = parts.learner.update(state, batch, parts.params, timer)
  parts.lockstep.phase(f'step {progress.step}')
  progress.step += 1
  values = counts | statistics.describe(played) | parts.search.pop() | learned
  values |= parts.sampler.hand_over.pop()
  values['training/rollouts'] = progress.rollouts
  return state, values, played


def _source(parts: builds.Parts, config):
  """Where a step's groups come from."""
  def collect(sampler, params, progress, policy_step):
    return collecting.collect(
        sampler, params, parts.stream, progress, parts.algorithm, parts.search,
        parts.reward, parts.outcome, config.rollout, policy_step)

  if not config.train.max_staleness:
    return asynchronous.InStep(functools.partial(collect, parts.sampler))
  handed = dataclasses.replace(parts.sampler, hand_over=lambda params: params)
  return asynchronous.AsyncRollouts(
      functools.partial(collect, handed),
      lambda params: jax.tree.map(jnp.copy, parts.sampler.hand_over(params)),
      max_staleness=config.train.max_staleness,
      last_step=config.train.num_steps)


def pack(groups, algorithm, policy_step: int, options) -> trajectory_lib.Batch:
  """Groups side by side, filled up with empty rows; options: config.rollout."""
  def baseline(number, group):
    its = algorithm.group_of(group[0].question)
    # A question that is asked twice in a step has two groups.
    by_question = algorithm.group_of is algorithms.question_uid
    return (its, number) if by_question else its

  trajectories = [trajectory for group in groups for trajectory in group]
  ids = [baseline(n, group) for n, group in enumerate(groups) for _ in group]
  return trajectory_lib.pack(
      trajectories, group_ids=ids, policy_step=policy_step, length=options.length,
      rows=options.questions * options.group_size,
      mask_truncated=options.mask_truncated)


class _Examiner:
  """Evaluates once under each name, and never again after a resume."""

  def __init__(self, parts: builds.Parts, folder: pathlib.Path, writer):
    self._parts, self._writer = parts, writer
    self._folder = folder / 'evaluation'

  def __call__(self, name: str, params, step: int) -> None:
    cases = self._parts.cases
    if not cases:
      return
    folder = self._folder / name
    table = processes.on_first(f'{name}?', lambda: _read_json(folder))
    if table is None:
      _say(f'Evaluating {name} training '
           f'({sum(len(e.set.questions) for e in cases)} questions) ...')
      table, records = suite.run(self._parts.sampler, params, cases)
      if processes.is_first():
        suite.save(folder, table, records, self._parts.sampler.tokenizer)
    if not self._writer.holds(step, 'val/'):
      self._writer.write(step, suite.scalars(table))


def _read_json(folder: pathlib.Path):
  file = folder / 'table.json'
  return json.loads(file.read_text()) if file.exists() else None


class _NoWriter:
  """What a process that does not write metrics writes them with."""

  def write(self, step, values) -> None:
    del step, values

  def truncate(self, step) -> None:
    del step

  def holds(self, step, prefix) -> bool:
    del step, prefix
    return True

  def close(self) -> None:
    pass


def _writer(config, folder: pathlib.Path):
  if not processes.is_first():
    return _NoWriter()
  return metrics.Writer(folder, tensorboard=config.train.tensorboard)


def _tell_of_stop() -> None:
  _say('Stopping after this step; press Ctrl-C again to stop at once and lose '
       'it.')


def _done(progress: collecting.Progress, options) -> bool:
  return (progress.step >= options.num_steps or
          0 < options.max_rollouts <= progress.rollouts)


def _rates(config, updates: dict[str, int]) -> dict[str, float]:
  """Learning rates of the last update; 0 before the first."""
  def last(optimizer, updates):
    if not updates:
      return 0.0
    return optimizers.learning_rate(optimizer.learning_rate, **{
        k: v for k, v in optimizer.items() if k in (
            'warmup_steps', 'total_steps', 'schedule', 'final_fraction')
    })(updates - 1)

  rates = {'actor/lr': last(config.optimizer, updates['policy'])}
  if 'critic' in updates:
    rates['critic/lr'] = last(config.critic.optimizer, updates['critic'])
  return rates


def _warn_if_silent(algorithm, progress: collecting.Progress, values,
                    warn_after: int) -> None:
  """Tells when the outcomes have had nothing to teach for some steps."""
  if algorithm.min_group_size > 1:
    silent = values['data/frac_group_mixed'] == 0
  else:  # the baseline is no group's
    silent = values['critic/score/max'] == values['critic/score/min']
  progress.silent_steps = progress.silent_steps + 1 if silent else 0
  if silent and progress.silent_steps % warn_after == 0:
    cause, remedy = ('is 0', 'Start from a model that is right now and then, '
                     'ask easier questions, or raise rollout.group_size')
    if values['data/frac_group_all_one'] > 0.5:
      cause, remedy = 'is 1 in most groups', 'Ask harder questions'
    elif values['data/frac_group_failed'] > 0.5:
      cause, remedy = 'is none: searches fail', 'Look at search/error_rate'
    _say(f'Warning: outcomes were alike for {progress.silent_steps} steps (the '
         f'reward {cause}), so nothing is learned. {remedy}.')


def _save_trajectories(folder: pathlib.Path, step: int, trajectories) -> None:
  """One gzipped jsonl a step, everything that was sampled."""
  path = folder / 'trajectories'
  path.mkdir(exist_ok=True)
  lines = ''.join(json.dumps(trajectory_lib.to_json(g), ensure_ascii=False) + '\n'
                  for g in trajectories)
  (path / f'step_{step:06d}.jsonl.gz').write_bytes(
      gzip.compress(lines.encode(), mtime=0))
