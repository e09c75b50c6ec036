# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a config: of single fields, and of several fields together.

The checks that called functions make by themselves are not repeated here.
"""

from collections.abc import Iterator, Mapping
import math
from typing import Any

from searchrl.data import datasets
from searchrl.data import question_files
from searchrl.experiment import guards
from searchrl.experiment import search as searches
from searchrl.experiment.rules import RULES, Rule
from searchrl.models import lora as loras
from searchrl.models.inference import sampling
from searchrl.rl import algorithms
from searchrl.runtime import processes
from searchrl.search import engines
from searchrl.training import optimizer as optimizers


def check(config) -> None:
  """Raises a ValueError for the first field that breaks its rule.

  No number in a config may be NaN or infinite, because comparisons with it and
  divisions by it would give wrong results without an error.
  """
  check_finite(config.to_dict())
  for rule in RULES:
    check_rule(config, rule)
  own = config.get('evaluate', {})
  for field, search in (
      ('search', config.get('search')), ('evaluate.search', own.get('search')),
      *((f'evaluate.engines.{name}', engine)
        for name, engine in own.get('engines', {}).items())):
    if search and search.get('engine'):
      spec = searches.spec(search, field)
      engines.check(spec)
      if 'rollout' in config:
        _check_deadline(spec, config.rollout)
  if 'guards' in config:
    guards.check(config.guards)


def check_finite(tree: Any, field: str = '') -> None:
  """Raises a ValueError if a number is NaN or infinite."""
  if isinstance(tree, Mapping):
    for name, value in tree.items():
      check_finite(value, f'{field}.{name}' if field else name)
  for value in tree if isinstance(tree, list | tuple) else (tree,):
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f'{field} must be finite, but is {tree!r}.')


def check_rule(config, rule: Rule) -> None:
  """Raises a ValueError if a config breaks a rule."""
  for value in _values(config, rule.field):
    if not rule.legal(value):
      raise ValueError(' '.join(filter(None, (
          f'{rule.field} must be {rule.must_be}, but is {value!r}.',
          rule.remedy))))


def _check_deadline(spec: engines.Spec, rollout: Any) -> None:
  """Raises a ValueError if an engine may answer after the search's time-out."""
  secs = spec.deadline_secs(rollout.max_num_seqs)
  if secs >= rollout.search_timeout_secs:
    raise ValueError(
        f'rollout.search_timeout_secs must be above what {spec.field} gives '
        f'its servers, {secs:g} seconds for rollout.max_num_seqs='
        f'{rollout.max_num_seqs} queries, but is '
        f'{rollout.search_timeout_secs:g}: the cause of a failure would be '
        f'lost. Raise it, or lower {spec.field}.deadline_secs (an engine that '
        'sends a request a query needs more connections, too).')


def _values(config, field: str) -> Iterator[Any]:
  """Yields the value of a dotted field, if the config has it."""
  for name in field.split('.'):
    if name not in config:
      return
    config = config[name]
  yield config


def check_questions(config) -> None:
  """Raises an error unless the question files exist and have valid weights.

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
  """Raises a ValueError if questions ask for knowledge that worlds lack."""
  data, evaluate = config.data, config.get('evaluate', {})
  asked = data.get('evaluate', '')
  if config.world.common or data.get('train') and asked != datasets.WORLDS:
    return
  kinds = () if asked not in ('', datasets.WORLDS) else evaluate.get(
      'worlds', {}).get('kinds', ())
  about = [kind for kind in kinds if kind in datasets.COMMON]
  for broken, message in (
      (data.get('common') and any(data.get('per_hop', ())),
       'data.common must be 0 where worlds have no common knowledge '
       f'(world.common=False), but is {data.get("common")}. Set it to 0, or '
       'world.common to True.'),
      (about, 'evaluate.worlds.kinds must not name famous or outdated where '
       'worlds have no common knowledge (world.common=False), but is '
       f'{tuple(kinds)}. Leave them out, or set world.common to True.'),
  ):
    if broken:
      raise ValueError(message)


def check_seeds(trained: Mapping[str, Any], config) -> None:
  """Raises a ValueError if a policy is evaluated in its own training world.

  Args:
    trained: Field config.data of the run that trains the policy.
    config: Config of the evaluation.
  """
  worlds, asked = config.evaluate.worlds, config.data.evaluate
  generates = not trained['train'] and any(trained['per_hop'])
  judged = worlds.kinds and asked in ('', datasets.WORLDS)
  if generates and judged and trained['world_seed'] == worlds.world_seed:
    raise ValueError(
        'evaluate.worlds.world_seed must not be that of training, '
        f'data.world_seed, but both are {worlds.world_seed}: the policy would '
        'be judged in the world that it has learned from. Choose another.')


def check_learner(config, algorithm: algorithms.Algorithm) -> None:
  """Raises a ValueError if the learner's options cannot work on any device.

  A warm-up that is longer than the run is legal, but gives a warning.
  """
  check_staleness(config.train.max_staleness, algorithm, 1,
                  config.evaluate.every)
  updates = config.train.num_steps * config.learner.minibatches
  for optimizer in (config.optimizer, config.critic.optimizer):
    optimizers.for_run(optimizer, updates)
  if config.model.lora.rank:
    loras.Lora(**config.model.lora)
  if 0 < updates < config.optimizer.warmup_steps:
    processes.say(
        f'Warning: optimizer.warmup_steps={config.optimizer.warmup_steps} are '
        f"more than the run's {updates} updates, so that it never reaches its "
        'learning rate.')


def check_algorithm(config, name: str, algorithm: algorithms.Algorithm) -> None:
  """Raises a ValueError if the rollouts do not suit the algorithm."""
  rollout = config.rollout
  truncation = truncation_of(rollout)
  truncation.check()
  needed = algorithm.min_group_size
  for broken, message in (
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
  ):
    if broken:
      raise ValueError(message)


def check_staleness(staleness: int, algorithm: algorithms.Algorithm,
                    devices: int, every: int = 0) -> None:
  """Raises a ValueError if rollouts cannot be asynchronous.

  Args:
    staleness: Value of config.train.max_staleness.
    algorithm: Algorithm of the run.
    devices: Number of devices in the mesh.
    every: Value of config.evaluate.every.
  """
  for broken, message in (
      (staleness and every,
       'evaluate.every must be 0 where rollouts run ahead in a thread, which '
       f'has the engine, but is {every} with train.max_staleness={staleness}. '
       'Set one of them to 0.'),
      (staleness and algorithm.one_update,
       'train.max_staleness must be 0 for an algorithm without an importance '
       f'ratio, but is {staleness}: another policy samples than is trained. '
       'Set it to 0, or choose a recipe with a ratio.'),
      (staleness and devices > 1,
       'train.max_staleness must be 0 on several devices, where two programs '
       f'at a time could wait for each other, but is {staleness} on {devices}. '
       'Set it to 0, or start one process with one device.'),
  ):
    if broken:
      raise ValueError(message)


def check_supervised(config) -> None:
  """Raises a ValueError for invalid options of configs/sft.py."""
  train, batch, places = config.train, config.batch, config.learner.max_segments
  for broken, message in (
      (not train.epochs and not train.steps,
       'train.epochs or train.steps must be above 0, but both are 0. '
       'Set one of them.'),
      (not batch.documents and not batch.tokens,
       'batch.documents or batch.tokens must be above 0, but both are 0. '
       'Set one of them.'),
      (config.learner.pack_length <= max(places, 1),
       'learner.pack_length must be more than learner.max_segments, '
       f'{places}, but is {config.learner.pack_length}.'),
      (config.data.validation and not config.data.train,
       'data.validation needs data.train, but that is empty: the '
       'demonstrations of generated worlds come with their own.'),
  ):
    if broken:
      raise ValueError(message)


def truncation_of(rollout: Any) -> sampling.Truncation:
  """Returns the truncation of sampling (top_k, top_p, min_p) in a config."""
  return sampling.Truncation(rollout.top_k, rollout.top_p, rollout.min_p)


def check_training_data(config) -> None:
  """Raises a ValueError if a run has no questions to train on.

  A config with a real model generates no questions. It uses the paper's data.
  """
  if not config.data.train and not any(config.data.per_hop):
    raise ValueError(
        'data.train and search.corpus must be given where data.per_hop='
        f'{tuple(config.data.per_hop)} generates no questions, as for the '
        "papers' models, but data.train is ''. Add --config.data.train="
        'train.jsonl and --config.search.corpus=corpus.jsonl; docs/settings.md '
        'says where to get them.')
