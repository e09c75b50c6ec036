# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""rewards: normalisation and scores of the five systems, their bugs aside."""

import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.trajectory import Action, Trajectory, Turn


def trajectory_of(*texts, golds=('Paris',)):
  """A trajectory with these texts as turns."""
  turns = tuple(Turn((1,), (0.0,), dialogues.parse_tags(text), (2,))
                for text in texts)
  return Trajectory(tiny.question(answers=golds), 0, 0, (1,), turns, 'answer')


@pytest.mark.parametrize('text, normal', [
    ('The  U.S.A.', 'usa'),
    ("rock 'n' roll", 'rock n roll'),
    ('a', ''), ('the', ''), ('', ''), (' An \n', ''), ('...', ''),
    ('10,000', '10000'),
    ('New-York', 'newyork'), ('New York', 'new york'),
    ('Beyoncé', 'beyoncé'),
    ('The Theatre of an Ant', 'theatre of ant'),
    ('a.b the-a', 'ab thea'),  # punctuation goes before articles do
    ('“quoted”', '“quoted”'),  # ASCII punctuation only
    ('İ', 'i̇'),
    ('x\t y\n\nz', 'x y z'),
])
def test_normalisation(text, normal):
  assert rewards.normalise(text) == normal
  assert rewards.normalise(normal) == normal


@pytest.mark.parametrize('answer, golds, em, subem, f1', [
    ('Paris', ['Paris'], 1, 1, 1),
    ('paris.', ['Paris'], 1, 1, 1),
    ('Rome', ['Paris'], 0, 0, 0),
    ('It is Paris, France', ['Paris'], 0, 1, 0.4),
    ('Paris', ['Rome', 'Paris'], 1, 1, 1),
    ('the city of Paris', ['Paris', 'Paris city'], 0, 1, 0.8),
    ('Parisian', ['Paris'], 0, 1, 0),  # characters, not words
    ('Par', ['Paris'], 0, 0, 0),
    ('New-York', ['New York'], 0, 0, 0),
    ('Beyonce', ['Beyoncé'], 0, 0, 0),
    ('zzz', ['The'], 0, 0, 0),  # a gold of nothing matches nothing
    ('', ['The'], 0, 0, 0), ('the', ['The'], 0, 0, 0),
    ('the', ['a', ''], 0, 0, 0),
    ('zzz', ['The', 'zzz'], 1, 1, 1),
    ('', ['Paris'], 0, 0, 0),
    ('a a b b', ['b c'], 0, 0, 2 * 1 / 4),  # 'a' is an article; b counts once
    ('b b', ['b b b'], 0, 0, 2 * 2 / 5),
])
def test_scores(answer, golds, em, subem, f1):
  assert rewards.exact_match(answer, golds) == em
  assert rewards.cover_match(answer, golds) == subem
  assert rewards.token_f1(answer, golds) == pytest.approx(f1)


SEARCHED = '<think> t </think>\n<search> capital </search>'


@pytest.mark.parametrize('texts, golds, em, subem, f1', [
    (['<think> t </think>\n<answer> Paris </answer>'], ['Paris'], 1, 1, 1),
    ([SEARCHED, '<think> t </think> <answer> paris. </answer>'], ['Paris'],
     1, 1, 1),
    ([SEARCHED, '<think> t </think> <answer> Rome </answer>'], ['Paris'],
     0, 0, 0),
    (['<answer> Paris </answer>'], ['Paris'], 1, 1, 1),
    (['no tags at all'], ['Paris'], 0, 0, 0),
    # Published code extracts the prompt's own example from a silent rollout.
    (['no tags at all'], ['Beijing'], 0, 0, 0),
    ([SEARCHED], ['Beijing'], 0, 0, 0),
    ([], ['Beijing'], 0, 0, 0),
    (['<think> a </think><think> b </think><answer> Paris </answer>'],
     ['Paris'], 1, 1, 1),
    (['<think> a </think> so <answer> Paris </answer>'], ['Paris'], 1, 1, 1),
    (['nonsense', '<answer> Paris </answer>'], ['Paris'], 1, 1, 1),
    (['<answer> It is Paris, France </answer>'], ['Paris'], 0, 1, 0.4),
    (['<answer> Paris'], ['Paris'], 0, 0, 0),
])
def test_rewards_of_whole_trajectories(texts, golds, em, subem, f1):
  trajectory = trajectory_of(*texts, golds=tuple(golds))
  assert rewards.em(trajectory) == em
  assert rewards.subem(trajectory) == subem
  assert rewards.f1(trajectory) == pytest.approx(f1)


def test_only_an_answer_action_is_an_answer():
  """What a passage or a query says earns nothing."""
  turn = Turn((1,), (0.0,), Action('search', ('Paris',)), (2,))
  question = tiny.question(answers=('Paris',))
  trajectory = Trajectory(question, 0, 0, (1,), (turn,), 'turn_limit')
  assert [f(trajectory) for f in (rewards.em, rewards.subem, rewards.f1)] == [
      0, 0, 0]
