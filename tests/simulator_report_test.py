# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""simulator_report: a report whose every number is counted by hand."""

import pytest

from searchrl.papers.zerosearch import query_pairs
from searchrl.papers.zerosearch import simulator_report as simulator
from searchrl.trajectory import Question


def compared(uid, hop, hops, real, useful, noisy, query='a query'):
  question = Question(uid, f'which {uid}?', ('Tarn', 'the Tarn'), hops)
  return simulator.Compared(
      query_pairs.Pair(question, query, (), True, hop), real, useful, noisy)


HIT, MISS = 'The Tarn, a river.', 'A hill.'
FOUND = [
    compared('a', 1, 1, (HIT, MISS), (MISS, 'the TARN!'), (MISS,)),
    compared('b', 1, 1, (MISS,), (HIT,), ()),
    compared('c', 1, 2, (MISS,), (HIT, HIT), (MISS, MISS)),
    compared('c', 2, 2, (HIT,), (MISS,), (HIT,)),
    compared('d', 3, 2, (HIT,), (HIT,), (HIT,)),  # after the last hop
]


def test_answers_are_counted_where_they_should_stand_and_before():
  rows = {row['search']: row for row in simulator.report(FOUND)['answers']}
  assert list(rows) == ['1 of 1', '1 of 2', '2 of 2', 'the last hop',
                        'earlier: a leak']
  for search, n, real, useful, noisy in (
      ('1 of 1', 2, 0.5, 1.0, 0.0), ('1 of 2', 1, 0.0, 1.0, 0.0),
      ('2 of 2', 1, 1.0, 0.0, 1.0), ('the last hop', 3, 2 / 3, 2 / 3, 1 / 3),
      ('earlier: a leak', 1, 0.0, 1.0, 0.0)):
    row = rows[search]
    assert row['n'] == n
    assert [row['real'], row['useful'], row['noisy']] == pytest.approx(
        [real, useful, noisy])


def test_the_form_of_the_documents():
  real, useful, noisy = simulator.report(FOUND)['qualities']
  assert [row['well-formed'] for row in (real, useful, noisy)] == [1, 1, 0.8]
  assert real['documents'] == 6 / 5 and noisy['documents'] == 5 / 4
  assert noisy['words'] == pytest.approx((2 + 2 + 2 + 4 + 4) / 5)
  assert noisy['words, sd'] == pytest.approx((0.96) ** 0.5)
  assert [row['repeated'] for row in (real, useful, noisy)] == [0, 0.2, 0.25]
  assert [row['auc'] for row in (real, useful, noisy)] == [None] * 3  # too few


def test_a_classifier_sees_the_documents_of_both_for_equal_queries():
  many = [compared(f'q{n}', 1, 1, (f'The town {n} lies on the Tarn.',),
                   (f'The town {n} lies on the Tarn.',), (f'zzz {n} qqq.',))
          for n in range(40)]
  _, useful, noisy = simulator.report(many)['qualities']
  assert useful['auc'] == pytest.approx(0.5, abs=0.05) and noisy['auc'] > 0.99


def test_nothing_well_formed_is_said_without_a_number():
  broken = [compared('a', 1, 1, (HIT,), (), ())]
  _, useful, _ = simulator.report(broken)['qualities']
  assert useful['well-formed'] == 0 and useful['words'] is None
  assert 'the last hop' in simulator.text(simulator.report(broken))


def test_samples_stand_side_by_side_and_are_inert():
  hostile = compared('a', 1, 1, ('one | two',), ('<script>x</script>',), (),
                     query='a|b')
  head, rule, row = simulator.samples([hostile]).splitlines()
  assert head.count('|') == rule.count('|') == row.replace(r'\|', '').count('|')
  assert r'a\|b<br>which a? (search 1 of 1)<br>Tarn, the Tarn' in row
  assert r'1. one \| two' in row and '1. &lt;script>' in row
  assert row.endswith('| malformed |')
