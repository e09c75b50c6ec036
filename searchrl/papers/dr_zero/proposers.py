# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a proposer: judged proposals in; tables and alarms out.

Where the world is a generated one, it also says how many proposals are true, and
how many hops they need: nobody else can.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import selection
from searchrl.trajectory import Question, Trajectory

ALL = 'all'  # the hops of a row of all proposals
COLUMNS = ('hops', 'n', 'reward', 'gate', 'think', 'tool', 'grounding',
           'leaking', 'difficulty', 'pass_rate', 'searches', 'tokens', 'entropy',
           'true', 'needed')
_PARTS = ('gate', 'think', 'tool', 'grounding', 'difficulty', 'pass_rate')


class Truth(NamedTuple):
  """What an oracle knows of a proposal."""

  true: bool  # the answer is right; not, if nothing sensible is asked
  needed: int  # hops that the question takes; 0: it asks nothing sensible


Oracle = Callable[[Question], Truth]


def rows(judged: Sequence[Trajectory], oracle: Oracle | None = None
        ) -> list[dict[str, Any]]:
  """A row of COLUMNS for each hop count that was asked for, and one for all.

  Means over all proposals, where one that is not played has no difficulty; of
  the pass rate over those that were played, of `true` over those that pass the
  gate, and of `needed` over those that ask something sensible. Tokens are those
  that it wrote, and entropy what they cost, in nats a token. What no proposal
  has, a row lacks.

  Args:
    judged: by `proposals.judge`, with their parts.
    oracle: knows the truth; None: nobody does.
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
  """Proposals with 0, 1, ... of the solver's attempts right, by nearest rate.
  """
  counts = [0] * (attempts + 1)
  for one in judged:
    if 'pass_rate' in one.parts:
      counts[round(one.parts['pass_rate'] * attempts)] += 1
  return counts


def alarms(judged: Sequence[Trajectory], *, unique: float, gate: float,
           leaking: float, unfinished: float, entropy: float) -> list[str]:
  """What speaks for a collapse of the proposer, a sentence each.

  Args:
    judged: by `proposals.judge`.
    unique: the least share of different questions, of those asked with
      different documents.
    gate: the least share that passes the gate.
    leaking: the largest share of questions that tell their answer.
    unfinished: the largest share without an end.
    entropy: the least, in nats a token.
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
