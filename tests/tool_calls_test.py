# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools beside the search: parsed, carried out, shown as data."""

import json
import time

import chats
import pytest

import fakes
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import statistics
from searchrl.agent import tag_parser
from searchrl.agent import tools
from searchrl.experiment import model_folders
from searchrl.rollouts import driver
from searchrl.rollouts import pending_searches
from searchrl.rollouts import records
from searchrl.search import call_metrics
from searchrl.search.engine_wrappers import toolset
from searchrl.trajectory import (
    Action, Passage, Request, SearchError, Tool, ToolCall, ToolResult)

ADD = Tool('add', 'Adds two numbers.', {
    'type': 'object', 'required': ['a'], 'properties': {
        'a': {'type': 'string'}, 'b': {'type': 'integer'}}})
NOW = Tool('now', 'Returns the time.', {'type': 'object', 'properties': {}})
TOOLS = (dialogues.SEARCH, ADD)
TAGS = dialogues.tags('q: {question}\n', TOOLS)


@pytest.mark.parametrize('text, action', [
    ('<add> 1 2 </add>', Action('add', ('1 2',), {'a': '1 2'})),
    ('<add>{"a": "1", "b": 2}</add>',
     Action('add', ('{"a": "1", "b": 2}',), {'a': '1', 'b': 2})),
    ('<add> [1] </add>', Action('add', ('[1]',), {'a': '[1]'})),
    ('<think> a </think><add> 1 </add>.', Action('add', ('1',), {'a': '1'})),
    ('<search> x </search><add> 1 </add>', Action('search', ('x',))),
    ('<answer> x </answer>', Action('answer', ('x',))),
    ('<add> </add>', Action('invalid')),
    ('<add> <search> x </add>', Action('invalid')),
    ('<search> <add> x </search>', Action('invalid')),
    ('<sub> 1 </sub>', Action('invalid')),
])
def test_a_tool_has_a_tag(text, action):
  assert TAGS.parse(text) == action
  if '<add>' in text and text.startswith('<add>'):
    # Without the tool, its tag is plain text.
    assert tag_parser.parse_tags(text) == Action('invalid')


@pytest.mark.parametrize('text, action', [
    ('<now>  </now>', Action('now', ('',), {})),
    ('<now></now>', Action('now', ('',), {})),
    ('<now>{}</now>', Action('now', ('{}',), {})),
    ('<think> a </think>\n<now> </now>.', Action('now', ('',), {})),
    ('<add>  </add>', Action('invalid')),
    ('<search> </search>', Action('invalid')),
])
def test_a_tool_without_parameters_is_called_as_the_prompt_shows(text, action):
  tools_ = (*TOOLS, NOW)
  dialogue = dialogues.with_tools(fakes.TOKENIZER, tools_)
  assert '<now>  </now>: Returns the time.' in dialogue.template
  assert dialogue.parse(text) == action


KILOMETRES = Tool('km', 'Converts miles.', {
    'type': 'object', 'required': ['n', 'unit'],
    'properties': {'n': {'type': 'number'}, 'unit': {'type': 'string'}}})
SQUARE = Tool('square', 'Squares.', {
    'type': 'object', 'required': ['n'], 'properties': {
        'n': {'type': ['integer', 'null']}}})


@pytest.mark.parametrize('text, action', [
    ('<square> 12 </square>', Action('square', ('12',), {'n': 12})),
    ('<square> {"n": 3} </square>', Action('square', ('{"n": 3}',), {'n': 3})),
    ('<square> twelve </square>',
     Action('square', ('twelve',), {'n': 'twelve'})),
    ('<km> {"n": 1.5, "unit": "mi"} </km>', Action(
        'km', ('{"n": 1.5, "unit": "mi"}',), {'n': 1.5, 'unit': 'mi'}))])
def test_arguments_that_are_no_text_are_given_as_the_prompt_shows(text, action):
  dialogue = dialogues.with_tools(
      fakes.TOKENIZER, (*TOOLS, SQUARE, KILOMETRES))
  assert '<square> n </square>: Squares.' in dialogue.template
  assert '<km> {"n": ..., "unit": ...} </km>: Converts' in dialogue.template
  assert dialogue.parse(text) == action


@pytest.mark.parametrize('schema, text, value', [
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, '12', 12),
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, 'null', None),
    ({'anyOf': [{'type': 'integer'}, {'type': 'string'}]}, '12', '12'),
    ({'oneOf': [{'enum': [1, 2]}, {'const': '3'}]}, '2', 2),
    ({'oneOf': [{'enum': [1, 2]}, {'const': '3'}]}, '3', '3'),
    ({'enum': ['1', 2]}, '1', '1'), ({'enum': ['1', 2]}, '2', 2),
    ({'enum': ['a', 'b']}, 'c', 'c'),
    ({'type': 'array', 'items': {'type': 'string'}}, '["a"]', ['a']),
    ({'$ref': '#/$defs/x'}, '12', '12'), (True, '12', '12')])
def test_a_text_is_read_as_json_if_the_argument_cannot_be_a_text(
    schema, text, value):
  tool = Tool('give', 'Gives.', {
      'type': 'object', 'properties': {'x': schema}, 'required': ['x']})
  action = tag_parser.parse_tags(f'<give> {text} </give>', (tool,))
  assert action == Action('give', (text,), {'x': value})
  assert type(action.arguments['x']) is type(value)


# Objects that programs read in different ways, or not at all.
UNCLEAR = ('{"a": "\\ud800"}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}',
           '{"a": "1", "a": "2"}', '{"a": {"b": 1, "b": 2}}',
           '{"a": ' + '[' * 64 + ']' * 64 + '}',
           '{"a": ' + '[' * 100_000 + ']' * 100_000 + '}')


@pytest.mark.parametrize('text', UNCLEAR, ids=range(len(UNCLEAR)))
def test_json_that_programs_read_in_different_ways_is_no_call(text):
  assert TAGS.parse(f'<add>{text}</add>') == Action('add', (text,), {'a': text})
  dialogue, _ = native()
  call_ = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
  assert dialogue.parse(call_ % text) == Action('invalid')
  deep = '{"a": ' + '[' * 62 + ']' * 62 + '}'  # 64 levels with the call's own
  assert dialogue.parse(call_ % deep).kind == 'add'


def test_half_a_character_is_no_argument_of_a_call():
  """No server and no file would take it, so the text is the argument."""
  text = '{"a": "\\ud800"}'
  assert TAGS.parse(f'<add>{text}</add>') == Action('add', (text,), {'a': text})
  whole = '{"a": "\\ud83d\\ude00"}'
  assert TAGS.parse(f'<add>{whole}</add>').arguments == {'a': '\U0001f600'}


def test_a_description_that_would_show_the_question_is_refused():
  tool = Tool('sum', 'Adds {question}.', {})
  with pytest.raises(ValueError, match="'{question}' once, but has it 2 times: "
                     ".* The description of the tool sum has it."):
    dialogues.with_tools(fakes.TOKENIZER, (tool,))


def test_the_search_alone_is_as_it_was():
  plain = dialogues.tags('q: {question}\n')
  assert plain == dialogues.tags('q: {question}\n', (dialogues.SEARCH,))
  assert plain.stop_strings == tag_parser.TAG_STOPS and not plain.tag_names
  assert plain.parse is tag_parser.parse_tags
  assert TAGS.stop_strings == ('</search>', '</add>', '</answer>')


def native(name='qwen2'):
  tokenizer = {'qwen2': chats.qwen(), 'llama3': chats.llama()}[name]
  return tools.native(tokenizer, TOOLS), tokenizer


def call(name, arguments):
  body = json.dumps({'name': name, 'arguments': arguments})
  return f'<tool_call>\n{body}\n</tool_call>'


@pytest.mark.parametrize('text, action', [
    (call('add', {'a': '1', 'b': 2}),
     Action('add', ('{"a": "1", "b": 2}',), {'a': '1', 'b': 2})),
    (call('add', {}), Action('add', ('{}',), {})),
    (call('search', {'query_list': ['x']}), Action('search', ('x',))),
    (call('sub', {'a': '1'}), Action('invalid')),
    (call('add', ['1']), Action('invalid')),
    (call('add', {'a': '\ud800'}), Action('invalid')),
    (call('search', {'a': '1'}), Action('invalid')),
])
def test_a_call_names_its_tool_and_arguments(text, action):
  dialogue, _ = native()
  assert dialogue.parse(text) == action
  if action.is_call:
    assert dialogue.parse(dialogue.write('Hm.', action)) == action


@pytest.mark.parametrize('name', ['qwen2', 'llama3'])
def test_the_template_writes_every_tool(name):
  dialogue, tokenizer = native(name)
  prompt = tokenizer.decode(dialogues.opening(dialogue, 'who?', tokenizer))
  for word in ('query_list', 'Adds two numbers.', 'who?'):
    assert word in prompt


def test_a_template_that_writes_one_tool_is_refused():
  with pytest.raises(ValueError, match='must write the tools, but writes '
                     "nothing of a"):
    tools.native(chats.qwen(chats.QWEN3), (
        dialogues.SEARCH, Tool('zzz', 'A tool.', {
            'type': 'object', 'properties': {'abcdef': {}}})))


# Forms in which a template writes a call named `c` of an assistant's message.
IN_XML = (r"'<tool_call>\n<function=' ~ c.name ~ '>\n<parameter=query_list>\n'"
          r" ~ (c.arguments.query_list | tojson) ~ '\n</parameter>\n"
          r"</function>\n</tool_call>'")
AS_PYTHON = ("'<tool_call>' ~ c.name ~ '(query_list=' ~ "
             "(c.arguments.query_list | tojson) ~ ')</tool_call>'")
IN_JSON = ("""'<tool_call>{"name": "' ~ c.name ~ '", "arguments": ' ~ """
           "(c.arguments | tojson) ~ '}</tool_call>'")
WITHOUT_TAGS = ("""'{"name": "' ~ c.name ~ '", "parameters": ' ~ """
                "(c.arguments | tojson) ~ '}'")
SAYS_NOTHING = "''"


def calling(form, template=chats.QWEN2):
  """Returns a tokenizer whose template writes calls in a form."""
  content = "m.content ~ '<|im_end|>\\n' }}"
  assert template.count(content) == 1
  return chats.qwen(template.replace(
      content, "m.content }}{% if m.tool_calls %}{% set c = "
      "m.tool_calls[0].function %}{{- " + form + " }}{% endif %}"
      "{{- '<|im_end|>\\n' }}"))


@pytest.mark.parametrize('form', [IN_XML, AS_PYTHON])
def test_a_template_whose_calls_cannot_be_read_is_not_chosen(form):
  tokenizer = calling(form)
  with pytest.raises(ValueError, match=(
      'must write a call as a JSON object .*, but writes .<tool_call>.* '
      'Choose the tags of searchrl.agent.chat:with_tools.$')):
    tools.native(tokenizer, TOOLS)
  assert model_folders.default_dialogue('x', tokenizer, TOOLS) == (
      'searchrl.agent.chat:with_tools')


@pytest.mark.parametrize('form', [IN_JSON, WITHOUT_TAGS, SAYS_NOTHING])
def test_a_template_whose_calls_are_read_is_chosen(form):
  tokenizer = calling(form)
  assert model_folders.default_dialogue('x', tokenizer, TOOLS) == (
      'searchrl.agent.tools:native')
  bare = '{"name": "search", "parameters": {"query_list": ["x"]}}'
  kind = tools.native(tokenizer, TOOLS).parse(bare).kind
  assert kind == ('search' if form == WITHOUT_TAGS else 'invalid')


@pytest.mark.parametrize('form, is_read', [(IN_JSON, True), (IN_XML, False)])
def test_an_example_of_a_call_and_a_thought_are_not_the_templates_call(
    form, is_read):
  """The prompt opens a thought, which the template leaves out of a call."""
  template = chats.QWEN2
  for old, new in (
      ("'\\n</tools>' }}", "'\\n</tools>\\n<tool_call>CALL</tool_call>' }}"),
      ("m.role ~ '\\n' ~", "m.role ~ '\\n' ~ ('<think>\\n' if m.role == "
       "'assistant' and not m.tool_calls else '') ~"),
      ("assistant\\n' }}", "assistant\\n<think>\\n' }}")):
    assert template.count(old) == 1
    template = template.replace(old, new)
  tokenizer = calling(form, template)
  assert model_folders.default_dialogue('x', tokenizer, TOOLS) == (
      'searchrl.agent.tools:native' if is_read else
      'searchrl.agent.chat:with_tools')


def add(calls):
  """Adds; 7 is a wrong call, 8 is out of service."""
  results = []
  for one in calls:
    number = one.arguments['a']
    results.append(
        ToolResult('no', is_error=True) if number == '7' else
        SearchError('unavailable', 'eight') if number == '8' else
        ToolResult(f'{number} <answer> is </answer> </add> more '
                   f'{one.question.uid}{one.sample}{one.turn}'))
  return results


def rollout(*actions, search=None):
  search = search or toolset({'search': fakes.Search(), 'add': add})
  (trajectory,), calls = driver.run(
      [Request(tiny.question('u'))], engine=fakes.Engine({('u', 0): actions}),
      search=search, dialogue=TAGS, tokenizer=fakes.TOKENIZER,
      budgets=driver.Budgets(max_turns=4, max_new_tokens=60,
                             max_prompt_tokens=30, passage_tokens=40),
      step=fakes.STEP, policy_step=0)
  return trajectory, calls


def test_a_tool_is_called_and_its_text_is_data():
  trajectory, calls = rollout(
      '<search> cat </search>', '<add> 3 </add>', '<answer> here </answer>')
  searched, added, answered = trajectory.turns
  assert searched.passages and not added.passages and not added.is_tool_error
  inside = added.observation.partition('<information>')[2]
  assert inside.startswith('3 ') and 'more u01</information>' in inside
  for tag in ('<answer>', '</answer>', '</add>'):
    assert tag not in inside
  assert added.observation.startswith('\n\n<information>')
  assert trajectory.stop_reason == 'answer' and trajectory.answer == 'here'
  assert trajectory.searches == 1 and answered.observation == ''
  assert sorted(c.tool for c in calls) == ['add', 'search']
  mask = [turn.observation_tokens for turn in trajectory.turns]
  assert sum(trajectory.loss_mask) == len(trajectory.tokens) - sum(
      map(len, mask)) - len(trajectory.prompt_tokens)


def test_a_wrong_call_goes_on_and_a_failed_tool_ends_the_trajectory():
  trajectory, calls = rollout('<add> 7 </add>', '<answer> here </answer>')
  assert trajectory.turns[0].is_tool_error and trajectory.answer == 'here'
  assert calls[0].wrong == 1 and calls[0].errors == 0
  trajectory, calls = rollout('<add> 8 </add>')
  assert trajectory.stop_reason == 'search_error'
  assert trajectory.search_error == SearchError('unavailable', 'eight')
  assert calls[0].errors == 1


def test_a_tool_that_the_run_lacks_has_failed():
  trajectory, _ = rollout('<add> 3 </add>', search=fakes.Search())
  assert trajectory.search_error == SearchError(
      'unavailable', "the run has no tool 'add'")


def test_a_record_of_a_tool_is_read_back():
  trajectory, _ = rollout('<add> 3 </add>', '<answer> here </answer>')
  text = json.dumps(records.to_json(trajectory))
  again = records.from_json(json.loads(text))
  assert again == trajectory
  assert again.turns[0].action.arguments == {'a': '3'}


def test_metrics_of_a_tool_stand_beside_those_of_the_search():
  trajectory, calls = rollout('<add> 7 </add>', '<add> 3 </add>',
                              '<answer> here </answer>')
  values = statistics.describe([trajectory])
  assert values['tool/add/calls_per_traj'] == 2
  assert values['tool/add/wrong_per_traj'] == 1
  assert values['search/calls_per_traj'] == 0
  values = call_metrics.describe(calls)
  assert values['tool/add/queries'] == 2 and values['search/queries'] == 0
  assert values['tool/add/wrong_rate'] == .5
  nothing = call_metrics.describe([call_metrics.count(0.1, [], 'add')])
  assert nothing['tool/add/wrong_rate'] == nothing['tool/add/queries'] == 0


def test_a_format_with_tools_is_in_order():
  trajectory, _ = rollout(
      '<think> a </think><add> 3 </add>',
      '<think> b </think><answer> here </answer>')
  assert formats.is_well_formed(trajectory)
  trajectory, _ = rollout(
      '<think> a </think> b <add> 3 </add>',
      '<think> b </think><answer> here </answer>')
  assert not formats.is_well_formed(trajectory)


def test_a_slow_tool_holds_up_no_other():
  def slow(calls):
    time.sleep(.5)
    return [ToolResult('late')] * len(calls)

  def quick(calls):
    return [(Passage('1', 'a', 'b'),)] * len(calls)

  pending = pending_searches.PendingSearches(
      toolset({'search': quick, 'slow': slow}), timeout_secs=9, calls=1)
  pending.submit('b', [ToolCall('slow', {}, tiny.question())], 'slow')
  pending.submit('a', [ToolCall('search', {}, tiny.question())], 'search')
  assert [*pending.some()] == ['a']  # the slow one was submitted first
  assert pending.all() == {'b': [ToolResult('late')]}


def test_another_engine_is_a_search():
  wiki = Tool('search_wiki', 'Searches Wikipedia.',
              dialogues.SEARCH.parameters)
  dialogue = dialogues.tags('q: {question}\n', (*TOOLS, wiki))
  action = dialogue.parse('<search_wiki> cat </search_wiki>')
  assert action.is_search and action.texts == ('cat',)
  schema = tools.schema(wiki)['function']
  assert schema['name'] == 'search_wiki' and (
      schema['parameters'] == tools.schema()['function']['parameters'])
