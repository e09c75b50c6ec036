# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""sampler: failed searches are sampled again; one engine, two dialogues."""

import collections
import dataclasses

import fakes
import jax
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import rewards
from searchrl.models.inference import engine as engines
from searchrl.rl import algorithms
from searchrl.rollouts import collect
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.rollouts import scoring
from searchrl.rollouts import weight_sync
from searchrl.trajectory import Request, Scores, SearchError

ASK, ANSWER = '<search> {} </search>', '<answer> here </answer>'
SCRIPT = {('fine', 0): [ANSWER], ('late', 0): [ASK.format('late'), ANSWER],
          ('never', 0): [ASK.format('never'), ANSWER]}
BUDGETS = driver.Budgets(max_turns=3, max_new_tokens=40, max_prompt_tokens=30,
                         passage_tokens=40, top_k=2)


def sampler(script, **options):
  engine = fakes.Engine(script, **options)
  return samplers.Sampler(
      tiny.CONFIG, fakes.TOKENIZER, dialogues.tags('q: {question}\n'), BUDGETS,
      engine, weight_sync.Synced)


def rollout(script, *, search, slots=2, **options):
  return sampler(script, slots=slots).rollout(
      None, [Request(tiny.question(uid), sample, group)
             for group, (uid, sample) in enumerate(script)],
      search=search, temperature=1.0, step=fakes.STEP, **options)


class Failing:
  """'late' fails once, 'never' always."""

  def __init__(self):
    self.asked, self.queries = collections.Counter(), []

  def __call__(self, queries):
    results = []
    self.queries += queries
    for query in queries:
      self.asked[query.text] += 1
      failed = query.text == 'never' or self.asked[query.text] == 1
      results.append(SearchError('unavailable', 'down') if failed else ())
    return results


@pytest.mark.parametrize('search_retries, asked, retries, last', [
    (0, [1, 1], [0, 0, 0], ['answer', 'search_error', 'search_error']),
    (1, [2, 2], [0, 1, 1], ['answer', 'answer', 'search_error']),
    (3, [2, 4], [0, 1, 3], ['answer', 'answer', 'search_error'])])
def test_failed_searches_are_sampled_again(
    search_retries, asked, retries, last):
  search = Failing()
  found = rollout(SCRIPT, search=search, search_retries=search_retries)
  assert [search.asked[name] for name in ('late', 'never')] == asked
  assert sum(call.queries for call in found.calls) == sum(asked)
  assert sum(call.errors for call in found.calls) == asked[1] + 1
  trajectories = found.trajectories
  assert [t.question.uid for t in trajectories] == ['fine', 'late', 'never']
  assert [t.group for t in trajectories] == [0, 1, 2]
  assert [t.retries for t in trajectories] == retries
  assert [t.stop_reason for t in trajectories] == last
  for trajectory in trajectories:
    failed = trajectory.stop_reason == 'search_error'
    assert trajectory.search_error == (
        SearchError('unavailable', 'down') if failed else None)


def test_a_search_that_is_repeated_is_asked_the_same():
  search = Failing()
  rollout(SCRIPT, search=search, search_retries=2)
  for name, times in (('late', 2), ('never', 3)):
    first, *again = [q for q in search.queries if q.text == name]
    assert again == [first] * (times - 1)  # its step, sample, turn and turns
    assert (first.step, first.question.uid, first.sample, first.turn,
            len(first.turns)) == (fakes.STEP, name, 0, 0, 1)


def test_what_is_not_needed_any_more_is_left_out():
  script = {(f'{n}', 0): [ANSWER] for n in range(40)}
  found = rollout(
      script, search=fakes.Search(), slots=2,
      enough=lambda finished: len(finished) >= 2 and all(
          t.stop_reason == 'answer' for t in finished))
  uids = [t.question.uid for t in found.trajectories]
  assert 2 <= len(uids) < 40 and uids == sorted(uids, key=int)


def test_who_watches_is_shown_what_grows():
  seen = []
  found = rollout({('late', 0): SCRIPT['late', 0]}, search=fakes.Search(),
                  watch=seen.append)
  assert [len(t.turns) for t in seen] == [1, 1, 2, 2]
  assert seen[-1].stop_reason == 'answer'
  assert seen[-1].tokens == found.trajectories[0].tokens


FIRST = dataclasses.replace(
    dialogues.tags('q: {question}\n'), parse=fakes.by_length,
    stop_strings=('th', '>'))
SECOND = dataclasses.replace(
    dialogues.tags('Judge at length what was found here: {question} '),
    parse=fakes.by_length, stop_strings=('e', 'in', 'never said'),
    before='\n(', after=')', end_ids=(40,))
SHORT = driver.Budgets(max_turns=3, max_new_tokens=12, max_prompt_tokens=40,
                       passage_tokens=10, top_k=1)
LONG = driver.Budgets(max_turns=2, max_new_tokens=20, max_prompt_tokens=90,
                      passage_tokens=30, top_k=2)


def with_engine(dialogue, budgets):
  """A sampler with an engine of its own."""
  engine = engines.Engine(
      tiny.CONFIG, slots=4, length=160, tile=16, tiles=(2, 8), block=32,
      steps=6, stop_table=samplers.compile_stops(dialogue, fakes.TOKENIZER,
                                                 tiny.CONFIG.vocab_size))
  return samplers.Sampler(tiny.CONFIG, fakes.TOKENIZER, dialogue, budgets,
                          engine, weight_sync.Synced)


def play(sampler, weights, uid='q'):
  return sampler.rollout(
      weights, [Request(tiny.question(f'{uid}{n}', 'where? ' * n), sample)
                for n in range(3) for sample in range(3)],
      search=fakes.Search(), temperature=1.5, step=2).trajectories


def compilations():
  """A list that grows by an entry a compilation, from now on."""
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name)
      if name == '/jax/core/compile/backend_compile_duration' else None)
  return compiled


@pytest.mark.slow
def test_one_engine_plays_two_dialogues_and_two_policies():
  policy, frozen = tiny.params(), tiny.params(seed=1)
  first = with_engine(FIRST, SHORT)
  expected = play(first, policy)
  compiled = compilations()
  second = first.with_dialogue(SECOND, LONG)
  judged = play(second, frozen)
  assert play(first, policy) == expected
  assert play(second, policy) != judged
  texts = lambda found: [t.response for t in found]
  assert texts(play(second, frozen, uid='judge:q')) != texts(judged)
  assert play(first, policy) == expected and not compiled
  assert judged == play(with_engine(SECOND, LONG), frozen)
  assert compiled  # by the other engine: the count can fail
  turns = [turn for t in judged for turn in t.turns]
  ends = (*fakes.TOKENIZER.eos_ids, 40)
  for turn in turns:
    *begun, last = [fakes.TOKENIZER.token_bytes[i] for i in turn.action_tokens]
    stops = lambda pieces: any(s in b''.join(pieces) for s in (b'e', b'in'))
    assert not stops(begun)
    assert (stops([*begun, last]) or turn.action_tokens[-1] in ends
            or len(turn.action_tokens) == LONG.max_new_tokens)
  assert any('>' in turn.text[:-1] for turn in turns)  # ends the other's turns


@pytest.mark.slow
def test_a_judge_plays_rollouts_between_those_of_the_steps():
  policy, frozen = tiny.params(), tiny.params(seed=1)
  first = with_engine(FIRST, SHORT)
  second = first.with_dialogue(SECOND, LONG)
  judged = []

  def length(trajectories):
    """How much a frozen policy says when it is told what this one said."""
    found = second.rollout(
        frozen, [Request(tiny.question(f'judge:{t.question.uid}', t.turns[0].text
                                      ), t.sample, t.group)
                 for t in trajectories], search=fakes.Search(),
        temperature=1.5, step=trajectories[0].policy_step).trajectories
    judged.extend(found)
    return [Scores(len(t.response), outcome=len(t.response) % 2,
                   parts={'turns': len(t.turns)}) for t in found]

  def steps(sampler, count, scorer):
    progress = collect.Progress()
    for step in range(count):
      found = collect.collect(
          sampler, weight_sync.Synced(policy), progress, step, draw=fakes.draw,
          keep=algorithms.keep_mixed, search=fakes.Search(), scorer=scorer,
          rounds=collect.Rounds(2, 3, max_rounds=2, temperature=1.5))
      progress = dataclasses.replace(found.progress, step=step + 1)
      yield found

  scorer = scoring.Scorer(rewards.Judge(length, collective=True))
  played = steps(first, 3, scorer)
  trajectories = list(next(played).trajectories)
  compiled = compilations()
  for found in played:
    trajectories += found.trajectories
    assert all(len({t.outcome_reward for t in group}) == 2
               for group in found.groups)  # filtered by the judge's outcomes
  assert len(compiled) == 0 and len(trajectories) >= 18
  assert [(t.reward, t.parts['turns']) for t in trajectories] == [
      (len(t.response), len(t.turns)) for t in judged]
  # What the policy says is what it says where nobody judges by rollouts.
  plain = scoring.Scorer(rewards.each(lambda t: len(t.tokens) % 2))
  alone = next(steps(with_engine(FIRST, SHORT), 1, plain)).trajectories[:6]
  assert [t.tokens for t in alone] == [
      t.tokens for t in trajectories[:len(alone)]]
  assert compiled  # by the other engine: the count can fail


@pytest.mark.parametrize('change, budgets, message', [
    ({}, dict(max_new_tokens=390), 'a prompt and a turn, 30 . 390 tokens, but'),
    (dict(stop_strings=('\u00fc',)), {}, 'must be able to write the stop str')])
def test_a_dialogue_that_the_engine_cannot_play_is_refused(
    change, budgets, message):
  with pytest.raises(ValueError, match=message):
    sampler({}).with_dialogue(dataclasses.replace(FIRST, **change),
                         dataclasses.replace(BUDGETS, **budgets))
