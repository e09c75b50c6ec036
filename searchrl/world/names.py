# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Names of fictional entities: unique, random, in disjoint splits.

Every name is composed of parts (a first and a last name, a stem and "Works"),
and every part is a made-up word: syllables and an ending that fits the kind.
There are three sources of words:

  known    a fixed inventory, which an agent sees in training
  fresh    drawn anew each time; teaches to copy words never seen before
  unseen   words that neither of the two can ever draw: for evaluation

A word's CRC-32 decides whether it is unseen, so the split needs no list.
"""

from collections.abc import Iterator
from typing import Literal
import zlib

import numpy as np

NameSource = Literal['known', 'fresh', 'unseen']
KINDS = ('person', 'city', 'company', 'river', 'sea', 'mountain', 'book')

_ONSETS = 'b br d dr f fl g gr h j k kr l m n p pl r s st t tr v w z'.split()
_VOWELS = tuple('aeiou')
_CODAS = ('', 'l', 'm', 'n', 'r', 's', 'ld', 'rn')
_ENDINGS = {  # a part's last syllable tells what it names
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
_TRADES = ('Works', 'Group', 'Lines', 'Foods', 'Motors', 'Press')
_TITLE_NOUNS = ('Garden', 'Winter', 'Letter', 'Harbour', 'Mirror', 'Orchard',
                'Lantern', 'Bridge')


def is_unseen(word: str) -> bool:
  """Whether a word is kept out of training; a quarter of all words are."""
  return zlib.crc32(word.lower().encode()) % 4 == 0


def _word(rng: np.random.Generator, part: str) -> str:
  stem = rng.choice(_ONSETS) + rng.choice(_VOWELS)
  if rng.random() < 0.2:  # one word in five has one more syllable
    stem += rng.choice(_ONSETS) + rng.choice(_VOWELS)
  stem += rng.choice(_CODAS)
  ending = rng.choice(_ENDINGS[part])
  if stem[-1] in _VOWELS and ending[0] in _VOWELS:
    stem += 'n'
  return str(stem + ending).capitalize()


def _words(rng: np.random.Generator, part: str, unseen: bool) -> Iterator[str]:
  """Yields distinct words of one split, until new ones are very rare."""
  seen, misses = set(), 0
  while misses < 1000:
    word = _word(rng, part)
    misses += 1
    if word not in seen and is_unseen(word) == unseen:
      seen.add(word)
      misses = 0
      yield word


def _inventory() -> dict[str, list[str]]:
  inventory = {}
  for index, (part, size) in enumerate(_INVENTORY_SIZE.items()):
    words = _words(np.random.default_rng([20251, index]), part, unseen=False)
    inventory[part] = [next(words) for _ in range(size)]
  return inventory


INVENTORY = _inventory()  # part -> the known words


def names(rng: np.random.Generator, kind: str,
          source: NameSource = 'known') -> Iterator[str]:
  """Yields distinct names of one kind, until the source has no more.

  Args:
    rng: consumed as names are drawn.
    kind: one of KINDS.
    source: where the parts come from; see the top of this file.

  Yields:
    Names such as 'Mirela Torsen', 'Korvik', 'Saltex Works', 'Elbava River'.
  """
  def part(name: str) -> Iterator[str]:
    if source != 'known':
      return _words(rng, name, unseen=source == 'unseen')
    words = INVENTORY[name]
    return iter([words[i] for i in rng.permutation(len(words))])

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


def _pairs(rng: np.random.Generator, left: Iterator[str],
           right: Iterator[str]) -> Iterator[str]:
  """Yields distinct pairs in random order, of at most 60 lefts, 80 rights."""
  lefts = [word for word, _ in zip(left, range(60))]
  rights = [word for word, _ in zip(right, range(80))]
  for cell in rng.permutation(len(lefts) * len(rights)):
    row, column = divmod(int(cell), len(rights))
    yield f'{lefts[row]} {rights[column]}'


def aliases(kind: str, name: str) -> tuple[str, ...]:
  """Other names that count as right; may be empty."""
  first, _, rest = name.partition(' ')
  if kind == 'mountain':
    return (rest,)
  if kind == 'sea':
    return (f'Sea of {first}',)
  if kind in ('river', 'company'):
    return (first,)
  return ()
