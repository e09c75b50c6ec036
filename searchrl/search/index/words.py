# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Words of a text by Unicode's annex 29, as in Lucene's StandardTokenizer.

Marks and format characters belong to the letter before them. Each Han or
Hiragana character is a word. So is a run of a script that is written without
spaces, such as Thai, because Lucene has no dictionary either. Lucene's tokens
for emoji are left out.

Source: Unicode Standard Annex 29, rules WB3 to WB13; the names of the rules'
  classes are those of the property Word_Break (WB).
"""

import re

import regex

# The same rules for Latin letters without marks, which are faster. A run of
# underscores is scanned only from its first; else it is quadratic.
_LATIN = r'\0-\xac\xae-\xb7\xb9-\u02af\u2010-\u2026\u20ac'
_IS_LATIN = re.compile(f'[{_LATIN}]*+')
_ANY, _LETTER = r'[^\W²³¹¼-¾]', r'[^\W\d_²³¹¼-¾]'
_LATIN_WORD = re.compile(rf"""
    (?<!_)(?=_*[^\W_²³¹¼-¾]) {_ANY}+ (?:
      (?: (?<={_LETTER}) ['’.:·‘․‧] (?={_LETTER})
          | (?<=\d) ['’.,;‘․] (?=\d) )
      {_ANY}+ )*""", re.VERBOSE)
# What stands between spaces and has another character.
_OTHERS = re.compile(
    rf'(?<![^\0-\x20])((?:(?![\0-\x20])[{_LATIN}])*+[^{_LATIN}][^\0-\x20]*+)')

_MARK = r'[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]'


def _run(characters: str) -> str:
  """Returns a pattern of one or more such characters, each with its marks."""
  return rf'{characters}++(?:{_MARK}++{characters}*+)*+'


_JOINS = _run(r'\p{WB=ExtendNumLet}')
_FIRST_JOINS = rf'(?=_JOIN)(?<!_JOIN{_MARK}*)'.replace(
    '_JOIN', r'\p{WB=ExtendNumLet}') + _JOINS
_LETTERS = _run(r'[\p{WB=ALetter}\p{WB=Hebrew_Letter}]')
_KATAKANA = _run(r'\p{WB=Katakana}')
_NO_SPACES = _run(r'\p{Line_Break=Complex_Context}')
_DIGITS = _run(r'\p{WB=Numeric}')
_AFTER_HEBREW = rf'(?<=\p{{WB=Hebrew_Letter}}{_MARK}*)'
_RUN = rf"""(?:
    (?: {_LETTERS} (?: (?:
            [\p{{WB=MidLetter}}\p{{WB=MidNumLet}}'] {_MARK}*+
            | {_AFTER_HEBREW} " {_MARK}*+ (?= \p{{WB=Hebrew_Letter}} )
          ) {_LETTERS} )*+ (?: {_AFTER_HEBREW} ' {_MARK}*+ )?+
        | {_DIGITS} (?:
            [\p{{WB=MidNum}}\p{{WB=MidNumLet}}'] {_MARK}*+ {_DIGITS} )*+
    )++ | {_KATAKANA} )"""
_WORD = regex.compile(rf"""
    [\p{{Script=Han}}\p{{Script=Hiragana}}] {_MARK}*+
    | (?: {_FIRST_JOINS} )?+ {_RUN} (?: {_JOINS} {_RUN} )*+ (?: {_JOINS} )?+
    | {_NO_SPACES}
    """, regex.VERBOSE)


def split(text: str) -> list[str]:
  """Returns the words of a text, in order."""
  if text.isascii() or _IS_LATIN.fullmatch(text):
    return _LATIN_WORD.findall(text)
  words: list[str] = []
  for n, part in enumerate(_OTHERS.split(text)):
    words += (_WORD if n % 2 else _LATIN_WORD).findall(part)
  return words
