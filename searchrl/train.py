# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, a trained policy and the record of its training out: the RL loop.

Each step: questions are played by the policy, scored, filtered and packed; the
learner adds the old log-probs and updates; metrics are written, and now and
then a checkpoint. The only file that knows everyone.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import signal
import sys
import time
from typing import Any

from searchrl import checkpoint
from searchrl import collect as collecting
from searchrl import datasets
from searchrl import evaluate
from searchrl import learner as learners
from searchrl import mesh as meshes
from searchrl import metrics
from searchrl import optimizer as optimizers
from searchrl import player as players
from searchrl import plugins
from searchrl import processes
from searchrl import summary
from searchrl import trajectory
from searchrl import watchdog
from searchrl import workdir as workdirs
from searchrl.agent import questions as questions_lib
from searchrl.agent import rollout
from searchrl.agent import statistics
from searchrl.models import attention
from searchrl.models import weights
from searchrl.rl import algorithms
from searchrl.rl import diagnostics
from searchrl.search import engines
from searchrl.search import meter

_FREE = ('train.num_steps', 'train.max_rollouts', 'train.checkpoint_every',
         'train.keep_checkpoints', 'train.progress', 'train.lockstep',
         'train.watchdog_secs')
_NEVER = 1e9  # seconds


def run(config, workdir: str) -> None:
  """Trains; the same call goes on where an earlier one stopped.

  On many hosts every process calls it, on a file system that they share; the
  first one writes and speaks for all.
  """
  folder = pathlib.Path(workdir)
  parts = build(config, folder)
  done = processes.on_first('done?', (folder / summary.FILE).exists)
  if done:
    _say((folder / summary.FILE).read_text(), file=sys.stdout)
    _say(f'{folder} is finished. Use another --workdir for another run.',
         file=sys.stdout)
    return
  state, progress = restore(parts, config, folder)
  with contextlib.closing(_writer(config, folder)) as writer:
    writer.truncate(progress.step)
    examine = _Examiner(parts, folder, writer)
    if progress.step == 0 and config.evaluate.initial:
      examine('before', state['params'], 0)
    state, stopped = loop(parts, config, folder, state, progress, writer)
    if stopped:
      _say(f'Stopped after step {progress.step}; everything is saved in '
           f'{folder}. Run the same command to go on.')
      return
    examine('after', state['params'], progress.step)
  weights.save(folder / 'model', state['params'], parts.player.shape,
               tokenizer_from=config.model.path or players.TINY_BASE,
               eos_id=parts.player.tokenizer.eos_ids[0])
  recipe = config.algorithm.name.partition(':')[2]
  processes.on_first('finish', lambda: summary.finish(
      folder, f'{recipe}, seed {config.seed}'))


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a config builds: everything that does not change during a run."""

  algorithm: algorithms.Algorithm
  player: players.Player
  learner: learners.Learner
  params: Any  # that the run starts from; also the reference policy
  stream: questions_lib.Stream
  search: meter.Meter
  reward: Callable[..., float]
  outcome: Callable[..., float]
  exams: list[evaluate.Exam]
  guard: processes.Guard


def build(config, folder: pathlib.Path) -> Parts:
  """Builds and checks everything, before any compilation.

  Raises:
    ValueError, FileNotFoundError: the config cannot be run.
  """
  processes.agree('config', json.loads(config.to_json()))
  algorithm = build_algorithm(config)
  mesh = meshes.make(**config.mesh)
  guard = processes.Guard(config.train.lockstep)
  player, params = players.load(
      config.model.path, dialogue=config.dialogue, seed=config.seed,
      slots=config.rollout.slots, length=config.rollout.length,
      budgets=rollout.Budgets(**config.rollout.budgets), mesh=mesh)
  learner = build_learner(config, algorithm, player, mesh, guard)
  reward, outcome = (
      plugins.resolve(config[field], field=field,
                      ours='searchrl.agent.rewards:em, :subem and :f1')
      for field in ('reward', 'outcome'))
  processes.on_first('workdir', lambda: workdirs.prepare(
      folder, config, free=_FREE, allow_changes=config.allow_changes))
  data, sets = _data(config, folder / 'data')
  return Parts(
      algorithm=algorithm, player=player, learner=learner, params=params,
      stream=questions_lib.Stream(
          data.questions, seed=config.seed, mix=config.data.mix),
      search=meter.Meter(engines.guarded(engines.make(
          config.search.engine, data.corpus, seed=config.seed,
          **config.search.options))),
      reward=reward, outcome=outcome,
      exams=evaluate.exams(
          sets, config.search.engine, config.search.options,
          noise=config.evaluate.noise, seed=config.seed),
      guard=guard)


def _data(config, folder: pathlib.Path):
  """The training set and the evaluation sets; the first process makes them."""
  def read():
    return datasets.train_set(
        folder, train=config.data.train, corpus=config.search.corpus,
        world_seed=config.data.world_seed, per_hop=config.data.per_hop
    ), datasets.evaluation_sets(
        folder, evaluate=config.data.evaluate, corpus=config.search.corpus,
        own_train=bool(config.data.train), **config.evaluate.worlds)

  processes.on_first('data', lambda: read() and None)
  return read()


def restore(parts: Parts, config, folder: pathlib.Path):
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


def loop(parts: Parts, config, folder, state, progress, writer):
  """Steps until the run is done, or someone asks to stop.

  Returns:
    The state, and whether the run was stopped before it was done.
  """
  options = config.train
  rate = optimizers.learning_rate(config.optimizer.learning_rate, **{
      k: v for k, v in config.optimizer.items()
      if k in ('warmup_steps', 'total_steps', 'schedule', 'final_fraction')})
  # A recipe that filters cannot tell its last step, but its last trajectory.
  unit = 'rollouts' if options.max_rollouts else 'step'
  bar = metrics.Progress(
      options.max_rollouts or options.num_steps, getattr(progress, unit),
      enabled=options.progress and processes.is_first(),
      unit=unit.removesuffix('s'))
  timer = metrics.Timer()
  with (_StopRequest() as stop, contextlib.closing(bar),
        watchdog.Watchdog(options.watchdog_secs or _NEVER) as dog):
    while not _done(progress, options):
      dog.beat(f'step {progress.step + 1}')
      with timer('step'):
        state, values, played = step(parts, config, state, progress, timer)
      values |= timer.pop() | {'actor/lr': rate(int(state['updates']) - 1)}
      tokens = sum(len(game.tokens) for game in played)
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


def step(parts: Parts, config, state, progress, timer):
  """One step of RL: play, keep, pack, score, update.

  Returns:
    The new state, metrics, and all trajectories that were played.
  """
  with timer('gen'):
    groups, played, counts = collecting.collect(
        parts.player, state['params'], parts.stream, progress, parts.algorithm,
        parts.search, parts.reward, parts.outcome, config.rollout)
  batch = pack(groups, parts.algorithm, progress.step, config.rollout)
  batch = parts.learner.score(state, batch, parts.params, timer)
  state, learned = parts.learner.update(state, batch, timer)
  parts.guard.phase(f'step {progress.step}')
  progress.step += 1
  progress.position = list(parts.stream.position)
  values = counts | statistics.describe(played) | parts.search.pop() | learned
  values |= diagnostics.mismatch(batch)
  values['training/rollouts'] = progress.rollouts
  return state, values, played


def build_algorithm(config) -> algorithms.Algorithm:
  """The config's algorithm, checked against its rollouts."""
  options = dict(config.algorithm)
  name = options.pop('name')
  algorithm = plugins.build(
      name, options, field='algorithm',
      ours='searchrl.rl.algorithms:grpo, :dspo and others')
  if not isinstance(algorithm, algorithms.Algorithm):
    raise ValueError(
        f'algorithm.name must lead to a function that returns an Algorithm, '
        f'but {name} returned {type(algorithm).__name__}.')
  if config.rollout.group_size < algorithm.min_group_size:
    raise ValueError(
        f'rollout.group_size must be at least {algorithm.min_group_size} for '
        f'{name}, whose baseline is the group, but is '
        f'{config.rollout.group_size}. Raise it, or choose an algorithm '
        'without a group baseline.')
  if config.mismatch.how == 'none':
    return algorithm
  return algorithms.corrected(algorithm, **config.mismatch)


def build_learner(config, algorithm, player, mesh, guard) -> learners.Learner:
  """The config's learner for the player's model."""
  return learners.make(
      player.shape, algorithm, optimizers.adamw(**config.optimizer), mesh,
      rows=config.rollout.questions * config.rollout.group_size,
      temperature=config.rollout.temperature,
      critic_optimizer=optimizers.adamw(**config.critic.optimizer),
      critic_warmup=config.critic.warmup_updates, guard=guard,
      attend=build_attention(config, player.shape, mesh),
      **{**config.learner,
         'lengths': (*config.learner.lengths, config.rollout.length)})


def build_attention(config, shape, mesh) -> Callable[..., Any]:
  """The config's attention of whole rows, tested by the first process."""
  name, note = processes.on_first('attention', lambda: attention.resolve(
      config.model.attention, platform=mesh.devices.flat[0].platform,
      dtype=config.learner.dtype, heads=shape.num_attention_heads,
      kv_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
      length=config.rollout.length, sliding_window=shape.sliding_window))
  if name != 'xla' or note.startswith('Warning'):
    _say(note)
  return functools.partial(
      attention.causal, implementation=name,
      block=config.model.attention_block or None,
      sharding=meshes.sharding(mesh, ('batch', None, 'heads', None)))


def pack(groups, algorithm, policy_step: int, options) -> trajectory.Batch:
  """Groups side by side, filled up with empty rows; options: config.rollout."""
  def baseline(number, group):
    its = algorithm.group_of(group[0].question)
    # A question that is asked twice in a step has two groups.
    by_question = algorithm.group_of is algorithms.question_uid
    return (its, number) if by_question else its

  games = [game for group in groups for game in group]
  ids = [baseline(n, group) for n, group in enumerate(groups) for _ in group]
  return trajectory.pack(
      games, group_ids=ids, policy_step=policy_step, length=options.length,
      rows=options.questions * options.group_size,
      mask_truncated=options.mask_truncated)


class _Examiner:
  """Evaluates once under each name, and never again after a resume."""

  def __init__(self, parts: Parts, folder: pathlib.Path, writer):
    self._parts, self._writer = parts, writer
    self._folder = folder / 'evaluation'

  def __call__(self, name: str, params, step: int) -> None:
    exams = self._parts.exams
    if not exams:
      return
    folder = self._folder / name
    table = processes.on_first(f'{name}?', lambda: _read_json(folder))
    if table is None:
      _say(f'Evaluating {name} training '
           f'({sum(len(e.set.questions) for e in exams)} questions) ...')
      table, records = evaluate.run(self._parts.player, params, exams)
      if processes.is_first():
        evaluate.save(folder, table, records, self._parts.player.tokenizer)
    if not self._writer.holds(step, 'val/'):
      self._writer.write(step, evaluate.scalars(table))


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


class _StopRequest:
  """Ctrl-C or SIGTERM asks to stop after the step; a second Ctrl-C insists."""

  def __init__(self):
    self.asked = False
    self._previous = {}

  def __enter__(self):
    for number in (signal.SIGINT, signal.SIGTERM):
      self._previous[number] = signal.signal(number, self._ask)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _ask(self, number, frame):
    del frame
    if self.asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.asked = True
    _say('Stopping after this step; press Ctrl-C again to stop at once and '
         'lose it.')


def _done(progress: collecting.Progress, options) -> bool:
  return (progress.step >= options.num_steps or
          0 < options.max_rollouts <= progress.rollouts)


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


def _save_trajectories(folder: pathlib.Path, step: int, games) -> None:
  """One gzipped jsonl a step, everything that was sampled."""
  path = folder / 'trajectories'
  path.mkdir(exist_ok=True)
  lines = ''.join(json.dumps(trajectory.to_json(g), ensure_ascii=False) + '\n'
                  for g in games)
  (path / f'step_{step:06d}.jsonl.gz').write_bytes(
      gzip.compress(lines.encode(), mtime=0))


def _say(text: str, file=None) -> None:
  if processes.is_first():
    print(text, file=file or sys.stderr, flush=True)
