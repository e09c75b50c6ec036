# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""sampler on a mesh whose weights span processes: what one process samples."""

import json
import types

import numpy as np
import pytest

from searchrl.experiment import policy as policies
from searchrl.runtime import mesh as meshes
import loopback

DEVICES = 8

# Two devices share the weights; the first process alone has an engine whose
# answers differ from call to call and that now and then fails.
SAMPLE = r'''
import json
import dataclasses
from searchrl.experiment import model_folders
from searchrl.experiment import policy as policies
from searchrl.rollouts import driver
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.trajectory import Passage, Question, Request, SearchError

processes.initialize()
sampler, params = policies.load(
    model_folders.read(str(policies.TINY_BASE), 'searchrl.agent.dialogue:laptop'),
    seed=3, slots=6, length=256,
    budgets=driver.Budgets(max_turns=3, max_new_tokens=24, passage_tokens=24,
                           top_k=1), mesh=meshes.make(data=1, tensor=2),
    tensor=2)
asked = []

def search(queries):
  asked.extend(query.text for query in queries)
  return [SearchError('unavailable', 'down') if len(asked) % 5 == 4 else
          (Passage(str(i), 'A title', f'{len(asked)} {query.text}', 0.1),)
          for i, query in enumerate(queries)]

def play(sampler):
  return sampler.rollout(
      sampler.sync(params).weights,
      [Request(Question(f'u{i}', f'What is the river of city {i}?', ('Nile',)),
               s) for i in range(3) for s in range(3)],
      search=search, temperature=1.0, step=2).trajectories

found = play(sampler)
second = sampler.with_dialogue(
    dataclasses.replace(sampler.dialogue, stop_strings=('a', 'e')),
    driver.Budgets(max_turns=2, max_new_tokens=9))
found += play(second)
print(json.dumps([
    sampler.together, len(asked),
    [[t.question.uid, t.sample, t.stop_reason, t.retries, t.tokens,
      [x for turn in t.turns for x in turn.action_logprobs]]
     for t in found]]))
'''


def sampled(count):
  done = loopback.run(count, SAMPLE, devices=2 // count, timeout=400)
  return [json.loads(d.stdout.splitlines()[-1]) for d in done]


@pytest.mark.slow
def test_two_processes_sample_as_one_would():
  (apart, asked, expected), = sampled(1)
  assert not apart and asked
  assert any(retries for _, _, _, retries, _, _ in expected)  # searches failed
  for number, (together, asked, trajectories) in enumerate(sampled(2)):
    assert together
    assert (asked > 0) == (number == 0)
    assert [t[:5] for t in trajectories] == [t[:5] for t in expected]
    for trajectory, other in zip(trajectories, expected):
      np.testing.assert_allclose(trajectory[5], other[5], atol=1e-5)


def test_lockstep_admits_in_a_fixed_order():
  mesh = meshes.make(data=4, tensor=2)
  options = types.SimpleNamespace(
      search_order='auto', tensor=2, async_decode=False,
      search_timeout_secs=1.0, search_calls=1)
  assert policies.schedule(mesh, options).search_order == 'deterministic'
  remote = policies.schedule(mesh, options, is_remote=True)
  assert remote.search_order == 'arrival'

  two_hosts = types.SimpleNamespace(size=2, shape={}, devices=np.array([
      types.SimpleNamespace(platform='cpu', process_index=i) for i in (0, 1)]))
  schedule = policies.schedule(two_hosts, options, is_remote=True)
  assert schedule.search_order == 'deterministic'
  options.search_order = 'arrival'
  with pytest.raises(ValueError, match="or 'deterministic' where "
                                       'rollout.tensor=2 devices of several'):
    policies.schedule(two_hosts, options)
