# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a conversation as texts, and the form in which answers are compared.
"""

import re
import string
from typing import Any, NamedTuple
import unicodedata

# Soft hyphens, joiners, marks of direction and byte-order marks show nothing.
_INVISIBLE = '\u00ad\u200b-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff'
_INVISIBLES = re.compile(f'[{_INVISIBLE}]')
_MANY_MARKS = re.compile(r'([^\w\s]{31,})')  # sorting them is quadratic
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')


def normalise(text: str) -> str:
  """Returns the form of a text in which answers and gold answers are compared.

  The result is in lower case. It has no ASCII punctuation, no English articles
  and no invisible characters, and single spaces separate its words. A letter
  and an accent become one character where Unicode has one (NFC).

  Source: SQuAD (Rajpurkar et al. 2016), as all five systems use it.
  """
  text = text.lower().translate(_PUNCTUATION)
  if not text.isascii():
    pieces = _MANY_MARKS.split(_INVISIBLES.sub('', text))
    text = ''.join(piece if n % 2 else unicodedata.normalize('NFC', piece)
                   for n, piece in enumerate(pieces))
  return ' '.join(_ARTICLES.sub(' ', text).split())


class Segment(NamedTuple):
  """A part of a conversation, such as a turn, which is tokenized separately."""

  text: str
  trained: bool  # True: trained on; False: only read
  special: bool = True  # True: special tokens in the text become their ids
  ids: tuple[int, ...] = ()  # ids in place of a text that cannot be encoded

  @property
  def record(self) -> dict[str, Any]:
    """Fields of the segment for a jsonl file; defaults are left out."""
    fields = {'text': self.text, 'trained': self.trained}
    return fields | ({} if self.special else {'special': False}) | (
        {'ids': list(self.ids)} if self.ids else {})
