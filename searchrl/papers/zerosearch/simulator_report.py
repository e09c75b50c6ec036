# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of a simulated engine with a real one, query by query.

It measures how often the documents contain the answer when they should, and
how often they do so too early. It also measures their length and form, and how
well a classifier distinguishes them from real documents.
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import statistics
from typing import Any

from searchrl.agent import rewards
from searchrl.evaluation import figures
from searchrl.papers.zerosearch.query_pairs import Pair

QUALITIES = ('real', 'useful', 'noisy')
FOLDS = 5  # number of parts in the cross-validation of the classifier


@dataclasses.dataclass(frozen=True)
class Compared:
  """A query and each engine's documents; () where a text was malformed."""

  pair: Pair
  real: tuple[str, ...]
  useful: tuple[str, ...]  # simulated documents that should help
  noisy: tuple[str, ...]  # simulated documents that should not help


def report(compared: Sequence[Compared]) -> dict[str, Any]:
  """Returns the tables of the comparison, as a dict that `text` can print.

  Returns:
    answers: Rows with the keys {'search', 'n', 'real', 'useful', 'noisy'}. The
      search is for instance '2 of 3', the second search of questions of 3 hops.
      A row has the number n of its queries, and for each quality of documents
      the share of queries whose documents contain a gold answer. The last two
      rows are for all searches of a last hop, and for all earlier searches,
      where a gold answer is a leak.
    qualities: One row for each of QUALITIES, with the number, the length and
      the form of the documents.
  """
  groups = collections.defaultdict(list)
  for query in compared:
    groups[query.pair.question.hops, query.pair.hop].append(query)
  rows = {f'{hop} of {hops}': groups[hops, hop]
          for hops, hop in sorted(groups) if hop <= hops}
  rows['the last hop'] = [
      query for query in compared if query.pair.hop == query.pair.question.hops]
  rows['earlier: a leak'] = [
      query for query in compared if query.pair.hop < query.pair.question.hops]
  return {'answers': [_answers(*row) for row in rows.items()],
          'qualities': [_quality(compared, name) for name in QUALITIES]}


def _answers(search: str, compared: Sequence[Compared]) -> dict[str, Any]:
  """Returns a row: fractions of queries whose documents contain a gold answer.

  The fractions are None if there are no queries.
  """
  return {'search': search, 'n': len(compared)} | {
      name: _mean(any(rewards.cover_match(text, query.pair.question.answers)
                      for text in getattr(query, name)) for query in compared)
      for name in QUALITIES}


def _mean(values: Iterable[float]) -> float | None:
  values = list(values)
  return statistics.mean(values) if values else None


def _quality(compared: Sequence[Compared], name: str) -> dict[str, Any]:
  """Returns a row about the documents of one quality: real, useful or noisy.

  well-formed: Fraction of texts that are lists of documents. Only these are
    used for the other values.
  documents: Mean number of documents per list.
  words; words, sd: Mean and standard deviation of a document's words.
  repeated: Fraction of lists that contain a document twice.
  auc: Area under the ROC curve of a classifier that distinguishes these
    documents from the real ones for the same queries.
  """
  formed = [query for query in compared if getattr(query, name)]
  lists = [getattr(query, name) for query in formed]
  words = [len(text.split()) for texts in lists for text in texts]
  return {
      'documents are': name,
      'well-formed': len(lists) / max(len(compared), 1),
      'documents': _mean(map(len, lists)),
      'words': _mean(words),
      'words, sd': statistics.pstdev(words) if words else None,
      'repeated': _mean(len(set(texts)) < len(texts) for texts in lists),
      'auc': None if name == 'real' else separability(
          [' '.join(query.real) for query in formed], [*map(' '.join, lists)],
          [query.pair.question.uid for query in formed])}


def separability(real: Sequence[str], written: Sequence[str],
                 groups: Sequence[str]) -> float | None:
  """Returns the area under the ROC curve of a classifier of two kinds of texts.

  The classifier is a logistic regression on the tf-idf of character trigrams,
  in five-fold cross-validation: it is tested on texts held out from training.
  At 0.5 it cannot distinguish the two kinds; at 1 it always does.

  Args:
    real: Texts of one kind.
    written: Texts of the other kind, as many as in `real`.
    groups: Group of the nth text of either kind. A group is in one fold.

  Returns:
    The area, or None if there are fewer groups than folds.
  """
  from sklearn import feature_extraction  # slow to import
  from sklearn import linear_model
  from sklearn import metrics
  from sklearn import model_selection
  from sklearn import pipeline
  if len({*groups}) < FOLDS:
    return None
  kinds = [0] * len(real) + [1] * len(written)
  classifier = pipeline.make_pipeline(
      feature_extraction.text.TfidfVectorizer(
          analyzer='char', ngram_range=(3, 3), lowercase=False,
          sublinear_tf=True),
      linear_model.LogisticRegression(C=10.0, max_iter=1000))
  scores = model_selection.cross_val_predict(
      classifier, [*real, *written], kinds, groups=[*groups, *groups],
      cv=model_selection.GroupKFold(FOLDS), method='decision_function')
  return float(metrics.roc_auc_score(kinds, scores))


def text(report: dict[str, Any]) -> str:
  """Returns the tables of a report as text."""
  return '\n'.join([
      'Queries whose documents hold a gold answer, by the nth search of all',
      '', figures.table(report['answers']), '',
      'Form of the documents; auc: of a classifier, .5 if it cannot tell them '
      'from real ones', '',
      figures.table(report['qualities']), ''])


def samples(compared: Sequence[Compared]) -> str:
  """Returns a Markdown table of queries and the documents of each quality."""
  lines = ['| query, question, answer | real | useful | noisy |',
           '|---' * 4 + '|']
  for query in compared:
    pair, question = query.pair, query.pair.question
    cells = [
        [pair.query, f'{question.text} (search {pair.hop} of {question.hops})',
         ', '.join(question.answers)],
        *(_numbered(getattr(query, name)) for name in QUALITIES)]
    lines.append('| ' + ' | '.join(
        '<br>'.join(map(_escaped, cell)) for cell in cells) + ' |')
  return '\n'.join(lines) + '\n'


def _escaped(text: str) -> str:
  return text.replace('|', r'\|').replace('<', '&lt;')


def _numbered(texts: Sequence[str]) -> list[str]:
  return [f'{n}. {text}' for n, text in enumerate(texts, start=1)] or [
      'malformed']
