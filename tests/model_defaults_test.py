# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A real model by its folder alone: what it gets, and what its jobs get."""

import copy
import functools
import json
import pathlib

import chats
import pytest
import tiny

from configs import ask as ask_config
from configs import common
from configs import evaluate as evaluate_config
from configs import export as export_config
from configs import grpo
from configs import predict as predict_config
from configs import serve_model as serve_config
from configs import sft
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.data import questions as questions_lib
from searchrl.evaluation import shards
from searchrl.experiment import model_defaults
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.experiment import rules
from searchrl.jobs import ask
from searchrl.jobs import evaluate
from searchrl.jobs import export
from searchrl.jobs import predict
from searchrl.jobs import serve_model
from searchrl.jobs import train
from searchrl.models import weights
from searchrl.runtime import config_fields
from searchrl.runtime import workdir as workdirs
from searchrl.search import corpus as corpora
from searchrl.trajectory import Passage, Question

OPTIMIZATION_LEVEL = 1

CHAT, PLAIN = model_folders.CHAT_DIALOGUE, model_folders.PLAIN_DIALOGUE
LAPTOP = model_folders.TINY_DIALOGUE
TEMPLATES = {'chat': chats.QWEN2, 'opens': chats.OPENS_THINKING, 'plain': None,
             'unusable': "{{ messages[0].content | upper }}"}


def make_model(folder, template, tokenizer=None):
  """Writes a random model with a tokenizer that has a chat template."""
  tokenizer = tokenizer or chats.qwen(template)
  tokenizer._fast.save_pretrained(folder / 'tokenizer')
  shape = tiny.CONFIG.__class__(**{
      **tiny.CONFIG.__dict__, 'vocab_size': tokenizer.vocab_size})
  weights.save(folder / 'model', tiny.params(shape), shape,
               tokenizer_from=folder / 'tokenizer', eos_id=tokenizer.eos_ids)
  return str(folder / 'model')


def make_data(folder, hops=(1, 2)):
  """Writes questions of some hop counts and a corpus; None: no hop counts."""
  questions = [Question(str(n), f'What is the river of City {n}{"!" * n}?',
                        (f'River {n}',), hops=hops[n % len(hops)] or 1)
               for n in range(6)]
  for name, part in (('train', questions), ('test', questions[::2])):
    questions_lib.write(folder / f'{name}.jsonl', part)
    if None in hops:
      rows = [json.loads(line) for line in
              (folder / f'{name}.jsonl').read_text().splitlines()]
      (folder / f'{name}.jsonl').write_text(''.join(json.dumps(
          {key: row[key] for key in ('id', 'question', 'golden_answers')})
                                                    + '\n' for row in rows))
  corpora.write(folder / 'corpus.jsonl', [
      Passage(str(n), f'City {n}', f'City {n} lies on River {n}. ' * (n // 2))
      for n in range(40)])


def flagged(config, **flags):
  """Sets fields as a command line does."""
  config_fields.assign(config, {
      name.replace('__', '.'): [str(value)] for name, value in flags.items()},
                       'configs/some.py')
  return config


def flags_of(folder, path):
  return dict(model__path=path, data__train=folder / 'train.jsonl',
              data__evaluate=folder / 'test.jsonl',
              search__corpus=folder / 'corpus.jsonl')


@pytest.mark.parametrize('kind, expected', [
    ('chat', CHAT), ('opens', CHAT), ('plain', PLAIN), ('unusable', PLAIN)])
def test_a_model_gets_its_chat_template_and_a_line_says_so(
    tmp_path, kind, expected, capsys):
  path = make_model(tmp_path, TEMPLATES[kind])
  make_data(tmp_path)
  config = flagged(common.get_config(), **flags_of(tmp_path, path))
  resolved = model_defaults.resolved(config)
  assert resolved.dialogue == expected and not config.dialogue
  assert policy.folder_of(resolved).dialogue.is_framed == (expected == CHAT)
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and f'dialogue={expected}, ' in said
  assert f'rollout.max_length={resolved.rollout.max_length}, ' in said


@pytest.mark.parametrize('path', ['', *weights.SHIPPED])
def test_a_tiny_base_keeps_every_number(path, capsys):
  config = flagged(common.get_config(), model__path=path)
  expected = copy.deepcopy(config)
  expected.dialogue = LAPTOP
  resolved = model_defaults.resolved(config, trains=True)
  assert resolved.to_dict() == expected.to_dict()
  assert not capsys.readouterr().err


@pytest.mark.parametrize('of_policy, of_solver, expected', [
    ('', '', LAPTOP), (PLAIN, '', PLAIN), ('', PLAIN, PLAIN)])
def test_a_solver_without_a_dialogue_has_that_of_the_policy(
    of_policy, of_solver, expected):
  config = common.get_config()
  config.dialogue = of_policy
  config.solver = dict(path='', dialogue=of_solver)
  resolved = model_defaults.resolved(config, trains=True)
  assert resolved.solver.dialogue == expected
  assert config.solver.dialogue == of_solver


def test_a_model_that_was_trained_from_a_tiny_base_is_one(tmp_path):
  path = make_model(tmp_path, None, tokenizers.load(str(policy.TINY_BASE)))
  assert model_folders.is_tiny(path)
  assert not model_folders.is_tiny(make_model(tmp_path / 'other', None))


@pytest.fixture
def own(tmp_path):
  """A config of a real model on own data, and a function that reads prompts."""
  path = make_model(tmp_path, chats.QWEN2)
  make_data(tmp_path)
  config = flagged(common.get_config(), **flags_of(tmp_path, path))
  folder = model_folders.read(path, CHAT)
  return config, folder, tmp_path


def test_numbers_are_those_of_the_longest_prompt_and_of_the_passages(own):
  config, folder, data = own
  resolved = model_defaults.resolved(config, trains=True)
  prompts = [len(dialogues.opening(folder.dialogue, question.text,
                                   folder.tokenizer))
             for question in questions_lib.read(data / 'train.jsonl')]
  passages = sorted(len(folder.tokenizer.encode_data(
      dialogues.tag_passage(1, passage)))
                    for passage in corpora.read(data / 'corpus.jsonl'))
  budgets, rollout = resolved.rollout.budgets, resolved.rollout
  assert max(prompts) + 64 <= budgets.max_prompt_tokens < max(prompts) + 128
  assert passages[-4] <= budgets.passage_tokens < passages[-1] + 16
  assert budgets.passage_tokens <= 512
  assert (budgets.max_turns, budgets.top_k, budgets.max_new_tokens) == (
      5, 3, 128)
  assert rollout.max_length == max(
      2048, budgets.max_prompt_tokens + 128)  # all budgets together are more
  assert rollout.max_num_seqs == 16
  assert resolved.optimizer.learning_rate == 1e-5
  assert resolved.learner.pack_length == 0  # rollout.max_length
  model_folders.ModelFolder.admit(folder, policy.budgets_of(resolved))
  folder.check(policy.budgets_of(resolved), rollout.max_length)


def test_slots_on_accelerators_are_64_a_copy_and_in_training_by_memory(own):
  config, _, _ = own
  config.rollout.tensor = 2
  resolve = functools.partial(model_defaults.resolved, config, devices='h200-8')
  assert resolve().rollout.max_num_seqs == 64 * 4
  assert 'rollout.max_num_seqs' in dict(rules.unset(resolve(trains=True)))


def test_short_conversations_get_what_all_their_budgets_take(own):
  config, folder, _ = own
  config.rollout.budgets.update(max_turns=2, max_new_tokens=10, top_k=1)
  resolved = model_defaults.resolved(config)
  budgets = resolved.rollout.budgets
  observed = len(dialogues.observation(
      folder.dialogue, [[Passage('0', 'City', 'word ' * 9999)]],
      folder.tokenizer, passage_tokens=budgets.passage_tokens).tokens)
  whole = budgets.max_prompt_tokens + 2 * 10 + observed
  assert whole <= resolved.rollout.max_length < whole + 64


def test_a_call_with_two_queries_has_room_in_every_turn_but_the_last(own):
  config, _, _ = own
  config.dialogue = 'searchrl.agent.tools:dr_zero'
  config.rollout.budgets.update(
      max_turns=3, max_new_tokens=10, top_k=1, passage_tokens=100)
  resolved = model_defaults.resolved(config)
  folder = model_folders.read(config.model.path, config.dialogue)
  budgets = resolved.rollout.budgets
  found = [Passage('0', 'City', 'word ' * 9999)]
  observed = len(dialogues.observation(
      folder.dialogue, [found, found], folder.tokenizer,
      passage_tokens=100).tokens)
  whole = budgets.max_prompt_tokens + 3 * 10 + 2 * observed
  assert whole <= resolved.rollout.max_length < whole + 128


def test_what_a_flag_sets_stays_even_at_its_default(own):
  config, _, _ = own
  default = common.get_config()
  names = [name for name in model_defaults.SAMPLING if name in dict(
      config_fields.leaves(default.to_dict()))]
  assert len(names) == 7
  flags = {name.replace('.', '__'): dict(config_fields.leaves(
      default.to_dict()))[name] for name in names}
  flagged(config, dialogue=PLAIN, optimizer__learning_rate=2e-4, **flags)
  assert model_defaults.resolved(config, trains=True).to_dict() == (
      config.to_dict())


@pytest.mark.parametrize('hops, turns', [((1,), 5), ((2, 4), 6), ((None,), 5)])
def test_turns_are_enough_for_the_hops(tmp_path, hops, turns):
  path = make_model(tmp_path, chats.QWEN2)
  make_data(tmp_path, hops)
  config = flagged(common.get_config(), **flags_of(tmp_path, path))
  assert model_defaults.resolved(config).rollout.budgets.max_turns == turns


def test_adapters_keep_their_learning_rate_and_penalties_follow(own):
  config, _, _ = own
  config.model.lora.rank = 4
  config.algorithm.update(common.get_config('smoke').algorithm)
  assert model_defaults.resolved(
      config, trains=True).optimizer.learning_rate == 2e-4


@pytest.mark.parametrize('recipe, fields', [
    ('dr_grpo', ('length',)), ('dapo', ('max_length', 'buffer'))])
def test_lengths_of_a_recipe_are_those_of_the_model(own, recipe, fields):
  import importlib  # pylint: disable=g-import-not-at-top
  config = flagged(importlib.import_module(f'configs.{recipe}').get_config(),
                   **{name.replace('.', '__'): value for name, value in (
                       ('model.path', own[0].model.path),
                       ('data.train', own[0].data.train),
                       ('search.corpus', own[0].search.corpus))})
  algorithm = model_defaults.resolved(config, trains=True).algorithm
  assert [algorithm[name] for name in fields] == [640, 128][:len(fields)]


def test_a_run_that_has_begun_keeps_what_it_recorded(own, tmp_path):
  config, _, _ = own
  old = copy.deepcopy(config)  # as it was before this file existed
  old.dialogue = LAPTOP
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run/config.json').write_text(old.to_json())
  resolved = model_defaults.resolved(config, tmp_path / 'run', trains=True)
  assert resolved.to_dict() == old.to_dict()
  workdirs.check(tmp_path / 'run', resolved.to_dict())
  config.model.path = 'tiny_raw'
  other = model_defaults.resolved(config, tmp_path / 'run', trains=True)
  with pytest.raises(ValueError, match='with another config: model.path'):
    workdirs.check(tmp_path / 'run', other.to_dict())


@pytest.mark.parametrize('longest, rank, flags, expected', [
    (100, 0, {}, (1024, 1e-4)), (1500, 0, {}, (1536, 1e-4)),
    (9999, 4, {}, (2048, 2e-4)),  # what one CPU has room for
    (100, 0, dict(learner__pack_length=512, optimizer__learning_rate=3e-4),
     (512, 3e-4))])
def test_tuning_follows_the_model_and_the_longest_conversation(
    tmp_path, longest, rank, flags, expected):
  path = make_model(tmp_path, chats.QWEN2)
  make = lambda: flagged(sft.get_config(), model__path=path,
                         model__lora__rank=rank, **flags)
  config, run = make(), tmp_path / 'run'
  shape = model_folders.parts(path)[1]
  numbers = lambda: (config.learner.pack_length, config.optimizer.learning_rate)
  model_defaults.follow_in_tuning(
      model_defaults.unset_of_tuning(config, run, path), config, shape, longest)
  assert numbers() == expected
  workdirs.prepare(run, config.to_dict())
  config = make()  # a resumed run, whose data need not be read for that
  assert not model_defaults.unset_of_tuning(config, run, path)
  assert numbers() == expected


def test_tuning_of_a_tiny_base_keeps_every_number(tmp_path):
  config = sft.get_config()
  assert not model_defaults.unset_of_tuning(
      config, tmp_path, str(policy.TINY_BASE))


@pytest.mark.parametrize('flags, engine, options', [
    ({}, 'dense', dict(encoder='tiny_e5', backend='scann')),
    (dict(search__corpus='c.jsonl'), 'bm25', {}),
    (dict(search__corpus='c.jsonl', search__engine='dense'), 'dense',
     dict(encoder='tiny_e5', backend='scann')),
    (dict(search__corpus='c.jsonl', search__options=dict(dim=64)), 'dense',
     dict(dim=64))])
def test_bm25_searches_an_own_corpus_unless_an_engine_is_set(
    tmp_path, flags, engine, options):
  config = flagged(grpo.get_config('smoke'), **flags)
  resolved = model_defaults.resolved(config, tmp_path)
  assert (resolved.search.engine, resolved.search.options.to_dict()) == (
      engine, options)
  assert config.search.engine == 'dense'
  workdirs.prepare(tmp_path, config.to_dict())  # as runs of before
  old = model_defaults.resolved(config, tmp_path)
  assert old.search == config.search


def test_options_of_the_shipped_encoder_stay_with_it_alone():
  for engine, options in (('my:make', {}), ('bm25', {}), ('bm25', {'k1': 1.0})):
    config = flagged(grpo.get_config('smoke'), search__engine=engine, **(
        {'search__options': options} if options else {}))
    found = model_defaults.resolved(config).search
    assert (found.engine, found.options.to_dict()) == (engine, options)


def test_passages_are_sampled_from_the_whole_file(tmp_path):
  corpora.write(tmp_path / 'c.jsonl', [
      Passage(str(n), f'Title {n}', 'text') for n in range(1000)])
  ids = [int(passage.id) for passage in model_defaults.sample(
      str(tmp_path / 'c.jsonl'), 100)]
  gaps = [b - a for a, b in zip(ids, ids[1:])]
  assert ids[0] == 0 and ids[-1] >= 980 and set(gaps) <= {9, 10, 11, 12}
  corpora.write(tmp_path / 'c.jsonl.gz', [
      Passage(str(n), f'Title {n}', 'text') for n in range(3)])
  assert [passage.id for passage in model_defaults.sample(
      str(tmp_path / 'c.jsonl.gz'), 100)] == ['0', '1', '2']


class Stop(Exception):
  """Ends a server before it listens."""


@pytest.mark.slow
@pytest.mark.parametrize('kind, hops', [
    ('chat', (1, 2)),
    pytest.param('plain', (None,), marks=pytest.mark.long)])
def test_a_run_by_four_flags_and_every_job_by_its_folder_alone(
    tmp_path, kind, hops, monkeypatch, capsys):
  path = make_model(tmp_path, TEMPLATES[kind])
  make_data(tmp_path, hops)
  run = tmp_path / 'run'

  def trained(**more):
    train.run(flagged(grpo.get_config('smoke'), **flags_of(tmp_path, path),
                      train__num_steps=1, evaluate__noise=False,
                      evaluate__decodings="('greedy',)", **more), str(run))

  trained()
  recorded = json.loads((run / 'config.json').read_text())
  assert recorded['dialogue'] == dict(chat=CHAT, plain=PLAIN)[kind]
  assert [line.partition(' for ')[2].partition(':')[0].partition(' and ')[0]
          for line in capsys.readouterr().err.splitlines()
          if line.startswith('Chosen for')] == [
              str(tmp_path / 'corpus.jsonl'), str(path)]
  trained()  # finished, and the same config
  assert 'Chosen for' not in capsys.readouterr().err
  own = _records(run / 'evaluation/after')
  assert len(own) == 3

  evaluate.run(evaluate_config.get_config(str(run)), str(tmp_path / 'again'))
  assert _records(tmp_path / 'again') == own
  predict.run(predict_config.get_config(f'run={run}'), str(tmp_path / 'told'))
  assert _records(tmp_path / 'told') == own
  assert 'Warning: not everything' not in capsys.readouterr().err
  _asks_and_serves_as(recorded, run, tmp_path, monkeypatch)

  export.run(export_config.get_config(f'{run}@1'), str(tmp_path / 'exports'))
  for name in ('model.safetensors', 'tokenizer.json', 'config.json'):
    assert (tmp_path / 'exports/run_step_1' / name).read_bytes() == (
        run / 'model' / name).read_bytes()


def _records(folder):
  """Returns the trajectory of each question: all its ids and its end."""
  records = shards.read_all(folder / 'records')
  return {record['question']: (
      record['trajectory']['prompt_tokens'],
      [turn['action_tokens'] for turn in record['trajectory']['turns']],
      record['trajectory']['stop_reason']) for record in records}


def _asks_and_serves_as(recorded, run, folder, monkeypatch):
  """Checks what ask and serve_model build, which then stop."""
  built = []

  def build(config, name, **_):
    built.append(config)
    raise Stop

  monkeypatch.setattr(policy, 'of_run', build)
  asking = ask_config.get_config(str(run))
  asking.ask.question = 'What is the river of City 1?'
  for job, config in ((ask, asking),
                      (serve_model, serve_config.get_config(str(run)))):
    with pytest.raises(Stop):
      job.run(config, str(folder / 'asked'))
  for config in built:
    ours = config.to_dict()
    assert (ours['dialogue'], ours['model']['path']) == (
        recorded['dialogue'], recorded['model']['path'])
    for name, value in ours['rollout'].items():
      assert value == recorded['rollout'][name], name
    assert ours['search']['engine'] == recorded['search']['engine'] == 'bm25'
  assert ask.corpus_file(built[0], str(run), folder) == (
      pathlib.Path(recorded['search']['corpus']))
