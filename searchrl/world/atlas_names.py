# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the data packages lack about names: corrections, articles, old names."""

import re
from typing import Any

CORRECTIONS: dict[str, dict[str, Any]] = {  # where the rows are out of date
    'BG': {'currencycode': 'EUR', 'currencyname': 'Euro'},  # since 2026
    'KZ': {'capital': 'Astana'}}  # since 2022
OTHER_NAMES = {  # of countries, besides those of the packages
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
    'Stalingrad', 'Izmir': 'Smyrna', 'Jakarta': 'Batavia', 'Tokyo': 'Edo',
    'Kinshasa': 'Leopoldville', 'Harare': 'Salisbury', 'Chongqing': 'Chungking',
    'Nanjing': 'Nanking', 'Gdansk': 'Danzig', 'Wroclaw': 'Breslau',
    'Bratislava': 'Pressburg', 'Oslo': 'Christiania', 'Tallinn': 'Reval',
    'Kyiv': 'Kiev', 'Lviv': 'Lemberg', 'Odesa': 'Odessa', 'Kharkiv': 'Kharkov',
    'Chittagong': 'Chattogram', 'Thessaloniki': 'Salonica', 'Ankara': 'Angora',
    'Tbilisi': 'Tiflis', 'Cologne': 'Koeln', 'Munich': 'Muenchen',
    'Vienna': 'Wien', 'Prague': 'Praha', 'Florence': 'Firenze'}
