# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""BM25 as Lucene computes it: an index of a corpus, and its search.

The steps of Lucene's English analysis and scoring, in the order of their use:
words, stop words, Porter's stems, one-byte lengths, postings, scores.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import re

from jaxtyping import Float, Int, UInt8
import numpy as np

from searchrl.search.corpus import Corpus
from searchrl.search.index import maxscore
from searchrl.search.index import ranking
from searchrl.search.index import words
from searchrl.trajectory import Passages, Query, SearchFn

_STOP_WORDS = frozenset(
    'a an and are as at be but by for if in into is it no not of on or such '
    'that the their then there these they this to was will with'.split())


def analyze(text: str) -> list[str]:
  """Returns the terms of a passage or of a query, in order."""
  terms = map(_term, words.split(text))
  return [term for term in terms if term]


@functools.lru_cache(maxsize=2**18)
def _term(word: str) -> str:
  """Returns the index's term for a word; '' for a stop word."""
  word = ''.join(letter.lower()[0] for letter in word)  # 'İ', 'Σ' as in Java
  word = re.sub("['’＇]s$", '', word)
  return '' if word in _STOP_WORDS else stem(word)


# Porter's suffixes, each with its replacement.
_DOUBLE = dict(
    ational='ate', tional='tion', enci='ence', anci='ance', izer='ize',
    bli='ble', alli='al', entli='ent', eli='e', ousli='ous', ization='ize',
    ation='ate', ator='ate', alism='al', iveness='ive', fulness='ful',
    ousness='ous', aliti='al', iviti='ive', biliti='ble', logi='log')
_SINGLE = dict(
    icate='ic', ative='', alize='al', iciti='ic', ical='ic', ful='', ness='')
# These are searched from the left, so that the longest suffix wins.
_DOUBLES = re.compile(f'(?:{"|".join(_DOUBLE)})$')
_SINGLES = re.compile(f'(?:{"|".join(_SINGLE)})$')
_LAST = re.compile(
    '(?:al|ance|ence|er|ic|able|ible|ant|ement|ment|ent|(?<=[st])ion|ou|ism|ate'
    '|iti|ous|ive|ize)$')


def stem(word: str) -> str:
  """Returns Porter's stem of a lower-case word, with Lucene's three departures.

  Words of at most two letters stay as they are, the suffix `bli` becomes `ble`
  after any letter, and the suffix `logi` becomes `log`.

  Source: Porter 1980, An algorithm for suffix stripping, Program 14(3); its
    author lists these departures for his own implementation.
  """
  if len(word) <= 2:
    return word
  if word.endswith(('sses', 'ies')):
    word = word[:-2]
  elif word.endswith('s') and not word.endswith('ss'):
    word = word[:-1]
  word = _without_ed_or_ing(word)
  if word.endswith('y') and 'v' in _shape(word[:-1]):
    word = word[:-1] + 'i'
  for pattern, table in ((_DOUBLES, _DOUBLE), (_SINGLES, _SINGLE)):
    match = pattern.search(word)
    if match and _measure(word[:match.start()]) > 0:
      word = word[:match.start()] + table[match[0]]
  match = _LAST.search(word)
  if match and _measure(word[:match.start()]) > 1:
    word = word[:match.start()]
  if word.endswith('e'):
    measure = _measure(word)
    if measure > 1 or measure == 1 and not _is_short(word[:-1]):
      word = word[:-1]
  return word[:-1] if word.endswith('ll') and _measure(word) > 1 else word


def _without_ed_or_ing(word: str) -> str:
  if word.endswith('eed'):
    return word[:-1] if _measure(word[:-3]) > 0 else word
  rest = re.sub('(?:ed|ing)$', '', word)
  if rest == word or 'v' not in _shape(rest):
    return word
  if rest.endswith(('at', 'bl', 'iz')):
    return rest + 'e'
  if rest[-1] == rest[-2:-1] and _shape(rest)[-1] == 'c':
    return rest if rest[-1] in 'lsz' else rest[:-1]
  return rest + 'e' if _measure(rest) == 1 and _is_short(rest) else rest


def _shape(word: str) -> str:
  """Returns the word with 'v' for vowels and 'c' for consonants.

  The letter y after a 'c' is a vowel.
  """
  shape = ''
  for letter in word:
    vowel = letter in 'aeiou' or letter == 'y' and shape[-1:] == 'c'
    shape += 'v' if vowel else 'c'
  return shape


def _measure(word: str) -> int:
  """Returns how often a consonant follows a vowel: Porter's m."""
  return _shape(word).count('vc')


def _is_short(word: str) -> bool:
  """Returns True for the end cvc, except with w, x or y: Porter's *o."""
  return _shape(word).endswith('cvc') and word[-1] not in 'wxy'


def encode_length(lengths: Int[np.ndarray, 'N']) -> UInt8[np.ndarray, 'N']:
  """Returns text lengths, in terms, as one-byte codes.

  Lengths below 24 are their own codes. For others, the code keeps the four
  leading bits of length - 24: a leading one and the three bits of a mantissa.
  Codes are therefore exact up to length 40. For many longer texts,
  `decode_length` returns a somewhat smaller length.

  Source: Lucene, SmallFloat.intToByte4.
  """
  rest = np.maximum(lengths - 24, 0)
  shift = np.maximum(np.frexp(rest)[1] - 4, 0)  # number of bits that are lost
  return (np.minimum(lengths, 24) + (rest >> shift) + 8 * shift).astype('u1')


def decode_length(codes: UInt8[np.ndarray, 'N']) -> Int[np.ndarray, 'N']:
  """Returns, for each code of `encode_length`, the smallest length that has it.

  Several lengths may have the same code.
  """
  codes = codes.astype(np.int64)
  rest = np.maximum(codes - 24, 0)
  shift = np.maximum(rest // 8 - 1, 0)
  return np.minimum(codes, 24) + ((rest - 8 * shift) << shift)


@dataclasses.dataclass(frozen=True)
class Index:
  """An inverted index: postings sorted by term, then by passage.

  The postings of term t have the positions [starts[t], starts[t + 1]).
  """

  terms: dict[str, int]  # a term's number t in [0, V)
  starts: Int[np.ndarray, 'V+1']
  postings: maxscore.Postings
  _bounds: dict[int, float] = dataclasses.field(default_factory=dict)  # key: t

  def spans(self, text: str) -> list[maxscore.Span]:
    """Returns a span (bound, start, stop, count) per distinct term of a query.

    The bound is the largest score that the term can add to a passage. The
    range [start, stop) has the term's postings. The count says how often the
    term occurs in the query. Terms that no passage contains are left out.
    """
    spans = []
    for term, count in collections.Counter(analyze(text)).items():
      t = self.terms.get(term)
      if t is not None:
        start, stop = int(self.starts[t]), int(self.starts[t + 1])
        if t not in self._bounds:
          self._bounds[t] = float(self.postings.impacts[start:stop].max())
        spans.append((count * self._bounds[t], start, stop, count))
    return spans


def build(texts: Sequence[str], *, k1: float = 0.9, b: float = 0.4) -> Index:
  """Returns an inverted index of texts, with the BM25 impacts of all terms.

    impact = idf tf / (tf + k1 (1 - b + b length / mean length))
    idf = ln(1 + (N - df + 0.5) / (df + 0.5))

  The impact is what one query term adds to a text's score, tf the term's count
  in the text, df the number of texts with the term, and N the number of texts.
  Lengths are in terms, rounded as by `encode_length`; the mean is exact. As in
  Lucene, N and the mean leave out texts without a term.
  """
  terms: dict[str, int] = {}
  rows, passages, counts, lengths = count_terms(texts, terms)
  starts = np.searchsorted(rows, np.arange(len(terms) + 1))
  idf, norms = weights(np.diff(starts), lengths, k1, b)
  impacts = idf[rows] * counts / (counts + norms[passages])
  return Index(terms, starts, maxscore.Postings(
      passages.astype(np.int32), impacts.astype(np.float32), len(texts)))


def count_terms(texts: Sequence[str], terms: dict[str, int]
               ) -> tuple[np.ndarray, ...]:
  """Counts the terms of texts, and gives each new term the next number.

  Args:
    texts: The texts, N of them.
    terms: Numbers of the terms that are known. New terms are added.

  Returns:
    The term, the text and the count of each posting, sorted by term and then by
    text, and the length of each text, in terms.
  """
  ids = [[terms.setdefault(term, len(terms)) for term in analyze(text)]
         for text in texts]
  lengths = np.array([len(row) for row in ids])
  owners = np.repeat(np.arange(len(ids)), lengths)
  flat = np.fromiter((t for row in ids for t in row), np.int64, len(owners))
  pairs, counts = np.unique(flat * len(ids) + owners, return_counts=True)
  return *np.divmod(pairs, len(ids)), counts, lengths


def weights(
    df: Int[np.ndarray, 'V'], lengths: Int[np.ndarray, 'N'], k1: float, b: float
) -> tuple[Float[np.ndarray, 'V'], Float[np.ndarray, 'N']]:
  """Returns the idf of each term, and the length norm of each text, for BM25.

    idf = ln(1 + (N - df + 0.5) / (df + 0.5))
    norm = k1 (1 - b + b length / mean length)

  N and the mean leave out texts without a term. The norm uses lengths rounded
  to one byte.

  Args:
    df: Number of texts that contain each of the V terms.
    lengths: Length of each text, in terms.
    k1: Saturation of repeated terms.
    b: Weight of the length, in [0, 1].
  """
  filled = np.count_nonzero(lengths)
  idf = np.log1p((filled - df + 0.5) / (df + 0.5))
  mean = lengths.sum() / max(filled, 1)
  relative = decode_length(encode_length(lengths)) / max(mean, 1e-9)
  return idf, k1 * (1 - b + b * relative)


def check(k1: float, b: float) -> None:
  """Raises a ValueError if k1 or b is out of range."""
  if not (k1 >= 0 and 0 <= b <= 1):
    raise ValueError(f'k1 must be at least 0 and b in [0, 1], but they are '
                     f'{k1} and {b}. Anserini uses 0.9 and 0.4.')


def bm25(corpus: Corpus, *, k1: float = 0.9, b: float = 0.4,
         workers: int = 0) -> SearchFn:
  """Indexes a corpus and returns its search.

  Args:
    corpus: Corpus whose passages are indexed, title and text together.
    k1: Parameter of how slowly repeated terms saturate, at least 0. Default:
      Anserini's.
    b: Weight of the length, in [0, 1]. Default: Anserini's.
    workers: Number of processes; see `searcher`.

  Returns:
    A search whose passages share a term with the query. They are ordered from
    the highest score down, and ties by position in the corpus.

  Raises:
    ValueError: An option is out of range.

  Source: Kamphuis et al. 2020, Which BM25 do you mean?, the variant "Lucene
    (default)".
  """
  check(k1, b)
  return searcher(corpus, build(corpus.texts, k1=k1, b=b), workers=workers)


def searcher(corpus: Corpus, index: Index, *, workers: int = 0) -> SearchFn:
  """Returns the search of an index. Results do not depend on `workers`.

  Args:
    corpus: Corpus from which the index was built.
    index: The index.
    workers: Number of processes that rank the queries of large calls, this one
      included; see `ranking.Ranking`. 0: one per available core, at most 8.

  Raises:
    ValueError: The number of workers is negative.
  """
  ranks = ranking.Ranking(index.postings, workers)

  def prepare(query: Query) -> tuple[list[maxscore.Span], int]:
    return index.spans(query.text), query.top_k

  def finish(best: ranking.Best) -> Passages:
    return tuple(dataclasses.replace(corpus[i], score=score)
                 for i, score in zip(*best))

  return lambda queries: ranks.map(queries, prepare, finish)
