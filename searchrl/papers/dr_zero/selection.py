# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Selection: which proposals become questions for a solver.

Source: Dr. Zero, arXiv:2601.07055, whose code keeps the best of five samples of
a prompt by its format score, and the first 50 words of its question. Differs:
what is ill-formed, ungrounded, too long, a duplicate or tells its answer is
dropped, not cut, or kept as a row without an answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.agent import rewards
from searchrl.papers.dr_zero import proposals
from searchrl.trajectory import Passage, Question, Trajectory

(ILL_FORMED, LEAKING, UNGROUNDED, TOO_LONG, DUPLICATE, UNANSWERABLE, KNOWN
) = REASONS = ('ill_formed', 'leaking', 'ungrounded', 'too_long', 'duplicate',
               'unanswerable', 'known')


@dataclasses.dataclass(frozen=True)
class Selected:
  """What was made of the samples of all seeds.

  Attributes:
    kept: the trajectories whose proposals become questions, in order.
    dropped: the best sample of every other seed, and why; of REASONS.
  """

  kept: list[Trajectory]
  dropped: list[tuple[Trajectory, str]]


def best(samples: Sequence[Trajectory]) -> Trajectory:
  """The sample of a seed with the highest format score; of equals the first."""
  return max(samples, key=lambda one: proposals.form(one).score)


def select(groups: Iterable[Sequence[Trajectory]],
           fits: Callable[[Question], bool] = lambda question: True
          ) -> Selected:
  """Keeps the best sample of each seed, unless there is something against it.

  Args:
    groups: the samples of each seed.
    fits: whether a question is short enough for who has to answer it.
  """
  kept, dropped, asked = [], [], set()
  for samples in groups:
    chosen = best(samples)
    question = rewards.normalise(proposals.read(chosen).question)
    reason = against(chosen) or (
        '' if fits(proposals.question(chosen)) else TOO_LONG) or (
            DUPLICATE if question in asked else '')
    if reason:
      dropped.append((chosen, reason))
    else:
      asked.add(question)
      kept.append(chosen)
  return Selected(kept, dropped)


def against(trajectory: Trajectory) -> str:
  """Why a proposal, by itself, makes no question; '' if it does."""
  proposal = proposals.read(trajectory)
  if not proposal.question or not proposal.answer:
    return ILL_FORMED
  if not proposal.passes:
    return LEAKING
  return '' if proposals.form(trajectory).grounding else UNGROUNDED


def checked(found: Selected, tried: Sequence[tuple[int, int]]) -> Selected:
  """Keeps what is answered with its evidence, and never without.

  Args:
    found: by `select`.
    tried: of each that was kept: the right answers with evidence, and without.

  Source: the check of a public fork of Dr. Zero's code: one of three tries with
  the evidence, none of three without.
  """
  kept, dropped = [], list(found.dropped)
  for one, (with_evidence, without) in zip(found.kept, tried, strict=True):
    if with_evidence and not without:
      kept.append(one)
    else:
      dropped.append((one, KNOWN if without else UNANSWERABLE))
  return Selected(kept, dropped)


def evidence(trajectory: Trajectory, write: Callable[[int, Passage], str]
            ) -> str:
  """What a proposal is grounded in, a line each: document, then passages.

  Args:
    trajectory: of a proposal.
    write: writes a passage, by its number.
  """
  passages = dict.fromkeys(
      p for turn in trajectory.turns if turn.action.kind == 'search'
      for p in turn.passages)
  return '\n'.join([proposals.document_of(trajectory.question), *(
      write(n, p) for n, p in enumerate(passages, start=1))])


def record(trajectory: Trajectory, answer: str = '') -> dict[str, Any]:
  """A line of a file of questions, with where the question comes from.

  Args:
    trajectory: of a kept proposal.
    answer: another one than the proposer's, for a control.
  """
  proposal, form = proposals.read(trajectory), proposals.form(trajectory)
  return {
      'id': proposals.question(trajectory).uid, 'question': proposal.question,
      'golden_answers': [answer or proposal.answer],
      'metadata': {
          'hops': trajectory.question.hops, 'data_source': 'proposals',
          'document': proposals.document_of(trajectory.question),
          'searches': [query for turn in trajectory.turns
                       if turn.action.kind == 'search'
                       for query in turn.action.texts],
          'form': dataclasses.asdict(form) | {'score': form.score},
          'proposed_answer': proposal.answer}}


def others(answers: Sequence[str], seed: int) -> list[str]:
  """The answers in another order, in which none has its own again.

  Equal answers count as one's own, too: a few that stayed right would teach. If
  more than half are equal, some of them must stay.

  Args:
    answers: of questions, in their order.
    seed: of the order.
  """
  rng, plain = np.random.default_rng(seed), list(map(
      rewards.normalise, answers))
  order = rng.permutation(len(answers))
  for place in range(len(order)):
    if plain[order[place]] == plain[place]:
      for other in rng.permutation(len(order)):
        if (plain[order[other]] != plain[place]
            and plain[order[place]] != plain[other]):
          order[[place, other]] = order[[other, place]]
          break
  return [answers[i] for i in order]


def distinct_bigrams(texts: Sequence[str]) -> float:
  """Different pairs of words, by all pairs; 0 of none.

  Source: distinct-2 of Li et al. 2016, arXiv:1510.03055.
  """
  pairs = [pair for text in texts for words in (rewards.normalise(text).split(),)
           for pair in zip(words, words[1:])]
  return len(set(pairs)) / len(pairs) if pairs else 0.0


def diversity(found: Sequence[Trajectory]) -> Mapping[str, float]:
  """How different the proposals are; shares, of those that have a question."""
  asked = [p for p in map(proposals.read, found) if p.question]
  questions = [rewards.normalise(p.question) for p in asked]
  answers = [rewards.normalise(p.answer) for p in asked]
  count = max(len(asked), 1)
  return {'unique_questions': len({*questions}) / count,
          'unique_answers': len({*answers}) / count,
          'distinct_bigrams': distinct_bigrams(questions)}
