# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Passages of the atlas, in plain English written around the facts.

Each passage is about one entity and contains a few of its facts. A country has
three passages. The wording of each sentence is random and depends on the seed.
"""

from collections.abc import Iterator, Mapping
import random

from searchrl.world.atlas_facts import Atlas, Entity, Fact
from searchrl.trajectory import Passage

# The relations of each passage, in order, by kind and the end of its title.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    'city': {'': ('country', 'state', 'old_name', 'inhabitants', 'time_zone')},
    'airport': {'': ('city', 'country', 'iata', 'icao', 'elevation')},
    'country': {
        '': ('continent', 'capital'),
        'currency and codes': ('currency', 'calling_code', 'domain'),
        'area and population': ('area', 'population', 'language', 'languages',
                                'neighbours')},
    'state': {'': ('nation', 'abbreviation', 'fips')},
    'county': {'': ('state', 'fips')},
    'region': {'': ('country', 'code')},
    'currency': {'': ('user', 'code', 'numeric')},
    'language': {'': ('code', 'long_code')}}
# {x}: the entity's phrase or "it"; {v}: the answer; {t}: the target's phrase.
_FIRST = {
    ('city', 'country'): ('{x} is a city in {t}.', '{x} is a city of {t}.',
                          '{x} is a city and lies in {t}.'),
    ('airport', 'city'): ('{x} serves {p}.',
                          '{x} is an airport that serves {p}.',
                          '{x} is an airport for {p}.'),
    ('airport', 'country'): ('{x} is an airport in {t}.',
                             '{x} is an airport of {t}.'),
    ('country', 'continent'): ('{x} is a country on the continent {v}.',
                               '{x} is a country; its continent is {v}.'),
    ('country', 'currency'): ('The currency of {x} is the {v}.',
                              'The {v} is the currency of {x}.'),
    ('country', 'area'): ('{x} has an area of {v} square kilometres.',
                          'The area of {x} is {v} square kilometres.'),
    ('state', 'nation'): ('{x} is a state of {t}.',),
    ('county', 'state'): ('{x} is in the state of {v}.',
                          '{x} belongs to the state of {v}.'),
    ('region', 'country'): ('{x} is {k} of {t}.', '{x} is {k} in {t}.'),
    ('currency', 'user'): ('{x} is the currency that is used in {t}.',
                           '{x} is the currency of {t}.'),
    ('currency', ''): ('{x} is a currency of several countries.',),
    ('language', ''): ('{x} is a language.',)}
_NEXT = {
    'state': ('Its US state is {v}.', 'It is in the US state of {v}.'),
    'old_name': ('Another or older name is {v}.', 'It also has or had the name '
                 '{v}.'),
    'inhabitants': ('It has {v} inhabitants.', 'Inhabitants: {v}.',
                    'The number of its inhabitants is {v}.'),
    'population': ('It has a population of {v}.', 'Its population is {v}.',
                   'Population: {v}.'),
    'time_zone': ('Its time zone is {v}.', 'The time zone is {v}.'),
    'iata': ('Its IATA code is {v}.', 'The IATA code is {v}.'),
    'icao': ('Its ICAO code is {v}.', 'The ICAO code is {v}.'),
    'elevation': ('Its elevation is {v} feet.', 'It has an elevation of {v} '
                  'feet.', 'The elevation is {v} feet above the sea.'),
    'capital': ('Its capital is {v}.', 'The capital is {v}.',
                '{v} is its capital.'),
    'calling_code': ('Its telephone calling code is {v}.',
                     'The calling code for telephones is {v}.'),
    'domain': ('Its internet domain is {v}.', 'The internet domain is {v}.'),
    'neighbours': ('Its neighbours include {v}.',
                   'Among its neighbours are {v}.'),
    'language': ('Its language is {v}.', 'The language is {v}.'),
    'languages': ('Its languages include {v}.',
                  'Among its languages are {v}.'),
    'abbreviation': ('Its postal abbreviation is {v}.',
                     'The postal abbreviation is {v}.'),
    'fips': ('Its FIPS code is {v}.', 'The FIPS code is {v}.'),
    'code': ('Its ISO code is {v}.', 'The ISO code is {v}.'),
    'numeric': ('Its numeric code is {v}.', 'The numeric code is {v}.'),
    'long_code': ('Its three-letter code is {v}.',
                  'The three-letter code is {v}.')}


def passages(atlas: Atlas, seed: int = 0) -> list[Passage]:
  """Writes the passages of an atlas: one per entity, up to three per country.

  The seed determines the wording.
  """
  return [passage for entity in atlas.entities.values()
          for passage in _about(atlas, entity, seed)]


def places(atlas: Atlas) -> dict[tuple[str, str], str]:
  """Returns for each fact the id of the passage that states it.

  The keys are (key of the subject, relation). Facts that no passage states are
  left out.
  """
  result = {}
  for fact in atlas.facts:
    kind = atlas.entities[fact.subject].kind
    section = _section_of(kind, fact.relation)
    if section is not None:
      result[fact.subject, fact.relation] = passage_id(fact.subject, section)
    elif fact.relation == 'capital_of':  # stated by the country's passage
      result[fact.subject, fact.relation] = passage_id(fact.target, '')
  return result


def passage_id(key: str, section: str) -> str:
  """Returns the id of the passage about an entity.

  Args:
    key: Key of the entity.
    section: Title of a part of the entity's facts; '' for the main part.
  """
  return f'{key}-{section.split()[0]}' if section else key


def _section_of(kind: str, relation: str) -> str | None:
  return next((section for section, relations in SECTIONS[kind].items()
               if relation in relations), None)


def _about(atlas: Atlas, entity: Entity, seed: int) -> Iterator[Passage]:
  """Yields the passages of an entity, one for each section with facts."""
  facts = atlas.facts_of[entity.key]
  for section, relations in SECTIONS[entity.kind].items():
    stated = [facts[name] for name in relations if name in facts]
    identity = passage_id(entity.key, section)
    if stated:
      draw = random.Random(f'{seed}/{identity}')
      yield Passage(
          identity, f'{entity.title}: {section}' if section else entity.title,
          _text(atlas, entity, facts, stated, draw))


def _text(atlas: Atlas, entity: Entity, facts: Mapping[str, Fact],
          stated: list[Fact], draw: random.Random) -> str:
  """Returns the text of a passage that states the facts in `stated`."""
  sentences = []
  opening = _FIRST.get((entity.kind, ''))
  if opening and (entity.kind, stated[0].relation) not in _FIRST:
    sentences.append(draw.choice(opening).format(x=entity.name))
  for fact in stated:
    target = atlas.entities.get(fact.target)
    forms = _NEXT.get(fact.relation, ())
    if fact is stated[0] and (entity.kind, fact.relation) in _FIRST:
      forms = _FIRST[entity.kind, fact.relation]
    sentences.append(draw.choice(forms).format(
        x=_subject(entity), v=fact.answers[0], t=target.phrase if target else '',
        p=_place(target) if target else '',
        k=_with_article(facts['kind'].answers[0]) if 'kind' in facts else ''))
  text = ' '.join(sentences)
  return text[0].upper() + text[1:]


def _subject(entity: Entity) -> str:
  return entity.phrase if entity.kind == 'country' else entity.name


def _place(city: Entity) -> str:
  """Returns a city's name, with its region or country if the name is shared."""
  return city.phrase.removeprefix('the city of ')


def _with_article(noun: str) -> str:
  return f'{"an" if noun[0] in "aeio" else "a"} {noun}'
