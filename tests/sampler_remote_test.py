# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""sampler over a remote search that fails: the same trajectories, or fewer.

Nothing of a failed search may be in a trajectory that is learned from, so the
rest must equal, token by token, what is sampled over the engine itself.
"""

import json

import faulty
import jax
import pytest

from configs import common
from searchrl.data import datasets
from searchrl.experiment import policy as policies
from searchrl.runtime import mesh as meshes
from searchrl.search import engines
from searchrl.search import engine_wrappers
from searchrl.search.remote import wire
from searchrl.trajectory import Query, Request

DEVICES = 8

pytestmark = pytest.mark.slow
FAULTS = ['500', '429', 'truncated JSON', 'fewer lists', 'score is NaN',
          'document is a string', 'closes early', 'closes at once',
          'never answers', 'not JSON']


@pytest.fixture(scope='module')
def case(tmp_path_factory):
  """A sampler with its params, questions, and their engine."""
  config = common.get_config('smoke')
  config.model.path = 'tiny_instruct'  # which searches in most trajectories
  config.rollout.max_num_seqs = 8
  sampler, params = policies.build(config, meshes.make(
      data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]))
  data = datasets.train_set(
      tmp_path_factory.mktemp('world'), train='', corpus='', world_seed=1,
      per_hop=(12, 12))
  return sampler, params, data.questions, engines.make('bm25', data.corpus)


def rollout(case, search, **options):
  sampler, params, questions, _ = case
  return sampler.rollout(
      sampler.sync(params).weights, list(map(Request, questions[:8])),
      search=search, temperature=1.0, step=0, **options)


def server(case, faults):
  """A server that finds what the engine finds."""
  _, _, questions, engine = case

  def body(path, request):
    del path
    request = json.loads(request)
    return wire.write_response(engine([
        Query(text, request['topk'], questions[0])
        for text in request['queries']]), return_scores=True)

  return faulty.Server(faults, body)


def client(url, **options):
  warnings = []
  search = engines.make('remote', None, urls=(url,), **dict(
      tries=1, try_secs=2.0, failures=1, rest_secs=0.2, backoff_secs=0.01,
      pause_secs=20.0, wiring=dict(warn=warnings.append)) | options)
  return search, warnings


def essence(trajectory):
  """Returns what the learner reads of a trajectory."""
  return trajectory.tokens, trajectory.loss_mask, trajectory.stop_reason


@pytest.fixture(scope='module')
def expected(case):
  trajectories = rollout(case, case[3]).trajectories
  assert sum(trajectory.searches for trajectory in trajectories) > 4
  return list(map(essence, trajectories))


def test_over_a_good_server_all_is_as_over_the_engine(case, expected):
  with server(case, []) as good:
    search, warnings = client(good.url)
    found = rollout(case, search)
  assert list(map(essence, found.trajectories)) == expected and not warnings
  assert not any(call.errors for call in found.calls)


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_that_passes_leaves_no_trace(case, expected, fault):
  """The first search and two probes fail; then the rows are sampled again."""
  with server(case, [fault] * 3) as bad:
    search, warnings = client(bad.url)
    found = rollout(case, search)
  assert list(map(essence, found.trajectories)) == expected
  assert any(trajectory.retries for trajectory in found.trajectories)
  assert any(call.errors for call in found.calls)
  assert engine_wrappers.pop(search)['search/remote/pauses'] == 1
  assert len(warnings) == 2


def test_a_server_that_answers_its_probe_alone_ends_the_run_with_a_sentence(
    case):
  """A run without searches goes on."""
  with server(case, []) as good:
    answer = good.body

    def body(path, request):
      is_probe = json.loads(request)['queries'] == ['test']
      return answer(path, request) if is_probe else b'{"result": 1}'

    good.body = body
    search, warnings = client(good.url, pause_secs=1.0)
    with pytest.raises(ConnectionError, match=(
        r'must answer within search.options.pause_secs=1 s, but failed last '
        r'with bad_response \(\d+ of \d+ at a time failed')):
      rollout(case, search)
  assert 'the run is paused' in warnings[0]


def test_a_pause_has_an_end(case):
  search, warnings = client(faulty.unused_url(), pause_secs=1.0)
  with pytest.raises(ConnectionError, match='pause_secs=1 s'):
    rollout(case, search)
  assert len(warnings) == 1
