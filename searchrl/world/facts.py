# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Generated worlds: entities, facts about them, and chains of facts.

A world is a set of fictional entities, such as persons and cities, with facts
about them. Every seed gives new facts, so that their answers can come only from
search, not from a model's memory. A world may also contain common knowledge: a
fixed small world, the same inside every world, that a model can memorise. In
each world some of these facts have changed, so that a model's memory of them is
outdated. A chain is a path of facts: the object of a fact is the subject of the
next.

In a hard world many entities have namesakes, and passages use other words than
queries (`hard`).
"""

import collections
from collections.abc import Collection, Iterator, Mapping, Set
import dataclasses
import functools
import itertools
from typing import Literal

import numpy as np

from searchrl.world import names

# Kind of the subject and kind of the object, by relation.
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
SMALL_SIZES = {'person': 36, 'city': 16, 'company': 14, 'river': 10, 'sea': 5,
               'mountain': 8, 'book': 18}
COMMON_SIZES = {'person': 36, 'city': 20, 'company': 16, 'river': 12, 'sea': 6,
                'mountain': 8, 'book': 16}  # 114 entities, 200 facts
Topic = Literal['fresh', 'famous', 'outdated']
_FRESH: tuple[Topic, ...] = ('fresh',)
Fact = tuple[str, str]  # subject, relation


@dataclasses.dataclass(frozen=True)
class World:
  """The entities of a world, and the facts about them."""

  seed: int
  entities: Mapping[str, tuple[str, ...]]  # names by kind
  facts: Mapping[Fact, str]  # object by (subject, relation)
  # Common knowledge before any change; {}: the world has none.
  memory: Mapping[Fact, str] = dataclasses.field(default_factory=dict)
  hard: bool = False  # entities have namesakes, and passages other words

  @functools.cached_property
  def kind_of(self) -> dict[str, str]:
    """Kind of each name. Names are unique in the world."""
    return {n: kind for kind, group in self.entities.items() for n in group}

  def answers(self, name: str) -> tuple[str, ...]:
    """Returns the texts that count as right if the answer is a given name.

    They are the name, and its aliases that no other name of its kind has.
    """
    kind = self.kind_of[name]
    return (name, *(alias for alias in names.aliases(kind, name)
                    if self._names_by_alias[kind][alias] == 1))

  @functools.cached_property
  def _names_by_alias(self) -> dict[str, collections.Counter[str]]:
    """Number of names that have an alias, by kind and alias."""
    return {kind: collections.Counter(
        alias for name in group for alias in {*names.aliases(kind, name)})
            for kind, group in self.entities.items()}


@dataclasses.dataclass(frozen=True)
class Chain:
  """A path of facts: start -relations[0]-> values[0] -relations[1]-> ..."""

  start: str
  relations: tuple[str, ...]
  values: tuple[str, ...]

  @property
  def facts(self) -> tuple[Fact, ...]:
    """Pair (subject, relation) of each step."""
    return tuple(zip((self.start, *self.values[:-1]), self.relations))


def make(seed: int, *, sizes: Mapping[str, int] | None = None,
         source: names.NameSource = 'known', common: bool = False,
         outdated: float = 0.15, hard: bool = False) -> World:
  """Draws a world.

  Args:
    seed: Seed of the world; equal arguments give equal worlds.
    sizes: Number of entities of each kind; default SIZES.
    source: Source of name parts, 'known', 'fresh' or 'unseen'; see `names`.
    common: Whether the world also has common knowledge. Other facts are not
      affected.
    outdated: Fraction of the common knowledge that has changed, in (0, 1).
    hard: Whether the world has namesakes, and passages with other words than
      queries. More names are then possible, such as some 500 cities for
      'known'.

  Returns:
    A World in which every relation of every subject has one object.

  Raises:
    ValueError: A kind is unknown, or has more entities than there are names.
  """
  unknown = set(sizes or ()) - set(SIZES)
  if unknown:
    raise ValueError(
        f'sizes may name {", ".join(SIZES)}, but names {sorted(unknown)}.')
  sizes = {**SIZES, **(sizes or {})}
  rng = np.random.default_rng([seed, len(source)])
  world = _drawn(seed, sizes, source, rng, hard)
  if not common:
    return world
  fixed = common_knowledge()
  return dataclasses.replace(
      world, memory=fixed.facts,
      entities={kind: world.entities[kind] + fixed.entities[kind]
                for kind in names.KINDS},
      facts={**world.facts, **_changed(fixed, outdated, seed)})


@functools.cache
def common_knowledge() -> World:
  """Returns the fixed world whose facts a model can memorise.

  Every world that is made with common knowledge contains it.
  """
  return _drawn(0, COMMON_SIZES, 'common', np.random.default_rng(20253))


@functools.cache
def held_out() -> Set[Fact]:
  """Returns the facts of common knowledge that training never asks about.

  They are three in ten of these facts, always the same.
  """
  keys = list(common_knowledge().facts)
  rng = np.random.default_rng(20254)
  return frozenset(keys[i] for i in rng.permutation(len(keys))[
      :round(0.3 * len(keys))])


def _drawn(seed: int, sizes: Mapping[str, int], source: names.NameSource,
           rng: np.random.Generator, hard: bool = False) -> World:
  entities = {}
  for kind in names.KINDS:
    candidates = names.names(rng, kind, source)
    if hard:
      candidates = names.with_namesakes(rng, kind, candidates)
    drawn = tuple(itertools.islice(candidates, sizes[kind]))
    if len(drawn) < sizes[kind]:
      raise ValueError(
          f'sizes[{kind!r}] is {sizes[kind]}, but the {source!r} source has '
          f'only {len(drawn)} names. Ask for fewer, or use source="fresh".')
    entities[kind] = drawn
  facts = {(subject, relation): str(rng.choice(entities[object_kind]))
           for relation, (subject_kind, object_kind) in RELATIONS.items()
           for subject in entities[subject_kind]}
  return World(seed=seed, entities=entities, facts=facts, hard=hard)


def _changed(fixed: World, share: float, seed: int) -> dict[Fact, str]:
  """Returns the facts of common knowledge after a random part is changed.

  Args:
    fixed: World of common knowledge.
    share: Fraction of the facts that get another object.
    seed: Seed of the random choices.
  """
  facts, rng = dict(fixed.facts), np.random.default_rng([seed, 20255])
  keys = list(facts)
  for i in rng.permutation(len(keys))[:round(share * len(keys))]:
    _, kind = RELATIONS[keys[i][1]]
    facts[keys[i]] = str(rng.choice(
        [name for name in fixed.entities[kind] if name != facts[keys[i]]]))
  return facts


def topic(world: World, chain: Chain) -> Topic | None:
  """Returns the topic of a chain: whether its answer can come from memory.

  Memory is what a model has memorised: common knowledge before any change.

  Returns:
    'fresh' if the chain does not begin in common knowledge, or the world has
    none: its answer is only in this world. 'famous' if no fact of the chain has
    changed, so that memory gives the right answer. 'outdated' if memory gives a
    wrong answer. None if a fact has changed, but memory gives the right answer.
  """
  if chain.start not in common_knowledge().kind_of or not world.memory:
    return 'fresh'
  if all(world.memory[fact] == world.facts[fact] for fact in chain.facts):
    return 'famous'
  return ('outdated' if remembered(world, chain)[-1] != chain.values[-1]
          else None)


def remembered(world: World, chain: Chain) -> tuple[str, ...]:
  """Returns the objects along a chain according to a model's memory.

  Memory is common knowledge before any change. The chain begins at an entity of
  common knowledge. Each further step begins at the object that is remembered
  for the step before.
  """
  values, here = [], chain.start
  for relation in chain.relations:
    here = world.memory[here, relation]
    values.append(here)
  return tuple(values)


def chains(world: World, hops: int, rng: np.random.Generator,
           topics: Collection[Topic] = _FRESH) -> Iterator[Chain]:
  """Yields random chains of `hops` facts in which no entity occurs twice.

  The iterator ends only if a thousand tries in a row find no chain.

  Args:
    world: World with the facts.
    hops: Number of facts of each chain.
    rng: Generator of the choices.
    topics: Topics of the chains; see `topic`.
  """
  relations_of: dict[str, list[str]] = {kind: [] for kind in names.KINDS}
  for relation, (subject_kind, _) in RELATIONS.items():
    relations_of[subject_kind].append(relation)
  kind_of = world.kind_of
  common = common_knowledge().kind_of if world.memory else {}
  starts = [name for name, kind in kind_of.items() if relations_of[kind] and (
      {*topics} - {'fresh'} if name in common else 'fresh' in topics)]
  pick = lambda group: group[rng.integers(len(group))]
  misses = 0
  while starts and misses < 1000:
    misses += 1
    path, relations = [pick(starts)], []
    while len(path) <= hops and relations_of[kind_of[path[-1]]]:
      relations.append(pick(relations_of[kind_of[path[-1]]]))
      path.append(world.facts[path[-1], relations[-1]])
    chain = Chain(path[0], tuple(relations), tuple(path[1:]))
    if (len(path) == hops + 1 == len({*path})
        and topic(world, chain) in topics):
      misses = 0
      yield chain
