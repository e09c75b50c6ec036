# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""demonstrations: which right answers are kept, and how they are written."""

import dataclasses

import tiny

from searchrl.agent import demonstrations
from searchrl.agent import rewards
from searchrl.trajectory import Action, Trajectory, Turn


def answered(uid, sample=0, hops=1, right=True):
  turns = (Turn((1,), (0.0,), Action('search', ('x',)), (2,), text='<search> x',
                observation='found'),
           Turn((3,), (0.0,), Action('answer', ('here' if right else 'no',)),
                text='<answer> here'))
  return Trajectory(tiny.question(uid, hops=hops), sample, 0, (1,), turns,
                    'answer', prompt='Ask: where?')


def kept(*found, most=1, balance=0.0):
  return [(t.question.uid, t.sample) for t in demonstrations.right(
      found, rewards.em, most=most, balance=balance)]


def test_right_answers_are_kept_the_first_of_a_question():
  found = [answered('a', 0, right=False), answered('a', 1), answered('a', 2),
           answered('b', 0, right=False)]
  assert kept(*found) == [('a', 1)]
  assert kept(*found, most=2) == [('a', 1), ('a', 2)]
  assert kept(found[0]) == []


def test_no_hop_count_is_more_than_so_many_times_the_rarest():
  found = [answered(f'one{n}') for n in range(9)] + [
      answered(f'two{n}', hops=2) for n in range(2)]
  uids = [uid for uid, _ in kept(*found, balance=2.0)]
  assert sum(uid.startswith('one') for uid in uids) == 4
  assert sum(uid.startswith('two') for uid in uids) == 2
  assert len(kept(*found)) == 11 and len(kept(*found, balance=9.0)) == 11


def test_a_line_is_trained_on_where_the_policy_wrote():
  assert demonstrations.segments(answered('a')) == {'segments': [
      {'text': 'Ask: where?', 'trained': False},
      {'text': '<search> x', 'trained': True},
      {'text': 'found', 'trained': False},
      {'text': '<answer> here', 'trained': True}]}
  alone = dataclasses.replace(answered('a'), turns=answered('a').turns[1:])
  assert len(demonstrations.segments(alone)['segments']) == 2
