# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""measures: cases by hand, and trec_eval's numbers through ir-measures."""

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
  assert ir_metrics.word_recall(found, golds, rewards.normalise) == words


def test_relevance_by_hand():
  ranked = ['a', 'b', 'c', 'd']
  assert [ir_metrics.hit(ranked, {'c'}, k) for k in (0, 2, 3)] == [0, 0, 1]
  assert ir_metrics.reciprocal_rank(ranked, {'c', 'd'}, 10) == 1 / 3
  assert ir_metrics.reciprocal_rank(ranked, {'c'}, 2) == 0
  # Gains 1 at rank 2 and 3 at rank 4, against 3 at rank 1 and 1 at rank 2.
  expected = (1 / np.log2(3) + 3 / np.log2(5)) / (3 + 1 / np.log2(3))
  np.testing.assert_allclose(
      ir_metrics.ndcg(ranked, {'b': 1, 'd': 3, 'z': 0}, 4), expected)
  assert ir_metrics.ndcg(ranked, {}, 4) == 0


@pytest.mark.parametrize('seed', range(10))
def test_numbers_are_those_of_trec_eval(seed):
  ir = pytest.importorskip('ir_measures')
  rng = np.random.default_rng(seed)
  k = int(rng.integers(1, 12))
  run, qrels, ours = [], [], []
  for topic in range(6):
    ranked = [str(i) for i in rng.permutation(20)[:rng.integers(1, 15)]]
    grades = {str(i): int(rng.integers(0, 4))
              for i in rng.permutation(20)[:rng.integers(1, 9)]}
    run += [ir.ScoredDoc(str(topic), uid, 100.0 - i)
            for i, uid in enumerate(ranked)]
    qrels += [ir.Qrel(str(topic), uid, grade) for uid, grade in grades.items()]
    relevant = {uid for uid, grade in grades.items() if grade > 0}
    ours.append((ir_metrics.ndcg(ranked, grades, k),
                 ir_metrics.reciprocal_rank(ranked, relevant, k),
                 ir_metrics.hit(ranked, relevant, k)))
  names = [ir.nDCG @ k, ir.RR @ k, ir.Success @ k]
  theirs = {(m.query_id, str(m.measure)): m.value
            for m in ir.iter_calc(names, qrels, run)}
  for topic, values in enumerate(ours):
    for name, value in zip(names, values):
      np.testing.assert_allclose(
          value, theirs[str(topic), str(name)], atol=1e-9, err_msg=str(name))


def test_a_set_of_questions():
  questions = [Question(f'{i}', text, (gold,)) for i, (text, gold) in enumerate(
      [('found', 'Elba'), ('part', 'lba'), ('not', 'Oder'), ('late', 'Elba'),
       ('x', 'Yes'), ('y', 'the')])]
  asked = []

  def search(queries):
    asked.append([(q.text, q.top_k) for q in queries])
    return [SearchError('timeout') if q.text == 'late' else
            passages('', 'On Elba.') for q in queries]

  values = ir_metrics.answers(search, questions, top_ks=(1, 3), batch=3,
                            normalise=rewards.normalise)
  assert values == pytest.approx({
      'retrieval/recall@1': 0, 'retrieval/word_recall@1': 0,
      'retrieval/recall@3': 0.5, 'retrieval/word_recall@3': 0.25,
      'retrieval/failed': 0.25, 'retrieval/left_out': 1 / 3})
  assert asked == [[('found', 3), ('part', 3), ('not', 3)], [('late', 3)]]
  assert ir_metrics.answers(search, [], top_ks=(3,), normalise=str) == {
      'retrieval/recall@3': 0, 'retrieval/word_recall@3': 0,
      'retrieval/failed': 0, 'retrieval/left_out': 1}
