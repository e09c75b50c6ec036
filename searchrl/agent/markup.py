# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Neutralises markup: breaks tags and control words in text from outside.

What a retriever returns is data. Only ids that the policy sampled are parsed,
and data is encoded without special tokens; this is the third wall: a passage
cannot even show the policy text that looks like a tag.
"""

from collections.abc import Sequence
import itertools
import re
import unicodedata

# Of both protocols, and of common chat templates.
_TAGS = ('think|search|information|answer|question|tools?|tool_calls?|'
         'tool_responses?|start_of_turn|end_of_turn|bos|eos|pad|unk')
_CONTROLS = ('INST|SYS|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|'
             'SYSTEM_PROMPT')
_MARK = re.compile(  # what follows the end of a text might make one of it
    rf'<(?=[\s/]*(?:\Z|(?:{_TAGS})\b|s\s*[>≯]|\|\s*(?:\w|\Z)|'
    r'<[\s/]*(?:SYS\b|\Z)))|'
    rf'\[(?=[\s/]*(?:{_CONTROLS})\s*\])', re.IGNORECASE)
_BRACKETS = re.compile(r'[<＜﹤\[［﹇]')  # all that NFKC turns into < or [
_BROKEN = {'<': '‹', '[': '⁅'}  # NFKC leaves these as they are
# Characters that show nothing and are no controls: some belong to emoji, Korean
# or Mongolian, so they stay, but a tag is one with them or without.
_UNSEEN = frozenset(map(chr, itertools.chain(
    (0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0),
    range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0000, 0xE1000))))
_SPACE = '▁'  # which SentencePiece reads as a space
_OTHERS = r'[^\w\s\x00-\x7f]'  # all combining marks are among them
_MARKS = re.compile(rf'[\n\t]{_OTHERS}+|{_OTHERS}{{31,}}')


def neutralise(text: str) -> str:
  """Returns text with its tags and control words broken; idempotent.

  Invisible and control characters are removed, so that no tag hides behind
  them, and the bracket before a tag's name becomes one that no parser accepts.
  Letters and brackets that only look alike (full-width, mathematical and so
  on: what NFKC makes equal) count as the plain ones.

  Combining marks at the start of a line are removed: JSON writes its break as
  \\n, and they would make another letter of the n. So are those beyond 30 in a
  row: no language has as many, and the time to sort them grows with their
  square (Unicode's annex 15, section 13).
  """
  text = ''.join(c for c in text if c in '\n\t' or
                 unicodedata.category(c) not in ('Cc', 'Cf'))
  # After that: a joiner keeps the parts of a character apart.
  text = _few_marks(unicodedata.normalize('NFC', _few_marks(text)))
  if not _BRACKETS.search(text):
    return text
  plain, origin = _plain(text)
  shown = list(text)
  for mark in _MARK.finditer(plain):
    shown[origin[mark.start()]] = _BROKEN[mark[0]]
  return ''.join(shown)


def shows_tag(text: str) -> bool:
  """Whether `neutralise` would break a tag or a control word in a text."""
  return bool(_BRACKETS.search(text) and _MARK.search(_plain(text)[0]))


def _few_marks(text: str) -> str:
  return _MARKS.sub(_thinned, f'\n{text}')[1:]


def _thinned(found: re.Match) -> str:
  """At most 30 combining marks in a row, and none after a break."""
  shown, row = [], 0
  for c in found[0]:
    row = row + 1 if unicodedata.combining(c) else 0
    if row <= 30:
      shown.append(c)
    if c in '\n\t':
      row = 30
  return ''.join(shown)


def _plain(text: str) -> tuple[str, Sequence[int]]:
  """The text in NFKC as it is seen, and where in `text` each character is."""
  if text.isascii():
    return text, range(len(text))
  plain, origin = [], []
  for i, c in enumerate(text):
    if c < '\x80':
      folded = c
    elif c in _UNSEEN:
      continue
    else:
      folded = ' ' if c == _SPACE else unicodedata.normalize('NFKC', c)
    plain.append(folded)
    origin += [i] * len(folded)
  return ''.join(plain), origin
