# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""scripted: turns that a function writes are those of the driver's rollouts."""

import threading

import fakes
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.rollouts import driver
from searchrl.rollouts import scripted
from searchrl.trajectory import Request

DIALOGUE = dialogues.tags('q: {question}\n')
BUDGETS = driver.Budgets(max_turns=4, max_new_tokens=60, max_prompt_tokens=60,
                         passage_tokens=30, top_k=1)
SEARCH = '<search>{}</search>'
ANSWER = '<answer>{}</answer>'


def rollout(write, requests, **options):
  options = dict(tokenizer=fakes.TOKENIZER, dialogue=DIALOGUE, budgets=BUDGETS,
                 length=400, search=fakes.Search()) | options
  return scripted.rollout(write, requests, **options)


def requests(count, samples=1):
  return [Request(tiny.question(f'q{n}'), sample, n)
          for n in range(count) for sample in range(samples)]


def by_number(request, turns):
  """Searches as often as the question's number, then answers."""
  number = int(request.question.uid[1:])
  if len(turns) < number:
    return SEARCH.format(f'cat {request.sample}')
  return ANSWER.format(turns[-1].observation.count('cat') if turns else 'here')


@pytest.mark.parametrize('threads', [1, 3])
def test_it_is_the_drivers_rollout_of_the_same_texts(threads):
  asked = requests(3, samples=2)
  trajectories = rollout(by_number, asked, threads=threads)
  assert [(t.question.uid, t.sample, t.group) for t in trajectories] == [
      (r.question.uid, r.sample, r.group) for r in asked]
  assert [t.searches for t in trajectories] == [0, 0, 1, 1, 2, 2]
  texts = {(t.question.uid, t.sample): [turn.text for turn in t.turns]
           for t in trajectories}
  replayed, _ = driver.run(
      asked, engine=fakes.Engine(texts), search=fakes.Search(),
      dialogue=DIALOGUE, tokenizer=fakes.TOKENIZER, budgets=BUDGETS,
      step=fakes.STEP, policy_step=0)
  for ours, theirs in zip(trajectories, replayed):
    assert ours.tokens == theirs.tokens and ours.loss_mask == theirs.loss_mask
    assert ours.stop_reason == theirs.stop_reason == 'answer'
    assert ours.turns[0].passages == theirs.turns[0].passages


def test_a_text_is_data_and_is_cut_to_the_budget_of_a_turn():
  trajectory, = rollout(lambda request, turns: 'x' * 150, requests(1))
  assert trajectory.stop_reason == 'turn_limit'
  assert {len(turn.action_tokens) for turn in trajectory.turns} == {60}


def test_turns_are_written_at_the_same_time():
  together = threading.Barrier(3, timeout=20)

  def write(request, turns):
    together.wait()
    return ANSWER.format('here')

  assert len(rollout(write, requests(3), threads=3)) == 3


def test_an_error_of_the_function_ends_the_rollout():
  def write(request, turns):
    if request.question.uid == 'q2':
      raise ConnectionError('gone')
    return ANSWER.format('here')

  for threads in (1, 2):
    with pytest.raises(ConnectionError, match='gone'):
      rollout(write, requests(4), threads=threads)


def test_a_failed_search_is_tried_again_from_the_start():
  search = fakes.Search()
  failed = []

  def write(request, turns):
    if turns:
      return ANSWER.format('here')
    failed.append(len(failed))
    return SEARCH.format('cat' if len(failed) > 1 else 'fail')

  trajectory, = rollout(write, requests(1), search=search)
  assert trajectory.answer == 'here' and trajectory.retries == 1
