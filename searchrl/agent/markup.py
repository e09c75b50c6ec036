# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Neutralises markup: breaks tags and control words in text from outside.

What a retriever returns is data. Only ids that the policy sampled are parsed,
and data is encoded without special tokens; this is the third wall: a passage
cannot even show the policy text that looks like a tag.
"""

from collections.abc import Sequence
import re
import unicodedata

# Of both protocols, and of common chat templates.
_TAGS = ('think|search|information|answer|question|tools?|tool_calls?|'
         'tool_responses?|start_of_turn|end_of_turn|bos|eos|pad|unk')
_CONTROLS = ('INST|SYS|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|'
             'SYSTEM_PROMPT')
_MARK = re.compile(
    rf'<(?=[\s/]*(?:(?:{_TAGS})\b|s\s*>|\|\s*\w|<\s*/?\s*SYS\b))|'
    rf'\[(?=[\s/]*(?:{_CONTROLS})\s*\])', re.IGNORECASE)
_BRACKETS = re.compile(r'[<＜﹤\[［﹇]')  # all that NFKC turns into < or [
_BROKEN = {'<': '‹', '[': '⁅'}  # NFKC leaves these as they are


def neutralise(text: str) -> str:
  """Returns text with its tags and control words broken; idempotent.

  Invisible and control characters are removed, so that no tag hides behind
  them, and the bracket before a tag's name becomes one that no parser accepts.
  Letters and brackets that only look alike (full-width, mathematical and so
  on: what NFKC makes equal) count as the plain ones.
  """
  text = ''.join(c for c in text if c in '\n\t' or
                 unicodedata.category(c) not in ('Cc', 'Cf'))
  text = unicodedata.normalize('NFC', text)  # after: a joiner keeps parts apart
  if not _BRACKETS.search(text):
    return text
  plain, origin = _plain(text)
  shown = list(text)
  for mark in _MARK.finditer(plain):
    shown[origin[mark.start()]] = _BROKEN[mark[0]]
  return ''.join(shown)


def _plain(text: str) -> tuple[str, Sequence[int]]:
  """The text in NFKC, and the index in `text` of each of its characters."""
  if text.isascii():
    return text, range(len(text))
  plain, origin = [], []
  for i, c in enumerate(text):
    folded = c if c < '\x80' else unicodedata.normalize('NFKC', c)
    plain.append(folded)
    origin += [i] * len(folded)
  return ''.join(plain), origin
