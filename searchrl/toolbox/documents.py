# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""The tool `open`: reads a document window by window, and can find a text.

A document consists of neighbouring passages of the corpus with the same title.
A corpus such as wiki-18 has several passages per document. A window, or page,
of a document has whole words and at most a given number of tokens. A word that
is longer than a page, such as a text without spaces, is divided.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
from typing import Any

from searchrl.trajectory import Passage, Tool, ToolCall, ToolResult

_MOST_INDEXED = 3_000_000  # ids that are kept in memory, some 300 bytes each
_MOST_NEIGHBOURS = 2000  # passages of one document
_FRAME = 24  # tokens for the line that says which page this is
_MOST_CHARS = 8  # most characters per token that a part of a long word has


def make(window_tokens: int = 0) -> Tool:
  """Returns the tool `open`, by which a policy reads a document page by page.

  Args:
    window_tokens: Largest number of tokens of a page, or window. 0, or more
      than fit: as many as fit into the tokens that a policy may read after a
      call (rollout.budgets), less a few for the page's heading.

  Raises:
    ValueError: `window_tokens` is below 0.
  """
  if window_tokens < 0:
    raise ValueError(f'window_tokens must be at least 0, but is {window_tokens}'
                     '. 0 is the usual.')

  def bind(corpus: Any, tokenizer: Any, result_tokens: int):
    most = max(result_tokens - _FRAME, result_tokens // 2)
    return _Reader(corpus, tokenizer, min(window_tokens or most, most))

  return Tool(
      'open', 'Opens the document of a passage, or reads on in it.',
      {'type': 'object', 'required': ['id'], 'properties': {
          'id': {'type': 'string', 'description':
                 'Id of the passage, or the title of one that was found.'},
          'page': {'type': 'integer', 'minimum': 1, 'description':
                   'Number of the page; the default is the next one.'},
          'find': {'type': 'string', 'minLength': 1, 'description':
                   'Text whose first page is opened.'}},
       'additionalProperties': False}, bind=bind)


class _Reader:
  """The function of the tool `open`, which reads documents.

  A result depends only on the call and its trajectory.
  """

  def __init__(self, corpus: Any, tokenizer: Any, window_tokens: int):
    if corpus is None:
      raise ValueError(
          'the tool open needs a corpus, but the search engine has none here. '
          'Name one in search.corpus, or leave the tool out.')
    self._corpus, self._tokenizer = corpus, tokenizer
    self._window_tokens = window_tokens
    self._row = _rows(corpus)
    # Documents are opened again and again; the windows of the newest are kept.
    self._pages = functools.lru_cache(1024)(self._cut)

  def __call__(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Returns for each call a page of its document, or an error message."""
    return [self._open(call) for call in calls]

  def _open(self, call: ToolCall) -> ToolResult:
    first = self._first(call)
    if first is None:
      return ToolResult(f'Error: there is no passage {call.arguments["id"]!r}.',
                        is_error=True)
    pages, passage = self._pages(first), self._corpus[first]
    page = int(call.arguments.get('page') or 1 + self._last_page(call, first))
    if 'find' in call.arguments:
      page = _page_of(call.arguments['find'], pages,
                      int(call.arguments.get('page', 1)))
      if not page:
        return ToolResult(f'Error: {call.arguments["find"]!r} is not in it.',
                          is_error=True)
    if page > len(pages):
      return ToolResult(f'Error: the document has {len(pages)} pages, and page '
                        f'{page} is none of them.', is_error=True)
    text = pages[page - 1].rstrip()
    return ToolResult(
        f'{passage.title} (page {page} of {len(pages)})\n{text}',
        passages=(Passage(passage.id, passage.title, text),))

  def _first(self, call: ToolCall) -> int | None:
    """Returns the row of the first passage of the document that a call names.

    The result is None if there is no such document.
    """
    name = call.arguments['id'].strip().removeprefix('[').removesuffix(']')
    row = self._row(name)
    if row is None:  # the title of a passage that was shown
      shown = [p for turn in reversed(call.turns) for p in turn.passages]
      row = next((self._row(p.id) for p in shown
                  if p.title.strip().lower() == name.strip('"').lower()), None)
    if row is None:
      return None
    title = self._corpus[row].title
    while title and row and self._corpus[row - 1].title == title:
      row -= 1
    return row

  def _last_page(self, call: ToolCall, first: int) -> int:
    """Returns the number of the page of a document that was read last.

    The document is the one whose first passage has the number `first`. The
    result is 0 if none of its pages has been read.
    """
    id_, last = self._corpus[first].id, 0
    for turn in call.turns[:-1]:
      if turn.action.kind == call.tool and [p.id for p in turn.passages] == [
          id_]:
        given = turn.action.arguments or {}
        start = given.get('page') or (1 if 'find' in given else last + 1)
        same = [number for number, text in enumerate(self._pages(first), 1)
                if text.rstrip() == turn.passages[0].text]  # some may be equal
        last = next((number for number in same if number >= start), same[0])
    return last

  def _cut(self, row: int) -> list[str]:
    """Returns the windows of the document that begins at a row.

    A window ends with a space, unless the next one goes on in the same word.
    """
    pages: list[str] = []
    page: list[str] = []
    tokens = 0
    for part, count in self._parts(self._text(row).split()):
      if page and tokens + count > self._window_tokens:
        pages.append(''.join(page))
        page, tokens = [], 0
      page.append(part)
      tokens += count
    return [*pages, ''.join(page)]

  def _parts(self, words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields each word and a space, with the number of its tokens.

    A word of more tokens than a page is divided into parts that fill a page.
    """
    counts = map(len, self._tokenizer.encode_passages(
        [f' {word}' for word in words]))
    for word, count in zip(words, counts):
      if count > self._window_tokens:
        *parts, word = self._divided(word)
        yield from ((part, self._window_tokens) for part in parts)
        count = self._count(word)
      yield f'{word} ', count

  def _divided(self, word: str) -> Iterator[str]:
    """Yields the parts of a word, each as long as a page but the last."""
    while word:
      most = min(len(word), self._window_tokens * _MOST_CHARS)
      length = max(1, bisect.bisect_right(
          range(1, most + 1), self._window_tokens,
          key=lambda length: self._count(word[:length])))
      yield word[:length]
      word = word[length:]

  def _count(self, word: str) -> int:
    """Returns the number of tokens of a word and the space before it."""
    return len(self._tokenizer.encode_data(f' {word}'))

  def _text(self, row: int) -> str:
    title = self._corpus[row].title
    texts: list[str] = []
    while row < len(self._corpus) and len(texts) < _MOST_NEIGHBOURS:
      passage = self._corpus[row]
      if texts and not (title and passage.title == title):
        break
      texts.append(passage.text)
      row += 1
    return ' '.join(texts)


def _page_of(text: str, pages: Sequence[str], first: int) -> int:
  """Returns the number of the page, from `first` on, on which a text begins.

  It is 0 if there is none. Case and the kind of white space do not count.
  """
  lower = [page.lower() for page in pages]
  starts = [*itertools.accumulate(map(len, lower), initial=0)]
  place = ''.join(lower).find(' '.join(text.lower().split()),
                              starts[min(first, len(starts)) - 1])
  return bisect.bisect_right(starts, place)


def _rows(corpus: Any) -> Callable[[str], int | None]:
  """Returns a function from an id to the number of the passage that has it.

  The function returns None if no passage has the id.

  Raises:
    ValueError: The corpus is too large for a table of its ids.
  """
  count = len(corpus)
  if count and corpus[0].id == '0' and corpus[count - 1].id == str(count - 1):

    def of_position(id_: str) -> int | None:
      is_row = (id_.isascii() and id_.isdigit() and len(id_) <= 12
                and int(id_) < count)
      return int(id_) if is_row and corpus[int(id_)].id == id_ else None

    return of_position
  if count > _MOST_INDEXED:
    raise ValueError(
        f'the tool open needs a corpus whose ids are 0, 1, 2, ... or that has '
        f'at most {_MOST_INDEXED} passages, but it has {count}. Number the '
        'passages of search.corpus.')
  return {passage.id: row for row, passage in enumerate(corpus)}.get
