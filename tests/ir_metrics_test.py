# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ir_metrics: answer recall by hand, and its mean over a set of questions."""

import numpy as np
import pytest

from searchrl.agent import rewards
from searchrl.search import ir_metrics
from searchrl.trajectory import Passage, Question, SearchError


def passages(*texts):
  return tuple(Passage(str(i), 'The Title', text)
               for i, text in enumerate(texts))


@pytest.mark.parametrize('texts, golds, substring, words', [
    (['Paris is big.'], ['paris'], 1, 1),
    (['It was a party.'], ['art'], 1, 0),  # the trap of substrings
    (['In the U.S. of A.'], ['us'], 1, 1),
    (['nothing'], ['title'], 1, 1),
    (['x', 'y, the\nAnswer!'], ['no', 'an answer'], 1, 1),
    (['anything'], ['the', '?!', ''], 0, 0),
    ([], ['x'], 0, 0),
    (['x'], [], 0, 0),
    (['new york'], ['york new'], 0, 0),
])
def test_answers_in_passages(texts, golds, substring, words):
  found = passages(*texts)
  assert ir_metrics.answer_recall(found, golds, rewards.normalise) == substring
  assert ir_metrics.answer_recall(
      found, golds, rewards.normalise, whole_words=True) == words


def test_a_set_of_questions():
  questions = [Question(f'{i}', text, (gold,)) for i, (text, gold) in enumerate(
      [('found', 'Elba'), ('part', 'lba'), ('not', 'Oder'), ('late', 'Elba'),
       ('x', 'Yes'), ('y', 'the')])]
  batches = []

  def search(queries):
    batches.append([(q.text, q.top_k) for q in queries])
    return [SearchError('timeout') if q.text == 'late' else
            passages('', 'On Elba.') for q in queries]

  values = ir_metrics.answers(search, questions, top_ks=(1, 3), batch=3,
                              normalise=rewards.normalise)
  assert values == pytest.approx({
      'retrieval/recall@1': 0, 'retrieval/word_recall@1': 0,
      'retrieval/recall@3': 0.5, 'retrieval/word_recall@3': 0.25,
      'retrieval/failed': 0.25, 'retrieval/left_out': 1 / 3})
  assert batches == [[('found', 3), ('part', 3), ('not', 3)], [('late', 3)]]
  assert ir_metrics.answers(search, [], top_ks=(3,), normalise=str) == {
      'retrieval/recall@3': 0, 'retrieval/word_recall@3': 0,
      'retrieval/failed': 0, 'retrieval/left_out': 1}


def test_recall_is_the_success_of_ir_measures():
  """It is Success@k, if passages that hold the answer are the relevant ones."""
  irm = pytest.importorskip('ir_measures')
  rng = np.random.default_rng(0)
  questions = [Question(f'{i}', f'{i}', (f'word{i}',)) for i in range(40)]
  found = {q.text: passages(*(f'so word{rng.integers(40) if hide else q.text}.'
                              for hide in rng.random(5) < 0.9))
           for q in questions}
  values = ir_metrics.answers(
      lambda queries: [found[q.text] for q in queries], questions,
      top_ks=(1, 3, 5), normalise=rewards.normalise)
  qrels = [irm.Qrel(q.uid, p.id, int(f'{q.answers[0]}.' in p.text))
           for q in questions for p in found[q.text]]
  ranked = [irm.ScoredDoc(q.uid, p.id, -rank) for q in questions
            for rank, p in enumerate(found[q.text])]
  theirs = irm.calc_aggregate(
      [irm.Success @ k for k in (1, 3, 5)], qrels, ranked)
  for k in (1, 3, 5):
    assert values[f'retrieval/word_recall@{k}'] == pytest.approx(
        theirs[irm.Success @ k])
  assert 0.1 < values['retrieval/word_recall@5'] < 1
