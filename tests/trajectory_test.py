# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""trajectory: masks that follow from who wrote a token; packed, and saved."""

import dataclasses
import json

import numpy as np
import pytest
import tiny

from searchrl import trajectory
from searchrl.rollouts import records
from searchrl.trajectory import Action, Passage, Trajectory, Turn

SEARCH = Turn((5, 6), (-0.5, -0.25), Action('search', ('x',)), (7, 8, 9),
              (Passage('3', 'A "title"', 'Text, é\n.', 1.25),),
              text='<search> x', observation='<information>')
ANSWER = Turn((10,), (-2.0,), Action('answer', ('here',)), text='here')


def made(uid='q', sample=0, *, turns=(SEARCH, ANSWER), stop_reason='answer',
         reward=1.0, policy_step=4, prompt=(1, 2, 3)):
  return Trajectory(
      tiny.question(uid), sample, policy_step, prompt, tuple(turns),
      stop_reason, reward, outcome_reward=reward and reward / 2)


def collate(trajectories, **options):
  options = dict(group_ids=[t.question.uid for t in trajectories],
                 policy_step=4, length=12) | options
  return trajectory.collate(trajectories, **options)


def random_trajectory(rng, uid):
  def ids(low=0):
    return tuple(rng.integers(100, 200, rng.integers(low, 5)).tolist())

  turns = []
  for _ in range(rng.integers(0, 4)):
    action = ids(1)
    turns.append(Turn(action, tuple(-rng.exponential(size=len(action))),
                      Action('invalid'), ids()))
  return made(uid, turns=turns, prompt=ids(1))


def test_tokens_are_the_prompt_and_then_every_turn():
  rng = np.random.default_rng(0)
  for n in range(50):
    one = random_trajectory(rng, f'{n}')
    expected = list(one.prompt_tokens)
    sampled = []
    for turn in one.turns:
      sampled += range(len(expected), len(expected) + len(turn.action_tokens))
      expected += [*turn.action_tokens, *turn.observation_tokens]
    assert one.tokens == tuple(expected)
    assert np.flatnonzero(one.loss_mask).tolist() == sampled
    assert len(one.behavior_logprobs) == len(one.loss_mask) == len(one.tokens)
    logprobs = [p for turn in one.turns for p in turn.action_logprobs]
    assert [one.behavior_logprobs[i] for i in sampled] == logprobs
    assert sum(map(abs, one.behavior_logprobs)) == pytest.approx(
        -sum(logprobs))


def test_the_response_is_what_was_said_and_read_in_order():
  assert made().response == '<search> x<information>here'
  assert made(turns=()).response == ''


def test_a_record_without_texts_and_parts_is_read():
  record = records.to_json(made())
  del record['prompt'], record['parts']
  for turn in record['turns']:
    del turn['text'], turn['observation']
  old = records.from_json(json.loads(json.dumps(record)))
  assert (old.prompt, old.response, old.parts) == ('', '', {})
  assert old.tokens == made().tokens and old.question == made().question


def test_pack_lays_rows_side_by_side():
  batch = collate([made()], pad_id=99)
  assert batch.tokens.tolist() == [[1, 2, 3, 5, 6, 7, 8, 9, 10, 99, 99, 99]]
  assert batch.loss_mask.tolist() == [
      [False] * 3 + [True] * 2 + [False] * 3 + [True] + [False] * 3]
  assert batch.behavior_logprobs.tolist() == [
      [0, 0, 0, -0.5, -0.25, 0, 0, 0, -2, 0, 0, 0]]
  assert batch.rewards.tolist() == [1]
  assert batch.outcome_rewards.tolist() == [0.5]
  assert batch.lengths.tolist() == [9]
  assert (batch.in_baseline & batch.in_loss & batch.on_policy).all()


def test_pack_keeps_every_sampled_token_of_random_rows():
  rng = np.random.default_rng(1)
  trajectories = [random_trajectory(rng, f'{n}') for n in range(30)]
  batch = collate(trajectories, length=64)
  for row, one in enumerate(trajectories):
    n = batch.lengths[row]
    assert batch.loss_mask[row].sum() == sum(one.loss_mask)
    assert tuple(batch.tokens[row, :n]) == one.tokens[:n]
    assert not batch.tokens[row, n:].any()  # nothing after the last action
    np.testing.assert_array_equal(
        batch.behavior_logprobs[row, :n], np.float32(one.behavior_logprobs[:n]))


def test_observations_after_the_last_action_need_no_room():
  unanswered = made(turns=(SEARCH, SEARCH), stop_reason='turn_limit')
  batch = collate([unanswered], length=10)  # the trajectory has 13 tokens
  assert batch.lengths.tolist() == [10]
  assert batch.tokens[0, -2:].tolist() == [5, 6]


def test_filler_rows_have_no_mask_and_count_nowhere():
  batch = collate([made('a'), made('b')], rows=5)
  assert batch.tokens.shape == (5, 12)
  for field in ('loss_mask', 'in_baseline', 'in_loss', 'on_policy', 'lengths'):
    assert not getattr(batch, field)[2:].any(), field
    assert getattr(batch, field)[:2].any(), field


def test_groups_and_questions_are_numbered_from_zero():
  trajectories = [made(uid) for uid in 'bbaab']
  group_ids = [(1, 'x'), (1, 'x'), 2, (1, 'x'), 3]
  batch = collate(trajectories, group_ids=group_ids, rows=6)
  assert batch.question_ids.tolist() == [0, 0, 1, 1, 0, 0]
  assert batch.group_ids.tolist() == [0, 0, 1, 0, 2, 0]


def test_a_failed_search_is_counted_out():
  failed = made(turns=(SEARCH,), stop_reason='search_error', reward=None)
  batch = collate([made(), failed])
  assert batch.in_baseline.tolist() == [True, False]
  assert batch.in_loss.tolist() == [True, False]
  assert not batch.loss_mask[1].any()
  assert np.isfinite(batch.rewards).all()


@pytest.mark.parametrize('reason, left_out', [
    ('answer', False), ('turn_limit', True), ('length_limit', True)])
def test_mask_truncated_leaves_rows_in_the_baseline(reason, left_out):
  trajectories = [made(stop_reason=reason)]
  assert collate(trajectories).in_loss.tolist() == [True]
  batch = collate(trajectories, mask_truncated=True)
  assert batch.in_loss.tolist() == [not left_out]
  assert batch.loss_mask.any() == (not left_out)
  assert batch.in_baseline.tolist() == [True]
  assert batch.rewards.tolist() == [1]


def test_a_row_without_a_sampled_token_is_in_no_loss():
  batch = collate([made(turns=(), stop_reason='length_limit', reward=0.0)])
  assert batch.in_baseline.tolist() == [True]
  assert batch.in_loss.tolist() == [False]


def test_rows_of_an_earlier_policy_are_flagged():
  batch = collate([made(policy_step=4), made(policy_step=3)])
  assert batch.on_policy.tolist() == [True, False]
  assert batch.in_loss.all()


@pytest.mark.parametrize('trajectories, options, message', [
    ([made(), made()], dict(rows=1), 'at least the number of trajectories, 2'),
    ([made()], dict(length=8), "at most 8 tokens, .*sample 0, has 9 tokens"),
    ([made()], dict(group_ids=[]), 'one entry a trajectory, 1, but has 0'),
    ([made(stop_reason=None)], {}, "'q', sample 0, has no stop_reason"),
    ([made(reward=None)], {}, "'q', sample 0, has no reward"),
    ([made(turns=(dataclasses.replace(
        SEARCH, action_logprobs=SEARCH.action_logprobs[:-1]), ANSWER))], {},
     "'q', sample 0, has action_logprobs that are not one per action token"),
    ([made(turns=(  # the sum of the lengths is right
        dataclasses.replace(
            SEARCH, action_logprobs=SEARCH.action_logprobs[:-1]),
        dataclasses.replace(
            ANSWER, action_logprobs=(*ANSWER.action_logprobs, -1.0))))], {},
     "'q', sample 0, has action_logprobs that are not one per action token"),
    ([made(), made()], dict(rows=3, contexts=2),
     'number of trajectories, 2 times contexts, 2, but is 3'),
])
def test_what_cannot_be_packed_is_named(trajectories, options, message):
  with pytest.raises(ValueError, match=message):
    collate(trajectories, **options)


def test_json_text_brings_a_trajectory_back_exactly():
  rng = np.random.default_rng(2)
  trajectories = [made(), made(turns=()),
           made(stop_reason='search_error', reward=None),
           dataclasses.replace(made(), turn_rewards=(0.5, None)),
           *(random_trajectory(rng, f'{n}') for n in range(10))]
  for one in trajectories:
    text = json.dumps(records.to_json(one))
    assert records.from_json(json.loads(text)) == one
    assert records.from_json(records.to_json(one)) == one
    hash(records.from_json(json.loads(text)))  # tuples throughout


def test_counts_survive_json_text_and_records_without_them_are_read():
  cut = dataclasses.replace(SEARCH, passages_cut=1)
  counted = dataclasses.replace(made(turns=(cut, ANSWER)), retries=2)
  record = json.loads(json.dumps(records.to_json(counted)))
  assert records.from_json(record) == counted
  del record['retries'], record['turn_rewards']
  for turn in record['turns']:
    del turn['passages_cut']
  assert records.from_json(record) == made()


def test_a_batch_is_a_pytree_whose_missing_fields_are_no_leaves():
  import jax
  batch = collate([made()])
  assert len(jax.tree.leaves(batch)) == 10
  doubled = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
  assert doubled.tokens.shape == (2, 12)
  assert doubled.old_logprobs is None


def test_answer_and_searches_are_read_off_the_turns():
  assert made().answer == 'here'
  assert made().searches == 1
  refused = dataclasses.replace(SEARCH, observation_tokens=(), passages=())
  unread = made(turns=(SEARCH, refused), stop_reason='turn_limit')
  assert unread.answer is None
  assert unread.searches == 1
