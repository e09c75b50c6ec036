# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a proposer: makes tables and alarms from judged proposals.

In a generated world the tables also say how many proposals are true, and how
many hops they need. Without such a world this is unknown.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import selection
from searchrl.trajectory import Question, Trajectory

ALL = 'all'  # value of `hops` in the row of all proposals
COLUMNS = ('hops', 'n', 'reward', 'gate', 'think', 'tool', 'grounding',
           'leaking', 'difficulty', 'pass_rate', 'searches', 'tokens',
           'entropy', 'true', 'needed')
_PARTS = ('gate', 'think', 'tool', 'grounding', 'difficulty', 'pass_rate')


class Truth(NamedTuple):
  """Facts about a proposal that an oracle of the generated world knows."""

  true: bool  # True: the answer is right; False also if a question has no sense
  needed: int  # hops that the question takes; 0 if it has no sense


Oracle = Callable[[Question], Truth]


def rows(judged: Sequence[Trajectory], oracle: Oracle | None = None
        ) -> list[dict[str, Any]]:
  """Returns a row of COLUMNS per requested hop count, and a row for all.

  Proposals without a reward are left out everywhere. Most values are means over
  all other proposals. The difficulty is 0 for proposals that the solver did not
  try. Some columns are means over fewer proposals: `leaking` over proposals
  with a question and an answer, `pass_rate` over proposals that the solver
  tried, `true` over proposals that pass the gate, and `needed` over proposals
  among them whose question the oracle understands. `tokens` is the number of
  tokens that the proposer wrote, and `entropy` is the mean of -log-prob over
  these tokens, in nats per token. A column without values is left out of the
  row.

  Args:
    judged: Trajectories that `proposals.judge` has judged, with their parts.
    oracle: Function that returns the Truth about a question; None: there is no
      oracle, and `true` and `needed` are left out.
  """
  judged = [t for t in judged if t.reward is not None]
  known = {id(t): oracle(proposals.question(t)) for t in judged
           if oracle and t.parts['gate']}
  by_hops = collections.defaultdict(list)
  for t in judged:
    by_hops[t.question.hops].append(t)
  return [*(_row(hops, group, known) for hops, group in sorted(
      by_hops.items())), _row(ALL, judged, known)]


def _row(hops: int | str, judged: Sequence[Trajectory],
         known: Mapping[int, Truth]) -> dict[str, Any]:
  truths = [known[id(t)] for t in judged if id(t) in known]
  written = [[value for turn in t.turns for value in turn.action_logprobs]
             for t in judged]
  readable = [p for p in map(proposals.read, judged) if p.question and p.answer]
  columns: dict[str, list[Any]] = {
      part: [t.parts[part] for t in judged if part in t.parts]
      for part in _PARTS} | {
      'reward': [t.reward for t in judged],
      'leaking': [not proposal.passes for proposal in readable],
      'searches': [t.searches for t in judged],
      'tokens': [len(logprobs) for logprobs in written],
      'entropy': [-value for logprobs in written for value in logprobs],
      'true': [truth.true for truth in truths],
      'needed': [truth.needed for truth in truths if truth.needed]}
  return {'hops': hops, 'n': len(judged)} | {
      name: float(np.mean(values)) for name, values in columns.items()
      if values}


def histogram(judged: Sequence[Trajectory], attempts: int) -> list[int]:
  """Returns how many proposals the solver answered right 0, 1, ... times.

  Proposals without a pass rate are not counted. If some attempts failed, the
  pass rate is rounded to a number of attempts.

  Args:
    judged: Trajectories that `proposals.judge` has judged.
    attempts: Number of the solver's attempts per proposal.
  """
  counts = [0] * (attempts + 1)
  for t in judged:
    if 'pass_rate' in t.parts:
      counts[round(t.parts['pass_rate'] * attempts)] += 1
  return counts


def alarms(judged: Sequence[Trajectory], *, unique: float, gate: float,
           leaking: float, unfinished: float, entropy: float) -> list[str]:
  """Returns warnings that the proposer has collapsed, one sentence each.

  There is also a warning if the solver's attempts give no proposal a difficulty
  above 0. If no trajectory has a reward, there is one warning that says so.

  Args:
    judged: Trajectories that `proposals.judge` has judged.
    unique: Minimum fraction of distinct questions. It is checked only if there
      is more than one document.
    gate: Minimum fraction of proposals that pass the gate.
    leaking: Maximum fraction of questions that reveal their answer.
    unfinished: Maximum fraction of proposals that end at a limit.
    entropy: Minimum entropy, in nats per token.
  """
  judged = [t for t in judged if t.reward is not None]
  if not judged:
    return ['no proposal was scored: searches fail.']
  whole = _row(ALL, judged, {})
  seen = {proposals.document_of(t.question) for t in judged}
  cut = float(np.mean([t.stop_reason != 'answer' for t in judged]))
  different = selection.diversity(judged)['unique_questions']
  hard = any(t.parts['difficulty'] for t in judged)
  return [sentence for broken, sentence in (
      (whole['gate'] < gate,
       f'only {whole["gate"]:.2f} of the proposals pass the gate; the least is '
       f'{gate}.'),
      (len(seen) > 1 and different < unique,
       f'only {different:.2f} of the questions are different ones, although '
       f'the documents are; the least is {unique}.'),
      (whole.get('leaking', 0.0) > leaking,
       f'{whole.get("leaking", 0.0):.2f} of the questions tell their answer; '
       f'the most is {leaking}.'),
      (cut > unfinished,
       f'{cut:.2f} of the proposals end at a limit; the most is {unfinished}.'),
      (whole.get('entropy', entropy) < entropy,
       f'a token has {whole.get("entropy", entropy):.3f} nats, so that '
       f'proposals hardly vary; the least is {entropy}.'),
      (not hard, 'every question is answered always or never, so that none is '
       'hard.')) if broken]
