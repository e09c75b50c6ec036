# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Real tokenizers: ids as tiktoken's, pieces, ends, dialogues, formats.

The properties are those of tokenizer_test, stops_test, chat_test, tools_test,
formats_test and demonstrations_test, on the vocabularies that people use.
"""

import collections
import functools
import json
import types
import unicodedata

import chats
import fakes
import formats_test
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import real_tokenizers
from strategies import TAGS
import text_oracles
import tiny
import tokenizers as raw_tokenizers

from searchrl.agent import chat
from searchrl.agent import demonstrations
from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import rewards
from searchrl.agent import tag_parser
from searchrl.agent import tokenizer as tokenizers
from searchrl.agent import tools
from searchrl.agent import transcripts
from searchrl.evaluation import scores
from searchrl.evaluation.report import tokens as report
from searchrl.experiment import solver
from searchrl.models.inference import stops
from searchrl.papers.dr_zero import proposals
from searchrl.papers.dr_zero import propose
from searchrl.rollouts import driver
from searchrl.trajectory import Action, Passage, Request, Trajectory, Turn

WITH_TOOLS = ['qwen2.5', 'qwen2.5-instruct', 'qwen3', 'llama3-instruct']
FRAMED = [*WITH_TOOLS, 'r1-distill', 'smollm2']  # have a chat template
FAMILIES = [*FRAMED, 'llama3']  # in this order, so that each is loaded once
IN_NFC = [*WITH_TOOLS[:3], 'r1-distill']
quick = hypothesis.settings(
    max_examples=30, deadline=None, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow])
TEXTS = [
    '', ' ', 'Who wrote it?', ' two  spaces   three\n\n\n four\t\t x \r\n y',
    "I'm sure they'll say it's WE'RE, don't", '12345 in 1789, 3.14159 and ½²',
    'a  12 b   7', 'naïve Émile Ærø ǅ ﬁ', 'e\u0301 a\u0308 o\u0327\u0301',
    'где находится библиотека?', 'Ποιος έγραψε;', 'מי כתב שָׁלוֹם', 'مَن كَتَبَ الكِتاب؟',
    'हिन्दी में किसने लिखा', 'বাংলা ভাষা', 'தமிழ் மொழி', 'ไทยภาษาใคร', 'ខ្មែរ',
    '日本語で誰が書いた', '谁写了这本书？', '누가 썼습니까 한글', 'አማርኛ', 'ქართული',
    'Հայերեն', '👩‍👩‍👧‍👦 🇫🇷 ❤️', '\x00\x01\u200b\ufeff\u2028', '𝐬𝐞𝐚𝐫𝐜𝐡 ＜ｓ＞',
    '<think> hm </think>\n<search> q </search>.', '<answer>x</answer></answer>',
    '{"name": "search", "arguments": {"query_list": ["é\\n", "a\\u00e9"]}}',
    'Doc 1(Title: "A") text\nDoc 2(Title: "B") 日本 "x"', '```py\n  x = [1]\n```',
    '=' * 70 + ' ' * 90 + '\n' * 5 + 'z' * 90]
THINK, SEARCH = '<think> hm </think>\n', '<search> capital </search>'
ANSWER = '<answer> Paris </answer>'
CALL = '<tool_call>\n' + json.dumps(
    {'name': 'search', 'arguments': {'query_list': ['q']}}) + '\n</tool_call>'
# A call as the template of Llama 3.2 writes it.
BARE = '{"name": "search", "parameters": {"query_list": ["q"]}}'


@functools.lru_cache(maxsize=2)  # tests run family by family
def load(name):
  return tokenizers.load(str(real_tokenizers.folder(name)))


@pytest.fixture(scope='module', params=FAMILIES)
def name(request):
  load(request.param)  # or skips
  return request.param


@pytest.fixture(scope='module')
def tokenizer(name):
  return load(name)


def of(families):
  """Runs a test on some of the families."""
  return pytest.mark.parametrize('name', families, indirect=True,
                                 scope='module')


def normal(name, text):
  """A text in the family's form: Qwen's vocabularies are in NFC."""
  return unicodedata.normalize('NFC', text) if name in IN_NFC else text


def written(tokenizer, text):
  """The bytes of a text that the vocabulary has; SmolLM2's lacks some."""
  known = {piece[0] for piece in tokenizer.token_bytes if len(piece) == 1}
  return bytes(byte for byte in text.encode() if byte in known)


@functools.lru_cache(maxsize=4)
def stop_table(name, stop_strings=('</tool_call>', '</search>', '</answer>')):
  return stops.compile_table(load(name).token_bytes, stop_strings)


ENDS = {  # size, ids that end a turn, some ids: as the families publish them
    'qwen2.5': (151_665, ['<|endoftext|>'], {
        '!': 0, 'Ġthe': 279, '<|endoftext|>': 151_643, '<|im_end|>': 151_645,
        '<tool_call>': 151_657, '<|file_sep|>': 151_664}),
    'qwen2.5-instruct': (151_665, ['<|im_end|>', '<|endoftext|>'], {
        '<|im_start|>': 151_644, '</tool_call>': 151_658}),
    'qwen3': (151_669, ['<|im_end|>', '<|endoftext|>'], {
        '<tool_response>': 151_665, '<think>': 151_667, '</think>': 151_668}),
    'r1-distill': (151_665, ['<｜end▁of▁sentence｜>'], {
        '<｜begin▁of▁sentence｜>': 151_646, '<think>': 151_648,
        '<|quad_start|>': 151_650, '<tool_call>': 151_657}),
    'llama3': (128_256, ['<|end_of_text|>'], {
        'Ġthe': 279, '<|begin_of_text|>': 128_000,
        '<|reserved_special_token_247|>': 128_255}),
    'llama3-instruct': (128_256, [
        '<|end_of_text|>', '<|eom_id|>', '<|eot_id|>'], {
            '<|start_header_id|>': 128_006, '<|end_header_id|>': 128_007,
            '<|eot_id|>': 128_009}),
    'smollm2': (49_152, ['<|im_end|>'], {
        '<|endoftext|>': 0, '<|im_start|>': 1, '<|im_end|>': 2, '!': 17}),
}


def test_sizes_ends_and_ids_are_those_that_are_published(name, tokenizer):
  size, ends, ids = ENDS[name]
  assert tokenizer.vocab_size == size
  assert [tokenizer.token(i) for i in tokenizer.eos_ids] == ends
  assert {tokenizer.token(i): i for i in ids.values()} == ids


def test_a_prompt_of_mistral_has_the_ids_of_mistral_common():
  """The ids are those of its MistralTokenizer.v3() for this question."""
  mistral = load('mistral')
  text = mistral.render([{'role': 'user', 'content': 'Where is  the town?\n'}])
  assert mistral.encode(text) == (
      1, 3, 7694, 1117, 29_473, 1040, 4504, 29_572, 781, 4)
  assert mistral.vocab_size == 32_768 and mistral.eos_ids == (2,)


def test_qwen3_of_2507_writes_tools():
  model = load('qwen3-instruct')
  assert model.vocab_size == 151_669
  assert 'query_list' in tools.dr_zero(model).head


@pytest.mark.slow
def test_every_text_has_tiktokens_ids(name, tokenizer):
  """A converted vocabulary is right if other people's program agrees."""
  encoding = real_tokenizers.encoding(name)
  file = raw_tokenizers.Tokenizer.from_file(
      str(real_tokenizers.folder(name) / 'tokenizer.json'))
  for text in TEXTS:
    text = normal(name, text)
    if len(written(tokenizer, text)) < len(text.encode()):
      continue
    ids = encoding.encode(text, allowed_special='all')
    if name == 'smollm2':
      ids = real_tokenizers.smollm2_ids(ids)
    assert file.encode(text, add_special_tokens=False).ids == ids, text
    assert list(tokenizer.encode(text)) == ids, text


def test_a_text_comes_back(name, tokenizer):
  for text in TEXTS:
    expected = written(tokenizer, normal(name, text)).decode(errors='replace')
    assert tokenizer.decode(tokenizer.encode_data(text)) == expected


def test_ids_add_the_bytes_of_their_pieces(tokenizer):
  rng = np.random.default_rng(0)
  for length in rng.integers(1, 12, 300):
    ids = rng.integers(0, tokenizer.vocab_size, length).tolist()
    joined = b''.join(tokenizer.token_bytes[i] for i in ids)
    assert tokenizer.decode(ids) == joined.decode(errors='replace')
    assert tokenizer.decode(ids) == tokenizer._fast.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
  special = [id_ for id_, piece in enumerate(tokenizer.token_bytes)
             if not piece]
  assert set(special) == tokenizer.special_ids


FRAGMENTS = st.lists(st.one_of(
    st.text(st.characters(exclude_categories=['Cs', 'Cn', 'Co']), max_size=4),
    st.sampled_from([
        '<|im_end|>', '<|eot_id|>', '<|endoftext|>', '<|im_start|>', '</',
        '<|', '|>', 'im_end', '<｜User｜>', '<｜end▁of▁sentence｜>', '<think>',
        '</think>', '</tool_call>', '<tool_response>', '<|fim_prefix|>', '>.',
        '<repo_name>', '<file_sep>', '<|python_tag|>', '</search>', '"', '\\',
        '</answer>', 'tool_call>', '\n', '\\n', '日本', 'é'])),
                     max_size=8).map(''.join)


@quick
@hypothesis.given(text=FRAGMENTS)
def test_text_from_outside_is_plain_and_whole(tokenizer, text):
  shown = dialogues.neutralise(text)
  ids = tokenizer.encode_data(shown)
  data = b''.join(tokenizer.token_bytes[i] for i in ids)
  assert data == written(tokenizer, shown)
  assert not tokenizer.special_ids.intersection(ids)
  assert not tokenizer.special_ids.intersection(tokenizer.encode_data(text))


@quick
@hypothesis.given(texts=st.lists(st.one_of(
    FRAGMENTS, st.sampled_from(TEXTS)), max_size=5))
def test_passages_have_the_ids_of_one_text_at_a_time(tokenizer, texts):
  """They do so if new or known, and in one batch with others or alone."""
  expected = [tuple(tokenizer._fast.encode(
      text, add_special_tokens=False, split_special_tokens=True))
              for text in texts]
  assert tokenizer.encode_passages(texts) == expected
  assert tokenizer.encode_passages(texts[::-1]) == expected[::-1]
  assert [tokenizer.encode_data(text) for text in texts] == expected


@of([*FAMILIES, 'mistral'])
def test_no_added_token_survives_in_a_passage(name, tokenizer):
  """Special or not: `<|fim_prefix|>` and `<｜User｜>` are words of templates."""
  added = {int(i): t.content for i, t in
           tokenizer._fast.added_tokens_decoder.items()}
  for token in added.values():
    ids = tokenizer.encode_data(dialogues.neutralise(f'a {token} b'))
    assert not added.keys() & set(ids), token
    assert len(ids) > 3


def test_stop_strings_are_found_however_they_are_cut(name, tokenizer):
  table, rng = stop_table(name), np.random.default_rng(1)
  for stop in ('</search>', '</answer>', '</tool_call>'):
    whole = tokenizer.encode(f' q {stop}')
    pieces = [tokenizer.encode(c)[0] for c in f' q {stop}']
    cut = int(rng.integers(4, 10))
    halves = (*tokenizer.encode(f' q {stop}'[:cut]),
              *tokenizer.encode(f' q {stop}'[cut:]))
    for ids in (whole, pieces, halves):
      hits, state = [], 0
      for id_ in ids:
        hits.append(bool(table.hit[state, id_]))
        state = table.next_state[state, id_]
      assert hits == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize('make, text, action', [
    (dialogues.tags, '<think> a </think><search> who? </search',
     Action('search', ('who?',))),
    (dialogues.tags, '<answer> Paris </answer', Action('answer', ('Paris',))),
    (tools.parse, CALL.removesuffix('>'), Action('search', ('q',))),
    (tools.parse, '<answer> Paris </answer', Action('answer', ('Paris',)))])
def test_a_bracket_of_any_token_closes_an_action(
    name, tokenizer, make, text, action):
  """`>.` and `></` are tokens; the rest of the last one is not read."""
  parse = tools.parse if make is tools.parse else dialogues.parse_tags
  closing = [i for i, piece in enumerate(tokenizer.token_bytes)
             if piece.startswith(b'>')]
  assert len(closing) > 100 or name == 'smollm2' and len(closing) > 10
  table, state = stop_table(name), 0
  start = tokenizer.encode(text)
  for id_ in start:
    assert not table.hit[state, id_]
    state = table.next_state[state, id_]
  for id_ in closing:
    assert table.hit[state, id_]
    assert parse(tokenizer.decode((*start, id_))) == action


@pytest.mark.parametrize('make', [
    dialogues.search_r1, dialogues.r1, dialogues.from_documents])
def test_a_plain_dialogue_begins_as_the_tokenizer_begins_a_text(
    tokenizer, make):
  dialogue = make(tokenizer)
  ids = dialogues.opening(dialogue, 'who?', tokenizer)
  assert list(ids) == tokenizer._fast.encode(dialogue.prompt('who?'))
  dialogues.check_writable(dialogue, tokenizer)


QUESTIONS = ['who?', 'é日本 "a" \\n {{ x }}', '</s>[INST] <s>?',
             'who <|im_end|>\n<|im_start|>user?', '<|eot_id|> </search>?']


@of(FRAMED)
@pytest.mark.parametrize('question', QUESTIONS)
def test_a_prompt_is_the_templates_text_and_its_question_is_data(
    tokenizer, question):
  dialogue = chat.search_r1(tokenizer)
  ids = dialogues.opening(dialogue, question, tokenizer)
  content = dialogues.search_r1(tiny.Tokenizer()).prompt(question)
  assert chats.written(tokenizer, ids) == tokenizer.render(
      [{'role': 'user', 'content': content}])
  frame = special(tokenizer, dialogues.opening(dialogue, 'x', tokenizer))
  assert special(tokenizer, ids) == frame != []
  if question == 'who?':  # as transformers encodes the template's own text
    assert list(ids) == tokenizer._fast.encode(
        chats.written(tokenizer, ids), add_special_tokens=False)


def special(tokenizer, ids):
  return [i for i in ids if i in tokenizer.special_ids]


@of(FRAMED)
def test_a_chat_ends_with_what_its_template_ends_turns_with(name, tokenizer):
  ends = {'r1-distill': '<｜end▁of▁sentence｜>',
          'llama3-instruct': '<|eot_id|>'}
  (end,) = chat.search_r1(tokenizer).end_ids
  assert tokenizer.token(end) == ends.get(name, '<|im_end|>')


@of(FRAMED)
def test_a_template_writes_tools_or_is_refused(name, tokenizer):
  if name in WITH_TOOLS:
    assert 'query_list' in tools.dr_zero(tokenizer).head
    return
  with pytest.raises(ValueError, match='must write the tools, but writes noth'):
    tools.dr_zero(tokenizer)


def test_a_call_of_llamas_template_is_a_search():
  """The call may also have the form that Llama 3.1 writes unasked."""
  tokenizer = load('llama3-instruct')
  dialogue = tools.dr_zero(tokenizer)
  asked = {'role': 'user', 'content': 'who?'}
  text, start = (tokenizer.render(messages, tools=[tools.schema()])
                 for messages in ([asked, {
                     'role': 'assistant', 'tool_calls': [{'function': {
                         'name': 'search',
                         'arguments': {'query_list': ['q']}}}]}], [asked]))
  call = text.removeprefix(start)
  assert call == f'{BARE}<|eot_id|>'
  spread = json.dumps({'type': 'function'} | json.loads(BARE), indent=4)
  for turn in (call, f'<|python_tag|>{call}', f'{THINK}{call}',
               f'<|python_tag|>{spread}<|eom_id|>', BARE):
    ids = tokenizer.encode(turn)
    assert dialogue.parse(tokenizer.decode(ids)) == Action('search', ('q',))
    # Whether the text has special tokens or not.
    assert dialogue.parse(turn) == Action('search', ('q',))
  for turn in (f'Call: {call}', f'{BARE} now', f'{BARE[:-1]}<|eot_id|>',
               '{"answer": "Paris"}<|eot_id|>'):
    ids = tokenizer.encode(turn)
    assert dialogue.parse(tokenizer.decode(ids)) == Action('invalid')


def test_a_call_without_tags_has_the_format_of_a_call():
  tokenizer = load('llama3-instruct')
  dialogue = tools.dr_zero(tokenizer)
  for texts, valid in (
      ([f'{THINK}{BARE}<|eot_id|>', THINK + ANSWER], True),
      ([f'{THINK}<|python_tag|>{BARE}<|eom_id|>', THINK + ANSWER + '.'], True),
      ([f'{THINK}{BARE}', THINK + CALL, THINK + ANSWER], True),
      ([f'{BARE}<|eot_id|>', THINK + ANSWER], False),  # has no thought
      ([f'{THINK}{BARE} now', THINK + ANSWER], False)):
    trajectory = formats_test.conversation(dialogue, tokenizer, *texts)
    assert formats.is_well_formed(trajectory, needs_search=True) == valid
    assert trajectory.turns[0].action.kind == (
        'invalid' if 'now' in texts[0] else 'search')


PARIS, LYON = Passage('1', 'Paris', 'the "town"\nof'), Passage('2', 'Lyon', 'é')
FOUND = [
    ([(PARIS,)], 'Doc 1 (Title: "Paris")\nthe "town"\nof'),
    ([(PARIS, LYON), (), (LYON,)],
     ('Doc 1 (Title: "Paris")\nthe "town"\nof\n\nDoc 2 (Title: "Lyon")\né\n---\n'
      'No search results found.\n---\nDoc 1 (Title: "Lyon")\né'))]


def test_a_rollout_with_a_call_of_llamas_is_the_templates_conversation():
  tokenizer = load('llama3-instruct')
  dialogue = tools.dr_zero(tokenizer)
  (trajectory,), _ = driver.run(
      [Request(tiny.question(text='where?', answers=('Paris',)))],
      engine=fakes.Engine({('q', 0): [f'{BARE}<|eot_id|>', ANSWER + '.']},
                          slots=1, length=2000, encode=tokenizer.encode),
      search=lambda queries: [(PARIS,) for _ in queries], dialogue=dialogue,
      tokenizer=tokenizer, budgets=driver.Budgets(
          max_new_tokens=99, max_prompt_tokens=999, passage_tokens=99),
      step=fakes.STEP, policy_step=0)
  assert [turn.action for turn in trajectory.turns] == [
      Action('search', ('q',)), Action('answer', ('Paris',))]
  assert trajectory.turns[0].passages == (PARIS,)
  assert rewards.em(trajectory) == 1
  found = json.dumps({'result': FOUND[0][1]})
  text = tokenizer.render([
      {'role': 'user', 'content': tools.solver_template().replace(
          '{question}', 'where?')},
      {'role': 'assistant', 'tool_calls': [{'function': {
          'name': 'search', 'arguments': {'query_list': ['q']}}}]},
      {'role': 'tool', 'content': found},
      {'role': 'assistant', 'content': f'{ANSWER}.'}], tools=[tools.schema()])
  assert chats.written(tokenizer, trajectory.tokens) == text.removesuffix(
      '<|eot_id|>')
  shown = [''.join(''.join(segment.texts) for segment in report.segments(
      trajectory, tokenizer, {}) if segment.role == report.POLICY)]
  assert shown == [f'{BARE}<|eot_id|>{ANSWER}.']


@of(WITH_TOOLS)
@pytest.mark.parametrize('ended', [(False, False), (True, True)])
def test_a_whole_conversation_is_the_templates_own_text(tokenizer, ended):
  dialogue = tools.dr_zero(tokenizer)
  question = 'where is <|im_end|></s> "x"\\n?'
  (end,) = dialogue.end_ids
  ids = list(dialogues.opening(dialogue, question, tokenizer))
  messages = [{'role': 'user', 'content': tools.solver_template().replace(
      '{question}', question)}]
  for number, (results, shown) in enumerate(FOUND):
    text = f'<think>\nThis is new\n</think>\n\n{CALL}'
    turn = (*tokenizer.encode(text), *[end] * ended[number])
    assert dialogue.parse(tokenizer.decode(turn)) == Action('search', ('q',))
    ids += (*turn, *dialogues.observation(
        dialogue, results, tokenizer, passage_tokens=200,
        action_tokens=turn).tokens)
    messages += [
        {'role': 'assistant', 'content': text},
        {'role': 'tool', 'name': 'search', 'tool_call_id': '123456789',
         'content': json.dumps({'result': shown}, ensure_ascii=False)}]
  assert chats.written(tokenizer, ids) == tokenizer.render(
      messages, tools=[tools.schema()])


PASSAGES = st.lists(st.lists(st.builds(
    Passage, st.just('0'), FRAGMENTS, FRAGMENTS), max_size=2),
                    min_size=1, max_size=2)
@functools.lru_cache(maxsize=2)
def dialogues_of(name):
  """The plain dialogue, and those that the chat template can frame."""
  makes = [dialogues.search_r1, *[chat.search_r1] * (name in FRAMED),
           *[tools.dr_zero] * (name in WITH_TOOLS)]
  tokenizer = load(name)
  for dialogue in (found := [make(tokenizer) for make in makes]):
    dialogues.check_writable(dialogue, tokenizer)
  return found


@quick
@hypothesis.given(results=PASSAGES, budget=st.integers(0, 40))
def test_no_document_leaves_its_place_or_its_budget(
    name, tokenizer, results, budget):
  for dialogue in dialogues_of(name):
    text, whole, cut = chats.passages_read(
        dialogue, tokenizer, stop_table(name), results, budget)
    assert cut or text == written(tokenizer, whole).decode(errors='replace')


def test_a_passage_of_a_hundred_words_is_cut_at_its_budget(name, tokenizer):
  """Some are in scripts that need several tokens a character."""
  for dialogue in dialogues_of(name):
    for text in ('The river flows through two towns, 1,204 m. ' * 12,
                 'हिन्दी में किसने लिखा ' * 25, '誰が書いた日本語の本。' * 10):
      passage = Passage('1', 'The "Tarn"', text)
      (piece,) = dialogue.arrange(dialogue.passage, [(passage,)])
      whole = len(tokenizer.encode_data(
          dialogues.in_json(piece, dialogue.json_levels)))
      frame = len(dialogues.observation(
          dialogue, [()], tokenizer, passage_tokens=0).tokens)
      if dialogue.json_levels:  # it says that nothing was found
        frame = len((*tokenizer.encode(dialogue.turn_end),
                     *tokenizer.encode(dialogue.before),
                     *tokenizer.encode(dialogue.after)))
      for budget in (whole, whole - 1, 50):
        shown = dialogues.observation(
            dialogue, [(passage,)], tokenizer, passage_tokens=budget)
        assert shown.passages_cut == (budget < whole)
        # An escape of JSON at the end is left out as a whole.
        assert 0 <= frame + budget - len(shown.tokens) <= (
            6 * dialogue.json_levels)


def test_formats_are_judged_alike_in_every_frame(name, tokenizer):
  for dialogue in dialogues_of(name):
    search = CALL if '</tool_call>' in dialogue.stop_strings else SEARCH
    prompt = tokenizer.decode(dialogues.opening(dialogue, 'x', tokenizer))
    think = THINK.removeprefix('<think>' * formats.opens_thought(prompt))
    for texts, valid in (
        ([think + search, THINK + ANSWER], True),
        ([think + search, THINK + search, THINK + ANSWER], True),
        ([think + ANSWER], True),
        ([think + ANSWER + '.'], True),  # `>.` is one token
        ([think + search + dialogue.turn_end, THINK + ANSWER], True),
        ([think + search, ANSWER], False),
        ([search, THINK + ANSWER], False),
        ([think + search], False),
        (['nonsense', THINK + ANSWER], False)):
      trajectory = formats_test.conversation(dialogue, tokenizer, *texts)
      assert formats.is_well_formed(trajectory) == valid, texts


def test_a_demonstration_has_the_ids_of_the_rollout(name, tokenizer):
  for dialogue in dialogues_of(name):
    trajectory = formats_test.conversation(
        dialogue, tokenizer, THINK + CALL, 'nonsense' + dialogue.turn_end,
        THINK + SEARCH, THINK + ANSWER)
    line = demonstrations.lines(trajectory, tokenizer)[0]['segments']
    read = transcripts.of_segments(
        [(piece['text'], piece['trained']) for piece in line], tokenizer)
    assert list(zip(*read)) == chats.marked_ids(trajectory)


def test_data_for_fine_tuning_has_one_start_and_one_end(name, tokenizer):
  ends = [tokenizer.token(i) for i in chat.ends(tokenizer)]
  last = tokenizer.token(chat.last_id(tokenizer))
  start = ''.join(map(tokenizer.token, tokenizer.start_ids))
  for end in ('', *ends, *(f'{end}\n' for end in ends)):
    for begin in ('', start):
      ids, trained = transcripts.of_segments(
          [(f'{begin}Who?', False), (f' Paris{end}', True)], tokenizer,
          ends=True)
      assert tokenizer.write(ids) == f'{start}Who? Paris{end.strip() or last}'
      assert tokenizer.write([i for i, x in zip(ids, trained) if x]) == (
          f' Paris{end.strip() or last}')
  ids, _ = transcripts.of_segments(
      [('Who\n', False), (' Paris \n', True)], tokenizer, ends=True)
  assert tokenizer.write(ids) == f'{start}Who\n Paris \n{last}'


@of([*WITH_TOOLS, 'smollm2'])  # R1's template takes no turn of its own
def test_a_message_that_has_its_end_is_not_ended_twice(tokenizer):
  end = tokenizer.token(chat.last_id(tokenizer))
  asked = {'role': 'user', 'content': f'Who {end}?'}
  plain, *others = [transcripts.of_messages(
      [asked, {'role': 'assistant', 'content': f'Paris{after}'}], tokenizer)
                    for after in ('', end, f'{end}\n', f' {end} {end}\n')]
  assert others[:2] == [plain] * 2
  assert all(ids.count(chat.last_id(tokenizer)) == plain.ids.count(
      chat.last_id(tokenizer)) for ids, _ in others)


CALLS = {'tools': [tools.schema()], 'messages': [
    {'role': 'user', 'content': 'Who <|eot_id|>?'},
    {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {
        'name': 'search', 'arguments': {'query_list': ['q']}}}]},
    {'role': 'tool', 'content': '{"result": "<|im_end|>"}'},
    {'role': 'assistant', 'content': ANSWER}]}


@of(FRAMED)
def test_calls_in_messages_are_trained_on_as_the_template_writes_them(
    name, tokenizer):
  if name in ('smollm2', 'r1-distill', 'qwen3'):
    with pytest.raises(ValueError, match=(
        'must write tool calls and .*, but writes .* for message 2 of a conver'
        if name == 'smollm2' else 'must only add to a conversation')):
      transcripts.of_messages(**CALLS, tokenizer=tokenizer)
    return
  if name == 'llama3-instruct':  # whose template drops the thought
    user, calls, *_ = CALLS['messages']
    with pytest.raises(ValueError, match='must write tool calls and the conte'):
      transcripts.of_messages([user, calls | {'content': 'hm'}], tokenizer)
  ids, trained = transcripts.of_messages(**CALLS, tokenizer=tokenizer)
  text = tokenizer.write(ids)
  assert tokenizer.render(**CALLS).startswith(text)
  end = tokenizer.token(chat.last_id(tokenizer))
  call, answer = tokenizer.write(
      [i for i, x in zip(ids, trained) if x]).removesuffix(end).split(end)
  assert tools.dr_zero(tokenizer).parse(call) == Action('search', ('q',))
  assert answer == ANSWER
  assert ids.count(chat.last_id(tokenizer)) == text.count(end) - (
      1 if end in ('<|im_end|>', '<|eot_id|>') else 0)  # one is data


@of(['qwen2.5-instruct', 'smollm2'])
def test_what_a_template_leaves_out_is_named(name):
  tokenizer = load(name)
  asks, answers = {'role': 'user', 'content': 'q'}, {
      'role': 'assistant', 'content': 'I search for it.'}
  calls = [{'type': 'function', 'function': {
      'name': 'search', 'arguments': {'q': 'one'}}}]
  cases = [([asks, answers | {'reasoning_content': 'deep'}], None,
            'must write reasoning_content, but writes')]
  if name == 'smollm2':
    cases += [([asks, answers | {'tool_calls': calls}], None,
               'must write tool calls and the content beside them'),
              ([asks, answers], CALLS['tools'], 'must write tools, but leaves')]
  else:
    cases.append(([{'role': 'developer', 'content': 'be'}, asks, answers], None,
                  "leaves out message 1 of x.jsonl, of role 'developer'"))
  for messages, described, message in cases:
    with pytest.raises(ValueError, match=message):
      transcripts.of_messages(messages, tokenizer, 'x.jsonl', described)


PIECES = ['<think>', '</think>', '<search>', '</search>', '<answer>',
          '</answer>', '<tool_call>', '</tool_call>', '<information>', 'Paris',
          ' who?\n', THINK, SEARCH, ANSWER, CALL, BARE, '<answer>Paris</answer>']


def generated(rng, pieces, closing, size):
  """Ids of a turn: tags whose brackets are any token, texts, random ids."""
  ids = []
  for _ in range(rng.integers(1, 8)):
    kind = rng.random()
    piece = pieces[rng.integers(len(pieces))]
    ids += piece if kind < 0.4 else (
        *piece[:-1], closing[rng.integers(len(closing))]) if kind < 0.8 else (
            rng.integers(size, size=2).tolist())
  return ids


@pytest.mark.parametrize('count', [
    200, pytest.param(15_000, marks=pytest.mark.long)])
def test_all_readers_agree_on_a_turn(name, tokenizer, count):
  """Seven families: 105,000 turns in the long tier."""
  rng = np.random.default_rng(2)
  pieces = [tokenizer.encode(text) for text in PIECES]
  closing = [i for i, piece in enumerate(tokenizer.token_bytes)
             if piece.startswith(b'>')]
  actions = collections.Counter()
  for number in range(count):
    dialogue = dialogues_of(name)[number % len(dialogues_of(name))]
    stop_strings = dialogue.stop_strings
    table, state, ids = stop_table(name, stop_strings), 0, []
    for id_ in generated(rng, pieces, closing, tokenizer.vocab_size):
      ids.append(id_)
      if table.hit[state, id_]:
        break
      state = table.next_state[state, id_]
    text = tokenizer.decode(ids)
    read = tag_parser.until_stop(text, stop_strings)
    assert read.endswith(stop_strings) == bool(table.hit[state, ids[-1]]), text
    action = dialogue.parse(text)
    assert action == dialogue.parse(read) == (
        text_oracles.tag_action(text) if stop_strings == tag_parser.TAG_STOPS
        else text_oracles.tool_action(
            text, tools.MAX_QUERIES, bare=name == 'llama3-instruct')), text
    trajectory = Trajectory(
        tiny.question(answers=('Paris',)), 0, 0, (1,),
        (Turn(tuple(ids), (0.0,) * len(ids), action, text=read),), 'answer',
        prompt='Ask.')
    right = action == Action('answer', ('Paris',))
    assert rewards.em(trajectory) == right or action.kind == 'answer'
    assert scores.score_trajectory(trajectory).values['em'] == rewards.em(
        trajectory) >= right
    if formats.is_well_formed(trajectory):
      answer = text_oracles.last_block(read, 'answer')
      assert action.kind == 'answer' or not answer or any(
          tag in answer for tag in TAGS)  # text to the published format check
    shown = ''.join(''.join(segment.texts) for segment in report.segments(
        trajectory, tokenizer, {}) if segment.role == report.POLICY)
    for id_ in special(tokenizer, ids):  # which the report shows as well
      shown = shown.replace(tokenizer.token(id_), '', 1)
    assert shown.startswith(read)
    actions[action.kind] += 1
  assert min(actions[kind] for kind in ('search', 'answer', 'invalid')) > (
      count / 50)


@of(['qwen2.5-instruct', 'smollm2'])
def test_evidence_is_cut_until_the_prompt_fits(name):
  """Qwen reads the line break before a question with the one before that."""
  document = 'A quick fox of Albi jumps, 1234, over a dog by the Tarn. ' * 50
  proposal = Trajectory(
      tiny.question(text=proposals.ask(document, 1)), 0, 0, (1,), (Turn(
          (1,), (0.0,), Action('answer', ('x',)), text='<question> Which town '
          'lies on the Tarn? </question><answer> x </answer>'),))
  tokenizer = load(name)
  dialogue = chat.from_documents(tokenizer)
  for limit in range(240, 260):
    reader = solver.Solver(types.SimpleNamespace(
        budgets=types.SimpleNamespace(max_prompt_tokens=limit),
        dialogue=dialogue, tokenizer=tokenizer), None, None, 1.0)
    asked = propose._with_evidence(reader, proposal)
    length = len(dialogues.opening(dialogue, asked.text, tokenizer))
    assert limit - 3 <= length <= limit
