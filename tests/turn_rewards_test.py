# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""turn_rewards: what each turn of a trajectory is worth, by hand."""

import dataclasses

import pytest
import tiny

from searchrl.agent import turn_rewards
from searchrl.trajectory import Action, Passage, Trajectory, Turn

LOT = Passage('a', 'Lot', 'A river of France')
TARN = Passage('b', 'Tarn', 'It joins the Garonne')


def search(query, *passages):
  text = ' '.join(f'{p.title} {p.text}' for p in passages)
  return Turn((1,), (0.0,), Action('search', (query,)), (2,), passages,
              observation=f'<information>{text}</information>')


def rewards(*turns, gold_passages=(), **options):
  question = dataclasses.replace(
      tiny.question(answers=('Garonne',)), gold_passages=gold_passages)
  return turn_rewards.evidence(
      Trajectory(question, 0, 0, (1,), turns, 'answer'), **options)


def test_new_evidence_counts_once():
  answer = Turn((1,), (0.0,), Action('answer', ('Garonne',)))
  assert rewards(search('lot', LOT), search('tarn', LOT, TARN),
                 search('tarn again', TARN), answer) == [0, 1, 0, None]


@pytest.mark.parametrize('gold_passages', [('a',), ('The Lot',), ('a', 'Lot', 'x')])
def test_evidence_is_a_gold_passage_where_the_question_names_them(gold_passages):
  """It is found by id or title, even if the passage does not say the answer."""
  untitled = Passage('c', '', 'Garonne')
  assert rewards(
      search('tarn', TARN, untitled), search('lot', LOT), search('lot!', LOT),
      gold_passages=gold_passages) == [0, 1, 0]
  assert rewards(search('tarn', untitled), gold_passages=('The',)) == [0]


def test_evidence_that_was_cut_from_the_observation_is_not_read():
  turn = search('tarn', TARN)
  cut = Turn(**vars(turn) | {'observation': '<information>It</information>'})
  assert rewards(cut) == [0]


def test_repeated_queries_and_invalid_turns_cost():
  retry = Turn((1,), (0.0,), Action('invalid'), (2,), observation='Try again')
  assert rewards(
      search('tarn', TARN), search('The  Tarn!', TARN), retry, retry,
      search('lot', LOT), new=2.0, duplicate=0.5, invalid=0.25) == [
          2, -0.5, -0.25, -0.25, 0]
