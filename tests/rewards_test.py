# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""rewards: normalisation and scores of the five systems, their bugs aside."""

import dataclasses
import itertools

import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.agent import tools
from searchrl.models.inference import stops
from searchrl.rollouts import scoring
from searchrl.trajectory import (
    Action, Passage, Question, Trajectory, Turn)


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


@pytest.mark.parametrize('texts, reward, outcome', [
    (['<answer> Paris </answer>'], 1, 1),
    ([SEARCHED, SEARCHED, '<answer> Paris </answer>'], .8, 1),
    ([SEARCHED, '<answer> Rome </answer>'], -.1, 0)])
def test_a_fee_for_each_search_is_no_part_of_the_outcome(
    texts, reward, outcome):
  scores = rewards.em_with_fee(trajectory_of(*texts, golds=('Paris',)), fee=.1)
  assert (scores.reward, scores.outcome) == (pytest.approx(reward), outcome)


def test_only_an_answer_action_is_an_answer():
  """An answer in a passage or in a query earns nothing."""
  turn = Turn((1,), (0.0,), Action('search', ('Paris',)), (2,))
  question = tiny.question(answers=('Paris',))
  trajectory = Trajectory(question, 0, 0, (1,), (turn,), 'turn_limit')
  assert [f(trajectory) for f in (rewards.em, rewards.subem, rewards.f1)] == [
      0, 0, 0]


@pytest.mark.parametrize('text, expected', [
    ('<answer> a </answer> or <answer> b </answer>', 'a'),
    ('<think> <answer> a </answer>? no </think> <answer> b </answer>', 'a'),
    ('<answer> a or <answer> b </answer>', 'b'),
    ('<answer> a </answer', None),
    ('<answer> </answer> <answer> b </answer>', None),
])
@pytest.mark.parametrize('make', [dialogues.tags, lambda: dataclasses.replace(
    dialogues.tags(), parse=tools.parse, stop_strings=(
        '</tool_call>', '</answer>'))])
def test_the_first_answer_that_is_closed_ends_a_trajectory_and_counts(
    make, text, expected):
  """It does so in a text that goes on, too, as from an engine without stops."""
  dialogue, tokenizer = make(), tiny.Tokenizer()
  table = stops.compile_table(tokenizer.token_bytes, dialogue.stop_strings)
  state, sampled = 0, []
  for id_ in tokenizer.encode(text):  # until the engine stops
    sampled.append(id_)
    if table.hit[state, id_]:
      break
    state = table.next_state[state, id_]
  for said in (tokenizer.decode(sampled), text):
    turn = Turn((1,), (0.0,), dialogue.parse(said), text=said)
    assert Trajectory(
        tiny.question(), 0, 0, (1,), (turn,)).answer == expected


PARIS = (Passage('1', 'France', 'Its capital is Paris.'),)
THOUGHT = '<think> t </think>'


def conversation(*texts, read=PARIS, golds=('Paris',), **fields):
  """A trajectory in tags; each search but the last turn's finds `read`."""
  turns = []
  for i, text in enumerate(texts):
    action = dialogues.parse_tags(text)
    shown = action.is_search and i + 1 < len(texts)
    turns.append(Turn(
        (1,), (0.0,), action, (2,) * shown, read if shown else (), text=text,
        observation='\n\n<information>' + ''.join(
            dialogues.tag_passage(n, p) for n, p in enumerate(read, 1)) +
        '</information>\n\n' if shown else ''))
  return Trajectory(tiny.question(answers=golds), 0, 0, (1,), tuple(turns),
                    'answer', prompt='where?', **fields)


def study_case(right, valid, found, **fields):
  """A trajectory with these three properties."""
  return conversation(
      (THOUGHT if valid else 'So: ') + '<search> capital </search>',
      f'{THOUGHT}<answer> {"Paris" if right else "Rome"} </answer>',
      read=PARIS if found else (Passage('1', 'France', 'A country.'),),
      **fields)


def scores_of(judge, *trajectories):
  return judge.score(trajectories)


@pytest.mark.parametrize('right, valid, found, eq3, eq4', [
    (True, True, True, 1, 1),
    (True, True, False, 1, 1),
    (True, False, True, 1 - .3, 1 - .3),
    (True, False, False, 1 - .3, 1 - .3),
    (False, True, True, .3, .3 + .05),
    (False, True, False, .3, .3),
    (False, False, True, 0, 0),
    (False, False, False, 0, 0),
])
def test_the_studys_equations_3_and_4(right, valid, found, eq3, eq4):
  case = study_case(right, valid, found)
  for judge, wanted in (
      (rewards.format_em(lambda_f=.3), eq3),
      (rewards.retrieval(lambda_f=.3, lambda_r=0), eq3),
      (rewards.retrieval(lambda_f=.3, lambda_r=.05), eq4)):
    one, = scores_of(judge, case)
    assert one.reward == pytest.approx(wanted) and one.outcome is None
    assert one.parts['em'] == right and one.parts['format'] == valid
    assert one.parts.get('retrieval', valid and found) == (valid and found)
  published, = scores_of(rewards.format_em(lambda_f=.3, invalid=.1), case)
  assert published.reward == pytest.approx(
      eq3 if right or valid else .1)
  fatal, = scores_of(rewards.retrieval(lambda_f=.3, lambda_r=.05, fatal=True),
                     case)
  assert fatal.reward == pytest.approx(eq4 if valid else 0)


@pytest.mark.parametrize('answer, right', [
    ('Rome', 1.0), ('Rome Italy', 2 / 3), ('Oslo', 0.0)])
@pytest.mark.parametrize('valid', [True, False])
def test_format_f1_is_equation_3_at_its_ends_and_linear_between(
    answer, right, valid):
  case = conversation((THOUGHT if valid else 'so ') + f'<answer> {answer} </answer>')
  case = dataclasses.replace(case, question=dataclasses.replace(
      case.question, answers=('Rome',)))
  one, = scores_of(rewards.format_f1(lambda_f=.3, invalid=.1), case)
  assert one.parts == dict(f1=pytest.approx(right), format=float(valid))
  best, worst = (1.0, .3) if valid else (1 - .3, .1)
  assert one.reward == pytest.approx(worst + right * (best - worst))
  em, = scores_of(rewards.format_em(lambda_f=.3, invalid=.1), case)
  if right in (0, 1):
    assert em.reward == one.reward
  with pytest.raises(ValueError, match='reward_options.lambda_f must be'):
    rewards.format_f1(lambda_f=2)


def test_defaults_are_the_papers():
  cases = [study_case(*case)
           for case in itertools.product((True, False), repeat=3)]
  assert scores_of(rewards.format_em(), *cases) == scores_of(
      rewards.format_em(lambda_f=.2, invalid=0.0), *cases)
  assert scores_of(rewards.retrieval(), *cases) == scores_of(
      rewards.retrieval(lambda_f=.2, lambda_r=.1), *cases)
  assert rewards.format_em().one_by_one and not rewards.format_em().collective


def test_an_answer_at_once_is_not_enough_where_a_search_is_asked_for():
  at_once = conversation(THOUGHT + '<answer> Rome </answer>')
  for judge in (rewards.format_em, rewards.retrieval):
    assert scores_of(judge(), at_once)[0].reward == .2
    assert scores_of(judge(needs_search=True), at_once)[0].reward == 0
    assert scores_of(judge(needs_search=True),
                     study_case(False, True, False))[0].reward == .2


def test_groups_of_one_outcome_get_exact_match_alone():
  group = lambda n, *cases: [
      study_case(right, valid, True, group=n) for right, valid in cases]
  wrong = group(4, (False, True), (False, False))
  right = group(7, (True, True), (True, False))
  mixed = group(5, (True, False), (False, True), (False, False))
  shuffled = [wrong[0], mixed[0], right[0], mixed[1], wrong[1], mixed[2],
              right[1]]
  judge = rewards.retrieval(lambda_f=.3, lambda_r=.05, mixed_only=True)
  assert not judge.one_by_one
  found = scores_of(judge, *shuffled)
  assert [s.reward for s in found] == pytest.approx(
      [0, 1 - .3, 1, .35, 0, 0, 1])
  assert [s.parts['format'] for s in found] == [1, 0, 1, 1, 0, 0, 0]
  scored = scoring.Scorer(judge)(shuffled)
  assert [t.outcome_reward for t in scored] == [0, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize('golds, read, found', [
    (('Paris',), PARIS, True),
    (('its, CAPITAL',), PARIS, True),
    (('Rome', 'the Paris'), PARIS, True),
    (('The', '...', ''), PARIS, False),  # they normalise to nothing
    (('information', 'Doc'), PARIS, False),  # of the frame, no passage
    (('France its',), PARIS, True),  # a title and its text are one passage
    (('Paris Lyon',), (*PARIS, Passage('2', 'Lyon', '')), False),
    (('Paris',), (), False),
])
def test_a_gold_is_found_in_a_passage(golds, read, found):
  assert rewards.found_gold(conversation(
      '<search> x </search>', '', golds=golds, read=read)) == found


def test_a_gold_is_found_only_where_the_policy_read_it():
  case = conversation('<search> x </search>', '')
  shown, last = case.turns
  cut = dataclasses.replace(shown, observation='<information>Its capital i')
  assert not rewards.found_gold(
      dataclasses.replace(case, turns=(cut, last)))
  unread = conversation('<search> Paris </search>')
  assert not rewards.found_gold(dataclasses.replace(
      unread, turns=(dataclasses.replace(unread.turns[0], passages=PARIS),)))


@pytest.mark.parametrize('options, message', [
    (dict(lambda_f=1.2), r'lambda_f must be a number in \[0, 1\].*is 1.2'),
    (dict(lambda_f='.2'), 'lambda_f must be a number in .* is .[.]2.'),
    (dict(lambda_f=-.1), 'lambda_f must be a number in .* is -0.1'),
    (dict(lambda_f=float('nan')), 'lambda_f must be a number in .* is nan'),
    (dict(invalid=2), 'reward_options.invalid must be a number in .* is 2'),
    (dict(invalid=.1, fatal=True), 'invalid must be 0 with fatal=True'),
    (dict(invalid=.7, lambda_f=.4), r'reward_options.invalid must be at most '
     r'1 - lambda_f = 0.6, so that no wrong answer .* but is 0.7'),
])
def test_options_outside_their_range_are_refused(options, message):
  for judge in (rewards.format_em, rewards.retrieval):
    with pytest.raises(ValueError, match=message):
      judge(**options)
  with pytest.raises(ValueError, match='lambda_r must be a number in .* is 3'):
    rewards.retrieval(lambda_r=3)
  with pytest.raises(ValueError, match='lambda_r must be at most 1 - lambda_f '
                     '= 0.2, .* but is 0.5'):
    rewards.retrieval(lambda_f=.8, lambda_r=.5)
  rewards.retrieval(lambda_f=.7, lambda_r=.3)


@pytest.mark.parametrize('gold', ['C:\\temp', '\\rho', 'List<String>'])
def test_a_gold_with_an_escape_or_a_tag_is_found(gold):
  passage = Passage('1', 'T', f'it is {gold} here')
  turn = Turn((1,), (0.,), Action('search', ('q',)), (2,), (passage,),
              observation=dialogues.tag_passage(1, passage))
  question = Question('u', 'q', (gold,))
  assert rewards.with_gold(turn, question) == [passage]
  unread = dataclasses.replace(turn, observation='it is')
  assert not rewards.with_gold(unread, question)
