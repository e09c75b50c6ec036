# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a config: of its fields' ranges, and of combinations of fields.

Checks that the called functions make themselves are not repeated here.
"""

from collections.abc import Mapping
import math
from typing import Any

from searchrl.data import datasets
from searchrl.data import question_files
from searchrl.experiment import guards
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.models import lora as loras
from searchrl.models import sequence_attention
from searchrl.models import transformer
from searchrl.models.inference import sampling
from searchrl.rl import algorithms
from searchrl.runtime import config_fields
from searchrl.runtime import loggers
from searchrl.runtime import plugins
from searchrl.runtime import processes
from searchrl.search import engines
from searchrl.training import optimizer as optimizers

_ENDLESS = 10**12  # updates, with which any warm-up ends before the run


def check(config) -> None:
  """Raises a ValueError for the first field that breaks its rule.

  It also checks the optimizers, search engines, guards and loggers. No number
  in a config may be NaN or infinite, because comparisons with it and divisions
  by it would give wrong results without an error.
  """
  for field, value, rule in config_fields.fields(config):
    for number in value if isinstance(value, list | tuple) else (value,):
      if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f'{field} must be finite, but is {value!r}.')
    if rule and not rule.is_legal(value):
      raise ValueError(f'{field} must be {rule.must_be}, but is {value!r}.')
  for path, group in config_fields.groups(config):
    if path.rpartition('.')[2] == 'optimizer':
      _check_optimizer(path, group, _ENDLESS)
  evaluate = config.get('evaluate', {})
  through = searches.of_evaluation(config) if evaluate.get('engines') else {}
  for field, search in (
      ('search', config.get('search')),
      ('evaluate.search', evaluate.get('search')),
      *((f'evaluate.engines.{name}', engine)
        for name, engine in through.items())):
    if field != 'search' and search and search.options and not search.engine:
      raise ValueError(
          f"{field}.engine must name the engine of {field}.options, but is ''. "
          'Set it, too.')
    if search and search.get('engine'):
      spec = searches.spec(search, field)
      engines.check(spec)
      if 'rollout' in config:
        _check_deadline(spec, config.rollout)
        _check_joint(spec, config.rollout)
  for spec in toolsets.engine_specs(config) if 'rollout' in config else ():
    _check_deadline(spec, config.rollout)
  if 'guards' in config:
    guards.check(config.guards)
  loggers.resolve(config.get('train', {}).get('loggers', ()))


def _refuse(*cases: tuple[Any, str]) -> None:
  """Raises a ValueError with the message of the first case that is true."""
  for is_case, message in cases:
    if is_case:
      raise ValueError(message)


def _check_optimizer(path: str, group: Mapping[str, Any], updates: int) -> None:
  keywords = plugins.keywords(optimizers.adamw)
  options = optimizers.options_for_run(group, updates)
  plugins.build(config_fields.OPTIMIZER, {
      name: value for name, value in options.items() if name in keywords},
                field=path, ours=config_fields.OPTIMIZER)


def _check_deadline(spec: engines.Spec, rollout: Any) -> None:
  """Raises a ValueError if a search would time out before its servers do."""
  secs = spec.deadline_secs(rollout.max_num_seqs)
  if secs >= rollout.search_timeout_secs:
    raise ValueError(
        f'rollout.search_timeout_secs must be above the {secs:g} seconds that '
        f'{spec.field} may wait for rollout.max_num_seqs={rollout.max_num_seqs}'
        f' queries, but is {rollout.search_timeout_secs:g}, so a search would '
        'be ended before it can say why it failed. Raise it, or lower '
        f'{spec.field}.deadline_secs (or raise {spec.field}.connections, if '
        'each query is a request).')


def _check_joint(spec: engines.Spec, rollout: Any) -> None:
  """Checks the fields that go with an index on the devices of all processes.

  With such an index (backend='mesh'), all processes search at the same time.

  Raises:
    ValueError: Searches are taken by arrival, or there are two such indexes.
  """
  _refuse(
      (spec.is_joint and rollout.search_order == 'arrival',
       "rollout.search_order must be 'deterministic' or 'auto' where "
       f"{spec.field} has backend='mesh', but is 'arrival': processes search "
       'together, and wait for each other.'),
      (sum(leaf.is_joint for leaf in spec.leaves) > 1,
       f"{spec.field} must have backend='mesh' once at most, but has it more "
       "often. Take 'exact' or an approximate index for the others."))


def check_questions(config) -> None:
  """Checks that the question files of a config exist, with valid weights.

  Raises:
    ValueError: Names or weights do not match the files.
    FileNotFoundError: A file does not exist.
  """
  data = config.data
  if data.get('evaluate', '') != datasets.WORLDS:
    question_files.named(
        data.get('evaluate', ''), 'data.evaluate', may_be_folder=True)
  files = question_files.named(data.get('train', ''), 'data.train')
  weights = tuple(data.get('weights', ()))
  if weights and (len(weights) != len(files) or min(weights) < 0
                  or sum(weights) <= 0):
    raise ValueError(
        'data.weights must have a number of at least 0 for each of the '
        f'{len(files)} files of data.train, and one above it, but is '
        f'{weights}. Use () to draw from all questions alike.')


def check_worlds(config) -> None:
  """Raises a ValueError if questions need facts that generated worlds lack.

  These facts are the common knowledge, which a generated world has only if
  world.common is True.
  """
  data = config.data
  judged = data.get('evaluate', '')
  if config.world.common or data.get('train') and judged != datasets.WORLDS:
    return
  kinds = () if judged not in ('', datasets.WORLDS) else config.get(
      'evaluate', {}).get('worlds', {}).get('kinds', ())
  _refuse(
      (data.get('common') and any(data.get('per_hop', ())),
       'data.common must be 0 where worlds have no common knowledge '
       f'(world.common=False), but is {data.get("common")}. Set it to 0, or '
       'world.common to True.'),
      ({*kinds} & {*datasets.COMMON},
       'evaluate.worlds.kinds must not name famous or outdated where '
       'worlds have no common knowledge (world.common=False), but is '
       f'{tuple(kinds)}. Leave them out, or set world.common to True.'))


def check_seeds(trained: Mapping[str, Any], config) -> None:
  """Raises a ValueError if a policy is evaluated in its own training world.

  Worlds are generated from seeds, so the same seed gives the same world.

  Args:
    trained: Field config.data of the run that trains the policy.
    config: Config of the evaluation.
  """
  worlds = config.evaluate.worlds
  generates = not trained['train'] and any(trained['per_hop'])
  is_judged = worlds.kinds and config.data.evaluate in ('', datasets.WORLDS)
  if generates and is_judged and trained['world_seed'] == worlds.world_seed:
    raise ValueError(
        'evaluate.worlds.world_seed must not be that of training, '
        f'data.world_seed, but both are {worlds.world_seed}: the policy would '
        'be judged in the world that it has learned from. Choose another.')


def check_learner(config, algorithm: algorithms.Algorithm) -> None:
  """Raises a ValueError if options of training do not fit each other.

  A warm-up that is longer than the run is legal, but gives a warning.
  """
  staleness, apart = config.train.max_staleness, config.train.rollout_devices
  evaluate = config.evaluate
  _refuse(
      (evaluate.every and 'greedy' not in evaluate.decodings,
       "evaluate.decodings must have 'greedy', by which runs are validated "
       f'(evaluate.every={evaluate.every}), but is '
       f'{tuple(evaluate.decodings)}. Add it, or set evaluate.every to 0.'),
      # Stale samples are those of an earlier policy.
      (staleness and algorithm.one_update,
       'train.max_staleness must be 0 for an algorithm without an importance '
       f'ratio, but is {staleness}: another policy samples than is trained. '
       'Set it to 0, or choose a recipe with a ratio.'),
      # These devices of a process sample while the others train.
      (apart % config.rollout.tensor,
       'train.rollout_devices must be a multiple of rollout.tensor, which is '
       f'{config.rollout.tensor}, but is {apart}. Change one of them.'),
      (apart and not staleness,
       'train.rollout_devices must be 0 where train.max_staleness is 0, but is '
       f'{apart}: those devices would wait while the others train. Set '
       'train.max_staleness to 1.'))
  updates = config.train.num_steps * config.learner.minibatches
  _check_optimizer('optimizer', config.optimizer, updates)
  _check_optimizer('critic.optimizer', config.critic.optimizer, updates)
  if config.model.lora.rank:
    loras.Lora(**config.model.lora)
  if 0 < updates < config.optimizer.warmup_steps:
    processes.say(
        f'Warning: optimizer.warmup_steps={config.optimizer.warmup_steps} is '
        f"more than the run's {updates} updates, so that it never reaches its "
        'learning rate.')


def check_shape(config, shape: transformer.TransformerConfig) -> None:
  """Raises a ValueError if the options do not suit a model's shape."""
  sequence_attention.check(
      shape, sequence=config.mesh.sequence, tensor=max(config.mesh.tensor, 1),
      pack_length=config.learner.pack_length)
  balance = config.learner.get('router_aux_loss_coef', 0)  # none in tuning
  _refuse((balance and not shape.experts,
           'learner.router_aux_loss_coef must be 0 for a model without experts, '
           f'but is {balance}. Set it to 0.'),
          (config.learner.get('router_replay') and not shape.experts,
           'learner.router_replay must be False for a model without experts, '
           'but is True. Set it to False.'),
          (config.mesh.expert > 1 and not shape.experts,
           'mesh.expert must be 1 for a model without experts, but is '
           f'{config.mesh.expert}. Give the devices to mesh.fsdp.'))


def check_algorithm(config, name: str, algorithm: algorithms.Algorithm) -> None:
  """Raises a ValueError if the rollouts do not suit the algorithm."""
  rollout = config.rollout
  truncation, needed = truncation_of(rollout), algorithm.min_group_size
  _refuse(
      (config.get('turn_reward') and not algorithm.reads_turns,
       f'turn_reward must be empty for {name}, which does not read rewards of '
       f'turns, but is {config.get("turn_reward")!r}. Leave it out, or choose '
       'mt_grpo, gigpo, or ppo with algorithm.turn_rewards=True.'),
      (rollout.group_size < needed,
       f'rollout.group_size must be at least {needed} for {name}, whose '
       f'baseline is the group, but is {rollout.group_size}. Raise it, or '
       'choose an algorithm without a group baseline.'),
      (not algorithm.one_update and not truncation.is_off
       and rollout.truncation == 'refuse',
       f'rollout.top_k, top_p and min_p must be off for {name}, whose loss has '
       'an importance ratio: they make the sampler another distribution than '
       f'the policy. They are {truncation.top_k}, {truncation.top_p} and '
       f'{truncation.min_p}. Turn them off (0, 1.0, 0.0), or accept that with '
       "rollout.truncation='renormalise'."),
      (not algorithm.one_update and not truncation.is_off and (
          config.get('train', {}).get('max_staleness') or rollout.max_rounds > 1
          and algorithm.keep is not algorithms.keep_all),
       f'rollout.top_k, top_p and min_p must be off for {name} where it trains '
       'on samples of an earlier policy (train.max_staleness above 0, or '
       'rollout.max_rounds above 1 with a filter): the sampler renormalises '
       'their log-probs over the tokens kept, and the learner does not. They '
       f'are {truncation.top_k}, {truncation.top_p} and {truncation.min_p}. '
       'Turn them off (0, 1.0, 0.0).'))


def check_dtype(config, mesh) -> None:
  """Raises a ValueError if the devices cannot update in learner.dtype."""
  if (mesh.devices.flat[0].platform == 'cpu'
      and config.learner.dtype != 'float32'):
    raise ValueError(
        'learner.dtype must be float32 on CPUs, for which XLA does not compile '
        f'an update in {config.learner.dtype}. Set --config.learner.dtype='
        'float32; rollout.dtype and model.dtype may stay.')


def check_processes_ahead(config, count: int, together: bool) -> None:
  """Raises a ValueError if this setup cannot sample ahead of training.

  If train.max_staleness is above 0, one thread samples while another trains.
  The sampling thread must not start programs that span processes, because the
  order of programs could then differ between processes.

  Args:
    config: Config of a run.
    count: Number of processes.
    together: Whether the sampler's weights are split over several processes.
  """
  staleness = config.train.max_staleness
  spec = searches.spec(config.search)
  _refuse(
      (staleness and together,
       'train.max_staleness must be 0 where rollout.tensor='
       f'{config.rollout.tensor} devices of several processes share a copy of '
       f'the weights, but is {staleness}. Set it to 0, or lower '
       'rollout.tensor.'),
      (staleness and count > 1 and spec.is_joint,
       "train.max_staleness must be 0 where several processes search an index "
       f"with backend='mesh' together, but is {staleness}. Set it to 0, or "
       'choose another backend.'))


def check_supervised(config) -> None:
  """Raises a ValueError for invalid options of configs/sft.py."""
  train, batch, learner = config.train, config.batch, config.learner
  _refuse(
      (not train.epochs and not train.steps,
       'train.epochs or train.steps must be above 0, but both are 0. '
       'Set one of them.'),
      (not batch.documents and not batch.tokens,
       'batch.documents or batch.tokens must be above 0, but both are 0. '
       'Set one of them.'),
      (learner.pack_length <= learner.max_segments,
       'learner.pack_length must be more than learner.max_segments, '
       f'{learner.max_segments}, but is {learner.pack_length}.'),
      (config.data.validation and not config.data.train,
       'data.validation needs data.train, but that is empty: the '
       'demonstrations of generated worlds come with their own.'))


def check_samples(evaluate) -> None:
  """Raises a ValueError for several samples where all answers are greedy."""
  _refuse((evaluate.samples > 1 and {*evaluate.decodings} == {'greedy'},
           "evaluate.samples must be 1 where evaluate.decodings is 'greedy' "
           f'alone, but is {evaluate.samples}: all samples would be alike. Add '
           "--config.evaluate.decodings=\"('greedy','sampled')\"."))


def truncation_of(rollout: Any) -> sampling.Truncation:
  """Returns top_k, top_p and min_p of config.rollout, as a Truncation."""
  return sampling.Truncation(rollout.top_k, rollout.top_p, rollout.min_p)


def check_training_data(config) -> None:
  """Raises a ValueError if a run has no questions to train on.

  A config for a paper's model generates no questions, so `data.train` must name
  a file of questions.
  """
  if not config.data.train and not any(config.data.per_hop):
    raise ValueError(
        'data.train and search.corpus must be given where data.per_hop='
        f'{tuple(config.data.per_hop)} generates no questions, as for the '
        "papers' models, but data.train is ''. Add --config.data.train="
        'train.jsonl and --config.search.corpus=corpus.jsonl; docs/settings.md '
        'says where to get them.')
