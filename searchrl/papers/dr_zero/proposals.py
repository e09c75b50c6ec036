# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Proposals: a question about a document, and its answer; form and difficulty.

A proposer is asked, in place of a question, to write one: so many hops from the
document that it is shown. It may search, and ends with <question> and <answer>.

Source: Dr. Zero, arXiv:2601.07055, section 3 and appendix A; where its code
says more than the paper, the code.
"""

from collections.abc import Callable, Sequence
import dataclasses
import re
import unicodedata

from searchrl.agent import rewards
from searchrl.trajectory import Question, Scores, Trajectory, Turn

_THOUGHT = re.compile(r'<think>.*?</think>', re.DOTALL)
_ASKED = re.compile(r'Hops: [0-9]+\nDocument: ?(.*)', re.DOTALL)
_ALONE = ('yes', 'no')  # answers that stand in no document
_SHORT = 4  # characters; a shorter answer stands in many a longer word
SHORT_WORDS, LONG_WORDS = 5, 10  # of an answer that is good, and that is fair


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A question, and what its proposer says is the answer; '' if not written."""

  question: str
  answer: str

  @property
  def passes(self) -> bool:
    """The gate: both are there, and the question does not tell the answer."""
    return bool(self.question and self.answer) and not leaks(
        self.answer, self.question)


@dataclasses.dataclass(frozen=True)
class Form:
  """How well a proposal was made: parts in [0, 1]."""

  gate: float  # 1 if the proposal passes; else all is 0
  think: float  # share of the turns that begin with a thought
  tool: float  # searches, for the hops that were asked for
  grounding: float  # a short answer that stands in what was read

  @property
  def score(self) -> float:
    """F, 0 or from 0.25 to 1."""
    return self.gate * (1 + self.think + self.tool + self.grounding) / 4


def ask(document: str, hops: int) -> str:
  """What a proposer is asked: the text of its `Question`."""
  return f'Hops: {hops}\nDocument: {document}'


def document_of(question: Question) -> str:
  """The document that a proposer was shown.

  Raises:
    ValueError: the question is not one that `ask` has written.
  """
  found = _ASKED.fullmatch(question.text)
  if found is None:
    raise ValueError(
        'what a proposer is asked must begin with its hops and its document, '
        f'but question {question.uid!r} is {question.text[:60]!r}.')
  return found[1]


def read(trajectory: Trajectory) -> Proposal:
  """The last question and the last answer that a policy wrote."""
  text = ''.join(turn.text for turn in trajectory.turns)
  return Proposal(_last_block(text, 'question'), _last_block(text, 'answer'))


def _last_block(text: str, name: str) -> str:
  """What the last block of a name holds, up to its first closing tag; or ''."""
  opening, closing, last, end = f'<{name}>', f'</{name}>', '', 0
  while (begin := text.find(opening, end)) >= 0 and (
      end := text.find(closing, begin)) >= 0:
    last = text[begin + len(opening):end].strip()
  return last


def leaks(answer: str, question: str) -> bool:
  """Whether a question tells its answer.

  Normalised, the answer is part of the question (as in Dr. Zero's code); or, if
  it is no shorter than four characters, it is so without accents, punctuation
  and space. An answer of which nothing is left always is.
  """
  plain = _plain(answer)
  return (rewards.normalise(answer) in rewards.normalise(question)
          or not plain or len(plain) >= _SHORT and plain in _plain(question))


def _plain(text: str) -> str:
  """Letters and digits alone, in lower case, without accents."""
  return ''.join(  # one by one: sorting many accents takes their square
      part for char in text
      for part in unicodedata.normalize('NFKD', char).casefold()
      if part.isalnum())


def form(trajectory: Trajectory) -> Form:
  """The four parts of the format reward of a proposer's trajectory.

  Differs from Dr. Zero's code: searches are those that were parsed, in whatever
  protocol, and `leaks` sees through punctuation.
  """
  proposal = read(trajectory)
  searches = [turn for turn in trajectory.turns if turn.action.kind == 'search']
  carried_out = bool(searches) and all(
      turn.observation_tokens for turn in searches)
  hops = trajectory.question.hops
  tool = float(hops == 1)
  if carried_out:
    tool = min((1 + len(searches)) / hops, 1.0)
  return Form(
      gate=float(proposal.passes), think=_thinks(trajectory.turns), tool=tool,
      grounding=_grounding(
          proposal.answer, document_of(trajectory.question),
          searches if carried_out else ()))


def _thinks(turns: Sequence[Turn]) -> float:
  return sum(bool(_THOUGHT.match(turn.text.strip()))
             for turn in turns) / max(len(turns), 1)


def _grounding(answer: str, document: str, searches: Sequence[Turn]) -> float:
  """1 for a short answer that stands in what was read, 0.5 for a longer one."""
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
  """D: 1 if one of the solver's attempts is right, falling; 0 for none or all.

  Source: Dr. Zero, eq. 4: (n - k) / (n - 1) for 0 < k < n.
  """
  return (attempts - right) / (attempts - 1) if 0 < right < attempts else 0.0


def parabola(right: int, attempts: int) -> float:
  """4 p (1 - p) of the solver's pass rate p: Dr. Zero's ablation (Table 7)."""
  rate = right / attempts
  return 4 * rate * (1 - rate)


def mixed(right: int, attempts: int) -> float:
  """1 unless all are right, or none: SQLM, arXiv:2508.03682."""
  return float(0 < right < attempts)


def uncertainty(right: int, attempts: int) -> float:
  """1 - 2 |p - 1/2| of the pass rate p: R-Zero, arXiv:2508.05004."""
  return 1 - 2 * abs(right / attempts - 0.5)


_REWARDS = {'difficulty': difficulty, 'parabola': parabola,
            'uncertainty': uncertainty, 'mixed': mixed}


def judge(play: rewards.Play, *, attempts: int = 5, format_weight: float = 0.5,
          difficulty: str = 'difficulty') -> rewards.Judge:
  """Rewards proposers: how hard a solver finds the question, and the form.

  Only proposals that pass the gate are played. Parts are those of the form,
  `difficulty`, and of what was played also `pass_rate` and `attempts`, of which
  those whose search failed are no part. The outcome is the difficulty.

  Source: Dr. Zero, eq. 4: reward = format_weight F + D.

  Args:
    play: a solver, frozen.
    attempts: at a question.
    format_weight: of the form; 0 leaves it out, but for the gate.
    difficulty: 'difficulty', 'parabola', 'uncertainty' or 'mixed', of the pass
      rate.

  Raises:
    ValueError: an option is out of range.
  """
  for name, value, legal, rule in (
      ('attempts', attempts, attempts >= 2, 'at least 2'),
      ('format_weight', format_weight, format_weight >= 0, 'at least 0'),
      ('difficulty', difficulty, difficulty in _REWARDS,
       f'one of {tuple(_REWARDS)}')):
    if not legal:
      raise ValueError(
          f'reward_options.{name} must be {rule}, but is {value!r}.')

  def score(trajectories: Sequence[Trajectory]) -> list[Scores]:
    forms = [form(one) for one in trajectories]
    asked = {place: question(one)
             for place, one in enumerate(trajectories) if forms[place].gate}
    played = dict(zip(asked, play([*asked.values()], attempts), strict=True)
                  ) if asked else {}
    return [_scores(found, played.get(place), format_weight,
                    _REWARDS[difficulty])
            for place, found in enumerate(forms)]

  return rewards.Judge(score, collective=True)


def question(trajectory: Trajectory) -> Question:
  """What a solver is asked; its uid is the proposer's sample's own."""
  proposal, seed = read(trajectory), trajectory.question
  return Question(f'proposal:{seed.uid}:{trajectory.sample}',
                  proposal.question, (proposal.answer,), seed.hops,
                  'proposals')


def _scores(found: Form, played: Sequence[Trajectory] | None,
            format_weight: float, reward: Callable[[int, int], float]
           ) -> Scores:
  parts = dataclasses.asdict(found)
  hard = 0.0
  if played is not None:
    finished = [one for one in played if one.stop_reason != 'search_error']
    right = sum(rewards.em(one) == 1 for one in finished)
    if len(finished) > 1:  # of one alone nothing can be said
      hard = reward(right, len(finished))
      parts['pass_rate'] = right / len(finished)
    parts['attempts'] = len(finished)
  return Scores(format_weight * found.score + hard, outcome=hard,
                parts=parts | {'difficulty': hard})
