# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Full contexts: what the policy reads, exact tokens, advantages of episodes."""

import dataclasses
import json

import fakes
import jax
import numpy as np
import oracles
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import statistics
from searchrl.evaluation.report import tokens as report_tokens
from searchrl.models import policy_logprobs
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops
from searchrl.rl import algorithms
from searchrl.rl import contexts
from searchrl.rl import turn_fields
from searchrl.rollouts import driver
from searchrl.rollouts import records
from searchrl import trajectory as trajectory_lib
from searchrl.trajectory import Passage, Request

TOKENIZER = tiny.Tokenizer()
DIALOGUE = dialogues.tags('q: {question}\n')
BUDGETS = driver.Budgets(max_turns=9, max_new_tokens=24, max_prompt_tokens=30,
                         passage_tokens=120, top_k=2, when_full='drop')
SEARCH = '<search>c</search>'
LENGTH = 450  # room for three passages of 124 tokens
NOTE = 'eft out to make room.</information>'


class Keeping(fakes.Engine):
  """A scripted engine that keeps all that it held between two fresh starts."""

  def __init__(self, script, **options):
    super().__init__(script, slots=1, **options)
    self.kept = []

  def release(self, slot):
    self.kept.append(tuple(self._held[slot]))
    super().release(slot)


def find(queries):
  """Finds a passage of about a hundred tokens for each query."""
  return [(Passage('1', 'on', ' a' * 100),) for _ in queries]


def rollout(*actions, length=LENGTH, **budgets):
  """The trajectory of a script, and the tokens of each context in the slot."""
  engine = Keeping({('u', 0): actions}, length=length)
  (trajectory,), _ = driver.run(
      [Request(tiny.question('u'))], engine=engine, search=find,
      dialogue=DIALOGUE, tokenizer=TOKENIZER, step=fakes.STEP, policy_step=5,
      budgets=dataclasses.replace(BUDGETS, **budgets))
  return trajectory, engine.kept


def check_exact(trajectory, kept, length=LENGTH):
  """The contexts have the engine's tokens, and lose or double none."""
  parts = trajectory.contexts
  assert [context.tokens for context in parts[:-1]] == kept[:-1]
  assert parts[-1].tokens[:len(kept[-1])] == kept[-1]
  assert all(len(tokens) <= length for tokens in kept)
  for field in ('tokens', 'loss_mask', 'behavior_logprobs'):
    assert getattr(trajectory, field) == sum(
        (getattr(context, field) for context in parts), ())
  sampled = [id_ for context in parts for id_, is_sampled in zip(
      context.tokens, context.loss_mask, strict=True) if is_sampled]
  assert sampled == [
      id_ for turn in trajectory.turns for id_ in turn.action_tokens]
  record = json.loads(json.dumps(records.to_json(trajectory)))
  assert records.from_json(record) == trajectory


def test_the_rule_stop_ends_at_the_length():
  trajectory, kept = rollout(*[SEARCH] * 9, when_full='stop')
  assert trajectory.stop_reason == 'length_limit'
  assert trajectory.contexts == (trajectory,) and len(kept) == 1


def test_dropped_observations_are_the_oldest_and_their_actions_stay():
  trajectory, kept = rollout(
      *[SEARCH] * 6, '<answer>x</answer>')
  assert trajectory.stop_reason == 'answer'
  parts = trajectory.contexts
  assert len(parts) > 1
  check_exact(trajectory, kept)
  for context in parts[1:]:
    opening = TOKENIZER.decode(context.prompt_tokens)
    assert opening.startswith('q: where?\n') and NOTE in opening
    # Notes come first, then observations as they were.
    pieces = opening.split('<information>')[1:]
    are_notes = ['eft out' in piece for piece in pieces]
    assert are_notes == sorted(are_notes, reverse=True) and not are_notes[-1]
    assert opening.count(SEARCH) == len(pieces)
    assert len(context.prompt_tokens) <= LENGTH - BUDGETS.max_new_tokens
  assert sum(len(context.turns) for context in parts) == len(trajectory.turns)
  # What was searched and found is whole in the trajectory.
  assert trajectory.searches == 6
  assert all(' a a a' in turn.observation for turn in trajectory.turns[:-1])


@pytest.mark.parametrize('rule, turns', [
    ('stop', 1), ('drop', 1), ('summarise', 1), ('summarise', 2)])
def test_an_observation_that_fits_nowhere_is_not_recorded_as_read(rule, turns):
  action = '<search>' + 'c' * (60 if turns == 1 else 9) + '</search>'
  trajectory, kept = rollout(
      action, 'notes ' * 5, action, when_full=rule, max_new_tokens=100,
      length=120 if turns == 1 else 185)
  assert trajectory.stop_reason == 'length_limit'
  assert len(trajectory.turns) == turns
  assert trajectory.searches == 0
  assert not any(turn.observation for turn in trajectory.turns)
  assert trajectory.contexts[0].tokens == kept[0]


def test_there_are_no_more_contexts_than_allowed():
  for most in (2, 3):
    trajectory, kept = rollout(
        *[SEARCH] * 19, max_contexts=most, max_turns=40)
    assert trajectory.stop_reason == 'length_limit'
    assert len(trajectory.contexts) == len(kept) == most


def test_a_summary_opens_the_next_context_with_what_was_found_last():
  notes = 'seen <search>x y'
  trajectory, kept = rollout(
      SEARCH, SEARCH, notes, '<answer>x</answer>',
      when_full='summarise', max_new_tokens=40)
  assert [turn.action.kind for turn in trajectory.turns] == [
      'search', 'search', 'summary', 'answer']
  check_exact(trajectory, kept)
  first, second = trajectory.contexts
  *_, last, summary, _ = trajectory.turns
  assert TOKENIZER.decode(first.tokens).endswith(TOKENIZER.decode(
      TOKENIZER.encode(f'{SEARCH}{DIALOGUE.summary_request}{notes}')))
  assert summary.action.texts == (notes,) and not summary.opens_context
  opening = TOKENIZER.decode(second.prompt_tokens)
  # The tokenizer knows few characters: a broken tag's bracket is '?'.
  start, rest = opening.split(SEARCH)
  assert start.startswith('q: where?') and 'search>x y' in start
  assert '<search>' not in start
  assert rest == last.observation and ' a a a' in rest
  assert trajectory.turns[-1].opens_context
  # Rewards and metrics see two searches, and no summary.
  assert trajectory.searches == 2 and trajectory.answer == 'x'
  assert DIALOGUE.summary_request not in trajectory.response
  metrics = statistics.describe([trajectory])
  assert metrics['env/number_of_contexts/max'] == 2
  assert metrics['env/ratio_of_valid_action'] == 1


def test_summaries_leave_a_valid_format_valid():
  texts = (*['<think>a</think><search>c</search>'] * 2, 'notes',
           '<think>b</think><answer>x</answer>')
  trajectory, _ = rollout(*texts, when_full='summarise',
                          max_new_tokens=40)
  assert [t.action.kind for t in trajectory.turns] == [
      'search', 'search', 'summary', 'answer']
  assert formats.is_well_formed(trajectory)


def test_a_policy_may_answer_instead_of_summarising():
  trajectory, kept = rollout(
      SEARCH, SEARCH, '<answer>x</answer>',
      when_full='summarise', max_new_tokens=40)
  assert trajectory.stop_reason == 'answer' and trajectory.answer == 'x'
  check_exact(trajectory, kept)
  assert len(trajectory.contexts) == 1


def test_summaries_do_not_count_as_turns():
  trajectory, _ = rollout(
      SEARCH, SEARCH, 'notes', SEARCH, 'more', max_turns=3,
      when_full='summarise', max_new_tokens=40)
  assert trajectory.stop_reason == 'turn_limit'
  assert [t.action.kind for t in trajectory.turns] == [
      'search', 'search', 'summary', 'search']


def test_report_and_fine_tuning_have_each_context():
  trajectory, _ = rollout(*[SEARCH] * 6, '<answer>x</answer>')
  parts = trajectory.contexts
  shown = list(report_tokens.segments(trajectory, TOKENIZER, {}))
  assert [s.role for s in shown].count(report_tokens.PROMPT) == len(parts)
  assert ''.join(text for s in shown for text in s.texts) == (
      ''.join(TOKENIZER.decode(context.tokens) for context in parts))


@pytest.mark.parametrize('rule', ['drop', 'summarise'])
def test_log_probs_are_those_of_one_forward_of_each_context(rule):
  """Random weights write garbage, which counts as searches of any length."""
  dialogue = dataclasses.replace(
      DIALOGUE, parse=fakes.by_length, stop_strings=('>', 'th', 'e', 'ar'))
  table = stops.compile_table(TOKENIZER.token_bytes, dialogue.stop_strings,
                              end_ids=TOKENIZER.eos_ids)
  engine = engines.Engine(tiny.CONFIG, slots=4, length=330, stop_table=table,
                          tile=24, block=48, steps=6)
  params = tiny.params()
  engine.load(params, 1.5)
  trajectories, _ = driver.run(
      [Request(tiny.question(f'{n}')) for n in range(16)], engine=engine,
      search=find, dialogue=dialogue, tokenizer=TOKENIZER, step=2,
      policy_step=2, budgets=dataclasses.replace(
          BUDGETS, max_new_tokens=12, max_turns=12, when_full=rule))
  counts = [len(t.contexts) for t in trajectories]
  assert max(counts) > 2 and sum(counts) > 22
  scored = [dataclasses.replace(t, reward=1.0, outcome_reward=1.0)
            for t in trajectories]
  batch = trajectory_lib.collate(
      scored, group_ids=range(16), policy_step=2, length=330, contexts=4)
  assert batch.tokens.shape == (64, 330)
  assert batch.loss_mask.sum() == sum(
      len(turn.action_tokens) for t in trajectories for turn in t.turns)
  logprobs, _ = jax.jit(lambda params, tokens: policy_logprobs.token_logprobs(
      params, tokens, tiny.CONFIG, temperature=1.5))(params, batch.tokens)
  np.testing.assert_allclose(
      batch.behavior_logprobs, np.where(batch.loss_mask, logprobs, 0),
      atol=1e-4)


def made_batch(seed=0):
  """Trajectories of one to three contexts in four rows each, and empty rows."""
  rng = np.random.default_rng(seed)
  trajectories = []
  for n in range(6):
    trajectory, _ = rollout(
        *[SEARCH] * (1 + n), '<answer>x</answer>')
    trajectories.append(dataclasses.replace(
        trajectory, question=tiny.question(f'{n // 3}'), sample=n,
        reward=float(rng.normal()), outcome_reward=1.0, group=n // 3,
        turn_rewards=tuple(rng.normal(size=len(trajectory.turns)))))
  assert [len(t.contexts) for t in trajectories][::5] == [1, 3]
  trajectories[1] = dataclasses.replace(
      trajectories[1], stop_reason='search_error', reward=None,
      outcome_reward=None, turn_rewards=None)
  batch = trajectory_lib.collate(
      trajectories, group_ids=[t.group for t in trajectories], policy_step=5,
      length=LENGTH, contexts=4, rows=32)
  return trajectories, turn_fields.with_turns(batch, trajectories, 4)


def sampled(batch, values, row):
  """The values of trajectory `row` at sampled tokens, in their order."""
  rows = slice(4 * row, 4 * row + 4)
  return np.asarray(values)[rows][np.asarray(batch.loss_mask)[rows]]


def test_group_advantages_count_an_episode_once():
  trajectories, batch = made_batch()
  counted = [t for t in trajectories if not t.is_void]
  expected = iter(oracles.group_relative(
      np.array([t.reward for t in counted]),
      np.array([t.group for t in counted])))
  for found in (contexts.over_contexts(algorithms.grpo(), 4).advantages(batch),
                algorithms.grpo().advantages(contexts.episodes(batch, 4)
                                             ).repeat(4)):
    assert found.shape == (32,)
  for row, trajectory in enumerate(trajectories):
    if not trajectory.is_void:
      wanted = next(expected)
      np.testing.assert_allclose(found[4 * row:4 * row + 4], wanted, rtol=1e-5)
  assert not np.any(batch.loss_mask[4:8])  # the failed one is not trained on


def test_gae_passes_from_one_context_to_the_next():
  trajectories, batch = made_batch()
  rng = np.random.default_rng(1)
  values, old, ref = rng.normal(size=(3, *batch.tokens.shape)).astype('float32')
  batch = dataclasses.replace(
      batch, values=values, old_logprobs=old, ref_logprobs=ref)
  recipe = algorithms.ppo(kl_coef=0.0, discount=0.9, gae_lambda=0.8)
  found = jax.jit(contexts.over_contexts(recipe, 4).advantages)(batch).returns
  for row, trajectory in enumerate(trajectories):
    if trajectory.is_void:
      continue
    mine = sampled(batch, values, row)[None]
    mask = np.ones(mine.shape, bool)
    rewards = oracles.token_rewards(np.array([trajectory.reward]), mask)
    _, returns = oracles.gae(
        rewards, mine, mask, discount=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(
        sampled(batch, found, row), returns[0], rtol=1e-4, atol=1e-4)


def test_turns_are_numbered_through_all_contexts():
  trajectories, batch = made_batch()
  for row, trajectory in enumerate(trajectories):
    numbers = [] if trajectory.is_void else [
        number for number, turn in enumerate(trajectory.turns, start=1)
        for _ in turn.action_tokens]
    rows = slice(4 * row, 4 * row + 4)
    ids = batch.turn_ids[rows]
    assert ids[ids > 0].tolist() == numbers
    ends = batch.turn_rewards[rows]
    np.testing.assert_allclose(
        ends[~np.isnan(ends)],
        [] if trajectory.is_void else trajectory.turn_rewards, rtol=1e-6)


def test_each_turn_needs_its_entry_among_the_rewards():
  trajectories, batch = made_batch()
  longer = dataclasses.replace(
      trajectories[0], turn_rewards=(*trajectories[0].turn_rewards, 1.0))
  with pytest.raises(ValueError, match='is longer'):
    turn_fields.with_turns(batch, [longer], 4)


def test_a_trajectory_with_too_many_contexts_is_refused():
  trajectories, _ = made_batch()
  with pytest.raises(ValueError, match='has 3 contexts. Raise contexts'):
    trajectory_lib.collate(
        trajectories[-1:], group_ids=[0], policy_step=5, length=LENGTH, contexts=2)


