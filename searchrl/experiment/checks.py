# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The rules of a config, as tables: of a field alone, and of several together.

What the called functions check by themselves is not repeated here.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
from typing import Any

from searchrl.data import datasets
from searchrl.data import question_files
from searchrl.experiment import guards
from searchrl.experiment import search as searches
from searchrl.models import attention
from searchrl.models import lora as loras
from searchrl.models.inference import layouts
from searchrl.models.inference import sampling
from searchrl.rl import algorithms
from searchrl.runtime import processes
from searchrl.search import factory
from searchrl.search.index import approximate
from searchrl.training import optimizer as optimizers


@dataclasses.dataclass(frozen=True)
class Rule:
  """What one field of a config must be."""

  field: str  # dotted; a config without it passes
  legal: Callable[[Any], bool]
  must_be: str
  remedy: str = ''


def _at_least(field: str, least: float, remedy: str = '') -> Rule:
  return Rule(field, lambda value: value >= least, f'at least {least}', remedy)


def _above(field: str, bound: float) -> Rule:
  return Rule(field, lambda value: value > bound, f'above {bound}')


def _one_of(field: str, *names: str) -> Rule:
  return Rule(field, lambda name: name in names,
              f'one of {", ".join(map(repr, names))}')


def _each(field: str, least: float, kind: type = int) -> Rule:
  return Rule(field, lambda values: all(
      isinstance(x, (kind, int)) and x >= least for x in values),
              f'numbers of at least {least}' if kind is float else
              f'whole numbers of at least {least}')


def _optimizer(field: str) -> tuple[Rule, ...]:
  return (
      _at_least(f'{field}.learning_rate', 0),
      Rule(f'{field}.b2', lambda x: 0 <= x < 1, 'in [0, 1)'),
      _at_least(f'{field}.weight_decay', 0),
      Rule(f'{field}.max_grad_norm', lambda x: x is None or x > 0, 'above 0'),
      _at_least(f'{field}.warmup_steps', 0))


_INDEXES = (*approximate.KINDS, 'bm25')
_DTYPES = ('float32', 'bfloat16')
_SEEDS = 2**63

RULES = (
    # Of all jobs.
    *(Rule(field, lambda seed: 0 <= seed < _SEEDS, 'from 0 to 2^63 - 1')
      for field in ('seed', 'data.world_seed', 'evaluate.worlds.world_seed',
                    'data.demonstrations.world_seed', 'lessons.seed')),
    *(Rule(f'mesh.{axis}', lambda ways: ways == -1 or ways >= 1,
           'at least 1, or -1 for the rest of the devices')
      for axis in ('data', 'fsdp', 'tensor')),
    *(_one_of(field, *_DTYPES) for field in (
        'model.dtype', 'model.save_dtype', 'learner.dtype', 'rollout.dtype',
        'encoder.dtype')),
    # Training and rollouts.
    _one_of('model.attention', 'auto', *attention.IMPLEMENTATIONS),
    _at_least('model.attention_block', 0, 'Set it to 0 for the usual one.'),
    _at_least('model.lora.rank', 0, 'Set it to 0 to train all parameters.'),
    *_optimizer('optimizer'),
    *_optimizer('critic.optimizer'),
    _one_of('optimizer.mu_dtype', *_DTYPES),
    _one_of('optimizer.schedule', 'constant', 'cosine', 'linear'),
    Rule('optimizer.final_fraction', lambda x: 0 <= x <= 1, 'in [0, 1]'),
    _at_least('critic.warmup_updates', 0),
    _one_of('mismatch.how', 'none', 'truncate', 'mask'),
    _one_of('mismatch.level', 'token', 'sequence'),
    _at_least('learner.minibatches', 1),
    _at_least('learner.microbatch_rows', 0, 'Set it to 0 for 2, or data * '
              'fsdp.'),
    _at_least('learner.row_length', 0, 'Set it to 0 for rollout.length.'),
    _at_least('learner.row_places', 1),
    _one_of('learner.remat', '', 'nothing', 'dots'),
    _one_of('train.lockstep', 'off', 'phase', 'call'),
    _at_least('train.watchdog_secs', 0, 'Set it to 0 for never.'),
    *(_at_least(f'rollout.budgets.{name}', 1) for name in (
        'max_turns', 'max_turn_tokens', 'max_prompt_tokens', 'passage_tokens',
        'top_k')),
    _at_least('rollout.length', 1),
    _at_least('rollout.tensor', 1),
    _one_of('rollout.admission', 'auto', 'deterministic', 'arrival'),
    _one_of('rollout.decodes_in_flight', 0, 1),
    _above('rollout.search_timeout_secs', 0),
    _at_least('rollout.search_calls', 1),
    _at_least('train.num_steps', 0),
    _at_least('train.max_rollouts', 0),
    _at_least('train.checkpoint_every', 1),
    _at_least('train.keep_checkpoints', 1),
    _at_least('train.warn_after', 1),
    _at_least('train.stop_after', 0),
    _at_least('train.max_staleness', 0),
    _at_least('rollout.cache_tokens', 0, 'Set it to 0 for as much as all slots '
              'could fill.'),
    _one_of('rollout.attention', 'auto', *layouts.IMPLEMENTATIONS),
    _at_least('guards.trusted_steps', 0),
    _at_least('guards.most_rollbacks', 0),
    Rule('guards.rollback_rate', lambda rate: 0 < rate <= 1, 'in (0, 1]'),
    _at_least('data.limit', 0, 'Set it to 0 to train on all questions.'),
    _at_least('evaluate.every', 0, 'Set it to 0 for none during training.'),
    _at_least('evaluate.limit', 0, 'Set it to 0 for all questions.'),
    _at_least('evaluate.during', 0, 'Set it to 0 for all sets.'),
    _at_least('evaluate.samples', 1),
    Rule('evaluate.step', lambda step: 0 <= step < 2**32, 'from 0 to 2^32 - 1'),
    Rule('evaluate.decodings', lambda names: names and {*names} <= {
        'greedy', 'sampled'}, "'greedy', 'sampled', or both"),
    # Generated worlds.
    _each('data.per_hop', 0),
    _each('data.mix', 0, float),
    _at_least('evaluate.worlds.questions_per_hop', 1),
    _at_least('evaluate.worlds.max_hops', 1),
    _at_least('evaluate.worlds.common_per_hop', 0,
              'Set it to 0 for as many as of fresh facts.'),
    _at_least('evaluate.worlds.few_per_hop', 0, 'Set it to 0 for all.'),
    Rule('evaluate.worlds.kinds', lambda kinds: {*kinds} <= {
        *datasets.FRESH, *datasets.COMMON} and len({*kinds}) == len(kinds),
         f'some of {", ".join((*datasets.FRESH, *datasets.COMMON))}'),
    Rule('data.common', lambda share: 0 <= share < 1, 'in [0, 1)',
         'Set it to 0 for none of common knowledge.'),
    Rule('world.outdated', lambda share: 0 < share < 1, 'in (0, 1)'),
    _above('world.scale', 0),
    Rule('data.hard', lambda share: 0 <= share <= 1, 'in [0, 1]'),
    _at_least('rollout.questions', 1),
    _at_least('rollout.group_size', 1),
    _at_least('rollout.max_rounds', 1),
    _at_least('rollout.slots', 1),
    _above('rollout.temperature', 0),
    Rule('rollout.truncation', lambda x: x in ('refuse', 'renormalise'),
         "'refuse' or 'renormalise'"),
    # Questions to a policy, and servers.
    _at_least('ask.samples', 1),
    _above('ask.temperature', 0),
    _at_least('serve.steps', 1),
    # Engines by themselves.
    Rule('retrieval.top_ks', lambda ks: ks and min(ks) >= 1,
         'whole numbers of at least 1'),
    # Exports.
    _at_least('export.step', 0, 'Set it to 0 for the newest.'),
    Rule('export.dtype', lambda x: x in ('float32', 'bfloat16'),
         "'float32' or 'bfloat16'"),
    # Encoders and the tiny base model.
    _at_least('steps', 1),
    _above('temperature', 0),
    _at_least('tokenizer.vocab_size', 300),
    _at_least('save_every', 1),
    _at_least('batch.queries', 2),
    _at_least('batch.hard_negatives', 0),
    _at_least('batch.depth', 1),
    _at_least('data.batches_a_world', 1),
    Rule('data.fresh', lambda share: 0 <= share <= 1, 'in [0, 1]'),
    # Supervised fine-tuning.
    _at_least('train.epochs', 0),
    _at_least('train.steps', 0),
    _at_least('train.save_every', 1),
    _at_least('train.validate_every', 0),
    _at_least('batch.documents', 0),
    _at_least('batch.tokens', 0),
    Rule('data.validation_share', lambda share: 0 <= share < 1, 'in [0, 1)'),
    _at_least('data.demonstrations.count', 1),
    _at_least('data.demonstrations.validation', 1),
    _at_least('data.demonstrations.a_world', 1),
    Rule('data.demonstrations.mix',
         lambda mix: mix and min(mix) >= 0 < max(mix),
         'shares from 0 on, one of them above 0'),
    Rule('data.demonstrations.sloppiness', lambda x: 0 <= x <= 2, 'in [0, 2]'),
    # Indexes.
    Rule('corpus', bool, 'a jsonl file of passages',
         'Add --config.corpus=my_corpus.jsonl.'),
    Rule('build', lambda kinds: set(kinds) <= {*_INDEXES},
         f'some of {", ".join(_INDEXES)}',
         'Exact search needs nothing besides the vectors.'),
)


def check(config) -> None:
  """Raises a ValueError for the first field that breaks its rule.

  No number of a config is NaN or infinite: what compares with it, or divides by
  it, would go on in silence.
  """
  check_finite(config.to_dict())
  for rule in RULES:
    check_rule(config, rule)
  own = config.get('evaluate', {})
  for field, search in (
      ('search', config.get('search')), ('evaluate.search', own.get('search')),
      *((f'evaluate.engines.{name}', engine)
        for name, engine in own.get('engines', {}).items())):
    if search:
      searches.check(search, field)
  if 'rollout' in config and 'search' in config:
    _check_deadline(config)
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


def _check_deadline(config) -> None:
  """Raises a ValueError if an engine may answer when nobody waits any more."""
  rollout, own = config.rollout, config.get('evaluate', {}).get('search', {})
  for field, search in (('search', config.search), ('evaluate.search', own)):
    if not search.get('engine'):
      continue
    secs = factory.deadline_secs(search.engine, search.options, rollout.slots)
    if secs >= rollout.search_timeout_secs:
      raise ValueError(
          'rollout.search_timeout_secs must be above what '
          f'{field}.options gives its servers, {secs:g} seconds for '
          f'rollout.slots={rollout.slots} queries, but is '
          f'{rollout.search_timeout_secs:g}: the cause of a failure would be '
          f'lost. Raise it, or lower {field}.options.deadline_secs (a writer '
          'of documents gets a request a query: more connections help, too).')


def _values(config, field: str) -> Iterator[Any]:
  """The value of a dotted field, if the config has it."""
  for name in field.split('.'):
    if name not in config:
      return
    config = config[name]
  yield config


def check_questions(config) -> None:
  """Raises unless a config's files of questions are there, and weighted right.

  Raises:
    ValueError: names or weights do not suit the files.
    FileNotFoundError: a file is none.
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
  """Raises a ValueError if worlds lack the knowledge that is asked about."""
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
  """Raises a ValueError if a policy is judged in the world that it learns from.

  Args:
    trained: config.data of the run that trains it.
    config: that judges it.
  """
  worlds, asked = config.evaluate.worlds, config.data.evaluate
  generates = not trained['train'] and any(trained['per_hop'])
  judged = worlds.kinds and asked in ('', datasets.WORLDS)
  if generates and judged and trained['world_seed'] == worlds.world_seed:
    raise ValueError(
        'evaluate.worlds.world_seed must not be that of training, '
        f'data.world_seed, but both are {worlds.world_seed}: the policy would '
        'be judged in the world that it has learned from. Choose another.')


def check_learner(config) -> None:
  """Raises a ValueError if a learner cannot be made of a config.

  A warm-up that is longer than the run is legal, and said.
  """
  for optimizer in (config.optimizer, config.critic.optimizer):
    optimizers.adamw(**optimizer)
  if config.model.lora.rank:
    loras.Lora(**config.model.lora)
  updates = config.train.num_steps * config.learner.minibatches
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
    staleness: config.train.max_staleness.
    algorithm: of the run.
    devices: of the mesh.
    every: config.evaluate.every.
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
  """Raises a ValueError for options of configs/sft.py that do not fit."""
  train, batch, places = config.train, config.batch, config.learner.row_places
  for broken, message in (
      (not train.epochs and not train.steps,
       'train.epochs or train.steps must be above 0, but both are 0. '
       'Set one of them.'),
      (not batch.documents and not batch.tokens,
       'batch.documents or batch.tokens must be above 0, but both are 0. '
       'Set one of them.'),
      (config.learner.row_length <= max(places, 1),
       'learner.row_length must be more than learner.row_places, '
       f'{places}, but is {config.learner.row_length}.'),
      (config.data.validation and not config.data.train,
       'data.validation needs data.train, but that is empty: the '
       'demonstrations of generated worlds come with their own.'),
  ):
    if broken:
      raise ValueError(message)


def truncation_of(rollout: Any) -> sampling.Truncation:
  """Which tokens may be drawn, from config.rollout."""
  return sampling.Truncation(rollout.top_k, rollout.top_p, rollout.min_p)


def check_training_data(config) -> None:
  """Raises a ValueError if a run has no questions to train on.

  A config of a real model generates none: its data is the paper's.
  """
  if not config.data.train and not any(config.data.per_hop):
    raise ValueError(
        'data.train and search.corpus must be given where data.per_hop='
        f'{tuple(config.data.per_hop)} generates no questions, as for the '
        "papers' models, but data.train is ''. Add --config.data.train="
        'train.jsonl and --config.search.corpus=corpus.jsonl; docs/settings.md '
        'says where to get them.')
