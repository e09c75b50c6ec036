# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""How like a real engine a simulated one is, query by query.

Whether its documents hold the answer when they should, and not before; their
length and form; and whether a classifier tells them from real ones.
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
  """A query, and what each engine found; () where a text was malformed."""

  pair: Pair
  real: tuple[str, ...]
  useful: tuple[str, ...]  # simulated, as they should help
  noisy: tuple[str, ...]  # simulated, as they should not


def report(found: Sequence[Compared]) -> dict[str, Any]:
  """What `text` prints; shares and means are over the queries.

  Returns:
    answers: rows of the nth search of questions with so many hops, {'search',
      'n', 'real', 'useful', 'noisy'}: the share whose documents hold a gold.
    qualities: of each of QUALITIES, a row; see `_quality`.
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
  """How often the documents hold a gold; None where there is no query."""
  found = list(found)
  return {'search': search, 'n': len(found)} | {
      name: statistics.mean(_holds(one, name) for one in found)
      if found else None for name in QUALITIES}


def _holds(one: Compared, quality: str) -> bool:
  golds = one.pair.question.answers
  return any(rewards.cover_match(text, golds) for text in getattr(one, quality))


def _quality(found: Sequence[Compared], name: str) -> dict[str, Any]:
  """The form of the documents of a quality.

  well-formed: the share of texts that are lists of documents; of these,
  documents: how many, words: of a document, mean and standard deviation, and
  repeated: the share whose list has a document twice.
  auc: of a classifier of them and of real documents for the same queries.
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
  """None of real ones, and where too few are well-formed to tell."""
  pairs = [one for one in found if getattr(one, name)]
  if name == 'real':
    return None
  return separability.auc(
      [' '.join(one.real) for one in pairs],
      [' '.join(getattr(one, name)) for one in pairs],
      [one.pair.question.uid for one in pairs])


def text(made: dict[str, Any]) -> str:
  """The tables of a report."""
  return '\n'.join([
      'Queries whose documents hold a gold answer, by the nth search of all',
      '', figures.table(made['answers'], tuple(made['answers'][0])), '',
      'Form of the documents; auc: of a classifier, .5 if it cannot tell them '
      'from real ones', '',
      figures.table(made['qualities'], tuple(made['qualities'][0])), ''])


def samples(found: Sequence[Compared]) -> str:
  """Queries with the documents of each quality, in Markdown."""
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
