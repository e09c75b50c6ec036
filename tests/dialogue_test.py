# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""dialogue: a strict parser, harmless passages, and observations that close."""

import string
import time
import unicodedata

import hypothesis
from hypothesis import strategies as st
import pytest
import text_oracles
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.trajectory import Action, Passage

quick = hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
TOKENIZER = tiny.Tokenizer()
NAMES = ('think', 'search', 'information', 'answer', 'question', 'tool_call',
         'tool_response')
TAGS = [f'<{slash}{name}>' for name in NAMES for slash in ('', '/')]


@pytest.mark.parametrize('text, action', [
    ('<search> who? </search>', Action('search', ('who?',))),
    ('<search>who?</search>\n', Action('search', ('who?',))),
    ('<search>two\nlines</search> \n\n', Action('search', ('two\nlines',))),
    ('<answer> Paris </answer>', Action('answer', ('Paris',))),
    ('<answer>a < b > c</answer>', Action('answer', ('a < b > c',))),
    ('<answer>42</ answer></answer>', Action('answer', ('42</ answer>',))),
    ('<think> hm\n </think>\n<search> x </search>', Action('search', ('x',))),
    # Only the first block is read: the engine stops there.
    ('<think> <search> a </search> no </think><answer> b </answer>',
     Action('search', ('a',))),
    ('<think> <answer> a </answer> </think>', Action('answer', ('a',))),
    ('<search> a </search><search> b </search>', Action('search', ('a',))),
    ('<search> a </search> and', Action('search', ('a',))),
    ('<search> a </search></think>', Action('search', ('a',))),
    ('<answer> a </answer> </search>', Action('answer', ('a',))),
    ('<search> a </search><information> made up </information>'
     '<answer> b </answer>', Action('search', ('a',))),
    ('text <search> a <search> b </search>', Action('search', ('b',))),
])
def test_the_first_block_of_a_turn_is_its_action(text, action):
  assert dialogues.parse_tags(text) == action


@pytest.mark.parametrize('text', [
    '', 'Paris', '<search></search>', '<search> \n </search>',
    '<answer></answer>', '<answer> </answer>',
    '<search> a', 'a </search>', '</search>', '<search>', '</search><search>',
    '<search> a </answer>', '<answer> a </search>', '<search> a <search>',
    '</search><search> a </search>', '<answer></answer><answer> b </answer>',
    '<search> a </answer></search>', '<answer>a<think></answer>.',
    '<answer> <search> a </answer>', '<search> <think> a </search>',
    '<search> a <tool_call> b </search>', '<answer> a <information> </answer>',
    '<Search> a </Search>', '<search > a </search >', '< search> a </search>',
    '<think> a </think>',
    '<information> a </information>', '＜search＞ a ＜/search＞',
])
def test_everything_else_is_invalid(text):
  assert dialogues.parse_tags(text) == Action('invalid')


@pytest.mark.parametrize('hidden', [
    *TAGS, '<SEARCH>', '</Answer>', '< search>', '</ search>', '<\t/ search>',
    '<search x="1">', '<search', '＜search＞', '＜/search>', '﹤answer>',
    '<／search>', '<\u200bsearch>', '<s\u200bearch>', '\u200d<\u2060/search>',
    '<\u00adanswer>', '<\x00search>', '<\rsearch>', '<se\ufeffarch>',
    '<\u202esearch>', '<<search>', '<​</search>', '<tools>', '<tool_calls>',
    '<ｓearch>', '＜ｓｅａｒｃｈ＞', '<𝐬𝐞𝐚𝐫𝐜𝐡>', '<ſearch>', '<ⓢearch>',
    '<\u00a0answer>',
    '</ｔool_call>', '<tool＿response>', '<𝚝𝚑𝚒𝚗𝚔>', '<thin\u212a>', '<<SYS>>',
    '<|im_start|>', '<|im_end|>', '<| im_end|>', '<｜User｜>', '＜|eot_id|>',
    '<|start_header_id|>', '<s>', '</s>', '<ｓ>', '< / S >', '<start_of_turn>',
    '<bos>', '<</SYS>>', '＜＜ＳＹＳ＞＞', '< < / SYS>', '<▁search>', '<▁/▁s>',
    '<\ufe0fsearch>', '<se\u034farch>', '<\u3164/answer>', '<｜\u180bim_end|>',
    '<\U000e0100think>', '<s\uffa0>', '</s≯', '<s>\u0338',
])
def test_no_tag_of_the_protocol_survives_in_a_passage(hidden):
  text = f'before {hidden} after'
  shown = dialogues.neutralise(text)
  assert '‹' in shown
  assert not [c for c in shown.replace('\t', '')
              if unicodedata.category(c) in ('Cc', 'Cf')]
  for tag in (*TAGS, '<search', '</search'):
    assert tag not in shown.lower()
  assert shown.startswith('before ') and shown.endswith(' after')
  plain = unicodedata.normalize('NFKC', shown).lower()
  for tag in (*TAGS, '<s>', '</s>', '<|', '<<sys>>', '<bos>', '<tools>'):
    assert tag not in plain


@pytest.mark.parametrize('hidden', [
    '[INST]', '[/INST]', '［INST］', '[ＩＮＳＴ]', '﹇/inst]', '[TOOL_CALLS]',
    '[AVAILABLE_TOOLS]', '[TOOL_RESULTS]', '[SYSTEM_PROMPT]'])
def test_no_control_word_in_brackets_survives(hidden):
  shown = dialogues.neutralise(f'before {hidden} after')
  assert shown.startswith('before ⁅') and shown.endswith(' after')
  assert '[' not in unicodedata.normalize('NFKC', shown)


def test_every_character_that_nfkc_turns_into_a_bracket_is_known():
  found = ''
  for c in map(chr, range(0x110000)):
    plain = unicodedata.normalize('NFKC', c)
    if '<' in plain or '[' in plain:
      rest = 'search>' if '<' in plain else 'INST]'
      assert dialogues.neutralise(c + rest) in ('‹search>', '⁅INST]'), c
      found += c
  assert len(found) == 6


@pytest.mark.parametrize('text', [
    'plain text', 'a < b, c > d', '<b>bold</b> <i>', 'if x<searching>y',
    'Émile, naïve: 日本語 😀', 'tabs\tand\nlines', 'the answer is </3',
    'ｆｕｌｌ width, x² < y½', 'a[0] [1]', '<span> <sup>2</sup>', 'p || q, <||>',
    '[citation needed]', '[Inst.]', 'a heart ❤\ufe0f and ﾡ', '1▁2',
])
def test_other_text_is_left_as_it_is(text):
  assert dialogues.neutralise(text) == text


@pytest.mark.parametrize('text', [
    '<<' + ' ' * 40_000, 'e' + '\u0301\u0327' * 40_000, '<|' + ' /' * 40_000,
    '＜' * 40_000, '[INST ' * 40_000])
def test_a_hostile_passage_takes_no_longer_than_another(text):
  begun = time.process_time()
  dialogues.neutralise(text)
  assert time.process_time() - begun < 2  # a hundredth of a second each


def test_marks_without_a_letter_are_left_out():
  assert dialogues.neutralise('\u0301a\n\u0301\u0327b\t\u030cc') == 'a\nb\tc'
  assert dialogues.neutralise('a\n—\u0301 \u0301') == 'a\n—\u0301 \u0301'


@pytest.mark.parametrize('end', ['<', '<|', '< / ', '<|\n', '<</', '＜｜'])
def test_no_tag_is_put_together_of_two_passages(end):
  """'<|' at the end of a passage would make a tag with the next one's start."""
  first, second = Passage('1', 'on', f'x {end}'), Passage('2', end, 'y')
  dialogue = dialogues.tags()
  for budget in (*range(30), 200):
    ids, _ = dialogues.observation(
        dialogue, [(first, second)], TOKENIZER, passage_tokens=budget)
    shown = TOKENIZER.decode(ids).removeprefix(dialogue.before)
    assert '<' not in unicodedata.normalize(
        'NFKC', shown.removesuffix(dialogue.after))


def test_marks_that_are_piled_on_a_letter_are_thinned():
  piled = 'e' + '\u0327\u0301' * 20 + 'x'
  shown = dialogues.neutralise(piled)
  assert len(shown) < 33 and shown[0] == 'ȩ' and shown[-1] == 'x'
  assert dialogues.neutralise(shown) == shown
  assert dialogues.neutralise('\u0344' * 99 + 'x').endswith('x')


FRAGMENTS = st.lists(st.one_of(
    st.sampled_from([
        *TAGS, *NAMES, *'<>/＜＞／﹤\u200b\u200d\u00ad\ufeff\u0301\u0338\u0327',
        'e', 'K', '‹', ' ', '\n', '</', 'se', 'arch>', 'ans', 'wer>', '\r',
        '\u2028', '\ud800', 'ｓ', 'ｓｅａｒｃｈ', '𝐚nswer', 'tool', '_', '＿', 'call>',
        '<|', '｜', 'im_end', '|>', '[', '［', 'INST', ']', '<s>', '"', '\\',
        '<|im_end|>', '</s>', '<|eot_id|>']),
    st.text(max_size=3)), max_size=12).map(''.join)


@quick
@hypothesis.given(FRAGMENTS)
@hypothesis.example('e\u200d\u0301')  # composes once the joiner is gone
@hypothesis.example('<\u200d\u0338search>')
def test_neutralised_text_holds_nothing_that_is_parsed(text):
  shown = dialogues.neutralise(text)
  plain = unicodedata.normalize('NFKC', shown)
  for tag in (*TAGS, '<|im_end|>', '<s>', '[INST]'):
    assert tag not in shown and tag not in plain
  assert dialogues.parse_tags(shown).kind == 'invalid'
  assert dialogues.parse_tags(f'<search>{shown}x</search>') == Action(
      'search', (f'{shown}x'.strip(),))  # no tag inside
  assert dialogues.neutralise(shown) == shown
  assert unicodedata.normalize('NFC', shown) == shown  # as tokenizers do
  assert shown == text_oracles.neutralise(text)


PASSAGES = st.lists(st.builds(
    Passage, st.just('0'), FRAGMENTS.map(lambda t: t.replace('\ud800', '')),
    FRAGMENTS.map(lambda t: t.replace('\ud800', ''))), max_size=4)


@quick
@hypothesis.given(PASSAGES, st.integers(0, 40))
def test_observations_are_closed_and_each_passage_keeps_to_its_budget(
    passages, budget):
  dialogue = dialogues.tags()
  ids, cut = dialogues.observation(
      dialogue, [passages], TOKENIZER, passage_tokens=budget)
  before = TOKENIZER.encode(dialogue.before)
  after = TOKENIZER.encode(dialogue.after)
  assert ids[:len(before)] == before and ids[-len(after):] == after
  shown = TOKENIZER.decode(ids)
  assert shown.count('<information>') == shown.count('</information>') == 1
  assert dialogues.parse_tags(shown).kind == 'invalid'
  lengths = [len(TOKENIZER.encode(dialogue.passage(n, p) + '\n' * (
      n < len(passages)))) for n, p in enumerate(passages, start=1)]
  inside = len(ids) - len(before) - len(after)
  least = [min(length, budget) for length in lengths]
  assert inside <= sum(least) and (inside == sum(least) or '<' in str(passages))
  assert cut == sum(length > budget for length in lengths)


def test_a_cut_makes_no_tag_of_a_longer_word():
  """'<searching' is none, and stays; cut in the middle it would look like one."""
  passage = Passage('7', 'on', 'x <searching> the sea')
  dialogue = dialogues.tags()
  shown = [TOKENIZER.decode(dialogues.observation(
      dialogue, [(passage,)], TOKENIZER, passage_tokens=budget).tokens)
           for budget in range(40)]
  assert not [text for text in shown if '<search<' in text]
  assert 'x <searching> the sea<' in shown[-1]
  assert any('x </information>' in text for text in shown)


def test_passages_are_numbered_and_titled_like_search_r1():
  ids, cut = dialogues.observation(
      dialogues.tags(),
      [(Passage('7', 'on a', 'it is.'),), (Passage('8', 'b', 'c'),)], TOKENIZER,
      passage_tokens=50)
  assert cut == 0
  assert TOKENIZER.decode(ids) == (
      '\n\n<information>Doc 1(Title: "on a") it is.\n'
      'Doc 2(Title: "b") c</information>\n\n')


def test_a_passage_is_cut_only_if_it_loses_a_token():
  passages = (Passage('7', 'on', 'x'), Passage('8', 'on', 'x' * 9))
  dialogue = dialogues.tags()
  fits = len(TOKENIZER.encode(dialogue.passage(1, passages[0]) + '\n'))
  for budget, cut in ((0, 2), (fits - 1, 2), (fits, 1), (fits + 9, 0)):
    assert dialogues.observation(
        dialogue, [passages], TOKENIZER, passage_tokens=budget)[1] == cut


def test_no_passages_give_an_empty_block():
  ids, cut = dialogues.observation(
      dialogues.tags(), [()], TOKENIZER, passage_tokens=5)
  assert TOKENIZER.decode(ids) == '\n\n<information></information>\n\n'
  assert cut == 0


def test_search_r1_is_word_for_word():
  dialogue = dialogues.search_r1(TOKENIZER)
  assert dialogue.template == (
      'Answer the given question. You must conduct reasoning inside <think> '
      'and </think> first every time you get new information. After reasoning, '
      'if you find you lack some knowledge, you can call a search engine by '
      '<search> query </search> and it will return the top searched results '
      'between <information> and </information>. You can search as many times '
      'as your want. If you find no further external knowledge needed, you can '
      'directly provide the answer inside <answer> and </answer>, without '
      'detailed illustrations. For example, <answer> Beijing </answer>. '
      'Question: {question}\n')
  assert dialogue.invalid == (
      '\nMy previous action is invalid. If I want to search, I should put the '
      'query between <search> and </search>. If I want to give the final '
      'answer, I should put the answer between <answer> and </answer>. Let me '
      'try again.\n')
  assert (dialogue.before, dialogue.after) == (
      '\n\n<information>', '</information>\n\n')


def test_a_question_is_put_in_as_it_is():
  dialogue = dialogues.tags('Q: {question} {x}')
  assert dialogue.prompt('{x} {question} \\1 %s?') == (
      'Q: {x} {question} \\1 %s? {x}')


@pytest.mark.parametrize('template, times', [
    ('no place', 0), ('{question} {question}', 2)])
def test_a_template_has_one_place_for_the_question(template, times):
  message = f"'{{question}}' once, but has it {times} times"
  with pytest.raises(ValueError, match=message):
    dialogues.tags(template)


def test_a_tokenizer_that_cannot_write_a_stop_string_is_refused():
  dialogues.check_writable(dialogues.tags(), TOKENIZER)

  class Plain(tiny.Tokenizer):
    def decode(self, ids):
      return super().decode(ids).strip(string.punctuation)

  with pytest.raises(ValueError, match="the stop string '</search>', but"):
    dialogues.check_writable(dialogues.tags(), Plain())

  class NoOpening(tiny.Tokenizer):
    def decode(self, ids):
      return super().decode(ids).replace('<search>', '')

  with pytest.raises(ValueError, match="the tag '<search>', but decodes"):
    dialogues.check_writable(dialogues.tags(), NoOpening())


def test_words_begin_with_the_space_of_the_tokenizer():
  tokenizer = tiny.Tokenizer()
  tokenizer.leading_space = ' '
  assert dialogues.laptop(tokenizer).template == (
      f' {dialogues.laptop(TOKENIZER).template}')
  assert dialogues.search_r1(tokenizer).template.startswith(' Answer the')
