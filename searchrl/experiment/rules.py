# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of single config fields, as a table with one field per line."""

from collections.abc import Callable
import dataclasses
from typing import Any

from searchrl.data import datasets
from searchrl.models import attention
from searchrl.models.inference import layouts
from searchrl.search.index import approximate


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule for the value of one config field."""

  field: str  # dotted name; a config without this field passes
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
    # All jobs.
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
    _one_of('importance_correction.method', 'none', 'truncate', 'mask'),
    _one_of('importance_correction.level', 'token', 'sequence'),
    _at_least('learner.minibatches', 1),
    _at_least('learner.microbatch_rows', 0, 'Set it to 0 for 2, or data * '
              'fsdp.'),
    _at_least('learner.pack_length', 0, 'Set it to 0 for rollout.max_length.'),
    _at_least('learner.max_segments', 1),
    _one_of('learner.remat', '', 'nothing', 'dots'),
    _one_of('train.lockstep', 'off', 'phase', 'call'),
    _at_least('train.watchdog_secs', 0, 'Set it to 0 for never.'),
    *(_at_least(f'rollout.budgets.{name}', 1) for name in (
        'max_turns', 'max_new_tokens', 'max_prompt_tokens', 'passage_tokens',
        'top_k')),
    _at_least('rollout.max_length', 1),
    _at_least('rollout.tensor', 1),
    _one_of('rollout.search_order', 'auto', 'deterministic', 'arrival'),
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
    _at_least('evaluate.num_sets_during', 0, 'Set it to 0 for all sets.'),
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
    _at_least('evaluate.worlds.sampled_per_hop', 0, 'Set it to 0 for all.'),
    Rule('evaluate.worlds.kinds', lambda kinds: {*kinds} <= {
        *datasets.FRESH, *datasets.COMMON} and len({*kinds}) == len(kinds),
         f'some of {", ".join((*datasets.FRESH, *datasets.COMMON))}'),
    Rule('data.common', lambda share: 0 <= share < 1, 'in [0, 1)',
         'Set it to 0 for none of common knowledge.'),
    Rule('world.outdated', lambda share: 0 < share < 1, 'in (0, 1)'),
    _above('world.scale', 0),
    Rule('data.hard', lambda share: 0 <= share <= 1, 'in [0, 1]'),
    _at_least('rollout.questions_per_step', 1),
    _at_least('rollout.group_size', 1),
    _at_least('rollout.max_rounds', 1),
    _at_least('rollout.max_num_seqs', 1),
    _above('rollout.temperature', 0),
    Rule('rollout.truncation', lambda x: x in ('refuse', 'renormalise'),
         "'refuse' or 'renormalise'"),
    # Questions for a policy, and servers.
    _at_least('ask.samples', 1),
    _above('ask.temperature', 0),
    _at_least('serve.steps', 1),
    # Search engines without a policy.
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
