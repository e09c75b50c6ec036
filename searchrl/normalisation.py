# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The form of a text in which answers and gold answers are compared."""

import re
import string
import unicodedata

# Soft hyphens, joiners, marks of direction and byte-order marks show nothing.
_INVISIBLE = '\u00ad\u200b-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff'
_INVISIBLES = re.compile(f'[{_INVISIBLE}]')
_MANY_MARKS = re.compile(r'([^\w\s]{31,})')  # sorting them is quadratic
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')


def normalise(text: str) -> str:
  """Returns the text in which answers and gold answers are compared.

  It is in lower case, without ASCII punctuation and articles, and words are
  separated by single spaces. An accent may be a character of its own or not.

  Source: SQuAD (Rajpurkar et al. 2016), as all five systems use it.
  """
  text = text.lower().translate(_PUNCTUATION)
  if not text.isascii():
    pieces = _MANY_MARKS.split(_INVISIBLES.sub('', text))
    text = ''.join(piece if n % 2 else unicodedata.normalize('NFC', piece)
                   for n, piece in enumerate(pieces))
  return ' '.join(_ARTICLES.sub(' ', text).split())
