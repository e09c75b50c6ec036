# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/many_hosts.py against cases worked out by hand."""

import dataclasses
import math
import pathlib
import sys

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / 'benchmarks'))
import hosts
import hosts_worker
import many_hosts
from many_hosts import Job, Measured

CONSTANTS = Measured(sent_bytes=2, scored_bytes=0.5, meetings=6, messages=30,
                     parse_secs=1e-6, hash_rate=1e9)
# Two hosts, each with two chips, of 10 conversations of 2 turns.
SMALL = Job(hosts=2, chips=2, params=100, conversations=10, turns=2,
            turn_tokens=50, context_tokens=300, row_tokens=1000, minibatches=2)


def test_conversations_without_spread_take_their_sum():
  job = dataclasses.replace(SMALL, turn_spread=0, search_spread=0,
                            token_secs=0.01, search_secs=3, search_limit=2)
  secs = many_hosts.rollout_secs(job, steps=3)
  assert secs.shape == (3, 2)
  np.testing.assert_allclose(secs, 2 * 50 * 0.01 + 2)  # the search is given up


def test_the_longest_of_all_is_what_the_step_waits_for():
  """One turn: a quantile of the largest of 64 log-normal numbers."""
  job = dataclasses.replace(SMALL, hosts=64, conversations=1, turns=1,
                            token_secs=1, turn_tokens=1, turn_spread=0.5)
  slowest = many_hosts.rollout_secs(job, steps=4000).max(1)
  # The median of the largest of n is the (1/2)^(1/n) quantile of one.
  # A table of the normal distribution has this quantile for (1/2)^(1/64).
  normal = 2.298
  assert np.median(slowest) == pytest.approx(
      math.exp(-0.125 + 0.5 * normal), rel=0.02)


def test_all_that_processes_send_passes_the_first():
  traffic = many_hosts.control(SMALL, CONSTANTS)
  assert SMALL.tokens == 10 * (2 * 50 + 300)  # 4,000 of a host
  assert traffic['bytes into process 0'] == 8000 * 2.5
  assert traffic['bytes out of process 0'] == 2 * 8000 * 2.5
  assert traffic['messages at process 0'] == 60
  assert traffic['CPU seconds of each host to read and pack all'] == (
      pytest.approx(8e-3))
  assert traffic['heartbeats per second'] == pytest.approx(2 * 2 / 100)


def test_bytes_of_parameters_and_gradients():
  """2,000 tokens of a chip: two micro-batches."""
  here = many_hosts.devices(SMALL, 2)
  # 2 x 5 times half of 200 bytes; 2 x 1/2 of 400 bytes / 2, twice.
  assert here['GB that a chip sends to gather and scatter'] == (
      pytest.approx(1000e-9))
  assert here['GB that a chip sends to sum gradients over hosts'] == (
      pytest.approx(400e-9))
  assert here['seconds of it'] == pytest.approx(1000 / 450e9)
  everywhere = many_hosts.devices(SMALL, 4)
  assert everywhere['GB that a chip sends to gather and scatter'] == (
      pytest.approx(1500e-9))
  assert everywhere['seconds of it'] == pytest.approx(1500 / 50e9)
  assert everywhere['GB that a chip sends to sum gradients over hosts'] == 0


def test_a_checkpoint_that_no_host_has_whole_is_gathered():
  split = many_hosts.checkpoint(SMALL, CONSTANTS)
  assert split['GB of a checkpoint'] == pytest.approx(1200e-9)
  received, waited = (split[f'mesh.fsdp of all: {name}'] for name in (
      'GB that each host receives for digests',
      'seconds that the steps wait for them'))
  assert received == pytest.approx(600e-9)
  assert waited == pytest.approx(600 / 100e9 + 1200 / 1e9)
  alone = dataclasses.replace(SMALL, hosts=1)
  assert many_hosts.checkpoint(alone, CONSTANTS)[
      'mesh.fsdp of all: seconds that the steps wait for them'] == 0


def test_the_page_shows_what_the_script_prints():
  page = (hosts.ROOT / 'docs/many_hosts.md').read_text()
  assert hosts.simulated(1024, hosts.records()).partition('\n\n')[2] in page


def test_failures_are_as_many_as_hosts():
  job = Job(hosts=10, host_hours=1000, heartbeat_secs=100, restart_secs=200,
            checkpoint_secs=1200)
  lost = many_hosts.failures(job)
  assert lost['hours between failures'] == 100
  assert lost['share of time lost'] == pytest.approx(900 / 360_000)


def test_constants_are_those_of_the_largest_run():
  def line(count, control):  # 5 steps of 1,000 tokens for each process
    counts = [{'bytes_sent': 3000 if number == 0 else 2000,
               'calls/wait_at_barrier': 6, 'calls/key_value_set_bytes': 12}
              for number in range(count)]
    return dict(scaling='joint', count=count, steps=5, tokens=5000 * count,
                step_tokens=1000 * count, step=counts,
                cpu={'control': control * 5 * count, 'rollout': 99})

  constants = many_hosts.measured([
      {'sha256': 7e8}, {'case': 'lost last', 'count': 2},
      line(1, 0.1), line(4, 0.1 + 3e-5 * 3000)])  # 30 us for each token
  assert constants == Measured(
      sent_bytes=2, scored_bytes=0.25, meetings=6, messages=18,
      parse_secs=pytest.approx(3e-5), hash_rate=7e8)


def test_a_latency_is_that_of_its_query_and_its_median_the_given_one():
  class Query:
    def __init__(self, text):
      self.text = text

  secs = [hosts_worker._latency(2.0, Query(str(n))) for n in range(4000)]
  assert np.median(secs) == pytest.approx(2, rel=0.05)
  assert np.std(np.log(secs)) == pytest.approx(0.5, rel=0.05)
  assert secs[7] == hosts_worker._latency(2.0, Query('7'))
