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

SETS = [datasets.Dataset('nq', [tiny.question('a', 'who?')], None)]


def facts(sets=SETS, path='', search=None, template='q: {question}\n'):
  config = evaluate.get_config('smoke')
  config.model.path = path
  sampler = samplers.Sampler(
      tiny.CONFIG, fakes.TOKENIZER, dialogues.tags(template), None, None, None)
  return fingerprint.facts(config, sampler, sets, search or {}, '')


@pytest.mark.parametrize('change', [
    dict(path='tiny_instruct'), dict(search={'digest': 'x'}),
    dict(template='Q: {question}\n'),
    dict(sets=[dataclasses.replace(SETS[0], name='hotpotqa')]),
    dict(sets=[dataclasses.replace(
        SETS[0], questions=[tiny.question('a', 'who?', answers=('x',))])])])
def test_data_index_model_and_prompt_change_it(change):
  assert fingerprint.of(facts()) == fingerprint.of(facts())
  assert fingerprint.of(facts(**change)) != fingerprint.of(facts())


def test_a_folder_is_known_by_its_weights_not_by_its_place(tmp_path):
  shutil.copytree(policy.TINY_BASE, tmp_path / 'copy')
  ours, theirs = facts()['model'], facts(path=str(tmp_path / 'copy'))['model']
  assert ours['digest'] == theirs['digest'] and len(ours['digest']) == 12


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
