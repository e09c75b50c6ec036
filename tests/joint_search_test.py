# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""joint_search: an index over the devices of all processes, against one's."""

import numpy as np
import pytest

from searchrl.search.index import exact_host
from searchrl.search.index import vector_store
import loopback

# A process searches as often as its number says, for as many queries at a time.
SEARCH = r'''
import numpy as np
from searchrl.runtime import processes
from searchrl.search.index import exact_device
from searchrl.search.index import vector_store
import joint_search_test

DEVICES = 8

processes.initialize()
me = processes.index()
index = exact_device.build(
    joint_search_test.source(), dtype='bfloat16', batch=4, block_rows=20,
    together=True, split=True)
results = []
for call in range(me):
  vectors = joint_search_test.vectors()[call:call + me]
  results.append([x.tolist() for x in index(vectors, call + 1)])
if index.is_joint:
  index.finish()
out('results', results)
'''

# Trajectories whose searches are answered by an index of all processes.
SAMPLE = r'''
import sys
from searchrl.experiment import model_folders
from searchrl.experiment import policy as policies
from searchrl.rollouts import driver
from searchrl.runtime import mesh as meshes
from searchrl.runtime import processes
from searchrl.search import engine_wrappers
from searchrl.search import cache
from searchrl.search.corpus import Corpus
from searchrl.search.index import dense
from searchrl.search.index import exact_device
from searchrl.search.index import vector_store
from searchrl.trajectory import Passage, Question, Request

processes.initialize()
tensor = int(sys.argv[1])
sampler, params = policies.load(
    model_folders.read(str(policies.TINY_BASE), 'searchrl.agent.dialogue:laptop'),
    seed=3, slots=4, length=256,
    budgets=driver.Budgets(max_turns=3, max_new_tokens=24, passage_tokens=24,
                           top_k=1),
    mesh=meshes.make(data=-1, tensor=tensor), tensor=tensor)
corpus = Corpus([Passage(str(i), f'City {i}', f'The river of city {i} is R{i}.')
                 for i in range(40)])
encode = dense.ngram_encoder(corpus)
rows = vector_store.InMemory(dense.encoded(encode, corpus.texts, 'passage'))
found = dense.searcher(corpus, encode, exact_device.build(rows, together=True))
search = engine_wrappers.with_typed_errors(cache.Cached(found, index='rivers'))
trajectories = sampler.rollout(
    sampler.sync(params).weights,
    [Request(Question(f'u{i}', f'What is the river of city {i}?', ('R',)), s)
     for i in range(3) for s in range(3)],
    search=search, temperature=1.0, step=2).trajectories
out('together', sampler.together)
out('searches', sum(bool(turn.passages) for t in trajectories for turn in t.turns))
out('trajectories', [
    [t.question.uid, t.sample, t.stop_reason, t.tokens,
     [p.id for turn in t.turns for p in turn.passages]] for t in trajectories])
'''


def source():
  rows = np.random.default_rng(0).normal(size=(203, 16)).astype(np.float32)
  rows[100:120] = rows[:20]  # which tie with rows of other processes
  return vector_store.InMemory(rows)


def vectors():
  return np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize('count', [2, 4])
def test_processes_find_what_one_finds(count):
  results = loopback.outputs(
      count, SEARCH, devices=4 // count, timeout=300)['results']
  alone = exact_host.on_host(vector_store.InMemory(
      vector_store.stored(source().rows - source().mean, 'bfloat16')[0]))
  assert [len(calls) for calls in results] == [*range(count)]
  for process, calls in enumerate(results):
    for call, (scores, ids) in enumerate(calls):
      queries = vectors()[call:call + process]
      expected, order = alone(queries, call + 1)
      assert ids == order.tolist()
      np.testing.assert_allclose(
          scores, expected + (queries @ source().mean)[:, None], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    'tensor', [pytest.param(1, marks=pytest.mark.long), 2])
def test_rollouts_of_two_processes_are_those_of_one(tensor):
  sampled = [loopback.outputs(count, SAMPLE, str(tensor), devices=2 // count,
                              timeout=400) for count in (1, 2)]
  alone, both = sampled
  assert both['together'] == [tensor == 2] * 2
  assert alone['searches'][0] > 2
  for trajectories in both['trajectories']:
    assert trajectories == alone['trajectories'][0]
