# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Definitions of what texts mean, by plain search and in plain loops."""

import json
import re
import unicodedata

from strategies import TAGS

from searchrl.agent import markup
from searchrl.agent import tag_parser
from searchrl.trajectory import Action


def read(text: str, *names: str) -> str:
  """Returns a turn's text up to the first closing tag of one of the names."""
  for end in range(len(text) + 1):
    if any(text[:end].endswith(f'</{name}>') for name in names):
      return text[:end]
  return text


def neutralise(text: str) -> str:
  """`markup.neutralise`, character by character, for any text alike."""
  text = ''.join(c for c in text if c in '\n\t' or
                 unicodedata.category(c) not in ('Cc', 'Cf'))
  for form in ('', 'NFC'):
    text = unicodedata.normalize(form, text) if form else text
    text = markup._MARKS.sub(markup._thinned, f'\n{text}')[1:]
  plain, origin = [], []
  for i, c in enumerate(text):
    if c in markup._UNSEEN:
      continue
    folded = ' ' if c == '▁' else unicodedata.normalize('NFKC', c)
    plain.append(folded)
    origin += [i] * len(folded)
  characters = list(text)
  for mark in markup._mark(()).finditer(''.join(plain)):
    characters[origin[mark.start()]] = {'<': '‹', '[': '⁅'}[mark[0]]
  return ''.join(characters)


def tag_action(text: str) -> Action:
  """The block that ends a turn; the tag before its closing one opens it."""
  body = read(text, 'search', 'answer')
  return last_action(body)


def last_action(body: str) -> Action:
  for kind in ('search', 'answer'):
    if body.endswith(f'</{kind}>'):
      body = body[:-len(f'</{kind}>')]
      at, tag = max((body.rfind(tag), tag) for tag in TAGS)
      inside = body[at + len(tag):].strip()
      if at >= 0 and tag == f'<{kind}>' and inside:
        return Action(kind, (inside,))
      break
  return Action('invalid')


def tool_action(text: str, most: int, bare: bool = False) -> Action:
  """A call at the end of a turn, in JSON and by its schema; or an answer.

  With `bare`, also a turn that is one JSON object, perhaps after a thought.
  """
  body = read(text, 'tool_call', 'answer')
  if bare and not body.endswith(('</tool_call>', '</answer>')):
    parts = body.split('</think>')
    rest = without_ends(parts[-1]).strip()
    thought = '</think>'.join(parts[:-1]).lstrip()
    if (not thought and len(parts) == 1 or thought.startswith('<think>')
        and len(parts) == 2 and thought.count('<think>') == 1):
      rest = rest.removeprefix('<|python_tag|>').strip()
      if rest.startswith('{') and '<tool_call>' not in rest:
        body = f'<tool_call>{rest}</tool_call>'
  if not body.endswith('</tool_call>'):
    action = last_action(body)
    return action if action.kind == 'answer' else Action('invalid')
  body = body[:-len('</tool_call>')]
  calls = [_call(part, most) for part in (
      body[at + len('<tool_call>'):] for at in range(len(body))
      if body.startswith('<tool_call>', at))]
  valid = [call for call in calls if call.kind != 'invalid']
  return valid[-1] if valid else Action('invalid')


def _call(text: str, most: int) -> Action:
  """The search that a JSON object names."""
  try:
    call = json.loads(text, object_pairs_hook=list)
  except ValueError:
    return Action('invalid')
  match sorted(call, key=lambda pair: pair[0]) if _is_object(call) else None:
    case [('arguments', [('query_list', list(queries))]), ('name', 'search')]:
      pass
    case [('name', 'search'), ('parameters', [('query_list', list(queries))])]:
      pass
    case [('name', 'search'), ('parameters', [('query_list', list(queries))]),
          ('type', 'function')]:
      pass
    case _:
      return Action('invalid')
  if _is_object(queries) and queries or not all(
      isinstance(query, str) and query.strip() and is_text(query)
      for query in queries) or not 1 <= len(queries) <= most:
    return Action('invalid')
  return Action('search', tuple(query.strip() for query in queries))


def _is_object(value) -> bool:
  """Returns whether a list stands for a JSON object: its items are pairs."""
  return isinstance(value, list) and all(isinstance(x, tuple) for x in value)


def is_text(text: str) -> bool:
  return not any('\ud800' <= c <= '\udfff' for c in text)


def without_ends(text: str) -> str:
  """A text without ends of turns and white space after it."""
  ends = [end for end in tag_parser.TURN_ENDS if text.rstrip().endswith(end)]
  return without_ends(text.rstrip()[:-len(ends[0])]) if ends else text.rstrip()


def is_in_format(text: str) -> bool:
  """The grammar of the Study's Appendix C, over a letter a tag."""
  letters = {'<think>': 'T', '</think>': 't', '<search>': 'S',
             '</search>': 's', '<information>': 'F', '</information>': 'f',
             '<answer>': 'A', '</answer>': 'a'}
  text = without_ends(text)
  shape, at = '', 0
  while at < len(text):
    tag = next((tag for tag in letters if text.startswith(tag, at)), '')
    shape += letters.get(tag, '' if text[at].isspace() else 'x')
    at += max(len(tag), 1)
    if tag in ('</search>', '</answer>'):  # the rest of the tag's own token
      at += len(re.split(r'\s|</?\w+>|<[|｜]', text[at:])[0])
  return bool(re.fullmatch('Tx*t(?:Sx*sFx*fTx*t)*Ax*a', shape))


def last_block(text: str, name: str) -> str:
  """Returns the text in the last block of a name, or '' without one."""
  found = re.findall(f'<{name}>(.*?)</{name}>', text, re.DOTALL)
  return ['', *found][-1].strip()


def title_and_text(contents, given):
  """Title and text of contents in a corpus, beside a title that may be given.

  Contents begin with the title, which may be in quotes. A given title that is
  another one shows that the contents are the text alone, unless they are a
  title in quotes and a text.
  """
  first = contents.partition('\n')[0]
  if exact := re.fullmatch(r'"([^\n]*)"\n(.*)', contents, re.S):
    title, text = exact.groups()
  else:
    lines = re.sub('\r\n?', '\n', contents) if '\r' in first else contents
    title, _, text = lines.removeprefix('\ufeff').partition('\n')
    quoted = re.fullmatch(r'"(.*)"', title.strip(), re.S)
    title = quoted[1] if quoted else title
  is_other = isinstance(given, str) and given.strip() and (
      given.strip().strip('"') != title.strip().strip('"'))
  if is_other and not (text and re.fullmatch('".*"', first.strip(), re.S)):
    return given.strip('\r\n'), contents
  return title, text
