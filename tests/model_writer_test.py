# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""writer: a language model's documents, alone, in company, and in a run."""

from concurrent import futures
import functools

import jax
import numpy as np
import pytest
import tiny

from searchrl.experiment import policy
from searchrl.papers.zerosearch import documents
from searchrl.papers.zerosearch import model_writer
from searchrl.papers.zerosearch.simulator_prompts import Prompts
from searchrl.runtime import dispatch
from searchrl.runtime import mesh as meshes
from searchrl.search import engines
from searchrl.search.corpus import Corpus
from searchrl.trajectory import Passage, Query, SearchError

DEVICES = 8

PROMPTS = Prompts('Useful: {query}', 'Noisy: {query} {ground_truth}')
SIMULATED = 'searchrl.papers.zerosearch.simulated:make'
OPTIONS = dict(slots=8, max_prompt_tokens=40, max_tokens=12, temperature=1.0)


def loader(mesh):
  return functools.partial(policy.second, mesh=mesh, seed=0)


@pytest.fixture(scope='module')
def write():
  one = meshes.make(devices=jax.devices()[:1])
  return model_writer.ModelWriter(loader(one), prompts=PROMPTS, **OPTIONS)


def task(text='river', seed=7, useful=True, **fields):
  return documents.Task(Query(text, 2, tiny.question(**fields)), useful, seed)


def test_a_text_does_not_depend_on_its_company_or_on_order(write):
  tasks = [task(f'the river of {i % 9}', i) for i in range(72)]
  together = write(tasks)
  assert [write([one])[0] for one in tasks[:6]] == together[:6]
  assert write(tasks[::-1]) == together[::-1]
  assert len({*together}) > 36 and all(isinstance(t, str) for t in together)
  metrics = write.pop()
  assert 150 < metrics['simulated/tokens'] <= 150 * 12
  assert write.pop() == {'simulated/tokens': 0}
  assert write([]) == []


def test_the_quality_and_the_seed_change_the_text(write):
  first = write([task()])
  assert write([task()]) == first
  assert write([task(seed=8)]) != first and write([task(useful=False)]) != first


def test_what_cannot_be_asked_fails_alone(write):
  long, good, unanswerable = write([
      task('river ' * 60), task(), task(useful=False, answers=())])
  assert isinstance(long, SearchError) and long.kind == 'too_long'
  assert 'max_prompt_tokens=40' in long.detail
  assert unanswerable.kind == 'unanswerable' and [good] == write([task()])


def test_an_engine_of_it_by_name():
  one = meshes.make(devices=jax.devices()[:1])
  corpus = Corpus((Passage('a', 'Tarn', 'A river.'),))
  search = engines.make(
      SIMULATED, corpus, writer='model', prompts=dict(vars(PROMPTS)),
      load_model=loader(one), **OPTIONS)
  found, blank = search([Query('river', 2, tiny.question()),
                         Query(' ', 2, tiny.question())])
  assert found == blank == ()  # no lesson has taught it to write documents
  metrics = search.pop()
  assert metrics['simulated/malformed_rate'] == 1
  assert metrics['simulated/tokens'] > 0
  with pytest.raises(ValueError, match="outside of a training, but is 'model'"):
    engines.make(SIMULATED, corpus, writer='model')


@pytest.mark.slow
def test_on_several_devices_it_writes_while_others_compute(write):
  """A program with a collective starts over and over in another thread."""
  assert jax.device_count() == 8
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('x',))
  split = jax.sharding.PartitionSpec('x')
  policy_step = dispatch.Ordered(jax.jit(jax.shard_map(
      lambda x: x + jax.lax.psum(x, 'x'), mesh=mesh, in_specs=split,
      out_specs=split)))
  eight = model_writer.ModelWriter(
      loader(meshes.make()), prompts=PROMPTS, **OPTIONS | dict(slots=9))
  assert eight._sampler.engine.slots == 16
  tasks = [task(f'the river of {i % 9}', i) for i in range(24)]
  with futures.ThreadPoolExecutor(2) as threads:
    written = [threads.submit(eight, tasks) for _ in range(2)]
    state = jax.device_put(np.zeros(8, np.int32),
                           jax.sharding.NamedSharding(mesh, split))
    while not all(texts.done() for texts in written):
      state = jax.block_until_ready(policy_step(state))
  texts = write(tasks)
  assert [texts, texts] == [found.result() for found in written]
