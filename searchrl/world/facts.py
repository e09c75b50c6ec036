# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Generated worlds: entities, facts about them, and chains of facts.

Every seed gives new facts, so their answers can only come from search, never
from what a model has memorised. But a world may also have common knowledge: a
fixed small world, the same inside every world, that a model can memorise. Some
of its facts have changed in each world since: memory is outdated there.

In a hard world many entities have namesakes, and passages are worded apart from
queries (`hard`).
"""

from collections.abc import Collection, Mapping, Set
import dataclasses
import functools
import itertools
from typing import Literal

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
COMMON_SIZES = {'person': 36, 'city': 20, 'company': 16, 'river': 12, 'sea': 6,
                'mountain': 8, 'book': 16}  # 114 entities, 200 facts
Topic = Literal['fresh', 'famous', 'outdated']
Fact = tuple[str, str]  # subject, relation


@dataclasses.dataclass(frozen=True)
class World:
  """The entities of a world, and the facts about them."""

  seed: int
  entities: Mapping[str, tuple[str, ...]]  # kind -> names
  facts: Mapping[Fact, str]  # (subject, relation) -> object
  # Common knowledge, as it once was; {}: the world has none.
  memory: Mapping[Fact, str] = dataclasses.field(default_factory=dict)
  hard: bool = False  # names have namesakes, passages a wording of their own

  @functools.cached_property
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

  @property
  def facts(self) -> tuple[Fact, ...]:
    """(subject, relation) of each step."""
    return tuple(zip((self.start, *self.values[:-1]), self.relations))


def make(seed: int, *, sizes: Mapping[str, int] | None = None,
         source: names.NameSource = 'known', common: bool = False,
         outdated: float = 0.15, hard: bool = False) -> World:
  """Draws a world.

  Args:
    seed: equal arguments give equal worlds.
    sizes: entities of each kind; default SIZES.
    source: 'known', 'fresh' or 'unseen' name parts; see `names`.
    common: it has common knowledge, too. All else is as without.
    outdated: the share of that knowledge that has changed, in (0, 1).
    hard: it has namesakes, and passages that are worded apart from queries. It
      may be larger, too: 'known' parts make some 500 cities then.

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
  """The world that every world with common knowledge holds."""
  return _drawn(0, COMMON_SIZES, 'common', np.random.default_rng(20253))


@functools.cache
def held_out() -> Set[Fact]:
  """The common facts that no question of training is about: three in ten."""
  keys = list(common_knowledge().facts)
  rng = np.random.default_rng(20254)
  return frozenset(keys[i] for i in rng.permutation(len(keys))[
      :round(0.3 * len(keys))])


def _drawn(seed: int, sizes: Mapping[str, int], source: names.NameSource,
           rng: np.random.Generator, hard: bool = False) -> World:
  entities = {}
  for kind in names.KINDS:
    found = names.names(rng, kind, source)
    if hard:
      found = names.with_namesakes(rng, kind, found)
    drawn = tuple(itertools.islice(found, sizes[kind]))
    if len(drawn) < sizes[kind]:
      raise ValueError(
          f'sizes[{kind!r}] is {sizes[kind]}, but the {source!r} source has '
          f'only {len(drawn)} names. Ask for fewer, or use source="fresh".')
    entities[kind] = drawn
  facts = {}
  for relation, (subject_kind, object_kind) in RELATIONS.items():
    for subject in entities[subject_kind]:
      facts[subject, relation] = str(rng.choice(entities[object_kind]))
  return World(seed=seed, entities=entities, facts=facts, hard=hard)


def _changed(fixed: World, share: float, seed: int) -> dict[Fact, str]:
  """Common knowledge as it is in a world: a share of its facts is new."""
  facts, rng = dict(fixed.facts), np.random.default_rng([seed, 20255])
  keys = list(facts)
  for i in rng.permutation(len(keys))[:round(share * len(keys))]:
    _, kind = RELATIONS[keys[i][1]]
    facts[keys[i]] = str(rng.choice(
        [name for name in fixed.entities[kind] if name != facts[keys[i]]]))
  return facts


def topic(world: World, chain: Chain) -> Topic | None:
  """Where a chain's answer can be known from.

  Returns:
    'fresh': from this world alone; 'famous': from memory, too, for no fact on
    the way has changed; 'outdated': memory gives another answer; None: a fact
    on the way has changed, and yet memory gives the same answer.
  """
  if chain.start not in common_knowledge().kind_of or not world.memory:
    return 'fresh'
  if all(world.memory[fact] == world.facts[fact] for fact in chain.facts):
    return 'famous'
  return ('outdated' if remembered(world, chain)[-1] != chain.values[-1]
          else None)


def remembered(world: World, chain: Chain) -> tuple[str, ...]:
  """What memory says at each step of a chain of common knowledge."""
  values, here = [], chain.start
  for relation in chain.relations:
    here = world.memory[here, relation]
    values.append(here)
  return tuple(values)


def chains(world: World, hops: int, rng: np.random.Generator,
           topics: Collection[Topic] = ('fresh',)):
  """Yields random chains of `hops` facts that never return to an entity.

  Endless, unless a thousand tries in a row find none.

  Args:
    world: has the facts.
    hops: of each chain.
    rng: of the choices.
    topics: of the chains; see `topic`.
  """
  relations_of = {}
  for relation, (subject_kind, _) in RELATIONS.items():
    relations_of.setdefault(subject_kind, []).append(relation)
  kind_of = world.kind_of
  common = common_knowledge().kind_of if world.memory else {}
  wanted = {False: 'fresh' in topics, True: bool({*topics} - {'fresh'})}
  starts = [name for name in kind_of if kind_of[name] in relations_of
            and wanted[name in common]]
  pick = lambda group: group[rng.integers(len(group))]
  misses = 0
  while starts and misses < 1000:
    misses += 1
    start = here = pick(starts)
    relations, values = [], []
    while len(values) < hops and kind_of[here] in relations_of:
      relations.append(pick(relations_of[kind_of[here]]))
      here = world.facts[here, relations[-1]]
      values.append(here)
    chain = Chain(start, tuple(relations), tuple(values))
    if (len(values) == hops and len({start, *values}) == hops + 1
        and topic(world, chain) in topics):
      misses = 0
      yield chain
