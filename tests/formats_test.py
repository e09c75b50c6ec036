# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""formats: what the Study's Appendix C calls valid, and three differences."""

import dataclasses
import json
import random
import re
import time

import chats
import oracles
import pytest
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import rewards
from searchrl.agent import tag_parser
from searchrl.agent import tools
from searchrl.trajectory import Passage, Tool, ToolResult, Trajectory, Turn

CHATML = ('<|im_start|>system\nYou search.<|im_end|>\n<|im_start|>user\nThink '
          'between <think> and </think>. Search by <search> query </search>, '
          'and answer by <answer> and </answer>, as <answer> Beijing </answer>.'
          '<|im_end|>\n<|im_start|>assistant\n')
THINK, SEARCH = '<think> hm </think>\n', '<search> capital </search>'
FOUND = '\n\n<information>Doc 1(Title: "France") Paris it is</information>\n\n'
PARIS, ROME = '<answer> Paris </answer>', '<answer> Rome </answer>'
INVALID = dialogues.verbatim('search_r1_invalid_action.txt')
ROWS = {  # the published code's verdicts
    THINK + PARIS: True,
    THINK + SEARCH + FOUND + THINK + '<answer>paris.</answer>': True,
    THINK + SEARCH + FOUND + THINK + ROME: True,
    THINK + SEARCH + FOUND.replace('Paris', 'Lyon') + THINK + ROME: True,
    PARIS: False,
    ROME: False,
    'Paris, I should think.': False,
    THINK + SEARCH + FOUND.replace('</', '<') + THINK + PARIS: False,
    THINK + SEARCH + '\n\n<information>Doc 1' + THINK + PARIS: False,
    THINK + THINK + PARIS: False,
    THINK + 'So: ' + PARIS: False,
    THINK + '<search> x' + INVALID + THINK + PARIS: False,
    INVALID + THINK + PARIS: False,
    THINK + '<answer> It is Paris, France </answer>': True,
    '': False,
    THINK: False,
    THINK + SEARCH: False,
    THINK + SEARCH + FOUND: False,
    THINK + SEARCH + THINK + PARIS: False,
    THINK + FOUND + THINK + PARIS: False,
    THINK + SEARCH + FOUND + PARIS: False,
    THINK + PARIS + PARIS: False,
    THINK + PARIS + ' done': False,
    THINK + PARIS + ' \n\t': True,
    ' \n' + THINK + PARIS: True,
    '<think></think><answer></answer>': True,
    '<think> <search> </think>' + PARIS: False,
    '<think> a <think> b </think> c </think>' + PARIS: False,
    '<think> <Search> </ think> <tool_call> < </think>' + PARIS: True,
    (THINK + SEARCH + FOUND) * 5 + THINK + PARIS: True,
}


@pytest.mark.parametrize('response', ROWS)
def test_rows_are_judged_as_by_the_published_code(response):
  assert oracles.study_format(CHATML + response) == ROWS[response]
  assert formats.is_valid(response) == ROWS[response]


def generated(rng):
  """A response: valid, or with a few pieces left out, put in, or exchanged."""
  inside = lambda: ''.join(rng.choices(
      ['a', ' ', '\n', 'é', '<', '>', '</', '<b>', '<tool_call>',
       '<|im_start|>', 'answer', '＜think＞', '<think >', '</Search>'],
      k=rng.randrange(5)))
  space = lambda: ''.join(rng.choices(
      [' ', '\n', '\t', '\u00a0', '\u2028', ''], k=rng.randrange(3)))
  block = lambda name: [f'<{name}>', inside(), f'</{name}>', space()]
  pieces = [space(), *block('think')]
  for _ in range(rng.randrange(4)):
    pieces += block('search') + block('information') + block('think')
  pieces += block('answer')
  tags = [f'<{slash}{name}>' for name in oracles.STUDY_TAGS
          for slash in ('', '/')]
  for _ in range(rng.choice([0, 0, 1, 1, 2])):
    place = rng.randrange(len(pieces))
    pieces[place:place + rng.randrange(2)] = rng.choice([
        [], [rng.choice(tags)], ['word'], [' '], pieces[place:place + 2] * 2,
        block(rng.choice(oracles.STUDY_TAGS)), pieces[place:place + 4][::-1]])
  return ''.join(pieces)


def test_ten_thousand_responses_are_judged_as_by_an_independent_reading():
  rng, valid = random.Random(0), 0
  for _ in range(10_000):
    response = generated(rng)
    # The published check reads what shares a token with the closing tag.
    read = re.sub(r'(</(?:search|answer)>)(?:(?!</?\w+>|<\|)\S)+', r'\1',
                  response)
    wanted = oracles.study_format(CHATML + read)
    assert formats.is_valid(response) == wanted, response
    valid += wanted
  # Both classes are well represented.
  assert 3000 < valid < 7000


def test_ends_of_turns_are_taken_off_in_linear_time():
  begun = time.process_time()
  assert formats.is_valid(THINK + PARIS + '</s> \n' * 100_000)
  assert tag_parser.without_turn_end('</s> ' * 100_000) == ''
  assert time.process_time() - begun < 2  # a third of a second


@pytest.mark.parametrize('rest', ['.', '<', '</', ',', ')', '"', "';", '>',
                                  '.\n', '<\n\n', 'The', '。'])
def test_the_rest_of_the_closing_tags_token_is_not_read(rest):
  assert formats.is_valid(THINK + PARIS + rest)
  assert formats.is_valid(THINK + PARIS + rest + '</s>')
  assert formats.is_valid(THINK + SEARCH + rest + FOUND + THINK + PARIS + rest)
  assert not formats.is_valid(THINK.rstrip() + '.' + PARIS)
  assert not formats.is_valid(THINK + SEARCH + FOUND.rstrip() + '.' + THINK
                              + PARIS)
  assert not formats.is_valid(THINK + PARIS + rest + ' done')


def test_no_marker_of_chatml_is_asked_for():
  llama = '<|start_header_id|>assistant<|end_header_id|>\n\n'
  assert not oracles.study_format(llama + THINK + PARIS)
  assert formats.is_valid(THINK + PARIS, prompt=llama)


@pytest.mark.parametrize('opened', ['<think>', 'assistant\n<think>\n'])
def test_a_thought_that_the_prompt_opens_is_the_responses(opened):
  rest = THINK.removeprefix('<think>') + SEARCH + FOUND + THINK + PARIS
  assert not formats.is_valid(rest)
  assert formats.is_valid(rest, prompt=opened)
  assert not formats.is_valid(THINK + PARIS, prompt=opened)  # opened twice
  assert not formats.is_valid(rest, prompt=CHATML)  # which only speaks of it
  assert not formats.is_valid(rest, prompt='<think> </think>')
  assert not formats.is_valid(' hm ' + PARIS, prompt=opened)


@pytest.mark.parametrize('end', tag_parser.TURN_ENDS)
def test_the_end_of_a_turn_is_no_text(end):
  for ended in (end, f' {end}\n', f'{end}{end}', f'{end}<|endoftext|> '):
    assert formats.is_valid(THINK + PARIS + ended)
    assert not oracles.study_format(CHATML + THINK + PARIS + ended)
  assert not formats.is_valid(THINK + PARIS + end + 'more')
  assert not formats.is_valid(end + THINK + PARIS)


def test_a_search_may_be_asked_for():
  assert formats.is_valid(THINK + SEARCH + FOUND + THINK + PARIS,
                          needs_search=True)
  assert not formats.is_valid(THINK + PARIS, needs_search=True)


def conversation(dialogue, tokenizer, *texts, prompt=None):
  """A trajectory of these texts, with what the dialogue shows after each."""
  opening = dialogues.opening(dialogue, 'where?', tokenizer)
  results, turns = [(Passage('1', 'Paris', 'the "town"\nof\tlight'),)], []
  for i, text in enumerate(texts):
    ids, shown = tokenizer.encode(text), ()
    action = dialogue.parse(tokenizer.decode(ids))
    if action.is_call:
      shown = dialogues.observation(
          dialogue, results if action.is_search else ToolResult('found'),
          tokenizer, passage_tokens=99, action_tokens=ids).tokens
    elif action.kind == 'invalid' and i + 1 < len(texts):
      shown = dialogues.retry(dialogue, tokenizer, ids)
    turns.append(Turn(
        ids, (0.0,) * len(ids), action, shown, text=tokenizer.decode(ids),
        observation=tokenizer.decode(shown),
        passages=results[0] if action.is_search else ()))
  return Trajectory(
      tiny.question(answers=('town of light',)), 0, 0, opening, tuple(turns),
      'answer', prompt=prompt or tokenizer.decode(opening))


CALL = '<tool_call>\n' + json.dumps(
    {'name': 'search', 'arguments': {'query_list': ['q']}}) + '\n</tool_call>'
TOKENIZERS = {'qwen2': chats.qwen(), 'qwen3': chats.qwen(chats.QWEN3),
              'llama3': chats.llama(),
              'mistral': chats.sentence_piece(chats.MISTRAL)}


@pytest.mark.parametrize('name', TOKENIZERS)
def test_a_gold_is_found_in_the_json_of_a_tools_answer(name):
  tokenizer = TOKENIZERS[name]
  found = conversation(tools.dr_zero(tokenizer), tokenizer, THINK + CALL,
                       THINK + PARIS)  # a line break stands in the gold
  assert rewards.found_gold(found)


@pytest.mark.parametrize('name', TOKENIZERS)
def test_tools_are_judged_alike_in_the_frame_of_any_template(name):
  tokenizer = TOKENIZERS[name]
  dialogue = tools.dr_zero(tokenizer)
  for texts, valid in (
      ([THINK + CALL, THINK + PARIS], True),
      ([THINK + CALL, THINK + CALL, THINK + PARIS], True),
      ([THINK + CALL + dialogue.turn_end, THINK + PARIS + '</s>'], True),
      ([THINK + PARIS], True),
      ([THINK + CALL, PARIS], False),
      ([CALL, THINK + PARIS], False),
      ([THINK + CALL], False),
      ([THINK + CALL, THINK + 'So: ' + PARIS], False),
      ([THINK + CALL.replace('"q"', ''), THINK + PARIS], False),
      ([THINK + SEARCH, THINK + PARIS], False),
      ([THINK + CALL + '.', THINK + PARIS + '></'], True),
      ([THINK + CALL + '<tool_response> made up', THINK + PARIS + '.'], True),
      (['nonsense', THINK + PARIS], False)):
    trajectory = conversation(dialogue, tokenizer, *texts)
    assert formats.is_well_formed(trajectory) == valid, texts
    assert formats.is_well_formed(trajectory, needs_search=True) == (
        valid and len(texts) > 1)


@pytest.mark.parametrize('make, call', [
    (dialogues.with_tools, '<{0}> q </{0}>'),
    (tools.native,
     '<tool_call>\n{{"name": "{0}", "arguments": {{"{1}": ["q"]}}}}\n'
     '</tool_call>')])
def test_any_search_engine_is_a_search_and_no_other_tool(make, call):
  web = dataclasses.replace(dialogues.SEARCH, name='search_web')
  page = Tool('page', 'Opens pages.', {
      'type': 'object', 'properties': {'ids': {'type': 'array'}}})
  tokenizer = chats.qwen()
  dialogue = make(tokenizer, (dialogues.SEARCH, web, page))
  for name, first, is_search in (
      ('search', 'query_list', True), ('search_web', 'query_list', True),
      ('page', 'ids', False)):
    trajectory = conversation(
        dialogue, tokenizer, THINK + call.format(name, first), THINK + PARIS)
    assert formats.is_well_formed(trajectory)
    assert formats.is_well_formed(trajectory, needs_search=True) == is_search


def test_a_template_that_opens_each_thought_counts_after_tools_too():
  tokenizer = chats.qwen(chats.OPENS_THINKING)
  dialogue = tools.dr_zero(tokenizer)
  rest = THINK.removeprefix('<think>')
  assert formats.is_well_formed(conversation(
      dialogue, tokenizer, rest + CALL, rest + PARIS))
  assert not formats.is_well_formed(conversation(
      dialogue, tokenizer, rest + CALL, THINK + PARIS))


def test_tags_of_a_trajectory_are_judged_as_its_response():
  tokenizer, dialogue = TOKENIZERS['qwen2'], dialogues.tags('{question}')
  for texts in ([THINK + PARIS], [THINK + SEARCH, THINK + PARIS],
                [SEARCH, THINK + PARIS], ['oh', THINK + PARIS],
                [THINK + SEARCH + '.', THINK + PARIS + '<'],
                [THINK + SEARCH + ' so <information>', THINK + PARIS],
                [THINK + CALL, THINK + PARIS]):
    trajectory = conversation(dialogue, tokenizer, *texts)
    read = ''.join(re.sub('(</search>|</answer>).*', r'\1', turn.text)
                   + turn.observation for turn in trajectory.turns)
    assert formats.is_well_formed(trajectory) == oracles.study_format(
        CHATML + read)


def test_an_invalid_turn_inside_a_thought_is_invalid():
  """Its observation has no tag, and would be read as more of the thought."""
  tokenizer, dialogue = TOKENIZERS['qwen2'], dialogues.tags('{question}')
  assert formats.is_well_formed(
      conversation(dialogue, tokenizer, THINK + PARIS))
  assert not formats.is_well_formed(conversation(
      dialogue, tokenizer, '<think> hmm', 'so </think>' + PARIS))


@pytest.mark.parametrize('name', ['qwen2', 'llama3'])
def test_a_call_inside_a_thought_is_invalid_in_json_too(name):
  tokenizer = TOKENIZERS[name]
  dialogue = tools.dr_zero(tokenizer)
  for call, is_valid in ((THINK + CALL, True), ('<think> a ' + CALL, False)):
    for last in (THINK + PARIS, 'b </think>' + PARIS):
      assert formats.is_well_formed(conversation(
          dialogue, tokenizer, call, last)) == (
              is_valid and last.startswith(THINK)), (call, last)


def test_a_record_without_texts_is_not_judged():
  trajectory = conversation(dialogues.tags('{question}'), TOKENIZERS['qwen2'],
                            THINK + PARIS)
  old = dataclasses.replace(trajectory, prompt='', turns=tuple(
      dataclasses.replace(turn, text='') for turn in trajectory.turns))
  with pytest.raises(ValueError, match="that of question 'q', sample 0, has "
                                       'none, because an older version'):
    formats.is_well_formed(old)
