# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""fingerprint: whatever changes a score changes it, and nothing else does."""

import dataclasses
import json
import shutil

import fakes
import pytest
import tiny

from configs import evaluate
from searchrl.agent import dialogue as dialogues
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.experiment import fingerprint
from searchrl.experiment import policy
from searchrl.rollouts import sampler as samplers
from searchrl.search import corpus as corpora
from searchrl.trajectory import Passage

SETS = [datasets.Dataset('nq', [tiny.question('a', 'who?')], None)]


def facts(sets=SETS, path='', search=None, template='q: {question}\n',
          options=None, **rollout):
  config = evaluate.get_config('smoke')
  config.search.update(engine='bm25', options=options or {})
  config.model.path = path
  config.rollout.update(rollout)
  sampler = samplers.Sampler(
      tiny.CONFIG, fakes.TOKENIZER, dialogues.tags(template), None, None, None)
  return fingerprint.facts(config, sampler, sets, search or {}, '')


@pytest.mark.parametrize('change', [
    dict(path='tiny_instruct'), dict(search={'digest': 'x'}),
    dict(template='Q: {question}\n'),
    dict(options={'k1': 5.0}),
    dict(sets=[dataclasses.replace(SETS[0], name='hotpotqa')]),
    dict(sets=[dataclasses.replace(
        SETS[0], questions=[tiny.question('a', 'who?', hops=3)])]),
    dict(sets=[dataclasses.replace(
        SETS[0], questions=[tiny.question('a', 'who?', answers=('x',))])])])
def test_data_index_model_and_prompt_change_it(change):
  assert fingerprint.of(facts()) == fingerprint.of(facts())
  assert fingerprint.of(facts(**change)) != fingerprint.of(facts())


def test_a_folder_is_known_by_its_weights_not_by_its_place(tmp_path):
  shutil.copytree(policy.TINY_BASE, tmp_path / 'copy')
  ours, theirs = facts()['model'], facts(path=str(tmp_path / 'copy'))['model']
  assert ours['digest'] == theirs['digest'] and len(ours['digest']) == 12


def test_answers_are_of_a_source_wherever_it_lies_and_whatever_is_asked(
    tmp_path):
  shutil.copytree(policy.TINY_BASE, tmp_path / 'copy')
  def source(step=0, **change):
    return fingerprint.sources(facts(**change), step)('nq', 'bm25')

  same = source(search={'nq': 1})
  for change in (dict(path=str(tmp_path / 'copy')), dict(sets=[])):
    assert source(search={'nq': 1}, **change) == same
  assert source(search={'nq': 1, 'hotpotqa': 2}) == same
  for change in (
      dict(path='tiny_instruct'), dict(template='Q: {question}\n'),
      dict(temperature=0.5), dict(top_k=3), dict(max_length=99), dict(step=1),
      dict(search={'nq': 2}), dict(options={'k1': 5.0})):
    assert source(**{'search': {'nq': 1}, **change}) != same


def test_a_new_engine_leaves_the_answers_of_the_others():
  def source(engine, searched, engines):
    known = facts() | {'search': searched, 'engines': engines}
    return fingerprint.sources(known, 0)('nq', engine)

  one = source('a', {'nq': 'x'}, {'a': 'A'})
  both = {'a': {'nq': 'x'}, 'b': {'nq': 'y'}}, {'a': 'A', 'b': 'B'}
  assert source('a', *both) == one != source('b', *both)


def test_a_question_of_the_test_that_is_trained_on_is_named(monkeypatch):
  said = []
  monkeypatch.setattr(fingerprint.processes, 'say', said.append)
  train = [dataclasses.replace(q, uid=f'train/{q.uid}', text=q.text.upper())
           for q in SETS[0].questions[:1]]
  fingerprint.warn_of_repeats(train, SETS)
  (text,), uid = said, SETS[0].questions[0].uid
  assert text.startswith(
      f'Warning: 1 of the {len(SETS[0].questions)} questions of nq are in '
      f"data.train, too, such as {uid!r} ('train/{uid}' there).")
  fingerprint.warn_of_repeats([], SETS)
  assert len(said) == 1


def test_questions_that_the_training_has_twice_are_named(monkeypatch):
  said = []
  monkeypatch.setattr(fingerprint.processes, 'say', said.append)
  fingerprint.warn_of_repeats([
      tiny.question('a', 'Who swims?', answers=('x', 'y')),
      tiny.question('b', 'who  swims', answers=('y', 'x')),
      tiny.question('c', 'Who swims?', answers=('z',)),
      tiny.question('d', 'Who runs?', answers=('x',))], [])
  assert said == [
      'Warning: 2 of the 4 questions of data.train repeat an earlier one, such '
      "as 'b' (that of 'a'); 1 with other answers. Drop them, unless they "
      'should count more than others.']


def test_questions_that_were_trained_on_are_counted(tmp_path):
  run = tmp_path / 'run'
  (run / 'data' / 'train').mkdir(parents=True)
  (run / 'config.json').write_text(json.dumps({'data': {'train': ''}}))
  questions_lib.write(run / 'data/train/questions.jsonl',
                      [tiny.question('t', 'Who'), tiny.question('u', 'x')])
  assert fingerprint.overlap(str(run), SETS) == {'nq': 1.0}
  (run / 'config.json').write_text(json.dumps(
      {'data': {'train': str(tmp_path / 'gone.jsonl')}}))
  assert fingerprint.overlap(str(run), SETS) == {}
  assert fingerprint.overlap('', SETS) == {}


@pytest.mark.parametrize('limit', [1, 3, 5])
def test_a_run_of_some_questions_was_trained_on_those_alone(limit, tmp_path):
  files = {}
  for name in ('first', 'second'):
    files[name] = tmp_path / f'{name}.jsonl'
    questions_lib.write(files[name], [
        tiny.question(f'{n}', f'{name} {n}?') for n in range(4)])
  train = ','.join(f'{name}={file}' for name, file in files.items())
  corpora.write(tmp_path / 'corpus.jsonl', [Passage('p', 'x', 'y')])
  (tmp_path / 'config.json').write_text(json.dumps(
      {'data': {'train': train, 'limit': limit}, 'seed': 3}))
  whole = datasets.train_set(
      tmp_path, train=train, corpus=str(tmp_path / 'corpus.jsonl'), limit=limit,
      seed=3, per_hop=(), world_seed=0, common=0.0)
  sets = [datasets.Dataset('all', [q for file in files.values()
                                   for q in questions_lib.read(file)], None)]
  assert fingerprint.overlap(str(tmp_path), sets) == {'all': limit / 8}
  only = [dataclasses.replace(sets[0], questions=whole.questions)]
  assert fingerprint.overlap(str(tmp_path), only) == {'all': 1.0}
