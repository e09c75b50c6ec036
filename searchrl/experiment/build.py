# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the config of a training run, and builds its Experiment."""

from collections.abc import Callable
import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

from searchrl.agent import rewards
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.evaluation import evaluator
from searchrl.experiment import config_checks
from searchrl.experiment import fingerprint
from searchrl.experiment import init_from
from searchrl.experiment import past_runs
from searchrl.experiment import policy
from searchrl.experiment import rules
from searchrl.experiment import schedules
from searchrl.experiment import search as searches
from searchrl.experiment import solver
from searchrl.experiment import toolsets
from searchrl.models import attention
from searchrl.models import lora as loras
from searchrl.rl import algorithms
from searchrl.rl import contexts
from searchrl.rollouts import collect
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.rollouts.sampler import Sampler
from searchrl.runtime import alerts
from searchrl.runtime import lockstep as locksteps
from searchrl.runtime import mesh as meshes
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.runtime import progress
from searchrl.runtime import workdir as workdirs
from searchrl.training import learner as learners
from searchrl.training import optimizer as optimizers
from searchrl.training import supervised
from searchrl.trajectory import SearchFn

_REWARDS = ('searchrl.agent.rewards:em, :subem, :f1, :em_with_fee, :format_em '
            'and :retrieval')
# Fields that may change when a run is resumed.
FREE = ('learner.remat', 'learner.microbatch_rows',  # may follow the memory
         'train.num_steps', 'train.max_rollouts', 'train.checkpoint_every',
         'train.keep_checkpoints', 'train.progress', 'train.loggers',
         'train.lockstep',
         'train.stop_after', 'train.watchdog_secs', 'evaluate.every',
         'evaluate.limit', 'evaluate.num_sets_during', 'train.keep_best',
         'rollout.budgets.max_prompt_tokens',  # did not affect past rollouts
         *(f'guards.{kind}.{rule}' for kind in ('actions', 'limits')
           for rule in alerts.RULES),
         *(f'guards.{name}' for name in (
             'trusted_steps', 'most_rollbacks', 'rollback_rate')))


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The objects that `build` makes of a config, for the RL loop of a run."""

  algorithm: algorithms.Algorithm
  sampler: Sampler  # samples trajectories with the policy
  learner: learners.Learner  # updates the policy
  params: Any  # initial parameters; also the reference policy
  start: Callable[[Any], Any]  # learner's first state -> the run's first state
  stream: questions_lib.Stream  # training questions
  search: SearchFn  # search engine and tools of training
  scorer: scoring.Scorer  # computes rewards and outcomes
  judge: scoring.Scorer | None  # judge of evaluations; None: they have none
  rounds: collect.Rounds  # settings by which a batch is sampled
  cases: list[evaluator.EvalCase]  # evaluations to run
  lockstep: locksteps.LockstepCheck


def build(config, folder: pathlib.Path) -> Experiment:
  """Builds the Experiment of a config, and records the config in `folder`.

  Args:
    config: Config of a training run.
    folder: Directory of the run.

  Raises:
    ValueError, FileNotFoundError, RuntimeError: The config cannot be run.
  """
  config_checks.check(config)
  config_checks.check_questions(config)
  config_checks.check_worlds(config)
  config_checks.check_seeds(config.data, config)
  init_from.check(config, folder)
  processes.agree('config', json.loads(config.to_json()))
  recipe, scored = algorithm(config), scorer(config)
  judge = evaluation_judge(config)
  collect.check(rounds(config.rollout), scored)
  _warn_of_outcome(config, recipe)
  lockstep = locksteps.LockstepCheck(config.train.lockstep)
  config_checks.check_training_data(config)
  config_checks.check_learner(config, recipe)
  free = tuple(name for name in FREE if name != 'train.num_steps' or
               not _depends_on_num_steps(config))
  workdir = workdirs.Workdir(
      folder, config, free, tuple(name for name, _ in rules.unset(config)))
  workdir.check()
  model = policy.folder_of(config)
  config_checks.check_shape(config, model.shape)
  if 'solver' in config:
    solver.check(config.solver, model.tokenizer)
  admit = model.admit(policy.budgets_of(config))
  data, sets = datasets.shared(lambda: (  # before the directory is claimed
      train_set(config, folder, admit=admit),
      evaluation_sets(config, folder, admit=admit)))
  if config.data.train:
    fingerprint.warn_of_repeats(data.questions, sets)
  questions = stream(config, data)
  with progress.phase('Starting the devices'):
    mesh, onto = meshes.divided(
        config.train.rollout_devices, config.rollout.tensor, **config.mesh)
  config_checks.check_dtype(config, mesh)
  config_checks.check_processes_ahead(
      config, processes.count(), weight_sync.spans_processes(
          onto, config.rollout.tensor))
  sampler, params = policy.build(
      config, mesh, folder=model, onto=onto if onto is not mesh else None)
  name = tested_attention(config, sampler.shape, mesh)
  trainer = learner(config, recipe, sampler.shape, mesh,
                    attend(config, name, mesh), lockstep)
  search = searches.engine(
      config.search, data.corpus, seed=config.seed,
      steps=config.train.num_steps,
      load_model=functools.partial(policy.second, mesh=onto, seed=config.seed))
  if 'solver' in config:
    scored = scorer(config, solver.load(
        config.solver, sampler, params, search, mesh))
  bind = toolsets.of_sampler(sampler, config.seed)
  search = bind(search, data.corpus)
  cases = searches.cases(searches.of_evaluation(config), sets, config.evaluate,
                         seed=config.seed, rollout=config.rollout, bind=bind)
  workdir.prepare()
  params, start = init_from.start(config, folder, sampler, params, mesh)
  if config.model.lora.rank and not (folder / past_runs.INIT).exists():
    workdir.note(policy.BASE, lambda: policy.base_of(config.model.path))
  note = functools.partial(workdir.note, alike=True)
  note('search', lambda: searches.describe(config.search, data.corpus))
  note('questions', lambda: fingerprint.questions([data, *sets]))
  toolsets.note_served(config, note)
  return Experiment(
      algorithm=recipe, sampler=sampler, learner=trainer, params=params,
      start=start, stream=questions, search=search, scorer=scored, judge=judge,
      rounds=rounds(config.rollout), cases=cases, lockstep=lockstep)


def _depends_on_num_steps(config) -> bool:
  """Returns whether a step's results depend on train.num_steps."""
  return searches.spec(config.search).depends_on_num_steps or any(
      options.get('schedule', 'constant') != 'constant'
      and not options.get('total_steps')
      for options in (config.optimizer, config.critic.optimizer))


def stream(config, data: datasets.Dataset) -> questions_lib.Stream:
  """Returns the stream of training questions that config.data describes."""
  return questions_lib.stream(
      data.files or [data.questions], seed=config.seed, mix=config.data.mix,
      weights=config.data.weights,
      common=0.0 if config.data.train else config.data.common,
      own=bool(config.data.train))


def _warn_of_outcome(config, recipe: algorithms.Algorithm) -> None:
  """Warns if an outcome other than the user's own reward filters the groups."""
  if recipe.keep is not algorithms.keep_all and (
      config.outcome != config.reward
      and not config.reward.startswith('searchrl.')):
    processes.say(
        f'Warning: the filter of {config.algorithm.name.partition(":")[2]} '
        f'keeps groups by outcome={config.outcome}, and not by reward='
        f'{config.reward}, unless that gives an outcome in its Scores. If that '
        'is not meant, add --config.outcome.')


def _nobody(questions: Any, attempts: int) -> Any:
  raise AssertionError('no solver plays before it is loaded')


def scorer(config, play: rewards.Play = _nobody) -> scoring.Scorer:
  """Returns the scorer of a config, which computes rewards and outcomes.

  The outcome says whether an answer is right; filters read it.

  Args:
    config: Config of a run. It names the functions of the reward and of the
      outcome, and the reward's options.
    play: Function that lets a solver answer questions, for a reward that needs
      one; see `experiment.solver`.

  Raises:
    ValueError: A function does not exist, or an argument is missing or unknown.
  """
  outcome = plugins.resolve(config.outcome, field='outcome', ours=_REWARDS)
  if plugins.argument(outcome) in ('', 'trajectories'):
    raise ValueError(
        'outcome must be a function of one trajectory, but is '
        f'{config.outcome}, which takes none or many. Choose one such as '
        'searchrl.agent.rewards:em; the outcome of a judge is in its Scores.')
  reward = plugins.bind(
      config.reward, dict(config.reward_options), field='reward',
      option_field='reward_options', ours=_REWARDS)
  if plugins.argument(reward) == 'play':
    if 'solver' not in config:
      raise ValueError(
          f'solver must say who plays for the reward {config.reward}, but this '
          'config has none. docs/rewards.md shows one.')
    reward = functools.partial(reward, play)
  return scoring.Scorer(_judge(reward, config.reward), outcome, config.reward,
                        _turn_reward(config))


def evaluation_judge(config) -> scoring.Scorer | None:
  """Returns the scorer that judges answers in evaluations, or None.

  Its judge is a function that says whether an answer is right, and may ask a
  language model. If config.evaluate.judge names no function, there is none.

  Raises:
    ValueError: There is no such judge, or it needs a solver to play rollouts.
  """
  options = config.evaluate.get('judge')
  if not options or not options.name:
    return None
  field = 'evaluate.judge.name'
  judge = plugins.bind(
      options.name, dict(options.options), field=field,
      option_field='evaluate.judge.options',
      ours='searchrl.rollouts.judged:judged')
  if plugins.argument(judge) == 'play':
    raise ValueError(
        f'{field} must be a judge without a solver, but is {options.name}, '
        'which takes one. Serve its model with configs/serve_model.py, and '
        'name searchrl.rollouts.judged:judged with its url.')
  return scoring.Scorer(_judge(judge, options.name), name=options.name)


def _turn_reward(config) -> scoring.TurnReward | None:
  """Returns the function of config.turn_reward, or None if it is not set."""
  if not config.get('turn_reward'):
    return None
  reward = plugins.bind(
      config.turn_reward, dict(config.turn_reward_options),
      field='turn_reward', option_field='turn_reward_options',
      ours='searchrl.agent.turn_rewards:evidence')
  if plugins.argument(reward) in ('', 'trajectories'):
    raise ValueError(
        'turn_reward must be a function of one trajectory, but is '
        f'{config.turn_reward}, which takes none or many. A judge of many can '
        'return rewards of turns in its Scores.')
  return reward


def _judge(reward: Callable[..., Any], name: str) -> rewards.Judge:
  """Makes a Judge from a function of a trajectory, of many, or of options."""
  takes = plugins.argument(reward)
  if takes:
    return (rewards.Judge(reward) if takes == 'trajectories' else
            rewards.each(reward))
  judge = reward()
  if not isinstance(judge, rewards.Judge):
    raise ValueError(
        'reward must lead to a function of a trajectory, of the trajectories '
        'of a round, or of options alone that returns a Judge, but '
        f'{name} takes options alone and returned {type(judge).__name__}. '
        'docs/rewards.md shows all three.')
  return judge


def rounds(rollout: Any) -> collect.Rounds:
  """Returns the settings in config.rollout by which a batch is sampled."""
  return collect.Rounds(
      rollout.questions_per_step, rollout.group_size, rollout.max_rounds,
      rollout.stop_when_full, rollout.temperature,
      config_checks.truncation_of(rollout))


def train_set(config, folder: pathlib.Path, *,
              admit: questions_lib.Admit = questions_lib.admit_all
             ) -> datasets.Dataset:
  """Returns the training set; generated files go to folder/data.

  `admit` gets each question and its place in a file, and may raise an error.
  """
  return datasets.train_set(
      folder / 'data', train=config.data.train, corpus=config.search.corpus,
      world_seed=config.data.world_seed, per_hop=config.data.per_hop,
      common=config.data.common, world=world(config),
      needs_corpus=searches.spec(config.search).needs_corpus,
      limit=config.data.limit, seed=config.seed,
      question_mark=config.data.question_mark,
      golds=config.data.get('golds', True), admit=admit)


def world(config) -> datasets.WorldOptions:
  """Returns the options of config.world for generated worlds."""
  return datasets.WorldOptions(**config.world)


def evaluation_sets(config, folder: pathlib.Path, *, golds: bool = True,
                    admit: questions_lib.Admit = questions_lib.admit_all
                   ) -> list[datasets.Dataset]:
  """Returns the evaluation sets; generated files go to folder/data.

  Without `golds`, questions of files may lack gold answers.
  """
  return datasets.evaluation_sets(
      folder / 'data', evaluate=config.data.evaluate,
      corpus=config.search.corpus, own_train=bool(config.data.get('train')),
      question_mark=config.data.get('question_mark', False),
      needs_corpus=searches.evaluation_needs_corpus(config),
      world=world(config), golds=golds, admit=admit, **config.evaluate.worlds)


def algorithm(config) -> algorithms.Algorithm:
  """Returns the algorithm that a config names.

  It raises a ValueError if the rollouts do not suit the algorithm.
  """
  options = dict(config.algorithm)
  name = options.pop('name')
  is_masked = options.pop('mask_observations', True)
  built = plugins.build(
      name, options, field='algorithm',
      ours='searchrl.rl.algorithms:grpo, :dspo and others')
  if not isinstance(built, algorithms.Algorithm):
    raise ValueError('algorithm.name must lead to a function that returns an '
                     f'Algorithm, but {name} returned {type(built).__name__}.')
  config_checks.check(config)
  config_checks.check_algorithm(config, name, built)
  built = contexts.over_contexts(built, policy.budgets_of(config).contexts)
  if not is_masked:
    built = algorithms.with_observations(built)
  if config.importance_correction.method == 'none':
    return built
  return algorithms.corrected(built, **config.importance_correction)


def learner(config, recipe, shape, mesh, attention_options,
            lockstep=lambda *facts: None) -> learners.Learner:
  """Returns the learner that a config describes, for a model of `shape`.

  Args:
    config: Config of a run.
    recipe: Algorithm whose loss is minimised.
    shape: Sizes of the model.
    mesh: Mesh of the devices.
    attention_options: Keyword arguments of the model's attention; see `attend`.
    lockstep: Function that receives facts that must be equal on all processes.
  """
  made = schedules.optimizers(config, 'values' in recipe.needs)
  return learners.make(
      shape, recipe, made['policy'], mesh,
      rows=(config.rollout.questions_per_step * config.rollout.group_size
            * policy.budgets_of(config).contexts),
      length=config.rollout.max_length, temperature=config.rollout.temperature,
      lora=loras.Lora(**config.model.lora) if config.model.lora.rank else None,
      seed=config.seed,
      critic_optimizer=made['critic'],
      critic_warmup=config.critic.warmup_updates, lockstep=lockstep,
      **attention_options, **config.learner)


def supervised_learner(config, shape, mesh, attention_options, *, rows: int,
                       updates: int) -> learners.Learner:
  """Returns the learner of a config like configs/sft.py.

  There are `updates` updates, each on at most `rows` documents. The other
  arguments are those of `learner`.
  """
  lora = config.model.lora
  return supervised.language_learner(
      shape, optimizers.for_run(config.optimizer, updates), mesh, rows=rows,
      lora=loras.Lora(**lora) if lora.rank else None, seed=config.seed,
      **attention_options, **config.learner)


def tested_attention(config, shape, mesh) -> str:
  """Returns the name of the attention implementation that training uses.

  It is config.model.attention, which the first process tests. 'auto' means an
  implementation for the device, or a simpler one if the test fails.

  Raises:
    RuntimeError: The implementation that the config names fails its test.
    ValueError: mesh.tensor does not suit the KV heads.
  """
  heads, ways = shape.num_key_value_heads, meshes.ways(mesh, 'attended')
  if meshes.ways(mesh, 'length') > 1:  # heads are repeated
    heads = math.lcm(heads, ways)
  tensor = 1 if heads % ways else ways
  rows = -(-(config.learner.microbatch_rows or 2) // meshes.ways(
      mesh, 'batch'))
  with progress.phase('Testing the attention of training'):
    name, note = processes.on_first('attention', lambda: attention.resolve(
        config.model.attention, platform=mesh.devices.flat[0].platform,
        dtype=config.learner.dtype, heads=shape.num_attention_heads // tensor,
        kv_heads=heads // tensor, head_dim=shape.head_dim,
        length=config.learner.pack_length or config.rollout.max_length,
        sliding_window=shape.sliding_window, rows=rows,
        max_segments=config.learner.max_segments))
  if name != 'xla' or note.startswith('Warning'):
    processes.say(note)
  if name != 'xla' and heads % ways:
    legal = [n for n in range(1, heads + 1) if heads % n == 0]
    raise ValueError(
        f'mesh.tensor must divide the {heads} KV heads under {name} attention, '
        f"but is {ways}. Choose one of {legal}, or model.attention='xla'.")
  return name


def attend(config, name: str, mesh) -> dict[str, Any]:
  """Returns the learner's keyword arguments for an attention implementation."""
  return dict(attend=functools.partial(
      attention.causal, implementation=name,
      block=config.model.attention_block or None,
      sharding=meshes.sharding(mesh, ('batch', None, 'attended', None))),
              fit_segments=name == 'cudnn_padded')


def beside_job(config, name: str) -> dict[str, Any]:
  """Calls a function of the job's module with the config; returns its result.

  The result is {} if the config names no job, or its module has no such
  function. A job that trains several models has `trainings`, which returns
  {name: config of a training}, and `examples`, {name: text of a first message}.
  A job whose phases need different memory has `phases`, {name: config}.

  Args:
    config: Config, whose field `job` may name a function 'module:run'.
    name: Name of the function to call in that module.

  Raises:
    ValueError: config.job is set, but names no function.
  """
  if not config.get('job'):
    return {}
  function = plugins.beside(
      config.job, name, field='job', ours='searchrl.jobs.train:run')
  return function(config) if function else {}
