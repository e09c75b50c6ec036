# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Neutralises markup: breaks tags and control words in text from outside.

A retriever's text is data, not instructions. There are three protections. Only
ids that the policy sampled are parsed. Data is encoded without special tokens.
And in this module, text in a passage that looks like a tag is changed.
"""

from collections.abc import Sequence
import functools
import itertools
import re
import unicodedata

# Tag names of both protocols and of common chat templates.
_TAGS = ('think|search|information|answer|question|tools?|tool_calls?|'
         'tool_responses?|start_of_turn|end_of_turn|bos|eos|pad|unk')
_CONTROLS = ('INST|SYS|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|'
             'SYSTEM_PROMPT')
_BRACKETS = '<＜﹤[［﹇'  # all that NFKC turns into < or [
_BROKEN = {'<': '‹', '[': '⁅'}  # replacements that NFKC does not change
# Invisible characters that are not controls. Some belong to emoji, Korean or
# Mongolian, so they are kept, but tags are recognised as if they were absent.
_UNSEEN = frozenset(map(chr, itertools.chain(
    (0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0),
    range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0000, 0xE1000))))
_CONTROLS_OF_ASCII = re.compile(r'[\x00-\x08\x0b-\x1f\x7f]')
_SPACE = '▁'  # character that SentencePiece reads as a space
_OTHERS = r'[^\w\s\x00-\x7f]'  # a class that includes all combining marks
_MARKS = re.compile(rf'[\n\t]{_OTHERS}+|{_OTHERS}{{31,}}')


@functools.cache
def _mark(tags: tuple[str, ...]) -> re.Pattern:
  """Returns the pattern of an opening bracket that `neutralise` must replace.

  The bracket begins a tag or a control word of a template, or a tag whose name
  is in `tags`. The pattern also finds a < at the end, where a tag may begin.
  """
  names = '|'.join([_TAGS, *map(re.escape, tags)])
  return re.compile(
      rf'<(?=[\s/]*(?:\Z|(?:{names})\b|s\s*[>≯]|\|\s*(?:\w|\Z)|'
      r'<[\s/]*(?:SYS\b|\Z)))|'
      rf'\[(?=[\s/]*(?:{_CONTROLS})\s*\])', re.IGNORECASE)


def neutralise(text: str, tags: tuple[str, ...] = ()) -> str:
  r"""Returns the text with its tags and control words broken.

  The bracket before a tag's name is replaced by one that no parser accepts.
  Look-alike letters and brackets (full-width, mathematical and all others that
  NFKC makes equal) count as the plain ones. Format and control characters are
  removed, so that they cannot hide a tag. A second call changes nothing.

  Combining marks at the start of a line are removed, because JSON writes the
  line break as \\n and the marks would turn the n into another letter. Marks
  beyond 30 in a row are removed, too: no language has as many, and the time to
  sort them grows with the square of their number (Unicode's annex 15, section
  13).

  Args:
    text: Text from outside.
    tags: Further names of tags that are broken.
  """
  text = _visible(text)
  if not _has_bracket(text):
    return text
  plain, origin = _plain(text)
  characters = list(text)
  for mark in _mark(tags).finditer(plain):
    characters[origin[mark.start()]] = _BROKEN[mark[0]]
  return ''.join(characters)


def shows_tag(text: str, tags: tuple[str, ...] = ()) -> bool:
  """Returns whether a text has a tag or control word that `neutralise` breaks.

  `tags` are further names of tags.
  """
  return _has_bracket(text) and bool(_mark(tags).search(_plain(text)[0]))


def _has_bracket(text: str) -> bool:
  return any(bracket in text for bracket in _BRACKETS)


def _visible(text: str) -> str:
  """Returns the text in NFC, without control and format characters.

  Line breaks and tabs stay. At most 30 combining marks in a row stay, and none
  at the start of a line or after a tab.
  """
  if text.isascii():
    return _CONTROLS_OF_ASCII.sub('', text)
  for c in set(text) - {'\n', '\t'}:
    if unicodedata.category(c) in ('Cc', 'Cf'):
      text = text.replace(c, '')
  # After the removal above, because a joiner keeps a character's parts apart.
  return _few_marks(unicodedata.normalize('NFC', _few_marks(text)))


def _few_marks(text: str) -> str:
  if not any(map(unicodedata.combining, set(text))):
    return text
  return _MARKS.sub(_thinned, f'\n{text}')[1:]


def _thinned(marks: re.Match) -> str:
  """Returns the matched text with at most 30 combining marks in a row.

  All marks directly after a line break or a tab are removed.
  """
  characters, row = [], 0
  for c in marks[0]:
    row = row + 1 if unicodedata.combining(c) else 0
    if row <= 30:
      characters.append(c)
    if c in '\n\t':
      row = 30
  return ''.join(characters)


def _plain(text: str) -> tuple[str, Sequence[int]]:
  """Returns the text as `_folded`, and each character's index in `text`."""
  folded = {c: _folded(c) for c in set(text) if c >= '\x80'}
  if all(len(characters) == 1 for characters in folded.values()):
    changed = {ord(c): other for c, other in folded.items() if c != other}
    return text.translate(changed) if changed else text, range(len(text))
  pieces = [folded.get(c, c) for c in text]
  origin = [i for i, piece in enumerate(pieces) for _ in piece]
  return ''.join(pieces), origin


def _folded(c: str) -> str:
  """Returns a character as a reader sees it.

  It is '' for an invisible one, a space for SentencePiece's mark of a space,
  and the NFKC form of any other, such as 'A' for a full-width A.
  """
  if c in _UNSEEN:
    return ''
  return ' ' if c == _SPACE else unicodedata.normalize('NFKC', c)
