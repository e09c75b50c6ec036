# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""English texts of a generated world: titled passages, and multi-hop questions.

They are Passages and Questions, as for published data. Other modules therefore
do not depend on whether a world is generated.
"""

from collections.abc import Iterator, Sequence
import itertools
from typing import Literal

import numpy as np

from searchrl.trajectory import Passage, Question
from searchrl.world import facts
from searchrl.world import hard

Split = Literal['train', 'test', '']  # '': all common knowledge
STATEMENTS = {  # {s} subject, {o} object
    'birthplace': ('{s} was born in {o}.', '{o} is the birthplace of {s}.',
                   'The home town of {s} is {o}.',
                   '{s} came into the world in {o}.'),
    'employer': ('{s} works for {o}.', 'The employer of {s} is {o}.',
                 '{s} is employed by {o}.', '{o} employs {s}.'),
    'founder': ('{s} was founded by {o}.', '{o} founded {s}.',
                'The founder of {s} is {o}.', '{o} created {s}.'),
    'headquarters': ('{s} has its headquarters in {o}.', '{s} is based in {o}.',
                     'The home city of {s} is {o}.', '{o} hosts {s}.'),
    'river': ('{s} lies on the {o}.', 'The {o} crosses {s}.',
              'The river of {s} is the {o}.', 'The {o} runs past {s}.'),
    'mayor': ('The mayor of {s} is {o}.', '{o} governs {s}.',
              '{s} is governed by {o}.', '{o} is mayor of {s}.'),
    'sea': ('The {s} flows into the {o}.', 'The {o} receives the {s}.',
            'The mouth of the {s} is at the {o}.', 'The {s} feeds the {o}.'),
    'source': ('The {s} rises on {o}.', '{o} is the source of the {s}.',
               'The {s} springs from {o}.', '{o} feeds the {s}.'),
    'author': ('{s} was written by {o}.', '{o} wrote {s}.',
               'The author of {s} is {o}.', '{o} is the writer of {s}.'),
    'publisher': ('{s} was published by {o}.', '{o} published {s}.',
                  'The publisher of {s} is {o}.', '{o} brought out {s}.'),
}
PHRASES = {  # "the" + phrase + subject
    'birthplace': ('birthplace of', 'home town of', 'city of birth of'),
    'employer': ('employer of', 'company employing', 'firm that employs'),
    'founder': ('founder of', 'person who founded', 'creator of'),
    'headquarters': ('headquarters of', 'home city of', 'city that hosts'),
    'river': ('river of', 'river that crosses', 'river running past'),
    'mayor': ('mayor of', 'person who governs', 'head of'),
    'sea': ('sea fed by', 'sea at the mouth of', 'sea that receives'),
    'source': ('source of', 'mountain that feeds', 'mountain above'),
    'author': ('author of', 'person who wrote', 'writer of'),
    'publisher': ('publisher of', 'company that published', 'firm behind'),
}
ASKS = ('What is the {}?', 'Name the {}.', 'Find the {}.')
DISTRACTORS = {
    'person': ('{s} likes to travel to {city}.', '{s} plays chess at home.',
               '{s} is an old friend of {person}.', '{s} once read {book}.'),
    'city': ('{s} holds a large market in spring.', '{s} has a famous tower.',
             'Trains from {s} go to {city}.', '{person} once visited {s}.'),
    'company': ('{s} has many workers.', '{s} is a rival of {company}.',
                '{s} sells its goods in {city}.', '{s} is known abroad.'),
    'river': ('The {s} is wide and slow.', 'The {s} is older than the {river}.',
              'Boats go up the {s} in summer.', '{person} swam in the {s}.'),
    'sea': ('The {s} is deep and cold.', 'The {s} is north of the {sea}.',
            'Many ships cross the {s}.', '{person} sailed on the {s}.'),
    'mountain': ('{s} is high and steep.', '{s} is higher than {mountain}.',
                 '{person} climbed {s}.', 'Snow covers {s} in winter.'),
    'book': ('{s} is a long book.', '{s} was sold in {city}.',
             '{s} is better known than {book}.', 'Many have read {s}.'),
}


def passages(world: facts.World) -> list[Passage]:
  """Writes the passages of a world, which state all its facts.

  The title is the entity's name. There is one passage for each entity. In a
  hard world, which has other wordings (see `hard`), there is instead one for
  each fact, and for most entities one without facts. Passages have distractors:
  sentences without facts, which may mention other entities. The world's seed
  determines the order, the wording and the number of sentences.
  """
  return [passage for passage, _ in _written(world)]


def stated(world: facts.World) -> dict[facts.Fact, Passage]:
  """Returns the passage that contains each fact."""
  return {fact: passage for passage, keys in _written(world) for fact in keys}


def _written(world: facts.World
            ) -> list[tuple[Passage, Sequence[facts.Fact]]]:
  """Returns every passage, with the facts that it contains."""
  rng = np.random.default_rng([world.seed, 1])
  articles = hard.articles(world, rng) if world.hard else [
      _article(world, kind, name, rng)
      for kind, group in world.entities.items() for name in group]
  return [(Passage(str(i), *articles[j][:2]), articles[j][2])
          for i, j in enumerate(rng.permutation(len(articles)))]


def _article(world: facts.World, kind: str, name: str, rng: np.random.Generator
            ) -> tuple[str, str, list[facts.Fact]]:
  """Returns the passage about an entity: its name, the text, and the facts.

  The text states the facts, in random order, between some distractors.
  """
  relations = [r for r, (s, _) in facts.RELATIONS.items() if s == kind]
  sentences = [
      str(rng.choice(STATEMENTS[r])).format(s=name, o=world.facts[name, r])
      for r in relations]
  count = int(rng.integers(0, 3)) if relations else 2
  for form in rng.choice(DISTRACTORS[kind], count, replace=False):
    others = {k: str(rng.choice([n for n in group if n != name] or [name]))
              for k, group in world.entities.items() if '{%s}' % k in form}
    sentences.append(str(form).format(s=name, **others))
  rng.shuffle(sentences)
  return (name, ' '.join(s[0].upper() + s[1:] for s in sentences),
          [(name, relation) for relation in relations])


def ask(chain: facts.Chain, rng: np.random.Generator) -> str:
  """Writes a chain of facts as a question: 'What is the mayor of ... of X?'.

  The last relation of the chain comes first. The wording is random.
  """
  phrase = chain.start
  for depth, relation in enumerate(chain.relations):
    article = 'the ' if depth else ''
    phrase = f'{rng.choice(PHRASES[relation])} {article}{phrase}'
  return str(rng.choice(ASKS)).format(phrase)


def questions(
    world: facts.World,
    per_hop: Sequence[int],
    *,
    seed: int = 0,
    data_source: str = 'world',
    topics: Sequence[facts.Topic] = ('fresh',),
    split: Split = '',
) -> list[Question]:
  """Draws distinct questions about a world.

  Args:
    world: World whose facts are the answers.
    per_hop: Number of questions of 1, 2, ... hops.
    seed: Seed of the choice; another seed gives other questions about the same
      world.
    data_source: Prefix under which evaluation reports each hop count,
      '<data_source>_<hops>hop'.
    topics: Topics of the questions; see `facts.topic`.
    split: Split of the questions about common knowledge. 'train': no fact of
      the chain is held out; 'test': the last fact is held out; '': any.

  Returns:
    Questions in order of hops. Their gold answers are the name, then its
    aliases. There may be fewer questions about common knowledge.

  Raises:
    ValueError: The world has too few fresh chains of some length.
  """
  result = []
  key = 2 if 'fresh' in topics else 6
  for hops, count in enumerate(per_hop, start=1):
    rng = np.random.default_rng([world.seed, key, seed, hops])
    chains = _distinct(
        (chain for chain in facts.chains(world, hops, rng, topics)
         if _is_of(chain, split)), count, 50 if 'fresh' in topics else 10)
    drawn = [Question(
        uid=f'{data_source}-{world.seed}-{seed}-{hops}-{number}',
        text=ask(chain, rng), answers=world.answers(chain.values[-1]),
        hops=hops, data_source=f'{data_source}_{hops}hop')
             for number, chain in enumerate(chains, start=1)]
    if len(drawn) < count and 'fresh' in topics:
      raise ValueError(
          f'per_hop[{hops - 1}] asks for {count} questions of {hops} hops, but '
          f'only {len(drawn)} different ones were found in this world. Ask for '
          'fewer, or raise its sizes.')
    result += drawn
  return result


def _is_of(chain: facts.Chain, split: Split) -> bool:
  """Returns whether a chain of facts belongs to a split: 'train', 'test' or ''.

  The split '' has all chains. Chains about facts of this world alone belong to
  all splits. A chain about common knowledge belongs to 'test' if its last fact
  is held out, and to 'train' if none of its facts is (`facts.held_out`).
  """
  common = facts.common_knowledge().kind_of
  if not split or chain.start not in common:
    return True
  held_out = [fact in facts.held_out() for fact in chain.facts]
  return held_out[-1] if split == 'test' else not any(held_out)


def _distinct(chains: Iterator[facts.Chain], count: int, times: int
             ) -> Iterator[facts.Chain]:
  """Yields up to `count` chains whose questions are distinct.

  At most `times` * `count` chains are tried.
  """
  seen = set()
  for chain in itertools.islice(chains, times * count):
    if (chain.start, chain.relations) in seen:
      continue
    seen.add((chain.start, chain.relations))
    yield chain
    if len(seen) == count:
      return
