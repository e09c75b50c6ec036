# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""tools: strict calls, and whole conversations as the template writes them."""

import dataclasses
import functools
import json

import chats
import hypothesis
from hypothesis import strategies as st
import pytest
import text_oracles
import tiny

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tools
from searchrl.experiment import model_folders
from searchrl.experiment import policy as policies
from searchrl.models.inference import stops
from searchrl.models import weights
from searchrl.papers.dr_zero import dialogues as proposer_dialogues
from searchrl.papers.dr_zero import proposals
from searchrl.rollouts import driver
from searchrl.runtime import mesh as meshes
from searchrl.trajectory import Action, Passage, Request

DEVICES = 8

quick = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
TOKENIZERS = {
    'qwen2': chats.qwen(), 'qwen3': chats.qwen(chats.QWEN3),
    'llama3': chats.llama(), 'mistral': chats.sentence_piece(chats.MISTRAL),
    'mistral legacy': chats.sentence_piece(chats.MISTRAL, legacy=True)}
each = pytest.mark.parametrize('name', TOKENIZERS)
PARIS, LYON = Passage('1', 'Paris', 'the "town"\nof'), Passage('2', 'Lyon', 'é')


def call(*queries, **changes):
  body = {'name': 'search', 'arguments': {'query_list': list(queries)}}
  return f'<tool_call>\n{json.dumps(body | changes)}\n</tool_call>'


@pytest.mark.parametrize('text, action', [
    (call('who?'), Action('search', ('who?',))),
    (call(' a ', 'b') + ' \n', Action('search', ('a', 'b'))),
    (f'<think> hm</think>\n{call("é")}', Action('search', ('é',))),
    (call('</search> <answer> x'), Action('search', ('</search> <answer> x',))),
    (call('a') + ' and', Action('search', ('a',))),
    (call('a') + call('b'), Action('search', ('a',))),
    (f'<think> {call("a")} </think> <answer> b </answer>',
     Action('search', ('a',))),
    ('<answer> a </answer> b', Action('answer', ('a',))),
    ('</search><answer> a </answer>', Action('answer', ('a',))),
    (call('x').replace('": ', '":').replace('\n', ''),
     Action('search', ('x',))),
    (call(*'abcdefgh'), Action('search', tuple('abcdefgh'))),
    (call('a').replace('arguments', 'parameters'), Action('search', ('a',))),
    ('<think> a </think><answer> No </answer>', Action('answer', ('No',))),
    (call('a <tool_call> b'), Action('search', ('a <tool_call> b',))),
    (call('<tool_call>', '<tool_call>{}'),
     Action('search', ('<tool_call>', '<tool_call>{}'))),
    (f'<think> <tool_call> {{ </think>{call("<tool_call>")}',
     Action('search', ('<tool_call>',))),
    ('<tool_call>' + call('a'), Action('search', ('a',))),
])
def test_a_call_or_an_answer_ends_a_turn(text, action):
  assert tools.parse(text) == action


@pytest.mark.parametrize('text', [
    '', 'text', '</tool_call>', '<tool_call></tool_call>', call() , call(''),
    call('a', ' '), call(*'abcdefghi'), call(1), call(None), call(['a']),
    call({'a': 'b'}), call('a', name='Search'), call('</answer>'),
    call('a', name=['search']), call('a', id=7), call(arguments={}),
    call(arguments=None), call(arguments='{"query_list": ["a"]}'),
    call(arguments=['a']), call(arguments={'query_list': 'abc'}),
    call(arguments={'query_list': {'a': 1}}), call(arguments={'query': ['a']}),
    call(arguments={'query_list': ['a'], 'topk': 3}),
    call('a', parameters={'query_list': ['a']}),
    '<tool_call> who? </tool_call>', '<tool_call> "a" </tool_call>',
    '<tool_call> [] </tool_call>', '<tool_call> null </tool_call>',
    '<tool_call> {} </tool_call>', call('a').replace('}}', '}'),
    call('a').replace('"', "'"), call('a') .replace('<tool_call>', ''),
    call('a').replace('{"name"', '{"name": "search", "name"'),
    '<tool_call>' + '[' * 100_000 + '</tool_call>',
    '<tool_call>' + '9' * 10_000 + '</tool_call>',
    call('\ud800'), '<search> a </search>', '<answer> </answer>',
    '<answer> <tool_call> a </answer>', call(1) + call('a'),
    '<Tool_call>{}</Tool_call>', call('a').replace('</tool', '</ tool'),
    '<tool_call>' * 2_000 + '{</tool_call>', call('<tool_call>', 1),
    call('a').replace('</tool_call>', '<tool_call></tool_call>'),
])
def test_everything_else_is_invalid(text):
  assert tools.parse(text) == Action('invalid')


BARE = '{"name": "search", "parameters": {"query_list": ["a"]}}'
FOUND_A, INVALID = Action('search', ('a',)), Action('invalid')


@pytest.mark.parametrize('text, action', [
    (BARE, FOUND_A), (f' \n{BARE}\n', FOUND_A), (f'{BARE}<|eot_id|>', FOUND_A),
    (f'<|python_tag|>{BARE}<|eom_id|>', FOUND_A),
    (f'<|python_tag|> {json.dumps(json.loads(BARE), indent=4)}\n', FOUND_A),
    (BARE.replace('parameters', 'arguments'), FOUND_A),
    (BARE.replace('{"name"', '{"type": "function", "name"'), FOUND_A),
    (f'<think> {{"b": 1}} hm </think>\n{BARE}', FOUND_A),
    (BARE.replace('"a"', '"a {\\"b\\": [1]}", "c"'),
     Action('search', ('a {"b": [1]}', 'c'))),
    (BARE.replace('"a"', '"</tool"'), Action('search', ('</tool',))),
    (f'I call it: {BARE}', INVALID), (f'{BARE} and wait', INVALID),
    (f'{BARE}{BARE}', INVALID), (f'{BARE}; {BARE}', INVALID),
    (f'[{BARE}]', INVALID), (f'```json\n{BARE}\n```', INVALID),
    (BARE[:-1], INVALID), (BARE[:-4], INVALID), (BARE + '}', INVALID),
    (f'<think> {BARE} </think>', INVALID), (f'<think> {BARE}', INVALID),
    (f'<think> a </think> so {BARE}', INVALID),
    (BARE.replace('"a"', '{"a": 1}'), INVALID),
    (BARE.replace('"a"', ''), INVALID), (BARE.replace('["a"]', '"a"'), INVALID),
    (BARE.replace('search', 'answer'), INVALID),
    (BARE.replace('{"name"', '{"type": "tool", "name"'), INVALID),
    (BARE.replace('{"name"', '{"id": 1, "name"'), INVALID),
    (BARE.replace('parameters', 'arguments').replace(
        '{"name"', '{"parameters": {}, "name"'), INVALID),
    (BARE.replace('"a"', '"</answer>"'), INVALID),
    ('{"answer": "Paris"}', INVALID), ('{}', INVALID), ('{"name": 1}', INVALID),
    (f'{{ <tool_call>{BARE}', INVALID), (f'{BARE}</tool_call>', INVALID),
    ('{' * 100_000 + '}' * 100_000, INVALID),
    (f'<answer> {BARE} </answer>', Action('answer', (BARE,))),
    (f'{BARE} <answer> Paris </answer>', Action('answer', ('Paris',))),
    (call('a'), FOUND_A), (f'{BARE}{call("b")}', Action('search', ('b',)))])
def test_a_turn_of_json_alone_is_a_call_where_the_template_writes_it_so(
    text, action):
  assert tools.parse(text, bare=True) == action
  assert text_oracles.tool_action(text, 8, bare=True) == action
  if '<tool_call>' not in text and action.is_search:
    assert tools.parse(text) == INVALID


@each
def test_the_template_says_whether_a_call_has_tags(name):
  parse = tools.dr_zero(TOKENIZERS[name]).parse
  assert parse(BARE) == (FOUND_A if name == 'llama3' else INVALID)
  assert parse(call('a')) == FOUND_A


@quick
@hypothesis.given(st.lists(st.one_of(st.text(max_size=5), st.sampled_from([
    '<tool_call>', '</tool_call>', '{"name": "search", ', '"parameters": ',
    '{"query_list": ', '["a"]', '}', '}}', '<answer>', '</answer>', '\\u'])),
                           max_size=9).map(''.join))
def test_a_turn_of_any_text_is_read(text):
  for bare in (False, True):
    action = tools.parse(text, bare=bare)
    assert action.kind in ('search', 'answer', 'invalid')
    assert all(isinstance(t, str) and t for t in action.texts)
    assert action == text_oracles.tool_action(text, 8, bare)


@quick
@hypothesis.given(st.lists(st.one_of(
    st.text(st.characters(exclude_categories=['Cs'])),
    st.just('a <tool_call> "')), max_size=6), st.booleans())
def test_what_json_writes_is_read_back(queries, plain):
  body = json.dumps({'name': 'search', 'arguments': {'query_list': queries}},
                    ensure_ascii=plain)
  action = tools.parse(f'<tool_call>{body}</tool_call>', max_queries=4)
  wanted = tuple(q.strip() for q in queries)
  if 1 <= len(wanted) <= 4 and all(wanted):
    assert action == Action('search', wanted)
  else:
    assert action.kind == 'invalid'


def test_the_solvers_prompt_is_word_for_word():
  assert tools.solver_template() == (
      'Answer the given question. You must conduct reasoning inside <think> '
      'and </think> first every time you get new information. After reasoning, '
      'if you find you lack some knowledge, you can call a search engine by '
      '<tool_call> query </tool_call> and it will return the top searched '
      'results between <tool_response> and </tool_response>. You can search as '
      'many times as your want. If you find no further external knowledge '
      'needed, you can directly provide the answer inside <answer> and '
      '</answer>, without detailed illustrations. For example, <answer> '
      'Beijing </answer>. Question: {question}')


@each
def test_a_proposer_is_asked_in_its_chat_and_ends_with_a_question(name):
  tokenizer = TOKENIZERS[name]
  dialogue = proposer_dialogues.with_tool(tokenizer)
  asked = proposals.ask('The Tarn is a river.', 3)
  ids = dialogues.opening(dialogue, asked, tokenizer)
  shown = chats.unspaced(chats.written(tokenizer, ids))
  assert shown.count(chats.unspaced(asked)) == 1
  assert '{question}' not in shown
  for tag in ('question', 'answer', 'tool_call', 'tool_response', 'think'):
    assert f'<{tag}>' in shown and f'</{tag}>' in shown
  end = ('<think> a </think> <question> Who? </question> '
         '<answer> Ann </answer>')
  assert dialogue.parse(end) == Action('answer', ('Ann',))
  assert dialogue.parse(call('Tarn')) == Action('search', ('Tarn',))
  assert dialogue.parse(end[:end.index('<answer>')]).kind == 'invalid'


def messages_of(system, question, turns, results):
  """The conversation as a chat client would hold it."""
  user = tools.solver_template().replace('{question}', question)
  messages = [{'role': 'system', 'content': system}] * bool(system)
  messages.append({'role': 'user', 'content': user})
  for n, text in enumerate(turns):
    messages.append({'role': 'assistant', 'content': text.strip(' ')})
    if n < len(results):
      messages.append({
          'role': 'tool', 'name': 'search', 'tool_call_id': '123456789',
          'content': json.dumps({'result': results[n]}, ensure_ascii=False)})
  return messages


FOUND = [  # what a search finds, and how the tool writes it
    ([(PARIS,)], 'Doc 1 (Title: "Paris")\nthe "town"\nof'),
    ([(PARIS, LYON), (), (LYON,)],
     ('Doc 1 (Title: "Paris")\nthe "town"\nof\n\nDoc 2 (Title: "Lyon")\né\n---\n'
      'No search results found.\n---\nDoc 1 (Title: "Lyon")\né'))]


@each
@pytest.mark.parametrize('ended', [
    (False, False, False), (True, True, True), (False, True, False),
    (True, False, True)])
def test_a_whole_conversation_is_the_templates_own_text(name, ended):
  tokenizer = TOKENIZERS[name]
  dialogue = tools.dr_zero(tokenizer)
  question = 'where is <|im_end|></s> "x"\\n?'
  lead = ' ' if name.startswith('mistral') else ''  # which the template writes
  turns = [f'{lead}<think>\nThis is new\n</think>\n\n{text}' for text in (
      call('Paris?'), call('a', 'b', 'c'), '<answer> here </answer>')]
  (end,) = dialogue.end_ids
  ids = list(dialogues.opening(dialogue, question, tokenizer))
  for n, text in enumerate(turns):
    turn = (*tokenizer.encode(text), *[end] * ended[n])
    assert tools.parse(tokenizer.decode(turn)).kind == (
        'search' if n < 2 else 'answer')
    ids += turn
    if n < 2:
      ids += dialogues.observation(
          dialogue, FOUND[n][0], tokenizer, passage_tokens=200,
          action_tokens=turn).tokens
  render = functools.partial(tokenizer.render, tools=[tools.schema()])
  expected = chats.unspaced(render(
      messages_of('', question, turns, [f[1] for f in FOUND])))
  text = chats.unspaced(chats.written(tokenizer, ids))
  assert expected.startswith(text)  # an answer's turn ends in the template only
  rest = expected[len(text):]
  assert rest.strip() == ('' if ended[2] else tokenizer.token(end))
  assert ids.count(end) == chats.written(tokenizer, ids).count(
      tokenizer.token(end)) - question.count(tokenizer.token(end))


@each
def test_the_tool_answers_an_invalid_turn(name):
  tokenizer = TOKENIZERS[name]
  system = 'You are a helpful and harmless assistant.'
  if name.startswith('mistral'):
    with pytest.raises(ValueError, match='messages of system, user, but: .* no '
                                         'role system'):
      tools.dspo(tokenizer)
    dialogue, system = tools.dr_zero(tokenizer), ''
  else:
    dialogue = tools.dspo(tokenizer)
  text = '<think>\nhm\n</think>\n\nnonsense'
  lead = ' ' if name.startswith('mistral') else ''
  for ends in ((), dialogue.end_ids):
    turn = (*tokenizer.encode(lead + text), *ends)
    ids = [*dialogues.opening(dialogue, 'who?', tokenizer), *turn,
           *dialogues.retry(dialogue, tokenizer, turn)]
    answer = tools._INVALID
    expected = tokenizer.render(
        messages_of(system, 'who?', [text], [answer]), tools=[tools.schema()])
    assert chats.unspaced(chats.written(tokenizer, ids)) == (
        chats.unspaced(expected))
  assert not tools.parse(answer).texts and '<' not in answer


def test_a_turn_ended_otherwise_is_ended_as_the_template_does():
  tokenizer = TOKENIZERS['qwen2']
  dialogue = tools.dr_zero(tokenizer)
  other = tokenizer.encode('<|endoftext|>')
  ids = dialogues.retry(dialogue, tokenizer, (*tokenizer.encode('hm'), *other))
  assert ids[:1] == dialogue.end_ids
  assert dialogues.retry(dialogue, tokenizer, ())[:1] == dialogue.end_ids
  assert dialogues.retry(dialogue, tokenizer, dialogue.end_ids) == ids[1:]


TEXTS = st.lists(st.one_of(
    st.text(st.characters(exclude_categories=['Cs']), max_size=5),
    st.sampled_from([
        '</tool_call>', '</answer>', '</search>', '<tool_call>', '</',
        'tool_call>', '<|im_end|>', '<|eot_id|>', '</s>', '<s>', '[INST]', '"',
        '\\', '\\\\', '\\n', '\n', '"}', '<unk>', '＜/tool_call＞',
        '</ｔool_call>', '\u200b', '▁', 'é', '日本', '</tool_response>'])),
                 max_size=12).map(''.join)
RESULTS = st.lists(st.lists(st.builds(
    Passage, st.just('0'), TEXTS, TEXTS), max_size=2), min_size=1, max_size=3)


@each
@pytest.mark.parametrize('make', [tools.dr_zero, chat.search_r1])
@quick
@hypothesis.given(results=RESULTS, budget=st.integers(0, 40))
def test_no_document_can_leave_its_place(name, make, results, budget):
  tokenizer = TOKENIZERS[name]
  dialogue, table = of(name, make)
  text, whole, cut = chats.passages_read(
      dialogue, tokenizer, table, results, budget,
      unknown=tokenizer._fast.unk_token_id)
  if not cut and '▁' not in whole:
    assert text.removeprefix(' ') == whole.removeprefix(' ')


@functools.cache
def of(name, make):
  """A dialogue, and the automaton of all stop strings."""
  tokenizer = TOKENIZERS[name]
  dialogue = make(tokenizer)
  dialogues.check_writable(dialogue, tokenizer)
  return dialogue, stops.compile_table(
      tokenizer.token_bytes, ('</tool_call>', '</search>', '</answer>'))


@each
def test_an_answer_stays_json_whatever_a_passage_begins_with(name):
  """The n of JSON's \\n and an accent after it would be another letter."""
  tokenizer = TOKENIZERS[name]
  dialogue = tools.dr_zero(tokenizer)
  odd = Passage('1', '\u0301', '\u0301 x\n\u0301y\t\u030cz')
  ids, _ = dialogues.observation(
      dialogue, [(odd, odd)], tokenizer, passage_tokens=99)
  text = tokenizer.decode(ids).removesuffix(
      tokenizer.decode(tokenizer.encode(dialogue.after)))
  text = text[text.index('Doc 1'):]
  for _ in range(dialogue.json_levels):
    text = json.loads(f'"{text}"')
  assert text == ('Doc 1 (Title: "")\n x\ny\tz\n\nDoc 2 (Title: "")\n x\ny\tz')


def test_a_cut_passage_keeps_what_parts_the_queries():
  tokenizer = TOKENIZERS['qwen2']
  dialogue = tools.dr_zero(tokenizer)
  long = Passage('1', 'on', 'the search ' * 50)
  observed = dialogues.observation(
      dialogue, [(long, long), (long,)], tokenizer, passage_tokens=20)
  assert observed.passages_cut == 3
  text = tokenizer.decode(observed.tokens)
  shown = json.loads(text[text.index('{'):text.rindex('}') + 1])['result']
  assert shown.count('Doc 1 (Title: "on")') == 2 and '\n\nDoc 2 (' in shown
  assert shown.count('\n---\nDoc 1 (') == 1


@pytest.mark.slow
def test_a_model_folder_with_a_template_is_sampled_from(tmp_path):
  tokenizer = TOKENIZERS['qwen2']
  tokenizer._fast.save_pretrained(tmp_path / 'tokenizer')
  other = tokenizer.encode('<|endoftext|>')
  (tmp_path / 'tokenizer' / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': list(other)}))
  shape = dataclasses.replace(tiny.CONFIG, vocab_size=tokenizer.vocab_size)
  weights.save(tmp_path / 'model', tiny.params(shape), shape,
               tokenizer_from=tmp_path / 'tokenizer', eos_id=other[0])
  budgets = driver.Budgets(max_turns=3, max_new_tokens=60,
                            max_prompt_tokens=1500)
  sampler, params = policies.load(
      model_folders.read(str(tmp_path / 'model'), 'searchrl.agent.tools:dr_zero'),
      seed=0, slots=8, length=2000, budgets=budgets, mesh=meshes.make())
  assert sampler.tokenizer.eos_ids == other
  (end,) = sampler.dialogue.end_ids
  trajectories = sampler.rollout(
      sampler.sync(params).weights,
      [Request(tiny.question(), n) for n in range(8)],
      search=None, temperature=1.5, step=0).trajectories
  turns = [turn for trajectory in trajectories for turn in trajectory.turns]
  ended = [turn for turn in turns if len(turn.action_tokens) < 60]
  assert {turn.action_tokens[-1] for turn in ended} == {
      end, *other, *tokenizer.encode('</tool_call>')}
  for trajectory in trajectories:  # all actions are invalid
    assert trajectory.stop_reason == 'turn_limit' and len(trajectory.turns) == 3
    assert trajectory.prompt_tokens == dialogues.opening(
        sampler.dialogue, 'where?', tokenizer)
    for turn in trajectory.turns[:-1]:
      ids = turn.observation_tokens
      assert ids == dialogues.retry(
          sampler.dialogue, tokenizer, turn.action_tokens)
      assert (ids[0] == end) == (turn.action_tokens[-1] != end)


@pytest.mark.parametrize('tag', ['</tool_call>', '<answer>', '<think>',
                                 '</tool_response>'])
def test_a_tokenizer_that_drops_the_tags_is_refused(tag):
  tokenizer = chats.byte_level(chats.QWEN2, special=(tag,))
  kind = 'stop string' if tag == '</tool_call>' else 'tag'
  with pytest.raises(ValueError, match=(
      f"the {kind} '{tag}', but has it as a special token.*In a copy of the "
      'model folder, set its "special" to false')):
    dialogues.check_writable(tools.dr_zero(tokenizer), tokenizer)
  dialogues.check_writable(dialogues.tags(), tiny.Tokenizer())
