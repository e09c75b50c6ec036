# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fuzzing: hostile documents and generations against both protocols."""

import json
import pathlib
import re
import unicodedata

import chats
import fakes
import strategies
from strategies import TAGS, Dice, fuzzed
import text_oracles
import tiny

from searchrl.agent import chat
from searchrl.agent import demonstrations
from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import tag_parser
from searchrl.agent.markup import neutralise
from searchrl.agent import rewards
from searchrl.agent import tokenizer as tokenizers
from searchrl.agent import tools
from searchrl.agent import transcripts
from searchrl.papers.dr_zero import proposals
from searchrl.papers.zerosearch import zerosearch_dialogues
from searchrl.rollouts import driver
from searchrl.trajectory import Passage, Question, Request, Trajectory, Turn

ASSETS = pathlib.Path(tokenizers.__file__).parents[1] / 'assets'
SHIPPED = {  # each file once: most models share theirs
    (folder / 'tokenizer.json').read_bytes(): folder
    for folder in sorted(ASSETS.glob('tiny_*')) if folder.name != 'tiny_e5'}
PLAIN = [tiny.Tokenizer(), chats.byte_level(), chats.byte_level(prefix=True),
         *(tokenizers.load(str(folder)) for folder in SHIPPED.values())]
CHATS = [chats.qwen(), chats.qwen(chats.QWEN3), chats.llama(),
         chats.sentence_piece(chats.MISTRAL),
         chats.sentence_piece(chats.MISTRAL, legacy=True)]
IN_TAGS = [*((make(own), own) for own in PLAIN for make in (
    dialogues.laptop, dialogues.search_r1, zerosearch_dialogues.in_tags)),
           *((make(own), own) for own in CHATS for make in (
               chat.search_r1, zerosearch_dialogues.in_chat))]
IN_TOOLS = [*((tools.dr_zero(own), own) for own in CHATS),
            (tools.dspo(CHATS[0]), CHATS[0])]
BUDGETS = driver.Budgets(max_turns=4, max_new_tokens=200,
                         max_prompt_tokens=4000, passage_tokens=20)
NAMES = '|'.join(tag[1:] for tag in TAGS if '/' not in tag).replace('>', '')
MARKUP = re.compile(  # after case and invisible characters are gone
    rf'<[\s/]*(?:(?:{NAMES})\b|s\s*>|\|\s*\w)|<\s*<\s*/?\s*sys\b|'
    r'\[[\s/]*(?:inst|tool_calls)\s*\]')
SHOWS_NOTHING = re.compile(
    '[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f'
    '\U000e0000-\U000e0fff]')


def bare(text: str) -> str:
  """A text as somebody sees it who overlooks case, width and the invisible."""
  text = unicodedata.normalize('NFKC', text)
  text = ''.join(c for c in text.replace('▁', ' ') if c in '\n\t' or
                 unicodedata.category(c) not in ('Cc', 'Cf'))
  return unicodedata.normalize(
      'NFKC', SHOWS_NOTHING.sub('', text)).casefold()


@fuzzed()
def test_nothing_in_a_neutralised_text_looks_like_a_tag(dice: Dice):
  text = strategies.text(dice)
  shown = neutralise(text)
  for form in ('NFC', 'NFKC', 'NFD', 'NFKD'):
    plain = unicodedata.normalize(form, shown)
    assert not [tag for tag in (*TAGS, '<|im_end|>', '</s>', '[INST]')
                if tag in plain or tag in plain.lower()]
  found = MARKUP.search(bare(shown))
  assert not found, (found, text)
  assert neutralise(shown) == shown == unicodedata.normalize('NFC', shown)
  assert len(shown) <= 3 * len(text)  # as NFC may add
  assert shown == text_oracles.neutralise(text)


@fuzzed()
def test_no_text_from_outside_becomes_a_special_token(dice: Dice):
  text = strategies.text(dice)
  tokenizer = dice.one_of(PLAIN[1:] + CHATS)
  ids = tokenizer.encode_data(text)
  assert not tokenizer.special_ids.intersection(ids)
  assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
  assert len(ids) <= 4 * len(text.encode('utf-8', 'replace')) + 4
  written = unicodedata.normalize('NFC', strategies.whole(text))
  if tokenizer in CHATS[3:]:  # of SentencePiece
    raw = tokenizer.decode((*tokenizer.encode('x'), *ids))
    assert raw == 'x' + strategies.whole(text).replace('▁', ' ')
  else:
    assert unicodedata.normalize('NFC', tokenizer.decode(ids)) == written
  shown = tokenizer.decode(tokenizer.encode_data(neutralise(text)))
  assert not MARKUP.search(bare(shown)), text


@fuzzed()
def test_a_question_is_data_in_the_prompt(dice: Dice):
  """The prompt's special tokens are those of a harmless question."""
  dialogue, tokenizer = dice.one_of(IN_TAGS[3:] + IN_TOOLS)
  question = strategies.text(dice)
  special = [[id_ for id_ in dialogues.opening(dialogue, text, tokenizer)
              if id_ in tokenizer.special_ids] for text in (question, 'who?')]
  assert special[0] == special[1]
  ids = dialogues.opening(dialogue, question, tokenizer)
  head, tail = tokenizer.encode(dialogue.head), tokenizer.encode(dialogue.tail)
  assert ids[:len(head)] == head and ids[len(ids) - len(tail):] == tail


def passages_of(dice: Dice):
  """The results of up to three queries."""
  return [tuple(dice.many(3, strategies.passage))
          for _ in range(1 + dice.below(3))]


@fuzzed()
def test_an_observation_is_closed_and_keeps_to_its_budget(dice: Dice):
  dialogue, tokenizer = dice.one_of(IN_TAGS + IN_TOOLS)
  results, budget = passages_of(dice), dice.below(40)
  ended = dialogue.turn_end and dice.below(2)
  action = tuple(dialogue.end_ids[:1]) if ended else ()
  ids, cut = dialogues.observation(
      dialogue, results, tokenizer, passage_tokens=budget, action_tokens=action)
  before = tokenizer.encode(dialogue.before)
  if not action and dialogue.turn_end:
    before = (*tokenizer.encode(dialogue.turn_end), *before)
  after = tokenizer.encode(dialogue.after)
  inside = ids[len(before):len(ids) - len(after)]
  assert ids == (*before, *inside, *after)
  pieces = dialogue.arrange(dialogue.passage, results)
  assert len(inside) <= budget * len(pieces) and 0 <= cut <= len(pieces)
  if tokenizer is not PLAIN[0]:
    assert not tokenizer.special_ids.intersection(inside)
  shown = tokenizer.decode((*tokenizer.encode('x'), *inside))[1:]
  if tokenizer is not PLAIN[0]:  # it writes a ? for letters, which end words
    assert not MARKUP.search(bare(shown))
  assert dialogue.parse(shown).kind == 'invalid'
  for _ in range(dialogue.json_levels):  # what JSON writes in a string
    shown = json.loads(f'"{shown}"')
  if not cut and tokenizer in CHATS[:3]:
    assert shown == unicodedata.normalize('NFC', strategies.whole(
        ''.join(pieces)))


ACTIONS = ('<search> who? </search>', '<answer> Zanzibar </answer>',
           '<think> hm </think>\n', '<tool_call>\n{"name": "search", '
           '"arguments": {"query_list": ["a", "b"]}}\n</tool_call>')


def said(dice: Dice) -> str:
  """Draws a turn's text as a policy writes it, often with an action."""
  kind, before = dice.below(8), strategies.text(dice, 4)
  if kind < 5:
    return before + dice.one_of(ACTIONS)
  if kind == 5:
    return f'<think>{before}</think>{dice.one_of(ACTIONS)}'
  return before + strategies.text(dice, 8) + dice.one_of(
      ('', '</search>', '</answer>', '</tool_call>', '\n', ' '))


@fuzzed()
def test_a_turn_in_tags_is_read_as_the_definition_has_it(dice: Dice):
  text = said(dice)
  action = dialogues.parse_tags(text)
  assert action == text_oracles.tag_action(text)
  if action.kind != 'invalid':
    again = f'<{action.kind}>{action.texts[0]}</{action.kind}>'
    assert dialogues.parse_tags(again) == action
    assert dialogues.parse_tags(text + strategies.text(dice, 3)) == action
    before = strategies.text(dice, 3)
    if not [tag for tag in tag_parser.TAG_STOPS if tag in before]:
      assert dialogues.parse_tags(before + text) == action
    assert not [tag for tag in TAGS if tag in action.texts[0]]


@fuzzed()
def test_a_turn_with_tools_is_read_as_the_definition_has_it(dice: Dice):
  call = {'name': 'search', 'arguments': {'query_list': [
      strategies.text(dice, 2) for _ in range(1 + dice.below(3))]}}
  names = ['name', 'arguments', 'parameters', 'query_list', 'x']
  written = strategies.body(dice, strategies.mutated(dice, call, names, 1))
  text = said(dice) if dice.below(2) else (
      f'{strategies.text(dice, 2)}<tool_call>'
      f'{written.decode(errors="replace")}</tool_call>')
  action = tools.parse(text)
  assert action == text_oracles.tool_action(text, tools.MAX_QUERIES)
  assert sum(map(len, action.texts)) <= len(text)
  if action.is_search:
    again = json.dumps({'name': 'search', 'arguments': {
        'query_list': action.texts}})
    if not [tag for tag in ('<tool_call>', *tools.TOOL_STOPS) if tag in again]:
      assert tools.parse(f'<tool_call>{again}</tool_call>') == action
  if action.kind != 'invalid':
    assert tools.parse(text + strategies.text(dice, 3)) == action
    before = strategies.text(dice, 3)
    if not [tag for tag in tools.TOOL_STOPS if tag in before]:
      assert tools.parse(before + text) == action


def played(dialogue, tokenizer, script, results):
  """A trajectory whose actions are a script's, through the real driver."""
  ids = [tokenizer.encode(strategies.whole(text))[:200] or
         tokenizer.eos_ids[:1] for text in script]
  question = tiny.question(answers=('Zanzibar',))
  left = iter(results)
  (found,), _ = driver.run(
      [Request(question)], engine=fakes.Engine(
          {(question.uid, 0): ids}, slots=1, length=20_000, encode=tuple),
      search=lambda queries: [next(left) for _ in queries], dialogue=dialogue,
      tokenizer=tokenizer, budgets=BUDGETS, step=fakes.STEP, policy_step=0)
  return found


def scores(trajectory):
  """All rewards that do not read passages."""
  return (*(reward(trajectory) for reward in (
      rewards.em, rewards.subem, rewards.f1)),
          rewards.format_em().score([trajectory]),
          rewards.retrieval().score([trajectory]),
          proposals.read(trajectory))


@fuzzed(short=100, share=0.5)
def test_what_a_retriever_finds_changes_nothing_but_what_is_read(dice: Dice):
  """Actions, rewards, masks are those of the same number of harmless ones."""
  dialogue, tokenizer = dice.one_of(IN_TAGS + IN_TOOLS)
  script = [said(dice) for _ in range(4)]
  hostile = [tuple(dice.many(2, strategies.passage)) for _ in range(12)]
  hostile = [tuple(without_gold(p) for p in found) for found in hostile]
  harmless = [(Passage('1', 'On', 'It is.'),) * len(found) for found in hostile]
  one, other = (played(dialogue, tokenizer, script, results)
                for results in (hostile, harmless))
  for a, b in zip(one.turns, other.turns, strict=True):
    assert (a.action_tokens, len(a.action_logprobs), a.action, a.text) == (
        b.action_tokens, len(b.action_logprobs), b.action, b.text)
    assert bool(a.observation_tokens) == bool(b.observation_tokens)
    assert a.text == text_oracles.read(
        tokenizer.decode(a.action_tokens),
        *(stop[2:-1] for stop in dialogue.stop_strings))
    assert a.action == dialogue.parse(a.text)
  assert (one.stop_reason, one.searches, one.answer, one.prompt_tokens) == (
      other.stop_reason, other.searches, other.answer, other.prompt_tokens)
  assert scores(one) == scores(other)
  trained = [[id_ for id_, ours in zip(t.tokens, t.loss_mask, strict=True)
              if ours] for t in (one, other)]
  assert trained[0] == trained[1] == [
      id_ for turn in one.turns for id_ in turn.action_tokens]
  if dialogue.json_levels == 0 and tokenizer is not PLAIN[0]:
    special = [[id_ for id_ in transcripts.of_segments([
        (part['text'], part['trained']) for part in demonstrations.lines(
            t, tokenizer)[0]['segments']], tokenizer).ids
                if id_ in tokenizer.special_ids]
               for t in (one, other)]
    assert special[0] == special[1]  # also where a model is tuned on it


def without_gold(passage):
  return Passage(passage.id, passage.title.replace('Zan', ''),
                 passage.text.replace('Zan', ''))


def talk(dice: Dice, protocol):
  """A trajectory of hostile texts, with what the policy read."""
  dialogue, tokenizer = protocol
  turns = []
  for _ in range(dice.below(4)):
    text = said(dice)
    action, seen = dialogue.parse(text), ''
    if action.is_search:
      seen = tokenizer.decode(dialogues.observation(
          dialogue, [tuple(dice.many(2, strategies.passage))], tokenizer,
          passage_tokens=30).tokens)
    elif action.kind == 'invalid':
      seen = tokenizer.decode(dialogues.retry(dialogue, tokenizer, ()))
    turns.append(Turn((1,), (0.0,), action, (2,), (), text=text,
                      observation=seen))
    if action.kind == 'answer':
      break
  golds = tuple(dice.many(2, lambda d: strategies.text(d, 3))) + ('Paris',)
  return Trajectory(Question('q', 'x?', golds), 0, 0, (1,), tuple(turns),
                    'answer', prompt='x?')


@fuzzed()
def test_rewards_lie_in_their_range_and_in_their_order(dice: Dice):
  trajectory = talk(dice, dice.one_of([IN_TAGS[0], IN_TOOLS[0]]))
  em, subem, f1 = (reward(trajectory) for reward in (
      rewards.em, rewards.subem, rewards.f1))
  assert em in (0, 1) and subem in (0, 1) and 0 <= f1 <= 1
  assert em <= subem and (not em or f1 == 1)
  for score in (*rewards.format_em().score([trajectory]),
                *rewards.retrieval().score([trajectory])):
    valid = score.parts['format']
    assert score.parts['em'] == em
    legal = ({1.0} if valid else {0.8}) if em else {0.2, 0.3} if valid else {0}
    assert round(score.reward, 9) in legal
  answer = trajectory.answer
  assert (answer is None) <= (em == subem == f1 == 0)
  if answer is not None:
    normal = rewards.normalise(answer)
    assert rewards.normalise(normal) == normal
    assert rewards.exact_match(answer, [answer]) == bool(normal)
    assert rewards.token_f1(answer, [answer]) == bool(normal)


@fuzzed()
def test_a_format_is_read_as_the_definition_has_it(dice: Dice):
  parts = [*TAGS, '<think>a</think>', '<search>b</search>', '\n', 'x', '</s>',
           '<information>c</information>', '<answer>d</answer>', '<|im_end|>',
           '<think>a</think><search>b</search><information>c</information>']
  text = ''.join(dice.many(8, lambda d: d.one_of(parts))) + dice.one_of(
      ('<think>a</think><answer>d</answer>', ''))
  prompt = dice.one_of(('', 'ask <think>', 'ask <think>\n'))
  assert formats.is_valid(text, prompt=prompt) == text_oracles.is_in_format(
      ('<think>' if prompt else '') + text)


@fuzzed()
def test_a_proposal_is_the_last_that_was_written(dice: Dice):
  document = strategies.text(dice)
  asked = Question('q', proposals.ask(document, 1 + dice.below(4)), (),
                   hops=1 + dice.below(4))
  assert proposals.document_of(asked) == document
  texts = [said(dice) + dice.one_of((
      '', '<question>', '</question>', '<question> who? </question> <answer> x '
      '</answer>')) for _ in range(dice.below(4))]
  trajectory = Trajectory(asked, 0, 0, (1,), tuple(
      Turn((1,), (0.0,), dialogues.parse_tags(text), (2,),
           tuple(dice.many(2, strategies.passage)), text=text)
      for text in texts), 'answer')
  found = proposals.read(trajectory)
  assert found == proposals.Proposal(*(
      text_oracles.last_block(''.join(
          text_oracles.read(text, 'answer') for text in texts), name)
      for name in ('question', 'answer')))
  form = proposals.form(trajectory)
  assert all(0 <= part <= 1 for part in vars(form).values())
  assert form.score == 0 or 0.25 <= form.score <= 1
  assert bool(form.gate) == found.passes
  if found.passes:
    assert rewards.normalise(found.answer) not in rewards.normalise(
        found.question)


@fuzzed()
def test_messages_of_others_are_data_and_turns_are_trained_on(dice: Dice):
  tokenizer = dice.one_of(CHATS[:1] + CHATS[2:4])
  contents = [strategies.whole(strategies.text(dice, 5)) for _ in range(2)]
  talk_of = lambda texts: [
      {'role': 'user', 'content': texts[0]},
      {'role': 'assistant', 'content': 'the search'},
      {'role': 'user', 'content': texts[1]},
      {'role': 'assistant', 'content': '<answer> x </answer>'}]
  hostile, harmless = (transcripts.of_messages(talk_of(texts), tokenizer)
                       for texts in (contents, ['who?', 'and?']))
  special = [[id_ for id_ in found.ids if id_ in tokenizer.special_ids]
             for found in (hostile, harmless)]
  assert special[0] == special[1]
  trained = [[id_ for id_, ours in zip(*found, strict=True) if ours]
             for found in (hostile, harmless)]
  assert trained[0] == trained[1]
  written, rendered = (
      unicodedata.normalize('NFC', chats.unspaced(text.replace('▁', ' ')))
      for text in (chats.written(tokenizer, hostile.ids),
                   tokenizer.render(talk_of(contents))))
  assert rendered.startswith(written)
