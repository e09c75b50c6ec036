# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""solver: a frozen policy that plays for a reward, in a run of one device."""

import dataclasses
import shutil

import experiment_policy_test
import jax
import numpy as np
import pytest
import tiny
import train_test

from configs import grpo
from searchrl.agent import rewards
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import build
from searchrl.experiment import policy
from searchrl.experiment import solver
from searchrl.jobs import train
from searchrl.models import weights
from searchrl.rollouts import sampler as samplers
from searchrl.runtime import mesh as meshes
from searchrl.search.corpus import Corpus
from searchrl.search.index import bm25
from searchrl.trajectory import Passage, Scores

OPTIMIZATION_LEVEL = 1


def again(play, *, attempts=2):
  """How often the solver is right on the question of each trajectory."""
  def score(trajectories):
    tried = play([dataclasses.replace(t.question, uid=f'again:{t.question.uid}')
                  for t in trajectories], attempts)
    assert [len(of_one) for of_one in tried] == [attempts] * len(trajectories)
    return [Scores(sum(map(rewards.em, of_one)) / attempts,
                   parts={'attempts': len(of_one)}) for of_one in tried]
  return rewards.Judge(score, collective=True)


def options(**changes):
  config = grpo.get_config('smoke')
  config.solver = dict(
      path='', run='', dialogue='searchrl.agent.dialogue:laptop',
      temperature=1.0,
      budgets=config.rollout.budgets.to_dict()) | changes
  return config.solver


@pytest.fixture(scope='module')
def loaded():
  config = grpo.get_config('smoke')
  config.rollout.max_num_seqs = 8
  mesh = meshes.make(devices=jax.devices()[:1])
  return *policy.build(config, mesh), mesh


SEARCH = bm25.bm25(Corpus((Passage('a', 'Tarn', 'The Tarn is a river.'),)))


@pytest.mark.slow
def test_attempts_are_of_their_question_and_depend_on_nothing_else(loaded):
  sampler, params, mesh = loaded
  play = solver.load(options(), sampler, params, SEARCH, mesh)
  questions = [tiny.question(f'q{i}', f'What is the river of place {i}?')
               for i in range(5)]
  tried = play(questions, 3)
  assert [[(t.question.uid, t.sample) for t in of_one] for of_one in tried] == [
      [(q.uid, n) for n in range(3)] for q in questions]
  assert play(questions[3:4], 3)[0] == [
      dataclasses.replace(t, group=0) for t in tried[3]]
  assert len({t.response for of_one in tried for t in of_one}) > 5
  assert play([], 3) == []


def test_the_solver_may_be_another_model_of_the_same_kind(loaded, tmp_path):
  sampler, params, mesh = loaded
  questions = [tiny.question(f'q{i}', 'What is the river?') for i in range(4)]

  def texts(**changes):
    play = solver.load(options(**changes), sampler, params, SEARCH, mesh)
    return [t.response for of_one in play(questions, 2) for t in of_one]

  assert texts(path=str(policy.TINY_BASE)) == texts()
  assert texts(path=str(policy.TINY_BASE.parent / 'tiny_instruct')) != texts()
  other = tmp_path / 'other'
  shutil.copytree(policy.TINY_BASE, other)
  shape = (other / 'config.json').read_text()
  (other / 'config.json').write_text(
      shape.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
  for changes, message in (
      (dict(path=str(other)), 'solver.path must have the shape and the token'),
      (dict(temperature=0.0), 'solver.temperature must be above 0'),
      (dict(dialogue='nowhere:x'), "solver.dialogue must be 'module:function'"),
      (dict(run=str(tmp_path)), 'solver.run must be the folder of a run')):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
      texts(**changes)


@pytest.mark.slow
def test_the_solver_may_be_a_run_of_adapters_of_another_model(
    loaded, tmp_path):
  """They are merged with the weights of that run, not with the policy's."""
  sampler, _, mesh = loaded
  run, merged = experiment_policy_test.run_of_adapters(tmp_path)
  path = policy.TINY_BASE.parent / 'tiny_instruct'
  policys = weights.load(str(path), sampler.shape)
  params = solver._params(
      options(run=f'{run}@3'), policys, sampler, mesh)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
               params, merged)
  with pytest.raises(ValueError, match='solver.run must be at a step whose'):
    solver._params(options(run=f'{run}@2'), policys, sampler, mesh)


def test_fields_of_a_solver_that_do_not_exist_or_are_missing_are_named():
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  solver.check(options(), tokenizer)
  solver.check(options(budgets=dict(top_k=1)), tokenizer)
  for changes, message in (
      (dict(budgets=dict(top_k=1, answer_tokens=8)),
       'solver.budgets may have the fields max_turns, .*, but has answer_token'),
      (dict(attempts=3), 'solver must have the fields path, .*, but has attempt')):
    with pytest.raises(ValueError, match=message):
      solver.check(options(**changes), tokenizer)
  lacking = options()
  del lacking['run']
  with pytest.raises(ValueError, match='solver must have .*, but lacks run'):
    solver.check(lacking, tokenizer)


def test_a_reward_that_needs_a_solver_says_so():
  config = grpo.get_config('smoke')
  config.reward = 'solver_test:again'
  with pytest.raises(ValueError, match='solver must say who plays'):
    build.scorer(config)
  config.solver = options()
  config.reward_options = dict(tries=3)
  with pytest.raises(ValueError, match='reward_options.tries is no option'):
    build.scorer(config)


@pytest.mark.slow
def test_a_run_has_its_solver_play_and_resumes_with_the_same_numbers(
    tmp_path, monkeypatch):
  calls, rollout = [], samplers.Sampler.rollout

  def counted(self, weights, requests, **kwargs):
    calls.append(len(requests))
    return rollout(self, weights, requests, **kwargs)

  monkeypatch.setattr(samplers.Sampler, 'rollout', counted)

  def run(folder, steps):
    config = train_test.tiny(grpo, steps=steps, checkpoint_every=1)
    config.evaluate.worlds.kinds = ()
    config.reward = 'solver_test:again'
    config.solver = options()
    train.run(config, str(folder))
    return train_test.lines(folder)

  whole = run(tmp_path / 'whole', 2)
  assert calls == [16, 32, 16, 32]  # the policy, and two attempts at each
  assert all(line['reward/attempts/mean'] == 2 for line in whole)
  assert 0 < whole[0]['critic/rewards/mean'] < 1
  run(tmp_path / 'broken', 1)
  (tmp_path / 'broken' / 'summary.txt').unlink()
  assert run(tmp_path / 'broken', 2) == whole
