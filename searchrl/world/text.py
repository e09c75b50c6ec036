# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A World in, its English out: titled passages and questions of 1 to 4 hops.

Both leave in the library's ordinary nouns, Passage and Question, so nothing
downstream knows that a world is generated.
"""

from collections.abc import Sequence

import numpy as np

from searchrl.trajectory import Passage, Question
from searchrl.world import facts

_STATEMENTS = {  # {s} subject, {o} object
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
_PHRASES = {  # "the" + phrase + what it is asked of
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
_ASKS = ('What is the {}?', 'Name the {}.', 'Find the {}.')
_DISTRACTORS = {
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
  """One passage an entity: its facts in random wording, and distractors.

  Distractors mention other entities that are no answer. Order, wording and
  number follow from the world's seed.
  """
  rng = np.random.default_rng([world.seed, 1])
  result = []
  for kind, group in world.entities.items():
    relations = [r for r, (s, _) in facts.RELATIONS.items() if s == kind]
    for name in group:
      sentences = [
          str(rng.choice(_STATEMENTS[r])).format(s=name, o=world.facts[name, r])
          for r in relations]
      count = int(rng.integers(0, 3)) if relations else 2
      for form in rng.choice(_DISTRACTORS[kind], count, replace=False):
        others = {k: str(rng.choice([n for n in g if n != name] or [name]))
                  for k, g in world.entities.items() if '{%s}' % k in form}
        sentences.append(str(form).format(s=name, **others))
      rng.shuffle(sentences)
      text = ' '.join(s[0].upper() + s[1:] for s in sentences)
      result.append(Passage(id='', title=name, text=text))
  order = rng.permutation(len(result))
  return [Passage(str(i), result[j].title, result[j].text)
          for i, j in enumerate(order)]


def ask(chain: facts.Chain, rng: np.random.Generator) -> str:
  """A chain in words, outermost relation first."""
  phrase = chain.start
  for depth, relation in enumerate(chain.relations):
    article = 'the ' if depth else ''
    phrase = f'{rng.choice(_PHRASES[relation])} {article}{phrase}'
  return str(rng.choice(_ASKS)).format(phrase)


def questions(
    world: facts.World,
    per_hop: Sequence[int],
    *,
    seed: int = 0,
    data_source: str = 'world',
) -> list[Question]:
  """Distinct questions about a world.

  Args:
    world: what they are about.
    per_hop: how many of 1, 2, ... hops.
    seed: another seed asks other questions of the same world.
    data_source: evaluation reports each under '<data_source>_<hops>hop'.

  Returns:
    Questions in order of hops, golds first by name and then by alias.

  Raises:
    ValueError: the world has too few different chains of some length.
  """
  result = []
  for hops, count in enumerate(per_hop, start=1):
    rng = np.random.default_rng([world.seed, 2, seed, hops])
    met = set()
    source = facts.chains(world, hops, rng)
    for _ in range(50 * count):
      if len(met) == count:
        break
      chain = next(source, None)
      if chain is None:
        break
      if (chain.start, chain.relations) in met:
        continue
      met.add((chain.start, chain.relations))
      result.append(Question(
          uid=f'{data_source}-{world.seed}-{seed}-{hops}-{len(met)}',
          text=ask(chain, rng), answers=world.answers(chain.values[-1]),
          hops=hops, data_source=f'{data_source}_{hops}hop'))
    if len(met) < count:
      raise ValueError(
          f'per_hop[{hops - 1}] asks for {count} questions of {hops} hops, but '
          f'only {len(met)} different ones were found in this world. Ask for '
          'fewer, or raise its sizes.')
  return result
