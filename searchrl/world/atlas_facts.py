# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The atlas: entities of the real world, and facts about them.

The atlas is a data set of entities, such as cities and countries, and facts
about them. A fact has a subject, a relation and an answer. If the answer is an
entity, too, facts can be chained. `atlas_sources` reads the facts from data
packages.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import functools
import hashlib
import re
import unicodedata

_NUMBER_UNITS = {'elevation': (' feet', ' ft'),
                 'area': (' square kilometres', ' km2'),
                 'inhabitants': (' inhabitants',)}
# Letters of Western and Central European languages, which every policy writes.
_PLAIN = re.compile(r"[A-Za-z\u00c0-\u017f0-9 .,'’()/&-]+")


@dataclasses.dataclass(frozen=True)
class Entity:
  """A thing in the real world that passages describe, such as a city."""

  key: str  # unique, as in city-2988507
  kind: str  # airport, city, country, county, currency, language, ...
  name: str  # as an answer: Springfield
  title: str  # as a title, unique in its kind: Springfield (Illinois)
  phrase: str  # in a sentence: the city of Springfield in Illinois
  words: str  # in a query: Springfield Illinois
  is_famous: bool  # by population, see `atlas_sources`
  other_phrases: tuple[str, ...] = ()  # other ways to ask about it
  other_words: tuple[str, ...] = ()  # in a query, for each of other_phrases


@dataclasses.dataclass(frozen=True)
class Fact:
  """A relation of an entity, with its answer."""

  subject: str  # key of the entity
  relation: str
  answers: tuple[str, ...]  # the first is the one that passages give
  target: str = ''  # key of the entity that is the answer; '': none
  is_asked: bool = True  # False: no question begins with this fact


@dataclasses.dataclass(frozen=True)
class Atlas:
  """All entities and facts; at most one fact per subject and relation."""

  entities: Mapping[str, Entity]
  facts: tuple[Fact, ...]

  @functools.cached_property
  def facts_of(self) -> dict[str, dict[str, Fact]]:
    """Facts of each subject, by relation."""
    result: dict[str, dict[str, Fact]] = {key: {} for key in self.entities}
    for fact in self.facts:
      result[fact.subject][fact.relation] = fact
    return result


@functools.lru_cache(maxsize=2**17)
def folded(text: str) -> str:
  """Returns a text in lower case, without accents and outer white space."""
  return without_accents(text).casefold().strip()


def without_accents(text: str) -> str:
  """Returns a text without accents, in its original case."""
  letters = unicodedata.normalize('NFKD', text)
  return ''.join(c for c in letters if not unicodedata.combining(c))


def is_plain(name: str) -> bool:
  """Returns whether a name has only letters that are common in Europe."""
  return bool(_PLAIN.fullmatch(name))


def spellings(names: Iterable[str]) -> tuple[str, ...]:
  """Returns the names, each also without its accents; no text occurs twice."""
  return tuple(dict.fromkeys(
      text for name in names if name
      for text in (name, without_accents(name))))


def number(relation: str, value: float) -> tuple[str, ...]:
  """Returns the texts that count as a number: '1,234' and '1234' for 1233.6.

  If the relation has units, each text is also returned with each unit.
  """
  value = round(value)
  plain = dict.fromkeys((f'{value:,}', str(value)))
  return (*plain, *(text + unit for text in plain
                    for unit in _NUMBER_UNITS.get(relation, ())))


def sample(atlas: Atlas, per_kind: int, seed: int = 0) -> Atlas:
  """Returns a small atlas: entities drawn at random, with all their facts.

  If the answer of a fact is an entity, this entity and its facts are added,
  too, and so on.

  Args:
    atlas: The full atlas.
    per_kind: Number of entities of each kind that are drawn.
    seed: Seed of the draw.
  """
  waiting: list[str] = []
  count: collections.Counter[str] = collections.Counter()
  for key in sorted(atlas.entities, key=lambda key: hashlib.sha256(
      f'{seed}/{key}'.encode()).digest()):
    kind = atlas.entities[key].kind
    count[kind] += 1
    if count[kind] <= per_kind:
      waiting.append(key)
  kept: set[str] = set()
  while waiting:
    key = waiting.pop()
    if key not in kept:
      kept.add(key)
      waiting += [fact.target for fact in atlas.facts_of[key].values()
                  if fact.target]
  return Atlas({key: entity for key, entity in atlas.entities.items()
                if key in kept},
               tuple(fact for fact in atlas.facts if fact.subject in kept))


def similar(atlas: Atlas) -> dict[str, str]:
  """Returns for each entity's key the key of a similar entity of its kind.

  It is the next entity of its kind by title, without case and accents. After
  the last comes the first. An entity alone in its kind is similar to itself.
  """
  result = {}
  by_kind: dict[str, list[Entity]] = {}
  for entity in atlas.entities.values():
    by_kind.setdefault(entity.kind, []).append(entity)
  for entities in by_kind.values():
    entities.sort(key=lambda entity: (folded(entity.title), entity.key))
    for one, other in zip(entities, entities[1:] + entities[:1]):
      result[one.key] = other.key
  return result
