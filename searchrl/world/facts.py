# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Generated worlds: entities, facts about them, and chains of facts.

Every seed gives new facts, so an answer can only come from search, never from
what a model has memorised.
"""

from collections.abc import Mapping
import dataclasses

import numpy as np

from searchrl.world import names

# relation -> (kind of its subject, kind of its object)
RELATIONS = {
    'birthplace': ('person', 'city'),
    'employer': ('person', 'company'),
    'founder': ('company', 'person'),
    'headquarters': ('company', 'city'),
    'river': ('city', 'river'),
    'mayor': ('city', 'person'),
    'sea': ('river', 'sea'),
    'source': ('river', 'mountain'),
    'author': ('book', 'person'),
    'publisher': ('book', 'company'),
}
SIZES = {'person': 160, 'city': 60, 'company': 60, 'river': 36, 'sea': 14,
         'mountain': 30, 'book': 90}


@dataclasses.dataclass(frozen=True)
class World:
  """The entities of a world, and the facts about them."""

  seed: int
  entities: Mapping[str, tuple[str, ...]]  # kind -> names
  facts: Mapping[tuple[str, str], str]  # (subject, relation) -> object

  @property
  def kind_of(self) -> dict[str, str]:
    """name -> kind; names are unique over the whole world."""
    return {n: kind for kind, group in self.entities.items() for n in group}

  def answers(self, name: str) -> tuple[str, ...]:
    """The right answers: the name, and the aliases that it alone has."""
    kind = self.kind_of[name]
    others = {alias for other in self.entities[kind] if other != name
              for alias in names.aliases(kind, other)}
    return (name, *(a for a in names.aliases(kind, name) if a not in others))


@dataclasses.dataclass(frozen=True)
class Chain:
  """A path of facts: start -relations[0]-> values[0] -relations[1]-> ..."""

  start: str
  relations: tuple[str, ...]
  values: tuple[str, ...]


def make(seed: int, *, sizes: Mapping[str, int] | None = None,
         source: names.NameSource = 'known') -> World:
  """Draws a world.

  Args:
    seed: equal seeds, sizes and sources give equal worlds.
    sizes: entities of each kind; default SIZES.
    source: 'known', 'fresh' or 'unseen' name parts; see `names`.

  Returns:
    A World in which every relation of every subject has one object.

  Raises:
    ValueError: a kind is unknown, or has more entities than there are names.
  """
  unknown = set(sizes or ()) - set(SIZES)
  if unknown:
    raise ValueError(
        f'sizes may name {", ".join(SIZES)}, but names {sorted(unknown)}.')
  sizes = {**SIZES, **(sizes or {})}
  rng = np.random.default_rng([seed, len(source)])
  entities = {}
  for kind in names.KINDS:
    drawn = tuple(name for name, _ in
                  zip(names.names(rng, kind, source), range(sizes[kind])))
    if len(drawn) < sizes[kind]:
      raise ValueError(
          f'sizes[{kind!r}] is {sizes[kind]}, but the {source!r} source has '
          f'only {len(drawn)} names. Ask for fewer, or use source="fresh".')
    entities[kind] = drawn
  facts = {}
  for relation, (subject_kind, object_kind) in RELATIONS.items():
    for subject in entities[subject_kind]:
      facts[subject, relation] = str(rng.choice(entities[object_kind]))
  return World(seed=seed, entities=entities, facts=facts)


def chains(world: World, hops: int, rng: np.random.Generator):
  """Yields random chains of `hops` facts that never return to an entity.

  Endless, unless a thousand tries in a row find none.
  """
  relations_of = {}
  for relation, (subject_kind, _) in RELATIONS.items():
    relations_of.setdefault(subject_kind, []).append(relation)
  kind_of = world.kind_of
  starts = [name for name in kind_of if kind_of[name] in relations_of]
  misses = 0
  while misses < 1000:
    misses += 1
    start = here = str(rng.choice(starts))
    relations, values = [], []
    while len(values) < hops and kind_of[here] in relations_of:
      relations.append(str(rng.choice(relations_of[kind_of[here]])))
      here = world.facts[here, relations[-1]]
      values.append(here)
    if len(values) == hops and len({start, *values}) == hops + 1:
      misses = 0
      yield Chain(start, tuple(relations), tuple(values))
