# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Selection of the proposals that become questions for a solver.

Source: Dr. Zero, arXiv:2601.07055. Of five samples of a prompt, its code keeps
the one with the best format score, and the first 50 words of its question. Here
a proposal is dropped if it is ill-formed, ungrounded, too long or a duplicate,
or if it reveals its answer. A question is never cut, and none is kept without
an answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from searchrl.agent import rewards
from searchrl.papers.dr_zero import proposals
from searchrl.trajectory import Passage, Question, Trajectory

(ILL_FORMED, LEAKING, UNGROUNDED, TOO_LONG, DUPLICATE, UNANSWERABLE, KNOWN,
 SURE_OR_UNSURE
) = REASONS = ('ill_formed', 'leaking', 'ungrounded', 'too_long', 'duplicate',
               'unanswerable', 'known', 'sure_or_unsure')


@dataclasses.dataclass(frozen=True)
class Selected:
  """The result of a selection: kept and dropped proposals.

  Attributes:
    kept: Trajectories whose proposals become questions, in the order of their
      seeds.
    dropped: For each seed without a question, its `best` sample and the reason,
      which is one of REASONS.
  """

  kept: list[Trajectory]
  dropped: list[tuple[Trajectory, str]]


def best(samples: Sequence[Trajectory]) -> Trajectory:
  """Returns the first sample that has the highest format score."""
  return max(samples, key=lambda t: proposals.form(t).score)


def select(groups: Iterable[Sequence[Trajectory]],
           fits: Callable[[Question], bool] = lambda question: True
          ) -> Selected:
  """Keeps the `best` sample of each seed, unless there is a reason to drop it.

  The reasons are those of `against`, a question that does not fit, and one that
  is already kept.

  Args:
    groups: Samples, grouped by seed.
    fits: Function that returns whether a question is short enough for the
      solver.
  """
  kept, dropped, questions = [], [], set()
  for samples in groups:
    chosen = best(samples)
    question = rewards.normalise(proposals.read(chosen).question)
    reason = against(chosen) or (
        '' if fits(proposals.question(chosen)) else TOO_LONG) or (
            DUPLICATE if question in questions else '')
    if reason:
      dropped.append((chosen, reason))
    else:
      questions.add(question)
      kept.append(chosen)
  return Selected(kept, dropped)


def against(trajectory: Trajectory) -> str:
  """Returns the reason to drop a proposal, one of REASONS; '' to keep it.

  A proposal is dropped if it lacks a question or an answer, if its question
  reveals the answer, or if `proposals.form` finds the answer ungrounded. A
  grounded answer has at most 10 words and occurs in the text that the proposer
  read; 'yes' and 'no' are always grounded. The proposal is not compared with
  other proposals.
  """
  proposal = proposals.read(trajectory)
  if not proposal.question or not proposal.answer:
    return ILL_FORMED
  if not proposal.passes:
    return LEAKING
  return '' if proposals.form(trajectory).grounding else UNGROUNDED


def checked(selected: Selected, tried: Sequence[tuple[int, int]]) -> Selected:
  """Drops questions that a solver cannot answer, or knows without evidence.

  Evidence is the document and the passages that the proposer read. A question
  is kept if at least one answer with it is right, and none without it.

  Args:
    selected: Selection from `select`.
    tried: For each kept question, the number of right answers with evidence
      and the number of right answers without it.

  Source: the check in a public fork of Dr. Zero's code, which tries three times
  with the evidence and three times without.
  """
  kept, dropped = [], list(selected.dropped)
  for t, (with_evidence, without) in zip(selected.kept, tried, strict=True):
    if with_evidence and not without:
      kept.append(t)
    else:
      dropped.append((t, KNOWN if without else UNANSWERABLE))
  return Selected(kept, dropped)


def evidence(trajectory: Trajectory, write: Callable[[int, Passage], str]
            ) -> str:
  """Returns the texts that a proposer read: its document, then found passages.

  Each passage occurs once.

  Args:
    trajectory: Trajectory of the proposal.
    write: Function that formats a passage, given its number from 1 and the
      passage.

  Returns:
    A text with a line break after each part but the last.
  """
  passages = dict.fromkeys(
      p for turn in trajectory.turns if turn.action.is_search
      for p in turn.passages)
  return '\n'.join([proposals.document_of(trajectory.question), *(
      write(n, p) for n, p in enumerate(passages, start=1))])


def record(trajectory: Trajectory, answer: str = '') -> dict[str, Any]:
  """Returns a proposal as a dict, which is one line of a file of questions.

  It has the question, its gold answer and, in 'metadata', its origin.

  Args:
    trajectory: Trajectory of a kept proposal.
    answer: Answer that replaces the proposer's, for a control experiment; ''
      keeps the proposer's.
  """
  proposal, form = proposals.read(trajectory), proposals.form(trajectory)
  return {
      'id': proposals.question(trajectory).uid, 'question': proposal.question,
      'golden_answers': [answer or proposal.answer],
      'metadata': {
          'hops': trajectory.question.hops, 'data_source': 'proposals',
          'document': proposals.document_of(trajectory.question),
          'searches': [query for turn in trajectory.turns
                       if turn.action.is_search
                       for query in turn.action.texts],
          'form': dataclasses.asdict(form) | {'score': form.score},
          'proposed_answer': proposal.answer}}


def others(answers: Sequence[str], seed: int) -> list[str]:
  """Returns the answers in an order that gives the questions wrong answers.

  No question gets an answer that is equal to its own answer. Otherwise a solver
  would learn from the few questions whose answers are still right. If more than
  half of the answers are equal, however, some questions keep their answers.

  Args:
    answers: Answers, in the order of the questions.
    seed: Random seed of the new order.
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
  """Returns the fraction of distinct pairs of adjacent words; 0 if none.

  Source: distinct-2 of Li et al. 2016, arXiv:1510.03055.
  """
  words = [rewards.normalise(text).split() for text in texts]
  pairs = [pair for line in words for pair in zip(line, line[1:])]
  return len(set(pairs)) / len(pairs) if pairs else 0.0


def diversity(kept: Sequence[Trajectory]) -> Mapping[str, float]:
  """Returns fractions of distinct questions, answers and pairs of words.

  Proposals without a question are left out. The keys are 'unique_questions',
  'unique_answers' and 'distinct_bigrams' (of the questions).
  """
  readable = [p for p in map(proposals.read, kept) if p.question]
  questions = [rewards.normalise(p.question) for p in readable]
  answers = [rewards.normalise(p.answer) for p in readable]
  count = max(len(readable), 1)
  return {'unique_questions': len({*questions}) / count,
          'unique_answers': len({*answers}) / count,
          'distinct_bigrams': distinct_bigrams(questions)}
