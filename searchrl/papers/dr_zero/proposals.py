# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Proposals: questions with answers, and rewards of form and difficulty.

A proposer is a policy that writes questions, and a solver is a policy that
answers them. A proposer's prompt shows a document and a number of hops. It asks
for a question whose answer is that many hops from the document. The proposer
may search, and it ends with <question> and <answer>. This is a proposal. It
passes the gate if the solver may try it: see `Proposal.passes`.

Source: Dr. Zero, arXiv:2601.07055, section 3 and appendix A. Details that the
paper leaves out are as in its code.
"""

from collections.abc import Callable, Sequence
import dataclasses
import re
import unicodedata

import regex

from searchrl.agent import formats
from searchrl.agent import rewards
from searchrl.agent import tag_parser
from searchrl.papers.dr_zero import rivals
from searchrl.runtime import option_rules
from searchrl.trajectory import Question, Scores, Trajectory, Turn

_THOUGHT = re.compile(r'<think>.*?</think>', re.DOTALL)
_ASKED = re.compile(r'Hops: [0-9]+\nDocument: ?(.*)', re.DOTALL)
_ALONE = ('yes', 'no')  # answers that need not occur in a document
# Vowel signs of Indian and other scripts, which are not accents.
_SIGN = regex.compile(r'[\p{M}&&\p{Alphabetic}&&\p{ccc=0}]', regex.V1)
_SHORT = 4  # characters; shorter answers occur inside many longer words
SHORT_WORDS, LONG_WORDS = 5, 10  # words of a good and of a fair answer


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A question and its proposer's answer; each is '' if it was not written."""

  question: str
  answer: str

  @property
  def passes(self) -> bool:
    """True if the question and answer exist, and the answer is hidden.

    This is the gate: the solver tries only such proposals.
    """
    return bool(self.question and self.answer) and not leaks(
        self.answer, self.question)


@dataclasses.dataclass(frozen=True)
class Form:
  """The parts of the format reward of a proposal, each in [0, 1]."""

  gate: float  # 1 if the proposal passes the gate; if 0, the score is 0
  think: float  # share of turns that begin with a thought
  # (1 + searches) / requested hops, at most 1. Without searches, or after a
  # failed one, it is 1 for one hop and 0 for more.
  tool: float
  grounding: float  # 1 or 0.5 if the answer occurs in the text read, else 0

  @property
  def score(self) -> float:
    """The format score F of Dr. Zero: 0, or in [0.25, 1]."""
    return self.gate * (1 + self.think + self.tool + self.grounding) / 4


def ask(document: str, hops: int) -> str:
  """Returns the text that asks a proposer for a question about a document.

  Args:
    document: Text of the document.
    hops: Number of hops that the answer should be away from the document.
  """
  return f'Hops: {hops}\nDocument: {document}'


def document_of(question: Question) -> str:
  """Returns the document that a proposer was shown.

  Raises:
    ValueError: The text of the question was not written by `ask`.
  """
  match = _ASKED.fullmatch(question.text)
  if match is None:
    raise ValueError(
        'the questions of a proposer must begin with the number of hops and a '
        f'document, as `proposals.ask` writes them, but {question.uid!r} is '
        f'{question.text[:60]!r}. Use the file seeds.jsonl of a self-play.')
  return match[1]


def read(trajectory: Trajectory) -> Proposal:
  """Returns the proposal in a trajectory: its last question and last answer.

  A turn is read up to its first </answer>, which ends it.
  """
  text = ''.join(tag_parser.until_stop(turn.text, ('</answer>',))
                 for turn in trajectory.turns)
  return Proposal(_last_block(text, 'question'), _last_block(text, 'answer'))


def _last_block(text: str, name: str) -> str:
  """Returns the text of the last closed block of a tag, or ''."""
  opening, closing, last, end = f'<{name}>', f'</{name}>', '', 0
  while (begin := text.find(opening, end)) >= 0 and (
      end := text.find(closing, begin)) >= 0:
    last = text[begin + len(opening):end].strip()
  return last


def leaks(answer: str, question: str) -> bool:
  """Returns whether a question reveals its answer.

  It does if the normalised answer is part of the normalised question, as in Dr.
  Zero's code. It also does if this holds without accents, punctuation and
  spaces, for an answer that then has at least four characters. An answer of
  articles alone, or without a letter or digit, always counts as revealed.
  """
  plain = _plain(answer)
  return (rewards.normalise(answer) in rewards.normalise(question)
          or not plain or len(plain) >= _SHORT and plain in _plain(question))


def _plain(text: str) -> str:
  """Returns the letters, vowel signs and digits of a text, in lower case.

  Accents, spaces and other characters are left out: 'Café, 1!' -> 'cafe1'.
  """
  return ''.join(  # per character: sorting many accents takes quadratic time
      part for char in text
      for part in unicodedata.normalize('NFKD', char).casefold()
      if part.isalnum() or _SIGN.match(part))


def form(trajectory: Trajectory) -> Form:
  """Returns the parts of the format reward for a proposer's trajectory.

  There are two differences from Dr. Zero's code. Searches are counted among the
  parsed actions, so any protocol can be used. A question that reveals its
  answer is recognised even if punctuation separates the answer's characters.
  """
  proposal = read(trajectory)
  searches = [turn for turn in trajectory.turns if turn.action.is_search]
  carried_out = bool(searches) and all(
      turn.observation_tokens for turn in searches)
  hops = trajectory.question.hops
  tool = float(hops == 1)
  if carried_out:
    tool = min((1 + len(searches)) / hops, 1.0)
  return Form(
      gate=float(proposal.passes), think=_thinks(trajectory), tool=tool,
      grounding=_grounding(
          proposal.answer, document_of(trajectory.question),
          searches if carried_out else ()))


def _thinks(trajectory: Trajectory) -> float:
  """Returns the share of turns that begin with a thought.

  A <think> that the text before a turn opens is a part of the turn.
  """
  turns = trajectory.turns
  before = [trajectory.prompt, *(turn.observation for turn in turns)]
  return sum(
      bool(_THOUGHT.match('<think>' * formats.opens_thought(text)
                          + turn.text.strip()))
      for text, turn in zip(before, turns)) / max(len(turns), 1)


def _grounding(answer: str, document: str, searches: Sequence[Turn]) -> float:
  """Returns how well the text that a proposer read supports its answer.

  If the text contains the answer, the result is 1 for an answer of at most 5
  words and 0.5 for one of 6 to 10 words. Otherwise it is 0. The answers 'yes'
  and 'no' always have 1. The text is the document and all passages found.
  """
  read_texts = [document] + [
      f'{p.title} {p.text}' for turn in searches for p in turn.passages]
  normal = rewards.normalise(answer)
  grounded = normal in _ALONE or normal and normal in rewards.normalise(
      '\n'.join(read_texts))
  words = len(answer.split())
  if not grounded or words > LONG_WORDS:
    return 0.0
  return 1.0 if words <= SHORT_WORDS else 0.5


def difficulty(right: int, attempts: int) -> float:
  """Returns the difficulty of a question, from a solver's attempts at it.

  It is 1 for one right attempt and falls with each further one. It is 0 if all
  attempts are right or none is.

  Source: Dr. Zero, eq. 4: (n - k) / (n - 1) for k right ones of n attempts,
  0 < k < n.
  """
  return (attempts - right) / (attempts - 1) if 0 < right < attempts else 0.0


def parabola(right: int, attempts: int) -> float:
  """Returns the difficulty 4 p (1 - p), where p is the share of right attempts.

  Source: an ablation of Dr. Zero (Table 7).
  """
  rate = right / attempts
  return 4 * rate * (1 - rate)


def mixed(right: int, attempts: int) -> float:
  """Returns 1 if some attempts at a question are right and some wrong, else 0.

  Source: SQLM, arXiv:2508.03682.
  """
  return float(0 < right < attempts)


def uncertainty(right: int, attempts: int) -> float:
  """Returns 1 - 2 |p - 1/2| for the share p of right attempts.

  It is 1 if half of the attempts are right, and 0 if all or none are.

  Source: R-Zero, arXiv:2508.05004.
  """
  return 1 - 2 * abs(right / attempts - 0.5)


_REWARDS = {'difficulty': difficulty, 'parabola': parabola,
            'uncertainty': uncertainty, 'mixed': mixed}


def judge(play: rewards.Play, *, attempts: int = 5, format_weight: float = 0.5,
          difficulty: str = 'difficulty', golds: str = 'proposer',
          repetition: float = 0.0) -> rewards.Judge:
  """Returns a judge that rewards proposals for their difficulty and their form.

  The reward is format_weight F + D (Dr. Zero, eq. 4). F is the score of the
  form. D is the difficulty, which is computed from the solver's attempts. D is
  also the outcome. The solver tries only proposals that pass the gate (see
  `Proposal.passes`). The parts of the scores are the parts of the form and
  `difficulty`. Proposals that were tried also have `attempts`, the number of
  attempts whose search did not fail. If there are at least two of these, the
  proposals also have `pass_rate`, the share of them that is right.

  Args:
    play: Function that lets the solver, which is not trained, try questions.
    attempts: Number of the solver's attempts per question, at least 2.
    format_weight: Weight of the form. At 0, only the gate has an effect.
    difficulty: Function of the pass rate: 'difficulty', 'parabola',
      'uncertainty' or 'mixed'.
    golds: Source of the right answers: 'proposer' for the proposer's answer, or
      'majority' for the most common answer of the attempts.
    repetition: Weight of a penalty on proposals that pass the gate. The penalty
      is the fraction of such proposals, among those judged together, whose
      questions are similar. It does not make a reward negative.

  Raises:
    ValueError: An option is out of range.
  """
  option_rules.check(
      'reward_options.',
      ('attempts', attempts, attempts >= 2, 'at least 2'),
      ('format_weight', format_weight, format_weight >= 0, 'at least 0'),
      ('difficulty', difficulty, difficulty in _REWARDS,
       f'one of {tuple(_REWARDS)}'),
      ('golds', golds, golds in ('proposer', 'majority'),
       "'proposer' or 'majority'"),
      ('repetition', repetition, repetition >= 0, 'at least 0'))

  def score(trajectories: Sequence[Trajectory]) -> list[Scores]:
    forms = [form(t) for t in trajectories]
    valid = {place: question(t)
             for place, t in enumerate(trajectories) if forms[place].gate}
    played = dict(zip(valid, play([*valid.values()], attempts), strict=True)
                  ) if valid else {}
    scores = [_scores(judged, played.get(place), format_weight,
                      _REWARDS[difficulty], golds == 'majority')
              for place, judged in enumerate(forms)]
    if repetition:
      shares = rivals.repetition([q.text for q in valid.values()])
      for place, share in zip(valid, shares):
        scores[place] = dataclasses.replace(scores[place], reward=max(
            scores[place].reward - repetition * share, 0.0))
    return scores

  return rewards.Judge(score, collective=True)


def question(trajectory: Trajectory) -> Question:
  """Returns a proposer's question as a task for a solver; its answer is gold.

  Its uid names the seed and the sample of the trajectory.
  """
  proposal, seed = read(trajectory), trajectory.question
  return Question(f'proposal:{seed.uid}:{trajectory.sample}',
                  proposal.question, (proposal.answer,), seed.hops,
                  'proposals')


def _scores(judged: Form, played: Sequence[Trajectory] | None,
            format_weight: float, reward: Callable[[int, int], float],
            by_majority: bool) -> Scores:
  parts = dataclasses.asdict(judged)
  hard = 0.0
  if played is not None:
    finished = [t for t in played if t.stop_reason != 'search_error']
    right = (round(rivals.majority(finished)[1] * len(finished))
             if by_majority else sum(rewards.em(t) == 1 for t in finished))
    if len(finished) > 1:  # a single attempt says nothing
      hard = reward(right, len(finished))
      parts['pass_rate'] = right / len(finished)
    parts['attempts'] = len(finished)
  return Scores(format_weight * judged.score + hard, outcome=hard,
                parts=parts | {'difficulty': hard})
