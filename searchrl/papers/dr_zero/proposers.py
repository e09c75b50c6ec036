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
           'leaking', 'difficulty', 'pass_rate', 'searches', 'tokens', 'entropy',
           'true', 'needed')
_PARTS = ('gate', 'think', 'tool', 'grounding', 'difficulty', 'pass_rate')


class Truth(NamedTuple):
  """The knowledge of an oracle about a proposal."""

  true: bool  # the answer is right; False for a senseless question
  needed: int  # hops that the question takes; 0 for a senseless one


Oracle = Callable[[Question], Truth]


def rows(judged: Sequence[Trajectory], oracle: Oracle | None = None
        ) -> list[dict[str, Any]]:
  """Returns a row of COLUMNS per requested hop count, and one for all of them.

  Values are means over all proposals; the difficulty of one that the solver did
  not try is 0. Some columns are means over fewer proposals: `leaking` over
  those with a question and an answer, `pass_rate` over those that the solver
  tried, `true` over those that pass the gate, and `needed` over those that ask
  something sensible. `tokens` counts what the proposer wrote, and `entropy` is
  the mean of -log-prob, in nats per token. A row has no column for which it has
  no values.

  Args:
    judged: Trajectories that `proposals.judge` has judged, with their parts.
    oracle: Function that returns the truth; None if it is unknown.
  """
  judged = [one for one in judged if one.reward is not None]
  known = {id(one): oracle(proposals.question(one)) for one in judged
           if oracle and one.parts['gate']}
  by_hops = collections.defaultdict(list)
  for one in judged:
    by_hops[one.question.hops].append(one)
  return [_row(hops, group, known) for hops, group in (
      *sorted(by_hops.items()), (ALL, judged))]


def _row(hops: int | str, judged: Sequence[Trajectory],
         known: Mapping[int, Truth]) -> dict[str, Any]:
  truths = [known[id(one)] for one in judged if id(one) in known]
  written = [[value for turn in one.turns for value in turn.action_logprobs]
             for one in judged]
  told = [p for p in map(proposals.read, judged) if p.question and p.answer]
  columns = {part: [one.parts[part] for one in judged if part in one.parts]
             for part in _PARTS} | {
      'reward': [one.reward for one in judged],
      'leaking': [not proposal.passes for proposal in told],
      'searches': [one.searches for one in judged],
      'tokens': [len(logprobs) for logprobs in written],
      'entropy': [-value for logprobs in written for value in logprobs],
      'true': [truth.true for truth in truths],
      'needed': [truth.needed for truth in truths if truth.needed]}
  return {'hops': hops, 'n': len(judged)} | {
      name: float(np.mean(values)) for name, values in columns.items()
      if values}


def histogram(judged: Sequence[Trajectory], attempts: int) -> list[int]:
  """Counts proposals by right attempts: 0, 1, ..., to the nearest pass rate."""
  counts = [0] * (attempts + 1)
  for one in judged:
    if 'pass_rate' in one.parts:
      counts[round(one.parts['pass_rate'] * attempts)] += 1
  return counts


def alarms(judged: Sequence[Trajectory], *, unique: float, gate: float,
           leaking: float, unfinished: float, entropy: float) -> list[str]:
  """Returns the signs that the proposer has collapsed, one sentence each.

  Args:
    judged: Trajectories that `proposals.judge` has judged.
    unique: Smallest share of distinct questions. It is checked only if there is
      more than one document.
    gate: Smallest share of proposals that pass the gate.
    leaking: Largest share of questions that reveal their answer.
    unfinished: Largest share of proposals that end at a limit.
    entropy: Smallest entropy, in nats per token.
  """
  judged = [one for one in judged if one.reward is not None]
  if not judged:
    return ['no proposal was scored: searches fail.']
  whole = _row(ALL, judged, {})
  seen = {proposals.document_of(one.question) for one in judged}
  cut = float(np.mean([one.stop_reason != 'answer' for one in judged]))
  different = selection.diversity(judged)['unique_questions']
  hard = any(one.parts['difficulty'] for one in judged)
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
