# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A config in, a trained policy and the record of its training out: the RL loop.

Each step: questions are played by the policy, scored, filtered and packed; the
learner adds the old log-probs and updates; metrics are written, and now and
then a checkpoint. The only file that knows everyone.
"""

import contextlib
import dataclasses
import gzip
import json
import math
import pathlib
import signal
import sys
from typing import Any

import jax
import numpy as np

from searchrl import checkpoint
from searchrl import datasets
from searchrl import evaluate
from searchrl import learner as learners
from searchrl import mesh as meshes
from searchrl import metrics
from searchrl import optimizer as optimizers
from searchrl import player as players
from searchrl import trajectory
from searchrl import workdir as workdirs
from searchrl.agent import questions as questions_lib
from searchrl.agent import rewards as rewards_lib
from searchrl.agent import rollout
from searchrl.models import weights
from searchrl.rl import algorithms
from searchrl.search import engines
from searchrl.trajectory import Trajectory

Group = list[Trajectory]  # samples of one question, by one policy

_FREE = ('train.num_steps', 'train.max_rollouts', 'train.checkpoint_every',
         'train.keep_checkpoints', 'train.progress')


@dataclasses.dataclass
class Progress:
  """What a run must remember besides the learner's state; checkpointed."""

  step: int = 0  # updates of the policy
  rollouts: int = 0  # trajectories sampled so far
  position: list[int] = dataclasses.field(default_factory=list)  # of the data
  surplus: list[Group] = dataclasses.field(default_factory=list)
  silent_steps: int = 0  # in a row, without a group to learn from

  def to_json(self) -> dict[str, Any]:
    surplus = [[trajectory.to_json(g) for g in group] for group in self.surplus]
    return {**vars(self), 'surplus': surplus}

  @classmethod
  def from_json(cls, record: dict[str, Any]) -> 'Progress':
    surplus = [[trajectory.from_json(g) for g in group]
               for group in record['surplus']]
    return cls(**{**record, 'surplus': surplus})


def run(config, workdir: str) -> None:
  """Trains; the same call goes on where an earlier one stopped."""
  folder = pathlib.Path(workdir)
  algorithm = build_algorithm(config)
  mesh = meshes.make(**config.mesh)
  player, params = players.load(
      config.model.path, dialogue=config.dialogue, seed=config.seed,
      slots=config.rollout.slots, length=config.rollout.length,
      budgets=rollout.Budgets(**config.rollout.budgets),
      place=lambda tree: meshes.shard_batch(mesh, tree))
  learner = build_learner(config, algorithm, player, mesh)
  reward = rewards_lib.make(config.reward)
  outcome = rewards_lib.make(config.outcome)
  workdirs.prepare(workdir, config, free=_FREE,
                   allow_changes=config.allow_changes)
  if (folder / 'summary.txt').exists():
    print((folder / 'summary.txt').read_text())
    print(f'{folder} is finished. Use another --workdir for another run.')
    return
  data = datasets.train_set(
      folder / 'data', train=config.data.train, corpus=config.search.corpus,
      world_seed=config.data.world_seed, per_hop=config.data.per_hop)
  stream = questions_lib.Stream(data.questions, seed=config.seed,
                                mix=config.data.mix)
  search = engines.guarded(engines.make(
      config.search.engine, data.corpus, seed=config.seed,
      **config.search.options))
  taken = _exams(config, folder)

  state = learner.init(params)
  ref_params = (jax.tree.map(jax.numpy.copy, state['params'])
                if 'ref_logprobs' in algorithm.needs else None)
  progress = Progress(position=stream.position)
  found = checkpoint.restore(folder / 'checkpoints', state,
                             warn=lambda text: _say(f'Warning: {text}'))
  if found:
    _, state, extra = found
    progress = Progress.from_json(extra)
    stream.position = progress.position
    _say(f'Resumed at step {progress.step} of {folder}.')
  with contextlib.closing(metrics.Writer(
      folder, tensorboard=config.train.tensorboard)) as writer:
    writer.truncate(progress.step if found else -1)
    if not found:
      checkpoint.save(folder / 'checkpoints', 0, state, progress.to_json())
    examine = _Examiner(player, taken, folder, writer)
    examine('before', state['params'], progress.step)
    bar = metrics.Progress(config.train.num_steps, progress.step,
                           enabled=config.train.progress)
    timer = metrics.Timer()
    with _StopRequest() as stop:
      while not _done(progress, config.train):
        with timer('step'):
          with timer('gen'):
            groups, played, counts = collect(
                player, state['params'], stream, progress, algorithm, search,
                reward, outcome, config.rollout)
          batch = _pack(groups, algorithm, progress.step, config)
          with timer('old_log_prob'):
            batch = learner.score(state, batch, ref_params)
          with timer('update_actor'):
            state, learned = learner.update(state, batch)
          progress.step += 1
          progress.position = stream.position
          values = counts | describe(played, player.tokenizer) | learned
          values |= _mismatch(batch) | {
              'actor/lr': config.optimizer.learning_rate,
              'training/rollouts': progress.rollouts}
        values |= timer.pop()
        tokens = sum(len(g.tokens) for g in played)
        values['perf/total_num_tokens'] = tokens
        values['perf/throughput'] = tokens / values['timing_s/step']
        writer.write(progress.step, values)
        _save_trajectories(folder, progress.step, played)
        _warn_if_silent(progress, values, config.train.warn_after)
        if (progress.step % config.train.checkpoint_every == 0 or stop.asked
            or _done(progress, config.train)):
          checkpoint.save(folder / 'checkpoints', progress.step, state,
                          progress.to_json(), keep=config.train.keep_checkpoints)
        bar.update(reward=values['critic/score/mean'],
                   mixed=values['data/frac_group_mixed'],
                   searches=values['search/calls_per_traj'],
                   tokens_per_sec=values['perf/throughput'])
        if stop.asked and not _done(progress, config.train):
          bar.close()
          _say(f'Stopped after step {progress.step}; everything is saved in '
               f'{folder}. Run the same command to go on.')
          return
    bar.close()
    examine('after', state['params'], progress.step)
  weights.save(folder / 'model', state['params'], player.shape,
               tokenizer_from=config.model.path or players.TINY_BASE,
               eos_id=player.tokenizer.eos_ids[0])
  finish(folder, config)


def build_algorithm(config) -> algorithms.Algorithm:
  """The config's algorithm, checked against its rollouts."""
  options = dict(config.algorithm)
  algorithm = algorithms.make(options.pop('name'), **options)
  if config.rollout.group_size < algorithm.min_group_size:
    raise ValueError(
        f'rollout.group_size must be at least {algorithm.min_group_size} for '
        f'{config.algorithm.name}, whose baseline is the group, but is '
        f'{config.rollout.group_size}. Raise it, or choose an algorithm '
        'without a group baseline.')
  return algorithm


def build_learner(config, algorithm, player, mesh) -> learners.Learner:
  """The config's learner for the player's model."""
  return learners.make(
      player.shape, algorithm, optimizers.adamw(**config.optimizer), mesh,
      rows=config.rollout.questions * config.rollout.group_size,
      temperature=config.rollout.temperature,
      **{**config.learner,
         'lengths': (*config.learner.lengths, config.rollout.length)})


def collect(player, params, stream, progress: Progress, algorithm, search,
            reward, outcome, options):
  """Plays rounds of questions until `keep` has accepted a full batch.

  Args:
    player, params: the policy.
    stream: deals questions; its position moves on.
    progress: its surplus is used first, and takes what is left over.
    algorithm: `keep` decides group by group.
    search, reward, outcome: as in `Player.play`.
    options: config.rollout.

  Returns:
    The groups to train on, at most options.questions; all trajectories played
    now; and counts as metrics.
  """
  groups, progress.surplus = progress.surplus, []
  carried = len(groups)
  played, asked = [], []
  times_asked = {}
  for _ in range(options.max_rounds):
    missing = options.questions - len(groups)
    if missing <= 0:
      break
    # Ask for as many as should fill the batch, judging by this step so far.
    share = (len(groups) - carried) / len(asked) if asked else 1.0
    wanted = min(options.questions,
                 math.ceil(missing / max(share, 1 / options.questions)))
    questions = stream.draw(wanted)
    requests = []
    for question in questions:
      again = times_asked.get(question.uid, 0)
      times_asked[question.uid] = again + 1
      requests += [(question, again * options.group_size + i)
                   for i in range(options.group_size)]
    games = player.play(
        params, requests, search=search, reward=reward, outcome=outcome,
        temperature=options.temperature, step=progress.step,
        policy_step=progress.step)
    progress.rollouts += len(games)
    fresh = [games[i:i + options.group_size]
             for i in range(0, len(games), options.group_size)]
    scores = np.array([np.nan if g.outcome_reward is None else g.outcome_reward
                       for g in games])
    ids = np.repeat(np.arange(len(fresh)), options.group_size)
    kept = algorithm.keep(scores, ids).reshape(len(fresh), -1).all(1)
    groups += [group for group, keep in zip(fresh, kept) if keep]
    played += games
    asked += fresh
  progress.surplus = groups[options.questions:]
  groups = groups[:options.questions]
  return groups, played, _group_counts(asked, groups, carried, progress)


def _group_counts(asked, groups, carried, progress) -> dict[str, float]:
  spreads = [[g.outcome_reward for g in group if g.outcome_reward is not None]
             for group in asked]
  spreads = [s for s in spreads if s] or [[0.0]]
  mixed = np.mean([max(s) - min(s) > 1e-6 for s in spreads])
  return {
      'data/frac_group_mixed': mixed,
      'data/frac_group_all_zero': np.mean([max(s) <= 1e-6 for s in spreads]),
      'data/frac_group_all_one': np.mean([min(s) >= 1 - 1e-6 for s in spreads]),
      'data/groups_asked': len(asked),
      'data/groups_trained': len(groups),
      'data/groups_carried_in': carried,
      'data/groups_carried_out': len(progress.surplus),
      'data/tries_per_kept_group': len(asked) / max(
          len(groups) - carried + len(progress.surplus), 1),
  }


def _pack(groups, algorithm, step, config) -> trajectory.Batch:
  """Groups side by side, filled up with empty rows."""
  games = [game for group in groups for game in group]
  ids = [(algorithm.group_of(group[0].question), group[0].policy_step, i)
         if algorithm.group_of is algorithms.question_uid
         else algorithm.group_of(group[0].question)
         for i, group in enumerate(groups) for _ in group]
  return trajectory.pack(
      games, group_ids=ids, policy_step=step, length=config.rollout.length,
      rows=config.rollout.questions * config.rollout.group_size,
      mask_truncated=config.rollout.mask_truncated)


def describe(games, tokenizer) -> dict[str, float]:
  """What the trajectories of a step were like, under the field's names."""
  del tokenizer
  scores = [g.outcome_reward for g in games if g.outcome_reward is not None]
  rewards = [g.reward for g in games if g.reward is not None]
  lengths = [len(g.tokens) - len(g.prompt_tokens) for g in games]
  turns = [len(g.turns) for g in games]
  searches = [g.searches for g in games]
  actions = [t.action for g in games for t in g.turns]
  valid = np.mean([a.kind != 'invalid' for a in actions]) if actions else 0.0
  reasons = [g.stop_reason for g in games]
  sampled = sum(sum(g.loss_mask) for g in games)
  return {
      'critic/score/mean': np.mean(scores) if scores else 0.0,
      'critic/rewards/mean': np.mean(rewards) if rewards else 0.0,
      'response_length/mean': np.mean(lengths),
      'response_length/max': np.max(lengths),
      'response_length/clip_ratio': reasons.count('length_limit') / len(games),
      'num_turns/mean': np.mean(turns),
      'env/number_of_actions/mean': np.mean(turns),
      'env/number_of_actions/max': np.max(turns),
      'env/number_of_actions/min': np.min(turns),
      'env/finish_ratio': reasons.count('answer') / len(games),
      'env/number_of_valid_action': np.mean(
          [sum(t.action.kind != 'invalid' for t in g.turns) for g in games]),
      'env/ratio_of_valid_action': valid,
      'env/number_of_valid_search': np.mean(searches),
      'search/calls_per_traj': np.mean(searches),
      'search/error_rate': reasons.count('search_error') / len(games),
      'search/answer_in_context_rate': np.mean([_answer_seen(g) for g in games]),
      'format/valid_rate': valid,
      'actor/masked_token_frac': 1 - sampled / max(
          sum(len(g.tokens) for g in games), 1),
  } | {f'train/stop_{reason}': reasons.count(reason) / len(games)
       for reason in trajectory.STOP_REASONS}


def _answer_seen(game: Trajectory) -> bool:
  """Whether a gold stands in a passage that the policy was shown."""
  shown = rewards_lib.normalise(' '.join(
      f'{p.title} {p.text}' for turn in game.turns for p in turn.passages))
  golds = map(rewards_lib.normalise, game.question.answers)
  return any(gold and gold in shown for gold in golds)


def _mismatch(batch: trajectory.Batch) -> dict[str, float]:
  """How far the sampler's log-probs are from the learner's, on policy."""
  where = batch.loss_mask & batch.on_policy[:, None]
  if not where.any():
    return {}
  gap = np.abs(batch.behavior_logprobs - batch.old_logprobs)[where]
  probs = np.abs(np.exp(batch.behavior_logprobs)
                 - np.exp(batch.old_logprobs))[where]
  return {'training/rollout_logprobs_diff_mean': gap.mean(),
          'training/rollout_logprobs_diff_max': gap.max(),
          'training/rollout_probs_diff_mean': probs.mean(),
          'training/rollout_probs_diff_max': probs.max()}


def _exams(config, folder) -> list[evaluate.Exam]:
  sets = datasets.evaluation_sets(
      folder / 'data', evaluate=config.data.evaluate,
      corpus=config.search.corpus, own_train=bool(config.data.train),
      **config.evaluate.worlds)
  return evaluate.exams(sets, config.search.engine, config.search.options,
                        noise=config.evaluate.noise, seed=config.seed)


class _Examiner:
  """Evaluates once under each name, and never again after a resume."""

  def __init__(self, player, taken, folder, writer):
    self._player, self._taken = player, taken
    self._folder, self._writer = folder / 'evaluation', writer

  def __call__(self, name: str, params, step: int) -> None:
    if not self._taken:
      return
    file = self._folder / name / 'table.json'
    if not file.exists():
      _say(f'Evaluating {name} training '
           f'({sum(len(e.set.questions) for e in self._taken)} questions) ...')
      rows, records = evaluate.run(self._player, params, self._taken)
      evaluate.save(self._folder / name, rows, records, self._player.tokenizer)
    else:
      rows = json.loads(file.read_text())
    if name == 'after' or step == 0:
      self._writer.truncate(step - (name == 'before'))
      self._writer.write(step, evaluate.scalars(rows))


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


def _done(progress: Progress, options) -> bool:
  return (progress.step >= options.num_steps or
          0 < options.max_rollouts <= progress.rollouts)


def _warn_if_silent(progress: Progress, values, warn_after: int) -> None:
  silent = values['data/frac_group_mixed'] == 0
  progress.silent_steps = progress.silent_steps + 1 if silent else 0
  if silent and progress.silent_steps % warn_after == 0:
    cause, remedy = ('is 0', 'Start from a model that is right now and then, '
                     'ask easier questions, or raise rollout.group_size')
    if values['data/frac_group_all_one'] > 0.5:
      cause, remedy = 'is 1 in most groups', 'Ask harder questions'
    _say(f'Warning: no group had mixed outcomes for {progress.silent_steps} '
         f'steps (the reward {cause}), so nothing is learned. {remedy}.')


def _save_trajectories(folder: pathlib.Path, step: int, games) -> None:
  """One gzipped jsonl a step, everything that was sampled."""
  path = folder / 'trajectories'
  path.mkdir(exist_ok=True)
  lines = ''.join(json.dumps(trajectory.to_json(g), ensure_ascii=False) + '\n'
                  for g in games)
  (path / f'step_{step:06d}.jsonl.gz').write_bytes(
      gzip.compress(lines.encode(), mtime=0))


def finish(folder: pathlib.Path, config) -> None:
  """Draws the curve, prints before against after, and marks the run done."""
  lines = [line for line in metrics.read(folder / metrics.FILE)
           if 'critic/score/mean' in line]
  steps = [line['training/global_step'] for line in lines]
  shown = {'critic/score/mean': 'reward', 'search/calls_per_traj': 'searches',
           'data/frac_group_mixed': 'mixed groups',
           'response_length/mean': 'response length',
           'actor/entropy': 'entropy', 'actor/grad_norm': 'gradient norm'}
  units = {'reward': 'mean outcome', 'searches': 'per question',
           'mixed groups': 'share', 'response length': 'tokens',
           'entropy': 'nats', 'gradient norm': ''}
  metrics.curve(
      folder / 'curve',
      {name: (steps, [line.get(key, math.nan) for line in lines])
       for key, name in shown.items()},
      title=f'{config.algorithm.name.partition(":")[2]}, seed {config.seed}',
      units=units)
  text = summary(folder)
  (folder / 'summary.txt').write_text(text + '\n')
  print(text)


def summary(folder: pathlib.Path) -> str:
  """The table of a run: exact match before and after, and where things are."""
  rows = []
  try:
    before, after = (json.loads(
        (folder / 'evaluation' / name / 'table.json').read_text())
                     for name in ('before', 'after'))
  except FileNotFoundError:
    before, after = [], []
  for old, new in zip(before, after, strict=True):
    rows.append({'set': new['set'], 'engine': new['engine'],
                 'decoding': new['decoding'], 'hops': new['hops'],
                 'n': new['n'], 'em before': old['em'], 'em after': new['em'],
                 '95% interval': new['95% interval'],
                 'searches before': old['searches'],
                 'searches after': new['searches']})
  table = metrics.table(rows, tuple(rows[0])) if rows else (
      'No evaluation set: give --config.data.evaluate.')
  return (f'{table}\n\ncurve    {folder / "curve.png"}\n'
          f'model    {folder / "model"} (Hugging Face format)\n'
          f'metrics  {folder / metrics.FILE}')


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
