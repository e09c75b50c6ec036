# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of a simulated engine with a real one, query by query.

It measures how often the documents contain the answer when they should, and
how often they do so too early. It also measures their length and form, and how
well a classifier distinguishes them from real documents.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import statistics
from typing import Any

from searchrl.agent import rewards
from searchrl.data.simulation import Pair
from searchrl.evaluation import figures
from searchrl.evaluation import separability

QUALITIES = ('real', 'useful', 'noisy')


@dataclasses.dataclass(frozen=True)
class Compared:
  """A query and each engine's documents; () where a text was malformed."""

  pair: Pair
  real: tuple[str, ...]
  useful: tuple[str, ...]  # simulated documents that should help
  noisy: tuple[str, ...]  # simulated documents that should not help


def report(found: Sequence[Compared]) -> dict[str, Any]:
  """Returns the tables that `text` prints, as a dict.

  Returns:
    answers: Rows with the keys {'search', 'n', 'real', 'useful', 'noisy'}. A
      row is for the nth search of questions with a given number of hops. It
      has the number of queries, n, and for each quality the share of queries
      whose documents contain a gold answer. The last two rows are for all last
      hops and for all earlier hops, where a gold answer is a leak.
    qualities: One row for each of QUALITIES; see `_quality`.
  """
  places = sorted({(one.pair.question.hops, one.pair.hop) for one in found
                   if one.pair.hop <= one.pair.question.hops})
  answers = [
      _answers(f'{hop} of {hops}', (
          one for one in found
          if (one.pair.question.hops, one.pair.hop) == (hops, hop)))
      for hops, hop in places]
  answers += [
      _answers('the last hop', (one for one in found
                                if one.pair.hop == one.pair.question.hops)),
      _answers('earlier: a leak', (one for one in found
                                   if one.pair.hop < one.pair.question.hops))]
  return {'answers': answers,
          'qualities': [_quality(found, name) for name in QUALITIES]}


def _answers(search: str, found: Iterable[Compared]) -> dict[str, Any]:
  """Returns a row with the shares of queries whose documents contain a gold.

  The shares are None where there are no queries.
  """
  found = list(found)
  return {'search': search, 'n': len(found)} | {
      name: statistics.mean(_holds(one, name) for one in found)
      if found else None for name in QUALITIES}


def _holds(one: Compared, quality: str) -> bool:
  golds = one.pair.question.answers
  return any(rewards.cover_match(text, golds) for text in getattr(one, quality))


def _quality(found: Sequence[Compared], name: str) -> dict[str, Any]:
  """Returns a row that describes the form of the documents of a quality.

  well-formed: Share of texts that are lists of documents. The rest uses these.
  documents: Mean number of documents per list.
  words, and words, sd: Mean and standard deviation of a document's words.
  repeated: Share of lists that contain a document twice.
  auc: Area under the ROC curve of a classifier that distinguishes these
    documents from the real ones for the same queries.
  """
  lists = [getattr(one, name) for one in found if getattr(one, name)]
  words = [len(text.split()) for texts in lists for text in texts]
  return {
      'documents are': name,
      'well-formed': len(lists) / max(len(found), 1),
      'documents': statistics.mean(map(len, lists)) if lists else None,
      'words': statistics.mean(words) if words else None,
      'words, sd': statistics.pstdev(words) if words else None,
      'repeated': statistics.mean(
          len(set(texts)) < len(texts) for texts in lists) if lists else None,
      'auc': _auc(found, name)}


def _auc(found: Sequence[Compared], name: str) -> float | None:
  """Returns the AUC; None for real documents, or if too few are well-formed."""
  pairs = [one for one in found if getattr(one, name)]
  if name == 'real':
    return None
  return separability.auc(
      [' '.join(one.real) for one in pairs],
      [' '.join(getattr(one, name)) for one in pairs],
      [one.pair.question.uid for one in pairs])


def text(made: dict[str, Any]) -> str:
  """Returns the tables of a report as text."""
  return '\n'.join([
      'Queries whose documents hold a gold answer, by the nth search of all',
      '', figures.table(made['answers'], tuple(made['answers'][0])), '',
      'Form of the documents; auc: of a classifier, .5 if it cannot tell them '
      'from real ones', '',
      figures.table(made['qualities'], tuple(made['qualities'][0])), ''])


def samples(found: Sequence[Compared]) -> str:
  """Returns a Markdown table of queries and the documents of each quality."""
  lines = ['| query, question, answer | real | useful | noisy |',
           '|---' * 4 + '|']
  for one in found:
    question = one.pair.question
    asked = (one.pair.query, f'{question.text} (search {one.pair.hop} of '
             f'{question.hops})', ', '.join(question.answers))
    cells = [asked, *(_numbered(getattr(one, name)) for name in QUALITIES)]
    lines.append('| ' + ' | '.join(
        '<br>'.join(map(_escaped, cell)) for cell in cells) + ' |')
  return '\n'.join(lines) + '\n'


def _escaped(text: str) -> str:
  return text.replace('|', r'\|').replace('<', '&lt;')


def _numbered(texts: Sequence[str]) -> list[str]:
  return [f'{n}. {text}' for n, text in enumerate(texts, start=1)] or [
      'malformed']
