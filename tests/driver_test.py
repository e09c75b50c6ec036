# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""driver: each way to end, on a scripted engine; exact ids, on a real one."""

import collections
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

import fakes
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops
from searchrl.models import policy_logprobs
from searchrl.rollouts import driver
from searchrl.search import fusion
from searchrl.search import engine_wrappers
from searchrl import trajectory as trajectory_lib
from searchrl.trajectory import Action, Passage, Request, SearchError

TOKENIZER = tiny.Tokenizer()
DIALOGUE = dialogues.tags('q: {question}\n')
BUDGETS = driver.Budgets(max_turns=3, max_new_tokens=40, max_prompt_tokens=30,
                         passage_tokens=40, top_k=2)


def search_for(query, chatter=''):
  return f'{chatter}<search> {query} </search>'


def answer(text):
  return f'<answer> {text} </answer>'


def requests_of(script):
  return [Request(tiny.question(uid), sample) for uid, sample in script]


def rollout(script, *, engine=None, search=None, dialogue=DIALOGUE,
         schedule=driver.Schedule(), **options):
  """The trajectories of a script, and a check that nothing is left unread."""
  engine = engine or fakes.Engine(script)
  trajectories, _ = driver.run(
      requests_of(script), engine=engine, search=search or fakes.Search(),
      dialogue=dialogue, tokenizer=TOKENIZER,
      budgets=dataclasses.replace(BUDGETS, **options), step=fakes.STEP,
      policy_step=5, schedule=schedule)
  assert not engine._decoded
  assert [(t.question.uid, t.sample) for t in trajectories] == list(script)
  return trajectories


def rollout_one(*actions, **options):
  (trajectory,) = rollout({('u', 0): actions}, **options)
  return trajectory


def texts(trajectory):
  """Each action and its observation, in turn."""
  return [TOKENIZER.decode(ids) for turn in trajectory.turns
          for ids in (turn.action_tokens, turn.observation_tokens)]


def test_a_search_and_an_answer():
  trajectory = rollout_one(search_for('cat'), answer('here'))
  assert trajectory.stop_reason == 'answer'
  assert trajectory.answer == 'here' and trajectory.searches == 1
  assert TOKENIZER.decode(trajectory.prompt_tokens) == 'q: where?\n'
  assert (trajectory.policy_step, trajectory.reward) == (5, None)
  assert texts(trajectory) == [
      search_for('cat'), '\n\n<information>Doc 1(Title: "on") cat of u'
      '</information>\n\n', answer('here'), '']
  assert [p.id for p in trajectory.turns[0].passages] == ['cat']
  sampled = np.array(trajectory.behavior_logprobs)[list(trajectory.loss_mask)]
  assert len(sampled) and (sampled < 0).all()


def test_texts_are_the_tokens_decoded():
  trajectory = rollout_one('nonsense', search_for('cat'), answer('here'))
  assert trajectory.prompt == 'q: where?\n'
  assert [text for turn in trajectory.turns
          for text in (turn.text, turn.observation)] == texts(trajectory)
  assert trajectory.response == ''.join(texts(trajectory))


def test_a_query_says_on_whose_behalf_it_is_asked_and_after_what():
  asked = []

  def search(queries):
    asked.extend(queries)
    return fakes.Search()(queries)

  dialogue = dataclasses.replace(DIALOGUE, parse=several)
  trajectory, other = rollout(
      {('u', 3): ('nonsense', search_for('a|b'), answer('here')),
       ('v', 0): (search_for('c'), answer('here'))},
      search=search, dialogue=dialogue)
  found = {q.text: q for q in asked}
  assert [(q.step, q.question.uid, q.sample, q.turn)
          for q in map(found.get, 'abc')] == [
              (fakes.STEP, 'u', 3, 1), (fakes.STEP, 'u', 3, 1),
              (fakes.STEP, 'v', 0, 0)]
  # Earlier turns whole; of the one that asks, what the policy said.
  *earlier, asks = found['a'].turns
  assert earlier == list(trajectory.turns[:1]) and earlier[0].observation
  assert (asks.text, asks.observation) == (trajectory.turns[1].text, '')
  assert [t.text for t in found['c'].turns] == [other.turns[0].text]


def test_a_turn_counts_its_passages_that_were_cut():
  dialogue = dataclasses.replace(DIALOGUE, parse=several)
  trajectory = rollout_one(
      search_for('a|' + 'x' * 40), search_for('b'), answer('c'),
      dialogue=dialogue)  # at 40 tokens a passage
  assert [len(t.passages) for t in trajectory.turns] == [2, 1, 0]
  assert [t.passages_cut for t in trajectory.turns] == [1, 0, 0]


def test_a_search_in_the_last_turn_is_not_carried_out():
  search = fakes.Search()
  trajectory = rollout_one(
      search_for('a'), search_for('b'), search=search, max_turns=2)
  assert trajectory.stop_reason == 'turn_limit'
  assert search.calls == [['a']]
  assert not trajectory.turns[-1].observation_tokens
  assert trajectory.answer is None and trajectory.searches == 1


def test_an_invalid_action_gets_the_retry_sentence_and_counts_as_a_turn():
  trajectory = rollout_one('nonsense', answer('here'))
  assert trajectory.stop_reason == 'answer'
  assert [t.action.kind for t in trajectory.turns] == ['invalid', 'answer']
  assert texts(trajectory)[1] == DIALOGUE.invalid
  assert trajectory.searches == 0
  trajectory = rollout_one('nonsense', 'more', 'still', max_turns=3)
  assert trajectory.stop_reason == 'turn_limit'
  assert texts(trajectory)[1::2] == [DIALOGUE.invalid] * 2 + ['']


def test_an_action_cut_by_its_budget_is_invalid():
  trajectory = rollout_one(
      search_for('cat' * 9), answer('x'), max_new_tokens=10)
  assert [t.action.kind for t in trajectory.turns] == ['invalid', 'answer']
  assert len(trajectory.turns[0].action_tokens) == 10


def test_an_observation_that_does_not_fit_ends_the_trajectory():
  trajectory = rollout_one(
      search_for('cat'),
      engine=fakes.Engine({('u', 0): [search_for('cat')]}, length=40))
  assert trajectory.stop_reason == 'length_limit'
  assert not trajectory.turns[-1].observation_tokens  # the policy never saw it
  assert len(trajectory.tokens) <= 40


def test_a_prompt_that_fills_its_slot_ends_at_once():
  length = len(TOKENIZER.encode(DIALOGUE.prompt('where?')))
  script = {('u', 0): [answer('x')], ('u', 1): [answer('x')]}
  trajectories = rollout(
      script, engine=fakes.Engine(script, slots=1, length=length))
  assert {t.stop_reason for t in trajectories} == {'length_limit'}
  assert all(not t.turns and len(t.prompt_tokens) == length
             for t in trajectories)


def test_a_slot_filled_by_a_search_takes_nothing_from_its_neighbours():
  prompt = len(TOKENIZER.encode(DIALOGUE.prompt('where?')))
  script = {('full', 0): [search_for('x' * 20)],
            ('next', 3): [search_for('cat'), answer('here')]}
  length = prompt + len(TOKENIZER.encode(script['full', 0][0]))
  search = fakes.Search()
  trajectories = rollout(
      script, engine=fakes.Engine(script, length=length), search=search,
      passage_tokens=0)
  assert search.calls == [['cat']]
  assert trajectories[0].stop_reason == 'length_limit'
  assert trajectories[0].turns[0].action.is_search
  assert [p.id for p in trajectories[1].turns[0].passages] == ['cat']


def test_a_failed_search_is_an_outcome_and_never_text():
  script = {('u', 0): [search_for('cat'), search_for('fail')],
            ('v', 0): [search_for('dog'), answer('here')]}
  failed, fine = rollout(script)
  assert failed.stop_reason == 'search_error'
  assert failed.turns[-1].action == Action('search', ('fail',))
  assert failed.search_error == SearchError('timeout', 'after 3 s')
  assert not failed.turns[-1].observation_tokens
  assert not failed.turns[-1].passages
  assert fine.stop_reason == 'answer'
  shown = ''.join(texts(failed) + texts(fine))
  assert 'timeout' not in shown and 'after 3 s' not in shown
  assert 'dog of v' in shown


def several(text):
  """Queries parted by bars."""
  action = dialogues.parse_tags(text)
  if action.kind != 'search':
    return action
  return Action('search', tuple(t.strip() for t in action.texts[0].split('|')))


def test_several_queries_are_answered_in_their_order():
  dialogue = dataclasses.replace(DIALOGUE, parse=several)
  script = {('u', 0): [search_for('a|b|c'), answer('x')],
            ('u', 3): [search_for('d'), answer('x')],
            ('u', 6): [search_for('e|fail|f'), answer('x')]}
  search = fakes.Search()
  trajectories = rollout(
      script, engine=fakes.Engine(script, slots=3), search=search,
      dialogue=dialogue, passage_tokens=12)
  assert search.calls == [['a', 'b', 'c', 'd', 'e', 'fail', 'f']]  # one call
  assert [[p.id for p in t.turns[0].passages] for t in trajectories] == [
      ['a', 'b', 'c'], ['d'], []]
  assert [t.stop_reason for t in trajectories] == [
      'answer', 'answer', 'search_error']
  shown = texts(trajectories[0])[1]
  assert [shown.find(f'Doc {n}(') for n in (1, 2, 3)] == sorted(
      shown.find(f'Doc {n}(') for n in (1, 2, 3))
  assert 'Doc 3(' in shown


def long_script(rows=17):
  """Every way to end, many times."""
  rng = np.random.default_rng(0)
  choices = [lambda n: search_for(f'{"xy"[n % 2]}{n}'), lambda n: 'nonsense',
             lambda n: search_for('fail'), lambda n: answer(f'{n}'),
             lambda n: search_for(f'a{n}', '<think> hm </think>')]
  return {(f'q{n // 4}', n % 4): [
      choices[i](n) for i in rng.choice(5, 4, p=[.4, .15, .1, .15, .2])]
          for n in range(rows)}


@pytest.fixture(scope='module')
def by_one_slot():
  script = long_script()
  return rollout(
      script, engine=fakes.Engine(script, slots=1, length=150), max_turns=4)


@pytest.mark.parametrize('slots', [2, 3, 5, 16, 30])
def test_slots_change_nothing_about_the_trajectories(slots, by_one_slot):
  script = long_script()
  engine = fakes.Engine(script, slots=slots, length=150)
  assert rollout(script, engine=engine, max_turns=4) == by_one_slot
  # First come, first served: slots from the lowest, requests in their order.
  fresh = [feed for feed in engine.feeds if feed.fresh]
  assert [engine.name(feed)[:2] for feed in fresh] == list(script)
  assert [feed.slot for feed in fresh[:slots]] == list(range(min(slots, 17)))


def test_that_script_ends_in_every_way(by_one_slot):
  assert {t.stop_reason for t in by_one_slot} == set(
      trajectory_lib.STOP_REASONS)


def test_a_prompt_above_the_limit_is_refused_before_anything_is_sampled():
  with pytest.raises(ValueError, match="max_prompt_tokens=4 tokens, but that "
                                       "of question 'u' has 10"):
    rollout_one(answer('x'), max_prompt_tokens=4)
  assert rollout({}) == []


SCHEDULES = [
    driver.Schedule(), driver.Schedule(async_decode=True),
    driver.Schedule('arrival'),
    driver.Schedule('arrival', async_decode=True),
    driver.Schedule('arrival', async_decode=True, search_calls=1)]


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('slots', [1, 4, 30])
def test_admission_changes_nothing_about_the_trajectories(
    schedule, slots, by_one_slot):
  script = long_script()
  rng = np.random.default_rng(slots)

  def slow(queries):  # some more than others
    time.sleep(0.01 * rng.random())
    return fakes.Search()(queries)

  engine = fakes.Engine(script, slots=slots, length=150)
  assert rollout(script, engine=engine, search=slow, schedule=schedule,
                 max_turns=4) == by_one_slot


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('total', [15, 16, 40])
def test_few_pages_change_nothing_about_the_trajectories(
    schedule, total, by_one_slot):
  script = long_script()
  engine = fakes.PagedEngine(script, total=total, slots=9, length=150)
  assert rollout(script, engine=engine, schedule=schedule,
                 max_turns=4) == by_one_slot
  assert engine.refused  # each of them waited, and none for ever


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_queries_say_who_asks_in_any_schedule(schedule):
  script, search = long_script(), fakes.Noting()
  trajectories = rollout(
      script, engine=fakes.Engine(script, slots=5), schedule=schedule,
      search=engine_wrappers.with_typed_errors(fusion.fused([search])))
  named = {(t.question.uid, t.sample): t for t in trajectories}
  assert sorted((q.question.uid, q.sample, q.turn, q.text)
                for q in search.asked) == fakes.asked_by(trajectories) != []
  for query in search.asked:
    turns = named[query.question.uid, query.sample].turns
    assert query.step == fakes.STEP
    assert query.turns[:-1] == turns[:query.turn]
    assert query.turns[-1].action_tokens == turns[query.turn].action_tokens


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_a_watcher_receives_every_trajectory_as_it_grows(schedule):
  script, seen = long_script(30), collections.defaultdict(list)
  trajectories, _ = driver.run(
      requests_of(script),
      engine=fakes.Engine(script, slots=4, length=150), search=fakes.Search(),
      dialogue=DIALOGUE, tokenizer=TOKENIZER, budgets=BUDGETS,
      step=fakes.STEP, policy_step=5, schedule=schedule,
      watch=lambda grown: seen[grown.question.uid, grown.sample].append(grown))
  for trajectory in trajectories:
    stages = seen[trajectory.question.uid, trajectory.sample]
    assert stages[-1] == trajectory
    assert all(stage.stop_reason is None for stage in stages[:-1])
    sizes = [len(stage.tokens) for stage in stages[:-1]]
    assert sizes == sorted(set(sizes))  # each time it has grown
    assert all(trajectory.tokens[:n] == stage.tokens
               for n, stage in zip(sizes, stages))
    grown = len(trajectory.turns) + sum(
        bool(turn.observation_tokens) for turn in trajectory.turns)
    assert len(stages) == grown + 1  # and its end


@pytest.mark.parametrize('schedule', SCHEDULES[:2])
def test_a_deterministic_schedule_is_repeated_however_slow_the_search(schedule):
  script = long_script(30)

  def feeds(secs):
    engine = fakes.Engine(script, slots=4, length=150)

    def search(queries):
      time.sleep(secs * len(queries))
      return fakes.Search()(queries)

    rollout(script, engine=engine, search=search, schedule=schedule,
            max_turns=4)
    return engine.feeds

  assert feeds(0) == feeds(0.003)


def test_slots_decode_while_others_search():
  script = {('slow', 0): [search_for('cat'), answer('x')],
            ('other', 1): [search_for('dog'), answer('here')]}
  engine, released = fakes.Engine(script), threading.Event()

  def search(queries):
    if queries[0].text == 'cat':
      assert released.wait(5)
    else:
      released.set()  # the second searches while the first still does
    return fakes.Search()(queries)

  # The second acts later than the first (see `fakes.Engine`).
  trajectories = rollout(
      script, engine=engine, search=search,
      schedule=driver.Schedule('arrival', search_timeout_secs=4))
  assert [t.stop_reason for t in trajectories] == ['answer', 'answer']


@pytest.mark.parametrize('schedule', SCHEDULES[:4])
@pytest.mark.parametrize('fault, kind', [
    (lambda: 1 / 0, 'unavailable'), (lambda: time.sleep(1), 'timeout')])
def test_a_search_that_raises_or_hangs_ends_only_its_trajectories(
    schedule, fault, kind):
  script = {('u', 0): [search_for('bad')], ('v', 1): [answer('here')]}
  schedule = dataclasses.replace(schedule, search_timeout_secs=0.05)

  def search(queries):
    fault()
    return fakes.Search()(queries)

  failed, fine = rollout(script, search=search, schedule=schedule)
  assert failed.stop_reason == 'search_error'
  assert failed.search_error.kind == kind and failed.search_error.detail
  assert not failed.turns[-1].observation_tokens
  assert fine.stop_reason == 'answer'
  shown = ''.join(texts(failed) + texts(fine))
  assert kind not in shown and 'division' not in shown


def test_a_rollout_ends_when_there_is_enough():
  script = long_script(30)
  engine = fakes.Engine(script, slots=5, length=150)
  whole = rollout(script, engine=fakes.Engine(script, slots=5, length=150))
  trajectories, _ = driver.run(
      requests_of(script), engine=engine,
      search=fakes.Search(), dialogue=DIALOGUE, tokenizer=TOKENIZER,
      budgets=BUDGETS, step=fakes.STEP, policy_step=5,
      enough=lambda finished: len(finished) >= 7)
  kept = [t for t in trajectories if t is not None]
  assert len(trajectories) == 30 and 7 <= len(kept) < 12
  assert kept == [w for w, t in zip(whole, trajectories) if t is not None]
  assert not engine._decoding and not engine._decoded


@pytest.mark.parametrize('bad, message', [
    (dict(search_order='auto'), "rollout.search_order must be one of"),
    (dict(async_decode=2),
     'rollout.async_decode must be False or True, but is 2'),
    (dict(search_timeout_secs=0), 'search_timeout_secs must be above 0'),
    (dict(search_calls=0), 'search_calls must be at least 1')])
def test_a_schedule_without_an_end_is_refused(bad, message):
  with pytest.raises(ValueError, match=message):
    driver.Schedule(**bad)


class Recording:
  """The real engine, and every token that went through each conversation."""

  def __init__(self, engine, uids):
    self._engine = engine
    self.slots, self.length = engine.slots, engine.length
    self.admit = engine.admit
    self.seen = {}  # (uid, sample) -> ids
    self._names = {engines.row_ids(2, uid, sample, turn): (uid, sample)
                   for uid in uids for sample in range(4) for turn in range(4)}
    self._names_by_slot = {}

  def append(self, feeds):
    for feed in feeds:
      name = self._names_by_slot[feed.slot] = self._names[tuple(feed.row_ids)]
      assert feed.fresh == (name not in self.seen)
      self.seen.setdefault(name, []).extend(feed.tokens)
    self._engine.append(feeds)

  def dispatch(self):
    self._engine.dispatch()

  def read(self):
    stopped = self._engine.read()
    for turn in stopped:
      self.seen[self._names_by_slot[turn.slot]].extend(turn.tokens)
    return stopped

  def used(self, slot):
    return self._engine.used(slot)

  def release(self, slot):
    self._engine.release(slot)


@pytest.fixture(scope='module')
def garbage():
  """Trajectories of random weights, and what the engine saw of them."""
  params, length = tiny.params(), 240
  dialogue = dataclasses.replace(
      DIALOGUE, parse=fakes.by_length, stop_strings=('>', 'th', 'e', 'ar'))
  table = stops.compile_table(TOKENIZER.token_bytes, dialogue.stop_strings,
                              end_ids=TOKENIZER.eos_ids)
  recording = Recording(engines.Engine(
      tiny.CONFIG, slots=4, length=length, stop_table=table, tile=24, block=32,
      steps=6), map(str, range(6)))
  recording._engine.load(params, 1.5)

  def search(queries):  # passages as strange as what was asked
    return [(Passage('1', q.text[:4], f'{q.text} </search> é😀 <answer>'),
             Passage('2', 'on', 'ch>\n' * (len(q.text) % 3)))
            for q in queries]

  trajectories, _ = driver.run(
      [Request(tiny.question(f'{n}', 'where? ' * (1 + n % 3)), sample)
       for n in range(6) for sample in range(4)],
      engine=recording, search=search, dialogue=dialogue, tokenizer=TOKENIZER,
      budgets=dataclasses.replace(BUDGETS, max_new_tokens=12, max_turns=3,
                                  passage_tokens=14),
      step=2, policy_step=2)
  batch = trajectory_lib.collate(
      [dataclasses.replace(t, reward=0.0, outcome_reward=0.0)
       for t in trajectories],
      group_ids=range(len(trajectories)), policy_step=2, length=length)
  return trajectories, recording.seen, batch, params


def test_trained_ids_are_the_prompt_and_every_turn_as_the_engine_saw_them(
    garbage):
  trajectories, seen, batch, _ = garbage
  assert {t.stop_reason for t in trajectories} == {'answer', 'turn_limit'}
  for row, trajectory in enumerate(trajectories):
    name = trajectory.question.uid, trajectory.sample
    assert list(trajectory.tokens) == seen[name]
    assert trajectory.prompt_tokens == TOKENIZER.encode(
        DIALOGUE.prompt(trajectory.question.text))
    ids = list(trajectory.prompt_tokens)
    for turn in trajectory.turns:
      ids += [*turn.action_tokens, *turn.observation_tokens]
    trained = int(batch.lengths[row])
    assert batch.tokens[row, :trained].tolist() == ids[:trained]
    assert batch.loss_mask[row].sum() == sum(
        len(turn.action_tokens) for turn in trajectory.turns)


def test_decoding_and_encoding_again_would_have_changed_the_ids(garbage):
  turns = [turn for trajectory in garbage[0] for turn in trajectory.turns]
  drifted = [turn for turn in turns if turn.action_tokens != TOKENIZER.encode(
      TOKENIZER.decode(turn.action_tokens))]
  assert len(drifted) > 0.1 * len(turns)


def test_log_probs_of_whole_rollouts_are_those_of_one_forward(garbage):
  _, _, batch, params = garbage
  logprobs, _ = jax.jit(lambda params, tokens: policy_logprobs.token_logprobs(
      params, tokens, tiny.CONFIG, temperature=1.5))(params, batch.tokens)
  expected = np.where(batch.loss_mask, logprobs, 0)
  np.testing.assert_allclose(batch.behavior_logprobs, expected, atol=1e-4)
  assert (batch.behavior_logprobs < -1).sum() > 50


@pytest.mark.parametrize('cases', [
    500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_ids_never_change_between_turns(cases):
  """Hot sampling writes tags in ways that no encoder would."""
  dialogue = dataclasses.replace(
      DIALOGUE, parse=fakes.by_length,
      stop_strings=('</search>', 'ch>', '>', 'ar'))
  table = stops.compile_table(TOKENIZER.token_bytes, dialogue.stop_strings,
                              end_ids=TOKENIZER.eos_ids)
  engine = engines.Engine(
      tiny.CONFIG, slots=32, length=240, stop_table=table, tile=24, block=48,
      steps=6)
  recording = Recording(engine, map(str, range(cases // 4)))
  tags = ['</search>', '<answer>', '</', 'sea', 'rch', '>\n', 'é', '😀']
  rng = np.random.default_rng(0)

  def words(count):
    return ''.join(rng.choice(tags, count))

  def search(queries):
    return [(Passage('1', words(2), words(int(rng.integers(9)))),)
            for _ in queries]

  requests = [Request(tiny.question(f'{n}', words(int(rng.integers(1, 5)))),
                      sample)
              for n in range(cases // 4) for sample in range(4)]
  engine.load(tiny.params(), 2.5)
  trajectories, _ = driver.run(
      requests, engine=recording, search=search, dialogue=dialogue,
      tokenizer=TOKENIZER, step=2, policy_step=2,
      schedule=driver.Schedule('arrival', async_decode=True),
      budgets=dataclasses.replace(BUDGETS, max_new_tokens=10, max_turns=4,
                                  passage_tokens=14, max_prompt_tokens=60))
  drifted, fed = 0, 0
  for trajectory in trajectories:
    name = trajectory.question.uid, trajectory.sample
    assert list(trajectory.tokens) == recording.seen[name]
    fed += len(trajectory.tokens) - 1  # each is cached once, but the last
    drifted += any(t.action_tokens != TOKENIZER.encode(TOKENIZER.decode(
        t.action_tokens)) for t in trajectory.turns)
  assert drifted > cases / 2
  cached = (engine.prefilled_tokens + engine.copied_tokens +
            engine.decoded_tokens)
  assert cached == fed  # nothing is ever prefilled again


def test_a_dialogue_that_returns_no_action_is_told():
  broken = dataclasses.replace(DIALOGUE, parse=lambda text: None)
  with pytest.raises(ValueError, match='must return an Action, but returned '
                     "None for the turn '<answer> lake </answer>'"):
    rollout({('u', 0): [answer('lake')]}, dialogue=broken)
