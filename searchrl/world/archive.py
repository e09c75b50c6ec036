# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A generated archive: documents of towns, and questions that need tools.

A search shows the first sentence of a document, which has the numbers of the
town's people and houses. The other facts are further down, so a policy must
open the document and read on. Questions about sums and differences of the two
numbers need arithmetic that a small model cannot do.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools

import numpy as np

from searchrl.trajectory import Action, Passage, Question, Turn
from searchrl.world import names
from searchrl.world import text

RELATIONS = {'mayor': 'person', 'river': 'river', 'founder': 'person'}
SIGNS = {'sum': '+', 'difference': '-'}
KINDS = ('fact', *SIGNS)  # kinds of questions
_ASKS = {'sum': 'How many people and houses has {} together?',
         'difference': 'How many more people than houses has {}?'}
_FILLERS = 4  # distractors of a document


@dataclasses.dataclass(frozen=True)
class Town:
  """A town of the archive, and the sentences of its document."""

  name: str
  people: int
  houses: int
  facts: Mapping[str, str]  # object of each relation
  sentences: tuple[str, ...]  # the first has the two numbers

  def passage(self, number: int) -> Passage:
    """Returns the document as a passage of a corpus."""
    return Passage(str(number), self.name, ' '.join(self.sentences))


@dataclasses.dataclass(frozen=True)
class Problem:
  """A question about a town of the archive, with the data of its answer."""

  kind: str  # one of KINDS
  town: Town
  wording: str
  relation: str = ''  # relation of a fact

  @property
  def answer(self) -> str:
    """The right answer."""
    if self.kind == 'fact':
      return self.town.facts[self.relation]
    houses = self.town.houses if self.kind == 'sum' else -self.town.houses
    return str(self.town.people + houses)


def towns(seed: int, count: int) -> list[Town]:
  """Draws the towns of an archive; equal arguments give equal towns."""
  rng = np.random.default_rng([seed, 31])
  drawn = {kind: [*itertools.islice(names.names(rng, kind, 'fresh'), most)]
           for kind, most in (('city', count), ('person', 2 * count),
                              ('river', count))}
  return [_town(name, drawn, rng) for name in drawn['city']]


def _town(name: str, drawn: Mapping[str, Sequence[str]],
          rng: np.random.Generator) -> Town:
  facts = {relation: str(rng.choice(drawn[kind]))
           for relation, kind in RELATIONS.items()}
  people, houses = int(rng.integers(101, 999)), int(rng.integers(11, 99))
  sentences = [str(rng.choice(text.STATEMENTS[relation])).format(
      s=name, o=value) for relation, value in facts.items()]
  for form in rng.choice(text.DISTRACTORS['city'], _FILLERS, replace=False):
    sentences.append(str(form).format(
        s=name, city=rng.choice(drawn['city']), person=rng.choice(
            [x for x in drawn['person'] if x not in facts.values()])))
  rng.shuffle(sentences)
  first = f'{name} has {people} people and {houses} houses.'
  return Town(name, people, houses, facts, (first, *(
      s[0].upper() + s[1:] for s in sentences)))


def problems(found: Sequence[Town], kind: str, rng: np.random.Generator
            ) -> Iterator[Problem]:
  """Yields random questions about towns, without end. Questions may repeat.

  Args:
    found: Towns, as `towns` returns them.
    kind: Kind of all questions, one of KINDS: 'fact' asks for a fact of a town,
      'sum' and 'difference' for the sum or the difference of its numbers of
      people and houses.
    rng: Generator of the choices.
  """
  while True:
    town = found[int(rng.integers(len(found)))]
    if kind != 'fact':
      yield Problem(kind, town, _ASKS[kind].format(town.name))
      continue
    relation = str(rng.choice([*RELATIONS]))
    asked = f'{rng.choice(text.PHRASES[relation])} {town.name}'
    yield Problem(kind, town, str(rng.choice(text.ASKS)).format(asked),
                  relation)


def question(problem: Problem, uid: str, source: str) -> Question:
  """Converts a problem of the archive to a Question, with its right answer.

  Args:
    problem: Problem to convert.
    uid: Unique id of the question.
    source: Name of the data set under which evaluation reports it.
  """
  return Question(uid, problem.wording, (problem.answer,), data_source=source)


@dataclasses.dataclass(frozen=True)
class Habits:
  """Probabilities that the scripted agent of the demonstrations uses a tool.

  With the defaults, the demonstrations show every skill, but little use of it.
  RL must find out which use pays.
  """

  opens: float = 0.5  # opens a document whose first sentence lacks the fact
  reads_on: float = 0.5  # reads the next page if a page lacks the fact
  calculates: float = 0.4  # calculates a number instead of guessing it


def act(problem: Problem, turns: Sequence[Turn], habits: Habits,
        rng: np.random.Generator, tools: Sequence[str]
        ) -> tuple[str, Action]:
  """Returns (thought, action): what a scripted agent does next.

  It makes demonstrations. The agent searches first. It then opens the document
  or calculates, with the probabilities of its habits, and answers. An answer
  that it has not found is a guess.

  Args:
    problem: Question that the agent answers.
    turns: Turns so far.
    habits: Probabilities that the agent uses a tool.
    rng: Generator of the choices of this turn.
    tools: Names of the tools that the agent has.
  """
  town = problem.town
  if not turns:
    topic = problem.relation or 'people'
    return topic, Action('search', (f'{town.name} {topic}',))
  if problem.kind == 'fact':
    return _read(problem, turns, habits, rng, tools)
  if turns[-1].action.kind == 'calculate':
    return 'result', Action('answer', (problem.answer,))
  sign = SIGNS[problem.kind]
  thought = f'people {sign} houses'
  if 'calculate' in tools and rng.random() < habits.calculates:
    return thought, Action(
        'calculate', (f'{town.people} {sign} {town.houses}',))
  guess = int(problem.answer) + int(rng.integers(-60, 60))
  return thought, Action('answer', (str(max(guess, 1)),))


def _read(problem: Problem, turns: Sequence[Turn], habits: Habits,
          rng: np.random.Generator, tools: Sequence[str]
          ) -> tuple[str, Action]:
  """Returns (thought, action): what the agent does next to find a fact.

  It answers if it has read the answer. Otherwise it opens the next page of the
  document or guesses.
  """
  answer = problem.answer
  if any(answer in turn.observation for turn in turns):
    return f'{problem.relation} {answer}', Action('answer', (answer,))
  opened = turns[-1].action.kind == 'open'
  is_over = opened and turns[-1].is_tool_error
  goes_on = rng.random() < (habits.reads_on if opened else habits.opens)
  if 'open' in tools and goes_on and not is_over:
    return f'{problem.relation}', Action('open', (problem.town.name,))
  kind = RELATIONS[problem.relation]
  guess = next(names.names(rng, kind, 'fresh'))
  return problem.relation, Action('answer', (guess,))
