# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""baselines: what each asks, searches and answers, by a scripted model."""

import dataclasses

import fakes
import pytest
import sampler_test
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import prompts
from searchrl.evaluation import baselines
from searchrl.evaluation import scores
from searchrl.rollouts import driver
from searchrl.rollouts import sampler as samplers
from searchrl.trajectory import Passage, SearchError

QUESTION = tiny.question('q', 'where is it', answers=('here',))
SEARCHED = []


def search(queries):
  SEARCHED.extend(query.text for query in queries)
  return [SearchError('unavailable', 'down') if 'fail' in query.text else (
      Passage(f'{query.text}-1', 'a', f'{query.text} is here', 2.0),
      Passage('same', 'b', 'there', 1.0)) for query in queries]


def prompted(texts, length=900):
  """A model that writes these texts, one a rollout, to whatever question."""
  engine = Texts(texts, length)
  sampler = samplers.Sampler(
      tiny.CONFIG, fakes.TOKENIZER, dialogues.tags('q: {question}\n'),
      driver.Budgets(max_turns=3, max_new_tokens=60, max_prompt_tokens=60,
                     passage_tokens=40, top_k=2), engine,
      sampler_test.weight_sync.Synced)
  SEARCHED.clear()
  return baselines.PromptedModel(sampler, None, search, {
      name: f'{name}: {{question}}' for name in prompts.PLAIN}), engine


class Texts(fakes.Engine):
  """Writes the next text at each append, and keeps the prompts."""

  def __init__(self, texts, length):
    super().__init__({}, length=length)
    self.prompts, self._texts = [], iter(texts)

  def placed(self, table):
    return table

  def name(self, feed):
    self.prompts.append(fakes.TOKENIZER.decode(feed.tokens))
    self._script = {('q', 0): [next(self._texts)]}
    return 'q', 0, 0


ANSWER = '<answer> here </answer>'


def ask(text):
  return f'<search> {text} </search>'


def test_queries_that_fail_are_repeated_once_the_engine_answers():
  made, _ = prompted([ANSWER])
  calls = []

  class Engine:
    is_down = True

    def wait(self):
      calls.append('wait')
      self.is_down = len(calls) < 3

    def __call__(self, queries):
      calls.append([query.text for query in queries])
      return [SearchError('unavailable', 'down') if (
          self.is_down and query.text != 'b') else (
              Passage(query.text, '', '', 1.0),) for query in queries]

  attempts = [baselines._Attempt(QUESTION, text) for text in 'abc']
  made = dataclasses.replace(made, search=Engine())
  assert [passage.id for passage, in made.find(attempts)] == ['a', 'b', 'c']
  assert calls == ['wait', ['a', 'b', 'c'], 'wait', ['a', 'c']]
  assert made.find([]) == [] and len(calls) == 4


def test_direct_and_thought_answer_without_a_search():
  for name in ('direct', 'cot'):
    made, engine = prompted([ANSWER])
    one, = baselines.METHODS[name](made, [QUESTION])
    assert engine.prompts == [f'{name}: where is it'] and not SEARCHED
    assert scores.score_trajectory(one).values['em'] == 1 and one.stop_reason == 'answer'


def test_rag_searches_for_the_question_and_reads_what_is_found():
  made, engine = prompted([ANSWER])
  one, = baselines.rag(made, [QUESTION])
  assert SEARCHED == ['where is it']
  prompt, = engine.prompts
  assert prompt.startswith('rag: ') and 'where is it is here' in prompt
  assert prompt.endswith('\nwhere is it')
  found = scores.score_trajectory(one).values
  assert (found['em'], found['searches'], found['recall'], found['hit@1']) == (
      1, 1, 1, 1)
  assert one.question == QUESTION  # not the text that stood in the prompt


def test_ircot_searches_by_its_thought_and_ends_with_its_conclusion():
  made, engine = prompted(['it is far.', 'so the answer is: here.'])
  one, = baselines.ircot(made, [QUESTION])
  assert SEARCHED == ['where is it', 'it is far.']
  assert 'it is far.' in engine.prompts[1]
  assert engine.prompts[1].count('there') == 1  # a passage stands there once
  assert engine.prompts[1].index('where is it is here') < (
      engine.prompts[1].index('there'))  # the best first
  assert one.answer == 'here' and one.stop_reason == 'answer'
  assert scores.score_trajectory(one).values['searches'] == 2


def test_ircot_without_a_conclusion_has_no_answer():
  made, _ = prompted(['well.', 'hm.', 'who knows.'])
  one, = baselines.ircot(made, [QUESTION])
  assert one.answer is None and one.stop_reason == 'turn_limit'
  assert len(SEARCHED) == 3


def test_ircot_does_not_take_a_denial_for_an_answer():
  made, _ = prompted(['the answer is not there.', 'hm.',
                      'so the answer is: here.'])
  one, = baselines.ircot(made, [QUESTION])
  assert one.answer == 'here' and len(SEARCHED) == 3


def test_the_agent_reads_passages_and_search_o1_a_note_on_them():
  made, engine = prompted([ask('x'), ANSWER])
  one, = baselines.ra_agent(made, [QUESTION])
  assert SEARCHED == ['x'] and one.answer == 'here'
  assert '<information>' in engine.prompts[1] and 'x is here' in (
      engine.prompts[1])
  assert scores.score_trajectory(one).values['searches'] == 1
  made, engine = prompted([ask('x'), '<answer> a note </answer>', ANSWER])
  one, = baselines.search_o1(made, [QUESTION])
  assert engine.prompts[1].startswith('note: ')
  assert 'x is here' in engine.prompts[1]
  assert 'x is here' not in engine.prompts[2] and 'a note' in engine.prompts[2]
  assert scores.score_trajectory(one).values['recall'] == 1  # it was found, if not shown


def test_an_agent_ends_at_its_last_turn():
  made, _ = prompted([ask('x')] * 3)
  one, = baselines.ra_agent(made, [QUESTION])
  assert one.stop_reason == 'turn_limit' and one.answer is None


def test_a_prompt_without_room_is_no_error():
  made, engine = prompted([], length=70)
  for method in baselines.METHODS.values():
    one, = method(made, [QUESTION])
    assert one.stop_reason == 'length_limit' and one.answer is None
  assert not engine.prompts


@pytest.mark.parametrize('name, texts, text', [
    ('rag', [], 'fail'), ('ircot', [], 'fail'),
    ('ra_agent', [ask('fail')], 'x'),
    ('search_o1', [ask('fail'), ANSWER], 'x')])
def test_a_failed_search_ends_a_question_and_says_so(name, texts, text):
  made, _ = prompted(texts)
  asked = tiny.question('q', text, answers=('here',))
  one, = baselines.METHODS[name](made, [asked])
  assert one.stop_reason == 'search_error'
  assert one.search_error == SearchError('unavailable', 'down')
  assert scores.score_trajectory(one).failed


def test_every_template_has_one_place_for_the_question():
  for templates in prompts.SETS.values():
    assert templates.keys() == prompts.PLAIN.keys()
    for template in templates.values():
      dialogues.tags(template)
