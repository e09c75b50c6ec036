# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A step on many hosts on paper, with the constants of benchmarks/hosts.py.

All hosts have equal work. The fields of `Job` are assumptions, those of
`Measured` come from hosts.jsonl, and the functions are formulas, except for
`rollout_secs`, which draws conversations.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
  """A run of Qwen2.5-7B on H200 hosts; every number is an assumption."""

  hosts: int = 128
  chips: int = 8  # chips per host
  params: float = 7.6e9
  conversations: int = 64  # conversations per host and step
  turns: int = 4  # turns per conversation; all but the last end with a search
  turn_tokens: float = 250  # mean number of tokens per turn; log-normal
  turn_spread: float = 0.5  # standard deviation of its logarithm
  context_tokens: float = 2000  # prompt and passages of a conversation
  token_secs: float = 0.015  # seconds to decode one token
  search_secs: float = 0.3  # median of a search; log-normal
  search_spread: float = 1.0  # standard deviation of its logarithm
  search_limit: float = 60.0  # rollout.search_timeout_secs
  row_tokens: float = 4096  # tokens of a micro-batch on a chip
  minibatches: int = 2
  flops: float = 989e12  # a chip and second, in bfloat16
  utilization: float = 0.4  # share of them that training reaches
  chip_link: float = 450e9  # bytes a second from a chip to its host's others
  host_link: float = 50e9  # bytes a second from a chip to other hosts
  server_rate: float = 1e9  # bytes a second out of process 0, by gRPC
  file_rate: float = 20e9  # bytes a second into the file system, of all hosts
  heartbeat_secs: float = 100.0  # SEARCHRL_HEARTBEAT_SECS
  host_hours: float = 6300.0  # hours between failures: arXiv:2407.21783
  restart_secs: float = 300.0  # seconds from a restart to its first step
  checkpoint_secs: float = 1200.0  # seconds between two checkpoints

  @property
  def tokens(self) -> float:
    """Tokens of a host's conversations in a step."""
    return self.conversations * (
        self.turns * self.turn_tokens + self.context_tokens)


@dataclasses.dataclass(frozen=True)
class Measured:
  """Constants of the rehearsal.

  Attributes:
    sent_bytes: Bytes that a process sends to the others per token of its own
      trajectories, compressed.
    scored_bytes: Bytes that the first process sends, too, per token of all.
    meetings: Barriers of a step.
    messages: Calls of the coordination service by a process in a step.
    parse_secs: CPU seconds of each process per token of all processes, whose
      trajectories it reads, describes and packs.
    hash_rate: Bytes per second of SHA-256.
  """

  sent_bytes: float
  scored_bytes: float
  meetings: float
  messages: float
  parse_secs: float
  hash_rate: float


def measured(records: Sequence[Mapping]) -> Measured:
  """Returns the constants that the records of a rehearsal give."""
  joint = [line for line in records if line.get('scaling') == 'joint']
  # The first round's record of the largest run: `max` returns the first one.
  largest = max(joint, key=lambda line: line['count'])
  tokens = largest['step_tokens']
  first, *_, last = largest['step']
  own = last['bytes_sent'] / (tokens / largest['count'])
  calls = [sum(n for name, n in counts.items() if name.startswith('calls/'))
           for counts in largest['step']]
  return Measured(
      sent_bytes=own,
      scored_bytes=(first['bytes_sent'] - last['bytes_sent']) / tokens,
      meetings=last['calls/wait_at_barrier'], messages=float(np.mean(calls)),
      parse_secs=_slope(joint),
      hash_rate=next(line['sha256'] for line in records if 'sha256' in line))


def _slope(joint: Sequence[Mapping]) -> float:
  """Returns the CPU seconds of a process that each token of all adds."""
  host = [sum(line['cpu'].get(part, 0) for part in ('control', 'rest'))
          / line['count'] / line['steps'] for line in joint]
  tokens = [line['tokens'] / line['steps'] for line in joint]
  return float(np.polyfit(tokens, host, 1)[0])


def rollout_secs(job: Job, steps: int = 20, seed: int = 0) -> np.ndarray:
  """Draws the seconds of each host's rollouts, [steps, hosts].

  All conversations of a host run at the same time, so that the host takes as
  long as the longest one.
  """
  rng = np.random.default_rng(seed)
  shape = (job.hosts, job.conversations)
  mean = np.log(job.turn_tokens) - job.turn_spread**2 / 2
  hosts = []
  for _ in range(steps):
    tokens = rng.lognormal(mean, job.turn_spread, (*shape, job.turns))
    searches = np.minimum(job.search_limit, rng.lognormal(
        np.log(job.search_secs), job.search_spread, (*shape, job.turns - 1)))
    secs = job.token_secs * tokens.sum(-1) + searches.sum(-1)
    hosts.append(secs.max(-1))
  return np.stack(hosts)


def control(job: Job, constants: Measured) -> dict[str, float]:
  """Returns the traffic of the coordination service in a step.

  Each process gets what all others send, and all of it passes process 0.
  """
  tokens = job.hosts * job.tokens
  payload = tokens * (constants.sent_bytes + constants.scored_bytes)
  return {
      'barriers': constants.meetings,
      'messages at process 0': job.hosts * constants.messages,
      'bytes into process 0': payload,
      'bytes out of process 0': job.hosts * payload,
      'seconds of process 0 to send them': job.hosts * payload
                                           / job.server_rate,
      'CPU seconds of each host to read and pack all': tokens
                                                       * constants.parse_secs,
      'heartbeats per second': 2 * job.hosts / job.heartbeat_secs}


def devices(job: Job, fsdp: int) -> dict[str, float]:
  """Returns what a chip sends in a step, and how long it computes.

  Each micro-batch gathers the parameters for the forward and the backward pass
  and sums the gradients, in bfloat16, over `fsdp` chips. Two more forward
  passes give the log-probs of the policy and of the reference. Each mini-batch
  sums the gradients over the other chips, in float32.

  Args:
    job: The job.
    fsdp: Chips over which the parameters are split; one host's, or all.
  """
  micros = np.ceil(job.tokens / job.chips / job.row_tokens)
  copies = job.hosts * job.chips // fsdp
  gathers = micros * (3 + 2) * 2 * job.params * (1 - 1 / fsdp)
  sums = (2 * (1 - 1 / copies) * 4 * job.params / fsdp) * job.minibatches
  link = job.chip_link if fsdp <= job.chips else job.host_link
  flops = (6 + 2 * 2) * job.params * job.tokens / job.chips
  return {
      'GB that a chip sends to gather and scatter': gathers / 1e9,
      'seconds of it': gathers / link,
      'GB that a chip sends to sum gradients over hosts': sums / 1e9,
      'seconds of them': sums / job.host_link,
      'seconds that a chip computes': flops / job.flops / job.utilization}


def checkpoint(job: Job, constants: Measured) -> dict[str, float]:
  """Returns the cost of a checkpoint: parameters and two moments, in float32.

  If the parameters are split over all chips, the digests gather all of the
  state on every host, and the steps wait. If each host has all parts, nothing
  is gathered. Files are written beside the next steps.
  """
  state = 12 * job.params
  gathered = state * (1 - 1 / job.hosts)
  return {
      'GB of a checkpoint': state / 1e9,
      'GB that a host writes': state / job.hosts / 1e9,
      'seconds of the file system, beside the steps': state / job.file_rate,
      'mesh.fsdp of all: GB that each host receives for digests':
          gathered / 1e9,
      'mesh.fsdp of all: seconds that the steps wait for them': (
          gathered / (job.chips * job.host_link) + state / constants.hash_rate
          ) * (job.hosts > 1)}


def failures(job: Job) -> dict[str, float]:
  """Returns how often a host fails, and the share of time that this costs.

  A failure costs the wait for a heartbeat, the restart, and half the time
  between two checkpoints.
  """
  hours = job.host_hours / job.hosts
  lost = job.heartbeat_secs + job.restart_secs + job.checkpoint_secs / 2
  return {'hours between failures': hours,
          'seconds that a failure costs': lost,
          'share of time lost': lost / (3600 * hours)}


def table(jobs: Sequence[Job], constants: Measured) -> str:
  """Returns a Markdown table with a column for each job."""
  columns = []
  for job in jobs:
    secs = rollout_secs(job)
    longest = secs.max(1).mean()
    columns.append({
        'rollouts, seconds of the slowest host': longest,
        'share of it that the mean host waits': 1 - secs.mean() / longest,
        **control(job, constants),
        **_named('mesh.fsdp of a host', devices(job, job.chips)),
        **_named('mesh.fsdp of all', devices(job, job.hosts * job.chips)),
        **checkpoint(job, constants),
        **failures(job)})
  lines = ['| of a step | ' + ' | '.join(
      f'{job.hosts} x {job.chips}' for job in jobs) + ' |',
           '|---|' + '---|' * len(jobs)]
  return '\n'.join(lines + [
      f'| {name} | ' + ' | '.join(f'{column[name]:,.3g}' for column in columns)
      + ' |' for name in columns[0]])


def _named(prefix: str, values: dict[str, float]) -> dict[str, float]:
  return {f'{prefix}: {name}': value for name, value in values.items()}
