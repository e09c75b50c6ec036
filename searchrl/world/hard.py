# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Hard wording: passages express facts in words that queries do not use.

A query consists of a name and a relation. It shares only the name with the
passage that contains the fact. Other passages are about the same entity, or
about its namesakes, which are entities with a similar name. An engine that
compares words therefore finds the right passage only by chance. An engine that
compares the meanings of sentences finds it.
"""

from collections.abc import Sequence

import numpy as np

from searchrl.world import facts
from searchrl.world import names

STATEMENTS = {  # {s}: subject, {o}: object; rivers and seas include "the"
    'birthplace': ('{s} is a native of {o}.', '{s} first saw light in {o}.',
                   'The cradle of {s} stood in {o}.'),
    'employer': ('{s} draws wages from {o}.', '{s} is on the payroll of {o}.',
                 '{o} pays {s} a salary.'),
    'founder': ('{o} set up {s}.', '{s} began as an idea of {o}.',
                '{s} owes its start to {o}.'),
    'headquarters': ('The main office of {s} is in {o}.',
                     '{s} is managed from {o}.',
                     'The board of {s} meets in {o}.'),
    'river': ('{o} flows through {s}.', '{s} stands on the banks of {o}.',
              'The quays of {s} are on {o}.'),
    'mayor': ('{o} rules {s}.', '{s} is in the hands of {o}.',
              'The council of {s} obeys {o}.'),
    'sea': ('{s} ends in {o}.', '{s} pours into {o}.',
            'The water of {s} goes to {o}.'),
    'source': ('{s} begins on {o}.', '{s} comes down from {o}.',
               'The first drops of {s} fall on {o}.'),
    'author': ('{s} came from the pen of {o}.', '{o} penned {s}.',
               'The words of {s} are by {o}.'),
    'publisher': ('{s} was printed by {o}.', '{s} is on the list of {o}.',
                  'The copies of {s} come from {o}.'),
}
DISTRACTORS = {
    'person': ('{s} often visits {city}.', '{s} owns shares of {company}.',
               '{s} admires {person}.', '{s} has read {book}.'),
    'city': ('{s} trades with {city}.', '{person} likes {s}.',
             '{s} has a shop of {company}.', 'It often rains in {s}.'),
    'company': ('{s} sells in {city}.', '{s} competes with {company}.',
                '{person} buys from {s}.', '{s} has a good name.'),
    'river': ('Fish from {s} are sold in {city}.',
              '{s} is longer than {river}.', '{person} swims in {s}.',
              '{s} is cold.'),
    'sea': ('Ships on {s} come from {city}.', '{s} is warmer than {sea}.',
            '{person} swims in {s}.', '{s} is cold.'),
    'mountain': ('{s} can be seen from {city}.',
                 '{s} is lower than {mountain}.', '{person} likes {s}.',
                 '{s} is cold.'),
    'book': ('{s} is set in {city}.', '{s} mentions {company}.',
             '{person} likes {s}.', '{s} is shorter than {book}.'),
}
_NAMESAKE = ('Many confuse {s} with {n}.', '{s} is older than {n}.')
_MORE = 0.6  # share of entities with a passage that states no fact
_CONFUSED = 0.5  # share of passages that name a namesake, if there are any


def articles(world: facts.World, rng: np.random.Generator
            ) -> list[tuple[str, str, tuple[facts.Fact, ...]]]:
  """Writes the passages of a hard world: one for each fact, and some without.

  Args:
    world: World whose entities are described.
    rng: Generator of the wording and of distractors, which are sentences that
      state no fact.

  Returns:
    For each passage, its title, its text and the facts that it contains.
  """
  same = _namesakes(world)
  result = []
  for kind, group in world.entities.items():
    relations = [r for r, (s, _) in facts.RELATIONS.items() if s == kind]
    for name in group:
      stated: list[tuple[facts.Fact, ...]] = [
          ((name, relation),) for relation in relations]
      if not stated or rng.random() < _MORE:
        stated.append(())
      result += [(name, _text(world, kind, name, keys, same[name], rng), keys)
                 for keys in stated]
  return result


def _namesakes(world: facts.World) -> dict[str, list[str]]:
  """Returns, for each name, the other names of the same stem."""
  groups: dict[tuple[str, str], list[str]] = {}
  for name, kind in world.kind_of.items():
    groups.setdefault((kind, names.stem(kind, name)), []).append(name)
  return {name: [other for other in group if other != name]
          for group in groups.values() for name in group}


def _text(world: facts.World, kind: str, name: str,
          keys: Sequence[facts.Fact], namesakes: Sequence[str],
          rng: np.random.Generator) -> str:
  """Returns the text of a passage: two or three short sentences, shuffled.

  There is a sentence for each fact in `keys`. The other sentences are
  distractors, which state no fact. One distractor may mention a namesake.
  """
  subject = _called(kind, name)
  sentences = [
      str(rng.choice(STATEMENTS[r])).format(
          s=subject, o=_called(facts.RELATIONS[r][1], world.facts[name, r]))
      for _, r in keys]
  for form in rng.choice(DISTRACTORS[kind], 2 - len(keys), replace=False):
    others = {k: _called(k, _other(group, name, rng))
              for k, group in world.entities.items() if '{%s}' % k in form}
    sentences.append(str(form).format(s=subject, **others))
  if namesakes and rng.random() < _CONFUSED:
    sentences.append(str(rng.choice(_NAMESAKE)).format(
        s=subject, n=_called(kind, str(rng.choice(namesakes)))))
  rng.shuffle(sentences)
  return ' '.join(s[0].upper() + s[1:] for s in sentences)


def _other(group: Sequence[str], name: str, rng: np.random.Generator) -> str:
  """Returns another name of a group, or this name if there is no other."""
  place = int(rng.integers(len(group)))
  return group[(place + (group[place] == name)) % len(group)]


def _called(kind: str, name: str) -> str:
  """Returns a name as it appears in a sentence."""
  return f'the {name}' if kind in ('river', 'sea') else name
