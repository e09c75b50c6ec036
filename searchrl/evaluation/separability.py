# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Measure of how well a classifier distinguishes two kinds of texts."""

from collections.abc import Sequence

FOLDS = 5


def auc(one: Sequence[str], other: Sequence[str], groups: Sequence[str]
       ) -> float | None:
  """Returns the area under the ROC curve of a classifier on held-out texts.

  The classifier is a logistic regression on the tf-idf of character trigrams,
  in five-fold cross-validation. At 0.5 it cannot distinguish the two kinds; at
  1 it always does.

  Args:
    one: Texts of one kind.
    other: Texts of the other kind, as many as in `one`.
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
  kinds = [0] * len(one) + [1] * len(other)
  classifier = pipeline.make_pipeline(
      feature_extraction.text.TfidfVectorizer(
          analyzer='char', ngram_range=(3, 3), lowercase=False,
          sublinear_tf=True),
      linear_model.LogisticRegression(C=10.0, max_iter=1000))
  scores = model_selection.cross_val_predict(
      classifier, [*one, *other], kinds, groups=[*groups, *groups],
      cv=model_selection.GroupKFold(FOLDS), method='decision_function')
  return float(metrics.roc_auc_score(kinds, scores))
