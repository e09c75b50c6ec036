# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""config_checks: each rule refuses what breaks it, and nothing else."""

import copy
import importlib
import math
import pathlib

import pytest

from searchrl.experiment import build as builds
from searchrl.experiment import config_checks
from searchrl.runtime import config_fields

DEVICES = 8

CONFIGS = ['tools.tiny_base', *sorted(f'configs.{path.stem}' for path in (
    pathlib.Path(__file__).parents[1] / 'configs').glob('*.py')
    if path.stem not in ('__init__', 'common', 'arguments'))]
# Values of each type, of which a rule refuses at least one.
BAD = {int: (-1, -2), float: (-1.0, 9.0), str: ('none such', ''),
       tuple: ((), (-1,), ('none such',), (0, 0))}


def configured(name):
  config = importlib.import_module(name).get_config()
  if name == 'configs.build_index':
    config.corpus = 'c.jsonl'  # has no default
  return config


def ruled():
  """{dotted name: (name of a config that has it, rule)} of fields with rules."""
  return {field: (name, rule) for name in CONFIGS
          for field, _, rule in config_fields.fields(configured(name)) if rule}


def put(config, field, value):
  group, _, name = field.rpartition('.')
  (config[group] if group else config)[name] = value


RULED = ruled()


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_as_it_stands_is_legal(name):
  assert config_checks.check(configured(name)) is None  # and nothing is raised


@pytest.mark.parametrize('field', RULED)
def test_a_broken_rule_names_field_rule_and_value(field):
  name, rule = RULED[field]
  config = configured(name)
  group, _, last = field.rpartition('.')
  kind = (config[group] if group else config).get_type(last)
  bad = next(value for value in BAD[kind] if _is_refused(rule, value))
  put(config, field, bad)
  with pytest.raises(ValueError) as caught:
    config_checks.check(config)
  assert str(caught.value) == (
      f'{field} must be {rule.must_be}, but is {bad!r}.')


def _is_refused(rule, value):
  try:
    return not rule.is_legal(value)
  except TypeError:  # a text for a number
    return False


@pytest.mark.parametrize('field, words, legal, illegal', [
    ('rollout.temperature', 'above 0', (1e-9, 5.0), (0.0, -1.0)),
    ('rollout.group_size', 'at least 1', (1, 99), (0,)),
    ('rollout.top_p', 'above 0 and at most 1', (0.1, 1.0), (0.0, 1.01)),
    ('rollout.min_p', 'at least 0 and at most 1', (0.0, 1.0), (-0.1, 1.1)),
    ('data.common', 'at least 0 and below 1', (0.0, 0.9), (1.0, -0.1)),
    ('world.outdated', 'above 0 and below 1', (0.5,), (0.0, 1.0)),
    ('model.lora.rank', 'at least 0 (0: no LoRA, all parameters train)',
     (0, 1), (-1,)),
    ('rejection.balance', 'at least 1 (0: keeps all)', (0.0, 1.0), (0.5, -1.0)),
    ('data.per_hop', 'whole numbers of at least 0', ((), (0, 3)),
     ((1, -1), (0.5,))),
    ('data.mix', 'numbers of at least 0, or pairs (step, such numbers) from '
     'step 0 on, equally many in each',
     ((), (0.5, 1), ((0, (0, 1)), (3, (1, 1.5)))),
     ((-0.5,), (0, (1, 1)), ((1, (1, 1)),), ((0, 1),), ((0, ()),), ((0,),),
      ((0, (1, 1)), (0, (1, 2))), ((0, (1,)), (2, (1, 1))), ((0, (-1, 2)),),
      ((0, (math.nan, 1)),), ((0, ('a',)),))),
    ('rollout.dtype', "one of 'float32', 'bfloat16'", ('bfloat16',), ('', 'f')),
    ('evaluate.worlds.kinds', 'some of known, unseen, famous, outdated',
     ((), ('famous', 'known')), (('known', 'known'), ('knwn',))),
    ('build', 'some of scann, hnsw, bm25', ((), ('bm25',)), (('ivf',),)),
    ('mesh.data', 'at least 1, or -1 for the rest of the devices', (-1, 1),
     (0, -2)),
    ('evaluate.decodings', "'greedy', 'sampled', or both", (('greedy',),),
     ((), ('beam',))),
    ('proposer.rollout.temperature', 'above 0', (0.1,), (0.0,)),
    ('tuning.learner.max_segments', 'at least 1', (1,), (0,))])
def test_the_range_of_a_field(field, words, legal, illegal):
  _, rule = RULED[field]
  assert rule.must_be == words
  assert all(map(rule.is_legal, legal)) and not any(map(rule.is_legal, illegal))


def test_a_rule_stays_with_its_field():
  config = configured('configs.grpo')
  config.rollout.update(temperature=0.5, group_size=3)
  config.rollout.temperature = 0.0
  for copied in (config, copy.deepcopy(config)):
    with pytest.raises(ValueError, match='^rollout.temperature must be above 0'):
      config_checks.check(copied)
  copied.rollout.temperature = 1.0
  config_checks.check(copied)
  assert config.rollout.temperature == 0.0


@pytest.mark.parametrize('field, value, message', [
    ('optimizer.b1', 1.0, 'optimizer.b1 must be in [0, 1), but is 1.0.'),
    ('critic.optimizer.b2', 2.0, 'critic.optimizer.b2 must be in [0, 1)'),
    ('optimizer.learning_rate', -1.0, 'optimizer.learning_rate must be finite'),
    ('optimizer.schedule', 'cos', "optimizer.schedule must be one of ('const"),
])
def test_options_of_an_optimizer_are_checked_by_its_function(
    field, value, message):
  config = configured('configs.grpo')
  put(config, field, value)
  with pytest.raises(ValueError) as caught:
    config_checks.check(config)
  assert str(caught.value).startswith(message)


def test_a_bound_itself_is_legal_or_not_as_the_rule_says():
  config = configured('configs.grpo')
  config.train.update(num_steps=0, checkpoint_every=1)
  config_checks.check(config)
  config.rollout.temperature = 0.0
  with pytest.raises(ValueError, match='rollout.temperature must be above 0'):
    config_checks.check(config)


@pytest.mark.parametrize('field, value', [
    ('optimizer.learning_rate', math.nan), ('rollout.temperature', math.inf),
    ('data.mix', (1, math.nan)), ('critic.optimizer.b2', -math.inf),
    ('algorithm.clip_low', math.nan)])
def test_no_number_of_a_config_is_nan_or_infinite(field, value):
  config = configured('configs.ppo')
  config.data.mix = (1.0, 1.0)
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=f'^{field} must be finite, but is '):
    config_checks.check(config)


@pytest.mark.parametrize('seed', [2**63, 10**30, -1])
def test_a_seed_fits_into_eight_bytes(seed):
  config = configured('configs.grpo')
  config.seed = seed
  with pytest.raises(ValueError, match=r'^seed must be from 0 to 2\^63 - 1, b'):
    config_checks.check(config)
  config.seed = 2**63 - 1
  config_checks.check(config)


def test_no_policy_is_judged_in_the_world_it_learns_from():
  config = configured('configs.grpo')
  config.evaluate.worlds.world_seed = config.data.world_seed
  with pytest.raises(ValueError, match='^evaluate.worlds.world_seed must not'):
    config_checks.check_seeds(config.data, config)
  for change in (dict(per_hop=()), dict(train='a.jsonl'),
                 dict(evaluate='a.jsonl'), dict(world_seed=2)):
    other = config.copy_and_resolve_references()
    other.data.update(change)
    config_checks.check_seeds(other.data, other)
  config.evaluate.worlds.kinds = ()
  config_checks.check_seeds(config.data, config)


def test_a_warm_up_longer_than_the_run_is_said(capsys):
  config = configured('configs.grpo')
  config_checks.check_learner(config, builds.algorithm(config))
  assert not capsys.readouterr().err
  config.optimizer.warmup_steps = 100
  config_checks.check_learner(config, builds.algorithm(config))
  assert capsys.readouterr().err == (
      "Warning: optimizer.warmup_steps=100 is more than the run's 48 updates, "
      'so that it never reaches its learning rate.\n')


@pytest.fixture
def data(tmp_path):
  """A config of two training files, which are there."""
  config = configured('configs.grpo')
  for name in ('nq', 'hotpotqa'):
    (tmp_path / f'{name}.jsonl').write_text('')
  config.data.update(train=','.join(
      f'{name}={tmp_path}/{name}.jsonl' for name in ('nq', 'hotpotqa')))
  return config


@pytest.mark.parametrize('weights', [(1,), (1, 2, 3), (0, 0), (2, -1)])
def test_weights_must_be_a_number_a_file_and_one_above_zero(data, weights):
  data.data.weights = weights
  with pytest.raises(ValueError, match='data.weights must have a number of at '
                                       'least 0 for each of the 2 files'):
    config_checks.check_questions(data)
  data.data.weights = (0, 2)
  config_checks.check_questions(data)
  data.data.train = ''
  with pytest.raises(ValueError, match='each of the 0 files'):
    config_checks.check_questions(data)


def test_missing_files_are_named_before_a_model_is_loaded(data):
  data.data.evaluate = 'nq=gone.jsonl'
  with pytest.raises(FileNotFoundError, match='gone.jsonl is not a file. Check data.'):
    config_checks.check_questions(data)


def test_a_thread_samples_only_where_no_program_of_it_spans_processes(data):
  check = config_checks.check_processes_ahead
  check(data, 2, True)  # without a thread
  data.train.max_staleness = 1
  check(data, 2, False)
  with pytest.raises(ValueError, match='^train.max_staleness must be 0 where '
                     'rollout.tensor=1 devices .*, but is 1. Set it to 0, or'):
    check(data, 2, True)
  data.search.engine = 'dense'
  data.search.options = dict(encoder='tiny_e5', backend='mesh')
  check(data, 1, False)
  with pytest.raises(ValueError, match='^train.max_staleness must be 0 where se'
                     "veral processes search .* backend='mesh' together, but "):
    check(data, 2, False)


@pytest.mark.parametrize('field, value, message', [
    ('data.common', 0.4, r'^data.common must be 0 where worlds have no common '
     r'knowledge \(world.common=False\), but is 0.4. Set it to 0, or world.co'),
    ('evaluate.worlds.kinds', ('known', 'famous'),
     r"^evaluate.worlds.kinds must not name famous .* but is \('known', "
     r"'famous'\). Leave them out, or set world.common to True.$"),
])
def test_questions_about_knowledge_that_no_world_has_are_refused(
    field, value, message):
  config = configured('configs.grpo')
  config.world.common = False
  config.data.common = 0.0
  config.evaluate.worlds.kinds = ('known',)
  config_checks.check_worlds(config)  # the old world
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=message):
    config_checks.check_worlds(config)
  config.data.update(train='train.jsonl', evaluate='test.jsonl')
  config_checks.check_worlds(config)  # nothing is generated


@pytest.mark.parametrize('options, message', [
    (dict(engine='remote', options=dict(deadline_secs=100.0)),
     'must be above the 100 seconds that tool_options.search_news.options may'),
    (dict(engine='fusion', options=dict(engines=(
        dict(name='bm25'), dict(name='cache', engine=dict(
            name='remote', deadline_secs=90.0))))), 'above the 90 seconds'),
    (dict(engine='searchrl.papers.zerosearch.simulated:make', options=dict(
        writer='oracle')), 'tool_options.search_news must not depend on the '
     "length of the run, but 'searchrl.papers.*' does with these options. Make "
     "that the run's own engine, in config.search"),
    (dict(), 'tool_options.search_news must have an engine')])
def test_a_further_engine_among_the_tools_is_checked_as_the_own_one(
    options, message):
  config = configured('configs.grpo')
  config.tools = ('search', 'search_news')
  config.tool_options = {'search_news': options}
  with pytest.raises(ValueError, match=message):
    config_checks.check(config)


SIMULATED = 'searchrl.papers.zerosearch.simulated:make'
SERVED = dict(writer='served', urls=('http://127.0.0.1:1/v1',))


@pytest.mark.parametrize('engine, options, secs', [
    ('remote', dict(deadline_secs=60.0), 60),
    (SIMULATED, SERVED | dict(connections=36), 60),  # in two waves
    (SIMULATED, SERVED | dict(connections=10, deadline_secs=8.0), 64),
    ('cache', dict(engine=dict(name='web', deadline_secs=99.0)), 99)])
@pytest.mark.parametrize('field', ['search', 'evaluate.search'])
def test_a_search_must_end_while_somebody_waits(field, engine, options, secs):
  config = configured('configs.grpo')
  assert config.rollout.search_timeout_secs == 60
  assert config.rollout.max_num_seqs == 72
  search = config.search if field == 'search' else config.evaluate.search
  search.engine, search.options = engine, options
  with pytest.raises(ValueError, match=(
      'rollout.search_timeout_secs must be '
      rf'above the {secs} seconds that {field}.options may wait')):
    config_checks.check(config)
  config.rollout.search_timeout_secs = secs + 1.0
  config_checks.check(config)
