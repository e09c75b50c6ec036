# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Names of fictional entities: unique, random, in disjoint splits.

A name has one or two parts (a first and a last name, or a stem and "Works").
Most parts are made-up words, which consist of syllables and an ending that fits
the kind. A few, such as "Works" and "River", are fixed. There are four sources
of made-up words:

  known    a fixed inventory, which an agent sees in training
  fresh    words drawn anew each time; they teach an agent to copy new words
  unseen   words that no other source can ever draw: for evaluation
  common   a second fixed inventory, used only by common knowledge

In a hard world, a namesake is an entity whose name is another entity's name
with an addition ("New Korvik"). One entity's words therefore occur in the name
of another.

A word's CRC-32 decides whether it is unseen, so the split needs no list.
"""

from collections.abc import Collection, Iterator, Mapping
import itertools
from typing import Literal
import zlib

import numpy as np

NameSource = Literal['known', 'fresh', 'unseen', 'common']
KINDS = ('person', 'city', 'company', 'river', 'sea', 'mountain', 'book')

ONSETS = 'b br d dr f fl g gr h j k kr l m n p pl r s st t tr v w z'.split()
VOWELS = tuple('aeiou')
CODAS = ('', 'l', 'm', 'n', 'r', 's', 'ld', 'rn')
ENDINGS = {  # a part's last syllable shows the kind of its entity
    'first': 'a ia on en el is o ina'.split(),
    'last': 'sen mann ov ley wick dez aki son'.split(),
    'city': 'burg ton vik holm ford grad stadt polis'.split(),
    'firm': 'co tex ix dyne tron ara'.split(),
    'river': 'ava er ena une essa'.split(),
    'sea': 'ian ic une atic'.split(),
    'mountain': 'horn gor kul fell'.split(),
    'title': 'light rise fall song'.split(),
}
_INVENTORY_SIZE = {'first': 60, 'last': 80, 'city': 90, 'firm': 60,
                   'river': 50, 'sea': 24, 'mountain': 40, 'title': 60}
_COMMON_SIZE = {'first': 18, 'last': 20, 'city': 20, 'firm': 8, 'river': 12,
                'sea': 6, 'mountain': 8, 'title': 8}
_TRADES = ('Works', 'Group', 'Lines', 'Foods', 'Motors', 'Press')
_TITLE_NOUNS = ('Garden', 'Winter', 'Letter', 'Harbour', 'Mirror', 'Orchard',
                'Lantern', 'Bridge')
_FORMS = {  # forms of namesakes by kind; {} is the stem
    'person': ('{} the Younger', '{} the Elder', 'Captain {}', 'Doctor {}'),
    'city': ('New {}', 'Old {}', 'Upper {}', '{} Falls', '{} Bay'),
    'company': ('New {}', 'Old {}', 'Royal {}', '{} North', '{} South'),
    'river': ('Upper {}', 'Lower {}', 'Little {}', 'North {}', 'South {}'),
    'sea': ('Upper {}', 'Lower {}', 'Little {}', 'North {}', 'South {}'),
    'mountain': ('Little {}', 'Old {}', '{} East', '{} North', '{} South'),
    'book': ('{} Again', '{} Retold', '{} Abridged', '{} Revisited'),
}


def is_unseen(word: str) -> bool:
  """Returns whether a word is kept out of training; one word in four is."""
  return zlib.crc32(word.lower().encode()) % 4 == 0


def _word(rng: np.random.Generator, part: str) -> str:
  stem = rng.choice(ONSETS) + rng.choice(VOWELS)
  if rng.random() < 0.2:  # one word in five has one more syllable
    stem += rng.choice(ONSETS) + rng.choice(VOWELS)
  stem += rng.choice(CODAS)
  ending = rng.choice(ENDINGS[part])
  if stem[-1] in VOWELS and ending[0] in VOWELS:
    stem += 'n'
  return str(stem + ending).capitalize()


def _words(rng: np.random.Generator, part: str, unseen: bool) -> Iterator[str]:
  """Yields distinct words for a part of a name, a key of `ENDINGS`.

  If `unseen`, all of them are kept out of training, and otherwise none of them
  (`is_unseen`). The iterator ends when 1,000 draws in a row give no new word.
  """
  seen, misses = set(), 0
  while misses < 1000:
    word = _word(rng, part)
    misses += 1
    if word not in seen and is_unseen(word) == unseen:
      seen.add(word)
      misses = 0
      yield word


def _inventory(sizes: Mapping[str, int], seed: int,
               taken: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
  """Returns new words for each part of names, as many as `sizes` says.

  None of them is in `taken`.
  """
  inventory = {}
  for index, (part, size) in enumerate(sizes.items()):
    words = _words(np.random.default_rng([seed, index]), part, unseen=False)
    new = (word for word in words if word not in taken.get(part, ()))
    inventory[part] = list(itertools.islice(new, size))
  return inventory


INVENTORY = _inventory(_INVENTORY_SIZE, 20251, {})  # known words by part
COMMON = _inventory(_COMMON_SIZE, 20252, INVENTORY)  # common words by part


def names(rng: np.random.Generator, kind: str,
          source: NameSource = 'known') -> Iterator[str]:
  """Yields distinct names of one kind, until the source has no more.

  Args:
    rng: Generator, which is consumed as names are drawn.
    kind: One of KINDS.
    source: Source of the parts; see this module's docstring.

  Yields:
    Names such as 'Mirela Torsen', 'Korvik', 'Saltex Works', 'Elbava River'.
  """
  def part(name: str) -> Iterator[str]:
    if source in ('known', 'common'):
      words = (INVENTORY if source == 'known' else COMMON)[name]
      return iter([words[i] for i in rng.permutation(len(words))])
    drawn = _words(rng, name, unseen=source == 'unseen')
    return (word for word in drawn if word not in COMMON[name])

  if kind == 'person':
    yield from _pairs(rng, part('first'), part('last'))
  elif kind == 'company':
    yield from _pairs(rng, part('firm'), iter(_TRADES))
  elif kind == 'book':
    for title in _pairs(rng, part('title'), iter(_TITLE_NOUNS)):
      yield f'The {title}'
  else:
    form = {'city': '{}', 'river': '{} River', 'sea': '{} Sea',
            'mountain': 'Mount {}'}[kind]
    for word in part(kind):
      yield form.format(word)


def with_namesakes(rng: np.random.Generator, kind: str, stems: Iterator[str]
                  ) -> Iterator[str]:
  """Yields names, each followed by up to two of its namesakes.

  A namesake is a name with an addition, such as "New Korvik" for "Korvik". When
  the stems are used up, their other namesakes follow.

  Args:
    rng: Generator, which is consumed as names are drawn.
    kind: One of KINDS.
    stems: Distinct names of this kind.
  """
  rest = []
  for stem in stems:
    count = int(rng.integers(0, 3))
    forms = [form.format(stem) for form in rng.permutation(_FORMS[kind])]
    yield from (stem, *forms[:count])
    rest += forms[count:]
  yield from rest


def stem(kind: str, name: str) -> str:
  """Returns a name without a namesake's addition: 'New Korvik' -> 'Korvik'.

  A name without an addition is returned as it is.
  """
  for form in _FORMS[kind]:
    before, after = form.split('{}')
    if name.startswith(before) and name.endswith(after):
      return name[len(before):len(name) - len(after)]
  return name


def _pairs(rng: np.random.Generator, left: Iterator[str],
           right: Iterator[str]) -> Iterator[str]:
  """Yields distinct pairs 'LEFT RIGHT' of words, in random order.

  At most the first 60 words of `left` and the first 80 of `right` are used.
  """
  lefts = [word for word, _ in zip(left, range(60))]
  rights = [word for word, _ in zip(right, range(80))]
  for cell in rng.permutation(len(lefts) * len(rights)):
    row, column = divmod(int(cell), len(rights))
    yield f'{lefts[row]} {rights[column]}'


def aliases(kind: str, name: str) -> tuple[str, ...]:
  """Returns other forms of an entity's name that count as a right answer.

  For example, 'Elbava River' has the alias 'Elbava'. The aliases depend only on
  the entity's kind and name. Entities of a kind whose names have the same stem
  therefore have the same aliases.
  """
  name = stem(kind, name)
  first, _, rest = name.partition(' ')
  if kind == 'mountain':
    return (rest,)
  if kind == 'sea':
    return (f'Sea of {first}',)
  if kind in ('river', 'company'):
    return (first,)
  return ()
