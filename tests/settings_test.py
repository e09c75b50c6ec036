# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""settings: the numbers are the papers', and every combination works."""

import functools
import importlib
import itertools
import json
import operator
import pathlib
import re

import pytest

from configs import arguments
from configs import common
from searchrl.experiment import build as builds
from searchrl.experiment import config_checks
from searchrl.experiment import memory_plan
from searchrl.jobs import plan
from searchrl.models import shipped_shapes
from searchrl.models import weights
from searchrl.papers import settings
from searchrl.papers.known_models import MODELS
from searchrl.runtime import plugins

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'configs.json'
RECIPES = {  # -> the setting of a model alone
    'dapo': 'dspo', 'dr_grpo': 'search_r1', 'dspo': 'dspo',
    'gmpo': 'search_r1', 'grpo': 'search_r1', 'gspo': 'dspo',
    'gigpo': 'search_r1', 'hrpo': 'drzero_solver', 'mt_grpo': 'search_r1',
    'ppo': 'search_r1', 'reinforce': 'zerosearch',
    'reinforce_plus_plus': 'zerosearch', 'rloo': 'search_r1',
    'zerosearch': 'zerosearch'}
PARAMETERS = {  # as the hub counts those of the safetensors
    'smollm2-135m': 134_515_008, 'smollm2-360m': 361_821_120,
    'qwen2.5-0.5b': 494_032_768, 'qwen2.5-1.5b': 1_543_714_304,
    'qwen2.5-3b': 3_085_938_688, 'qwen2.5-7b': 7_615_616_512,
    'qwen2.5-14b': 14_770_033_664, 'qwen2.5-32b': 32_763_876_352,
    # Qwen3's small files hold the tied embedding twice, which counts once.
    'qwen3-0.6b': 751_632_384 - 151_936 * 1024,
    'qwen3-1.7b': 2_031_739_904 - 151_936 * 2048,
    'qwen3-4b': 4_022_468_096, 'qwen3-8b': 8_190_735_360,
    'qwen3-30b-a3b': 30_532_122_624,
    'llama-3.2-1b': 1_235_814_400, 'llama-3.2-3b': 3_212_749_824,
    'deepseek-r1-distill-qwen-7b': 7_615_616_512,
    'deepseek-r1-distill-qwen-14b': 14_770_033_664}


def config_of(recipe, size):
  return importlib.import_module(f'configs.{recipe}').get_config(size)


def value(config, field):
  return functools.reduce(operator.getitem, field.split('.'), config)


ROWS = [(name, row) for name in settings.SETTINGS
        for row in settings.SETTINGS[name].rows]
WORDS = {'one': 1, 'two': 2, 'three': 3, 'four': 4, 'five': 5}


def numbers(sentence):
  """Every number that a sentence names, in digits, as a power or in words."""
  digits = re.findall(r'(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?:x10\^(-?\d+))?',
                      sentence)
  words = re.findall('|'.join(WORDS), sentence)
  return {float(number.rstrip(',').replace(',', '') + (power and f'e{power}'))
          for number, power in digits} | {WORDS[word] for word in words}


def stated(row):
  """The numbers that a row's sentence must name."""
  if row.stated is not None:
    return set(row.stated)
  found = row.share_of_steps or row.value
  leaves = found.values() if isinstance(found, dict) else [found]
  return {number for number in leaves
          if isinstance(number, (int, float)) and not isinstance(number, bool)}


@pytest.mark.parametrize('name, row', ROWS, ids=[
    f'{name}-{row.field}-{n}' for n, (name, row) in enumerate(ROWS)])
def test_a_number_is_that_of_its_sentence(name, row):
  """Otherwise it is ours. A config has it where its conditions hold."""
  assert row.ours or row.source and (row.sentence or row.note)
  if row.source:
    assert stated(row) <= numbers(f'{row.sentence}; {row.note}'), row
  held = [(recipe, model) for recipe in RECIPES for model in MODELS
          if counts(name, row, recipe, model)]
  assert held, 'a later row always replaces this one'
  for recipe, model in held[::max(1, len(held) // 4)]:
    config = config_of(recipe, f'{name}/{model}')
    if row.field.startswith('algorithm.') and (
        row.field.partition('.')[2] not in config.algorithm):
      continue
    if row.field == 'learner.minibatches' and config.learner.minibatches == 1:
      continue
    found = value(config, row.field)
    expected = row.value
    if row.share_of_steps:
      steps = 1005 if name == 'study' else config.train.num_steps
      expected = config.learner.minibatches * (
          int(steps * row.share_of_steps + 1e-6))
    if hasattr(found, 'to_dict'):
      found = found.to_dict()
    assert found == expected and type(found) is type(expected), (recipe, model)


@functools.cache
def facts(recipe):
  """A recipe's algorithm, and whether it samples several times a question."""
  config = config_of(recipe, 'laptop')
  return (config.algorithm.name.rpartition(':')[2],
          config.rollout.group_size > 1)


def counts(name, row, recipe, model):
  """Returns whether a row is the last of its field for a recipe and a model."""
  rows = settings.rows_for(name, MODELS[model], *facts(recipe))
  return [other for other in rows if other.field == row.field][-1:] == [row]


@pytest.mark.parametrize('recipe, size, field, expected', [
    ('grpo', 'search_r1/qwen2.5-7b', 'optimizer.warmup_steps', 286 * 4),
    ('ppo', 'search_r1/qwen2.5-7b', 'optimizer.warmup_steps', 286 * 2),
    ('ppo', 'search_r1/qwen2.5-7b', 'critic.optimizer.warmup_steps', 15 * 2),
    ('grpo', 'study/qwen2.5-7b', 'optimizer.warmup_steps', 286 * 4),
    ('grpo', 'zerosearch/qwen2.5-7b', 'optimizer.warmup_steps', 190 * 2),
    ('ppo', 'zerosearch/qwen2.5-7b', 'optimizer.warmup_steps', 57 * 2),
    ('ppo', 'zerosearch/qwen2.5-7b', 'critic.optimizer.warmup_steps', 3 * 2),
    ('hrpo', 'drzero_proposer/qwen2.5-3b', 'optimizer.warmup_steps', 1),
    ('dspo', 'dspo/qwen2.5-7b-instruct', 'optimizer.warmup_steps', 94 * 4),
    ('dspo', 'dspo/qwen2.5-7b-instruct', 'train.num_steps', 169_615 // 512),
    ('grpo', 'search_r1/qwen2.5-7b', 'rollout.budgets.passage_tokens',
     500 // 3),
    ('grpo', 'zerosearch/qwen2.5-7b', 'rollout.budgets.passage_tokens',
     2048 // 5),
    ('grpo', 'drzero_solver/qwen2.5-3b', 'rollout.budgets.passage_tokens',
     512 // 3),
    ('grpo', 'study/qwen2.5-7b', 'train.keep_checkpoints', 600 // 100),
    ('grpo', 'search_r1/qwen2.5-32b', 'optimizer.learning_rate', 2e-7),
    ('ppo', 'study/qwen2.5-14b', 'optimizer.learning_rate', 5e-7),
    ('gspo', 'dspo/qwen2.5-7b', 'algorithm.clip_low', 3e-4),
    ('dspo', 'study/qwen2.5-7b', 'algorithm.clip_high', 4e-4),
])
def test_a_value_that_is_computed_or_has_conditions(
    recipe, size, field, expected):
  assert value(config_of(recipe, size), field) == expected


def test_each_text_of_others_is_a_prompt_of_a_paper():
  """Each prompt names its origin, and a dialogue or engine that exists."""
  prompts = [prompt for paper in settings.PAPERS.values()
             for prompt in paper.get('prompts', ())]
  folder = pathlib.Path(__file__).parents[1] / 'third_party'
  texts = {file.name for file in folder.iterdir()} - {
      'README.md', 'simpleqa_grader.txt'}  # the latter is a judge's
  assert {prompt['file'] for prompt in prompts if 'file' in prompt} == texts
  for prompt in prompts:
    assert prompt['origin']
    name = prompt.get('dialogue') or prompt['engine']
    assert callable(plugins.resolve(name, field='dialogue', ours=''))


@pytest.mark.parametrize('recipe', RECIPES)
def test_every_setting_of_every_model_builds_and_checks(recipe):
  name = config_of(recipe, 'laptop').algorithm.name
  for setting, model in itertools.product(settings.SETTINGS, MODELS):
    config = config_of(recipe, f'{setting}/{model}').lock()
    config_checks.check(config)
    algorithm = builds.algorithm(config)
    assert config.model.path == MODELS[model].hub_id
    assert config.algorithm.name == name  # the recipe's, whatever the setting
    assert config.learner.minibatches == 1 or not algorithm.one_update
    rows = memory_plan.rows_of(config)
    assert rows % config.learner.minibatches == 0
    budgets = config.rollout.budgets
    assert (budgets.max_prompt_tokens + budgets.max_new_tokens
            <= config.rollout.max_length)
    assert not config.train.max_rollouts and not config.data.per_hop


@pytest.mark.parametrize('recipe, setting', RECIPES.items())
def test_a_model_alone_has_the_recipes_own_setting(recipe, setting):
  for model in ('qwen2.5-7b', 'llama-3.2-3b'):
    alone = config_of(recipe, model).to_json()
    assert alone == config_of(recipe, f'{setting}/{model}').to_json()


@pytest.mark.parametrize('setting', settings.SETTINGS)
def test_every_setting_of_every_model_prints(setting):
  for model, facts in MODELS.items():
    assert facts.hub_id in str(config_of('grpo', f'{setting}/{model}'))


@pytest.mark.parametrize('recipe', ['grpo', 'ppo', 'hrpo'])
def test_a_setting_leaves_nothing_of_the_laptop_or_of_search_r1(recipe):
  for setting in settings.SETTINGS:
    size = f'{setting}/llama-3.2-3b'
    config = config_of(recipe, 'laptop')
    assert arguments.apply_setting(config, size, 'dspo')
    assert config.to_json() == config_of(recipe, size).to_json()


@functools.cache
def flat(recipe, size):
  """{dotted option: value} of a config, as JSON has them."""
  def options(tree, prefix=''):
    for key, child in tree.items():
      if isinstance(child, dict) and child:
        yield from options(child, f'{prefix}{key}.')
      else:
        yield prefix + key, child
  return dict(options(json.loads(config_of(recipe, size).to_json())))


def test_laptop_and_smoke_change_on_purpose_alone():
  golden = json.loads(GOLDEN.read_text())
  assert {name.partition(':')[0] for name in golden} == {*RECIPES, 'common'}
  for name, differences in golden.items():
    recipe, _, size = name.partition(':')
    expected = golden[f'common:{size}'] | differences
    expected = {key: value for key, value in expected.items()
                if value != 'absent'}
    assert flat(recipe, size) == expected


@pytest.mark.parametrize('size, rate, updates', [
    ('stress_1', 2e-4, 2), ('stress_2', 4e-4, 4), ('stress_3', 6e-4, 4)])
@pytest.mark.parametrize('recipe', RECIPES)
def test_stress_is_the_laptop_run_with_larger_updates(
    recipe, size, rate, updates):
  expected, found = flat(recipe, 'laptop'), flat(recipe, size)
  if builds.algorithm(config_of(recipe, size)).one_update:
    updates = 1
  assert found == expected | {
      'optimizer.learning_rate': rate, 'learner.minibatches': updates}
  # DSPO's own laptop run makes three updates of each of its few batches.
  assert (found == expected) == (size == 'stress_1' and recipe != 'dspo')


def test_jobs_besides_training_take_stress_for_a_laptop_run():
  for job in ('evaluate', 'evaluate_search'):
    worlds = config_of(job, 'stress_2').evaluate.worlds
    assert worlds == config_of(job, 'laptop').evaluate.worlds
    assert worlds.questions_per_hop == 200


@pytest.mark.parametrize('job', ['ask', 'evaluate', 'evaluate_search',
                                 'serve_model', 'serve_search'])
def test_jobs_besides_training_take_a_setting_and_a_model(job):
  config = config_of(job, 'zerosearch/qwen2.5-7b').lock()
  config_checks.check(config)
  if 'search' in config:
    assert config.search.engine == 'dense'
    assert config.search.options.index == 'runs/e5'
  if 'rollout' in config:
    assert config.rollout.budgets.top_k == 5
    assert config.model.path == 'Qwen/Qwen2.5-7B'


@pytest.mark.parametrize('setting', settings.SETTINGS)
def test_what_a_setting_names_is_there(setting):
  for model in MODELS:
    config = config_of('grpo', f'{setting}/{model}')
    assert callable(plugins.resolve(config.dialogue, field='dialogue', ours=''))
    assert builds.scorer(config).name == config.reward


def test_a_config_of_ones_own_needs_common_alone():
  config = common.get_config('study/qwen2.5-3b')
  assert config.rollout.questions_per_step == 512
  assert config.reward_options.lambda_f


def test_tools_become_tags_where_a_template_cannot_frame_them():
  def of(model):
    return config_of('dspo', f'dspo/{model}').dialogue
  assert of('llama-3.2-3b') == 'searchrl.agent.dialogue:search_r1'
  assert of('deepseek-r1-distill-qwen-7b') == 'searchrl.agent.chat:search_r1'
  assert of('smollm2-135m-instruct') == 'searchrl.agent.chat:search_r1'
  assert of('qwen2.5-7b') == of('qwen3-8b') == 'searchrl.agent.tools:dspo'


def test_a_run_without_questions_is_refused_before_anything_is_built(tmp_path):
  config = config_of('grpo', 'qwen2.5-7b')
  with pytest.raises(ValueError, match='data.train and search.corpus must be '
                     r'given where data.per_hop=\(\) generates no questions'):
    builds.build(config, tmp_path)
  config.data.train = 'mine.jsonl'
  config_checks.check_training_data(config)
  config.data.update(train='', per_hop=(0, 5))
  config_checks.check_training_data(config)


def test_the_shipped_shapes_are_those_of_the_models_and_no_others():
  found = {str(file.parent.relative_to(shipped_shapes.FOLDER))
           for file in shipped_shapes.FOLDER.rglob('config.json')}
  assert found == {model.hub_id for model in MODELS.values()}
  for name, parameters in PARAMETERS.items():
    if name not in MODELS:  # only the instruct model is known
      continue
    shape = weights.read_config(shipped_shapes.FOLDER / MODELS[name].hub_id)
    assert shape.vocab_size * shape.hidden_size < parameters
    sibling = f'{name}-instruct'
    if sibling in MODELS:
      other = weights.read_config(shipped_shapes.FOLDER / MODELS[sibling].hub_id)
      for field in ('hidden_size', 'num_hidden_layers', 'vocab_size'):
        assert getattr(shape, field) == getattr(other, field)


def offline(monkeypatch):
  monkeypatch.setattr(weights, 'locate', lambda path: pytest.fail(path))


def planned(recipe, setting, model):
  config = config_of(recipe, f'{setting}/{model}')
  config.plan.update(devices='h200-64', compile=False)
  # SmolLM2 has an odd number of key-value heads.
  config.rollout.tensor = 1 if model.startswith('smollm2') else 2
  return memory_plan.make(config)


@pytest.mark.parametrize('model, recipe, setting', list(zip(
    MODELS, itertools.cycle(RECIPES),
    itertools.cycle(settings.SETTINGS))))
def test_a_model_is_planned_offline(model, recipe, setting, monkeypatch):
  """Each recipe, too; the sum of parameters is the hub's."""
  offline(monkeypatch)
  found = planned(recipe, setting, model)
  known = model.removesuffix('-instruct').removesuffix('-instruct-2507')
  assert found.parameters == PARAMETERS[known] and found.fits
  assert 'billion parameters on 64 x h200' in plan.describe(found)


@pytest.mark.long
@pytest.mark.parametrize('setting', settings.SETTINGS)
@pytest.mark.parametrize('model', MODELS)
def test_every_setting_of_every_model_is_planned(model, setting, monkeypatch):
  offline(monkeypatch)
  found = planned('grpo', setting, model)
  assert found.fits and found.peak > 0


def test_a_shape_is_taken_from_where_the_model_is(tmp_path, monkeypatch):
  import huggingface_hub
  offline(monkeypatch)
  hub_id = 'Qwen/Qwen2.5-7B'
  assert shipped_shapes.locate(hub_id) == str(shipped_shapes.FOLDER / hub_id)
  cached = tmp_path / 'snapshot' / 'config.json'
  monkeypatch.setattr(huggingface_hub, 'try_to_load_from_cache',
                      lambda *_: str(cached))
  assert shipped_shapes.locate(hub_id) == str(cached.parent)
  monkeypatch.setattr(weights, 'locate', lambda path: f'located {path}')
  for other in (str(tmp_path), 'Qwen/Qwen2.5-7B@main', 'mine/other'):
    assert shipped_shapes.locate(other) == f'located {other}'


def short(number):
  """A number as the page writes it: 1,005 or 1e-3."""
  return (f'{number:,}' if number >= 1 else '0' if not number
          else f'{number:.0e}'.replace('e-0', 'e-'))


def cells(config):
  """The beginnings of a setting's cells in the table of the page."""
  rollout, steps = config.rollout, config.train.num_steps
  budgets, updates = rollout.budgets, config.learner.minibatches
  warm_up = config.optimizer.warmup_steps // updates
  engine = {
      'dense': 'E5', 'bm25': 'BM25',
      'searchrl.papers.zerosearch.simulated:make': 'simulated'}[
          config.search.engine]
  return {
      'questions per step x samples':
          f'{rollout.questions_per_step} x {rollout.group_size}',
      'updates per step': str(updates),
      'learning rate': short(config.optimizer.learning_rate),
      'warm-up of steps': f'{warm_up} of {short(steps)}',
      'KL of GRPO and PPO': short(config.algorithm.kl_coef),
      'turns with a search': str(budgets.max_turns - 1),
      'passages, engine': f'{budgets.top_k}, {engine}',
      'tokens per prompt, turn, conversation': ', '.join(map(short, (
          budgets.max_prompt_tokens, budgets.max_new_tokens,
          rollout.max_length))),
      'reward': f"`{config.reward.rpartition(':')[2]}`",
      'dialogue': 'tools' if '.tools:' in config.dialogue else 'tags',
      'a missing `?` is added': 'yes' if config.data.question_mark else 'no'}


def test_the_page_compares_the_settings_as_they_are():
  page = (pathlib.Path(__file__).parents[1] / 'docs/settings.md').read_text()
  table = [[cell.strip() for cell in line.strip('|').split('|')]
           for line in page.splitlines() if line.startswith('| ')]
  head, = (row for row in table if not row[0])
  for column, name in enumerate(head[1:], 1):
    expected = cells(config_of('grpo', f"{name.strip('`')}/qwen2.5-7b"))
    for label, text in expected.items():
      row, = (row for row in table if row[0] == label)
      cell = row[1] if row[column] == 'as `search_r1`' else row[column]
      assert cell.startswith(text), (name, label, text)


def test_the_page_lists_every_setting_and_every_model():
  page = (pathlib.Path(__file__).parents[1] / 'docs/settings.md').read_text()
  for name in settings.SETTINGS:
    own = [recipe for recipe, setting in RECIPES.items() if setting == name]
    row, = (line for line in page.splitlines()
            if line.startswith(f'| `{name}` |'))
    assert all(f'`{recipe}`' in row.rpartition(' | ')[2] for recipe in own)
    assert row.rpartition(' | ')[2].count('`') == 2 * len(own)
  for name, model in MODELS.items():
    assert f'`{name}`' in page or (
        name.endswith('-instruct') and name.removesuffix('-instruct') in MODELS)
    assert model.hub_id.partition('/')[0] in page
