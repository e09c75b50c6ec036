# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""docs/extend.md: each file that it shows is written, imported and used."""

import dataclasses
import importlib
import json
import pathlib
import re
import sys

from configs import dspo, grpo, mt_grpo
import build_test
import driver_test
import fakes
import faulty
import learner_test
import ml_collections
import numpy as np
import pytest
import safetensors
import tiny
import train_test

from searchrl.data import datasets
from searchrl.data import forms
from searchrl.data import questions
from searchrl.experiment import build
from searchrl.experiment import model_folders
from searchrl.experiment import search as searches
from searchrl.experiment import toolsets
from searchrl.jobs import demonstrate
from searchrl.jobs import train
from searchrl.models import families
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.rl import algorithms, masked
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.trajectory import (
    Action, Passage, Query, ToolCall, ToolResult, Trajectory, Turn)

OPTIMIZATION_LEVEL = 1

PAGE = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'extend.md'
CORPUS = Corpus((Passage('a', 'Tarn', 'A river that joins another'),
                 Passage('b', 'Lot', 'A river'), Passage('c', 'Alps', 'High')))


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
  """The names of the files that the page shows, on the path."""
  blocks = re.findall(r'^```python\n(.*?)^```$', PAGE.read_text('utf-8'),
                      re.M | re.S)
  names = []
  for block in blocks:
    name = re.match(r'# (\w+)\.py\n', block)[1]
    (tmp_path / f'{name}.py').write_text(block)
    monkeypatch.delitem(sys.modules, name, raising=False)
    names.append(name)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(families, 'FAMILIES', dict(families.FAMILIES))
  monkeypatch.setattr(forms, 'FORMS', list(forms.FORMS))
  return names


def config(name, **options):
  return ml_collections.ConfigDict(dict(engine=name, options=options))


def ids(search, text='tarn river', top_k=2):
  found, = search([Query(text, top_k, tiny.question())])
  return [passage.id for passage in found]


def test_every_file_is_imported(files):
  assert len(files) == len(set(files)) >= 2
  for name in files:
    __import__(name)


def test_the_engine_finds_what_shares_words():
  search = searches.engine(config('my_engine:make'), CORPUS, seed=0)
  assert ids(search) == ['a', 'b'] and ids(search, 'alps') == ['c']
  assert ids(searches.engine(
      config('my_engine:make', min_words=2), CORPUS, seed=0)) == ['a']


OWN = dict(name='my_engine:make', min_words=2)


@pytest.mark.parametrize('name, options', [
    ('fusion', dict(engines=(OWN,))),
    ('fusion', dict(engines=(dict(name='fusion', engines=(OWN,)),)))])
def test_the_engine_is_a_part_of_others(name, options):
  engines.check(searches.spec(config(name, **options)))
  assert searches.spec(config(name, **options)).needs_corpus
  assert not searches.spec(config(name, **options)).is_remote
  assert ids(searches.engine(config(name, **options), CORPUS, seed=0)) == ['a']


def test_the_engine_is_reranked():
  search = engines.make(
      'rerank', CORPUS, engine=dict(name='my_engine:make'), model='m',
      load_judge=lambda model: lambda pairs: [-len(text) for _, text in pairs])
  assert ids(search) == ['b', 'a']


def test_evaluation_goes_through_it():
  parts = dict(search=config('bm25'), evaluate=dict(
      engines=dict(own=config('my_engine:make', min_words=2))))
  through = searches.of_evaluation(ml_collections.ConfigDict(parts))
  sets = [datasets.Dataset('known', [tiny.question()], CORPUS)]
  found, = searches.engines(through['own'], sets, seed=0)
  assert ids(found) == ['a']
  del parts['evaluate']['engines']
  parts['evaluate']['search'] = config('my_engine:make')
  assert [*searches.of_evaluation(ml_collections.ConfigDict(parts))] == [
      'my_engine:make']


@pytest.mark.parametrize('name, options, message', [
    ('my_engine:mak', {}, "search.engine must be .*did you mean make"),
    ('no_engine:make', {}, 'there is no module no_engine'),
    ('my_engine', {}, "search.engine must be one of bm25, .*'module:function'"),
    ('my_engine:make', dict(min_word=1), "'min_word' is given. Did you mean "),
    ('my_engine:make', dict(seed=1), "must be those of .*'seed' is given"),
    ('my_service:make', {}, "of 'my_service:make' must have url"),
    ('fusion', dict(engines=(dict(name='my_engine:make', k=1),)),
     "search.options.engines must be those of 'my_engine:make', .*'k'"),
])
def test_mistakes_are_named(name, options, message):
  with pytest.raises(ValueError, match=message):
    engines.check(searches.spec(config(name, **options)))


def test_no_cache_stands_around_an_engine_that_may_read_more():
  with pytest.raises(ValueError, match='but my_engine:make in it may also'):
    engines.make('cache', CORPUS, engine=OWN, index='i')


def test_the_service_needs_no_corpus_and_may_be_cached():
  found = [dict(id='s', title='', text='found', score=1.0)]
  with faulty.Server([], lambda path, request: json.dumps(found).encode()
                    ) as server:
    service = dict(name='my_service:make', url=server.url)
    options = dict(engine=service, index='mine')
    search = engines.make('cache', None, **options)
    assert ids(search) == ids(search) == ['s']
    with pytest.raises(ValueError, match='index must name'):
      engines.make('cache', None, engine=service)
  assert not engines.parse('cache', options).needs_corpus
  assert engines.parse('cache', options).is_remote
  error, = searches.engine(config(
      'my_service:make', url=faulty.unused_url()), None, seed=0)(
          [Query('x', 1, tiny.question())])
  assert error.kind == 'unavailable'


def test_what_the_run_knows_is_passed_if_it_is_named(tmp_path):
  (tmp_path / 'seeded.py').write_text(
      'def make(corpus, *, seed, steps, size=1):\n'
      '  ask = lambda queries: [()] * len(queries)\n'
      '  ask.given = len(corpus), seed, steps, size\n'
      '  return ask\n\n\n'
      'def nothing(corpus):\n'
      '  return None\n')
  made = engines.make('seeded:make', CORPUS, seed=3, steps=9, size=2)
  assert made.given == (3, 3, 9, 2)
  with pytest.raises(ValueError, match='must return a function of queries'):
    engines.make('seeded:nothing', CORPUS)
  with pytest.raises(TypeError, match="'is_slow'"):
    engines.traits(is_slow=True)(lambda corpus: None)


def test_the_family_is_read_and_written(tmp_path):
  config = importlib.import_module('my_config').get_config()
  assert config.model.path.startswith('ByteDance-Seed/')
  shape = dataclasses.replace(
      tiny.CONFIG, architecture='SeedOssForCausalLM', attention_out_bias=True,
      mlp_bias=True, tie_word_embeddings=False)
  params = tiny.params(shape)
  for _ in range(2):  # what is written is read, and written again
    weights.save(tmp_path / 'model', params, shape, tokenizer_from=tmp_path,
                 eos_id=0)
    assert weights.read_config(tmp_path / 'model') == shape
    params = weights.load(tmp_path / 'model', shape)
  raw, _ = weights.read_json(tmp_path / 'model')
  assert raw['model_type'] == 'seed_oss' and raw['attention_out_bias']
  with safetensors.safe_open(tmp_path / 'model/model.safetensors', 'np') as file:
    bias = file.get_tensor('model.layers.1.self_attn.o_proj.bias')
  np.testing.assert_array_equal(bias, params['layers']['o']['bias'][1])
  llama = dataclasses.replace(shape, architecture='LlamaForCausalLM')
  tokens = np.arange(8)[None]
  np.testing.assert_array_equal(transformer.forward(params, tokens, shape),
                                transformer.forward(params, tokens, llama))
  for key in ('attention_bias', 'attention_out_bias', 'mlp_bias', 'head_dim'):
    del raw[key]
  (tmp_path / 'model' / 'config.json').write_text(json.dumps(raw))
  bare = weights.read_config(tmp_path / 'model')
  assert bare.attention_bias and bare.head_dim == 128
  assert not bare.attention_out_bias and not bare.mlp_bias


def test_the_form_reads_a_benchmarks_records(tmp_path):
  importlib.import_module('my_form')
  file = tmp_path / 'mine.jsonl'
  file.write_text('\n'.join(map(json.dumps, (
      {'query': 'Who?', 'query_id': 'a', 'short_answers': ['Ann', 'A.']},
      {'query': 'Where?', 'short_answers': ['Albi']}))))
  first, second = questions.read(file)
  assert (first.uid, first.text, first.answers) == ('a', 'Who?', ('Ann', 'A.'))
  assert second.answers == ('Albi',) and len(second.uid) == 16


def test_an_engine_says_what_it_loads_and_depends_on(tmp_path):
  (tmp_path / 'own.py').write_text(
      'from searchrl.search import engines\n\n\n'
      'def size_of(options):\n'
      "  return engines.LocalModel(options['path'], 'search.options.path', 2,\n"
      "                            9, 'float32')\n\n\n"
      '@engines.traits(local_model=size_of, depends_on_num_steps=True,\n'
      "                deadline_secs=lambda options, queries: 2.0 * queries)\n"
      'def make(corpus, *, load_model, path):\n'
      "  loaded = load_model(path, field='search.options.path')\n"
      '  return lambda queries: [loaded] * len(queries)\n')
  search = engines.make('own:make', CORPUS, path='here',
                        load_model=lambda path, field: (path, field))
  assert search([None]) == [('here', 'search.options.path')]
  part = dict(engines=(dict(name='bm25'), dict(name='own:make', path='here')))
  fused = engines.parse('fusion', part)
  assert fused.local_model.path == 'here' and fused.depends_on_num_steps
  assert fused.deadline_secs(4) == 8.0


def test_the_tool_converts_units():
  listed = toolsets.listed({
      'tools': ('search', 'my_tool:make'),
      'tool_options': {'my_tool:make': {'rates': (('mile', 1.609),)}}})
  made = model_folders.load_dialogue(
      'searchrl.agent.dialogue:laptop', fakes.TOKENIZER, tools=listed)
  action = made.parse('<km> {"n": 100, "unit": "mile"} </km>')
  tools = toolsets.binder(made, fakes.TOKENIZER, result_tokens=9, seed=0)(
      fakes.Search(), None).tools
  call = lambda arguments: ToolCall('km', arguments, tiny.question())
  right, wrong = tools['km']([
      call(action.arguments), call({'n': 1, 'unit': 'foot'})])
  assert right == ToolResult('160.9')
  assert wrong.is_error and "'foot' is not one of" in wrong.text


def test_the_mcp_server_converts_units(tmp_path):
  pytest.importorskip('mcp')
  options = {'command': [sys.executable, str(tmp_path / 'my_server.py')]}
  _, tool = toolsets.listed({'tools': ('search', 'mcp'),
                             'tool_options': {'mcp': options}})
  assert tool.name == 'to_km' and tool.description == (
      'Converts miles to kilometres.')
  assert tool.call([ToolCall('to_km', {'miles': 100}, tiny.question())]) == [
      ToolResult('160.9')]


def test_the_dialogue_reads_lines():
  made = model_folders.load_dialogue('my_dialogue:lines', fakes.TOKENIZER)
  assert [made.parse(text) for text in (
      'search: tarn \n', 'It is\nanswer: lot\n', 'answer: \n', 'tarn\n')] == [
          Action('search', ('tarn',)), Action('answer', ('lot',)),
          Action('invalid'), Action('invalid')]
  demonstrate.check_writes(made, 'my_dialogue:lines')
  trajectory = driver_test.rollout_one(
      'hm\n', 'search: cat\n', 'answer: here\n', dialogue=made,
      max_prompt_tokens=200)
  assert trajectory.answer == 'here' and trajectory.searches == 1
  assert trajectory.prompt.endswith('uestion: where?\n')
  retry, passages, _ = [turn.observation for turn in trajectory.turns]
  assert 'egin the line with ' in retry
  assert 'oc 1(' in passages and passages.endswith('\n')


def played(group, *queries, answer='Paris'):
  turns = [(Action('search', (query,)), (2,)) for query in queries]
  return Trajectory(tiny.question(answers=('Paris',)), 0, 0, (1,), tuple(
      Turn((1,), (0.0,), action, ids)
      for action, ids in [*turns, (Action('answer', (answer,)), ())]),
                    'answer', group=group)


def test_the_reward_and_the_judge_score():
  one = played(0, 'a', 'b'), played(0, 'a', answer='Rome'), played(1, 'b')
  scores = build_test.scorer('my_reward:frugal', price=0.25)(one)
  assert [t.reward for t in scores] == [0.5, -0.25, 0.75]
  scores = build_test.scorer('my_reward:diverse', weight=0.5)(one)
  assert [t.reward for t in scores] == [1.25, 0, 1.5]
  assert [t.outcome_reward for t in scores] == [1, 0, 1]
  assert [t.parts for t in scores] == [
      {'unique_queries': share} for share in (0.5, 0, 1)]


def test_the_judge_by_a_command_scores_or_says_why_not():
  script = ('import sys; answer = sys.stdin.read(); '
            'print("?" if answer == "?" else float(answer in sys.argv[2:]))')
  answers = [played(0), played(0, answer='Rome'), played(0, answer='?')]
  found = build_test.scorer('my_judge:by_command', command=[
      sys.executable, '-c', script])(answers)
  assert [t.reward for t in found] == [1, 0, None]
  assert found[2].judge_error.startswith('ValueError: could not convert')
  found = build_test.scorer('my_judge:by_command', command=['false'])(answers)
  assert all(t.judge_error.startswith('CalledProcessError: ') for t in found)


def test_the_reward_of_turns_pays_the_first_search():
  config = mt_grpo.get_config('smoke')
  config.turn_reward = 'my_turn_reward:terse'
  config.turn_reward_options = dict(per_word=0.25)
  found = build.scorer(config)([played(0, 'a b', 'a b', 'a'), played(0)])
  assert [t.turn_rewards for t in found] == [(0.5, -0.5, -0.25, None), (None,)]


def test_the_algorithm_halves_what_is_above_the_baseline():
  config = grpo.get_config('smoke')
  config.algorithm = dict(name='my_algorithm:cautious', positive=0.25)
  algorithm = build.algorithm(config)
  assert algorithm.needs == {'ref_logprobs'}
  batch = learner_test.ragged_batch()
  plain = algorithms.grpo().advantages(batch)
  advs = algorithm.advantages(batch)
  assert np.any(plain > 0) and np.any(plain < 0)
  np.testing.assert_allclose(advs, np.where(plain > 0, plain / 4, plain))
  shape = batch.tokens.shape
  zeros = np.zeros(shape, np.float32)
  batch = dataclasses.replace(batch, behavior_logprobs=zeros,
                              old_logprobs=zeros, ref_logprobs=zeros)
  policy = algorithms.PolicyOutput(zeros, zeros)
  terms, _ = algorithm.loss(policy, batch, advs)
  assert terms.keys() == {'policy', 'kl'}
  expected = -masked.mean(np.broadcast_to(advs[:, None], shape),
                          algorithms.trained_tokens(batch))
  np.testing.assert_allclose(algorithms.total(terms), expected, atol=1e-6)


def test_an_engine_is_built_over_others(tmp_path):
  (tmp_path / 'joined.py').write_text(
      'from searchrl.search import engines\n\n\n'
      "@engines.traits(inner='engines', needs_corpus=False)\n"
      'def make(corpus, *, parts):\n'
      '  return lambda queries: [\n'
      '      sum(results, ()) for results in zip(*(p(queries) for p in parts))]'
      '\n')
  parts = (dict(name='my_engine:make', min_words=2), dict(name='bm25'))
  search = config('joined:make', engines=parts)
  assert ids(searches.engine(search, CORPUS, seed=0)) == ['a', 'a', 'b']
  assert searches.spec(search).needs_corpus
  with pytest.raises(ValueError, match="'joined:make' must have engines"):
    engines.make('joined:make', CORPUS)
  with pytest.raises(ValueError, match="options.engines must .* index, k1"):
    engines.make('joined:make', CORPUS, engines=(dict(name='bm25', k3=1),))


@pytest.mark.slow
def test_a_run_searches_by_it(tmp_path):
  own = train_test.tiny(dspo, steps=1)
  own.search.engine, own.search.options = 'my_engine:make', dict(min_words=1)
  train.run(own, str(tmp_path / 'run'))
  line, = (line for line in train_test.lines(tmp_path / 'run')
           if 'search/calls_per_traj' in line)
  assert line['search/calls_per_traj'] > 0
  assert line['search/failed_queries'] == 0
  facts = json.loads((tmp_path / 'run' / 'search.json').read_text())
  assert facts['engine'] == 'my_engine:make'
