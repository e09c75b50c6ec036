# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ends of turns: a closing tag that shares its last token with other text."""

import functools
import json

import chats
import fakes
import pytest
import tiny

from searchrl.agent import chat
from searchrl.agent import demonstrations
from searchrl.agent import dialogue as dialogues
from searchrl.agent import formats
from searchrl.agent import rewards
from searchrl.agent import tag_parser
from searchrl.agent import tools
from searchrl.agent import tokenizer as tokenizers
from searchrl.evaluation import scores
from searchrl.evaluation.report import tokens as report_tokens
from searchrl.models.inference import stops
from searchrl.papers.dr_zero import proposals
from searchrl.rollouts import driver
from searchrl.trajectory import Action, Passage, Request

# Some of the 256 tokens of Qwen 2.5 and Llama 3 that begin with '>'.
MERGED = ('>.', '><', '></', '>,', '>)', '>"', '>\n\n', '>";\n', '>(', '>The',
          '>。')
RESTS = [token[1:] for token in MERGED]
QWEN = chats.byte_level(chats.QWEN2, added=(
    '<tool_call>', '</tool_call>', '<think>', '</think>', *MERGED))
LLAMA = chats.byte_level(chats.LLAMA3, eos='<|eot_id|>', added=MERGED)
PIECES = chats.sentence_piece(chats.MISTRAL)
PIECES._fast.add_tokens(list(MERGED))
PIECES = tokenizers.Tokenizer(PIECES._fast)
IN_TAGS = [(make(own), own) for own in (QWEN, LLAMA, PIECES) for make in (
    dialogues.search_r1, chat.search_r1)]
IN_TOOLS = [(tools.dr_zero(own), own) for own in (QWEN, LLAMA, PIECES)]
BOTH = IN_TAGS + IN_TOOLS
THINK = '<think> hm </think>\n'
ANSWER = '<answer> Paris </answer>'
CALL = '<tool_call>\n' + json.dumps({
    'name': 'search', 'arguments': {'query_list': ['who?']}}) + '\n</tool_call>'
FOUND = (Passage('1', 'Paris', 'the town'),)


@functools.cache
def sampled(dialogue, tokenizer):
  """Returns a function from a text to its ids, up to where an engine stops."""
  table = stops.compile_table(
      tokenizer.token_bytes, dialogue.stop_strings, tokenizer.vocab_size)

  def encode(text):
    ids, state = [], 0
    for id_ in tokenizer.encode(text):
      ids.append(id_)
      if table.hit[state, id_]:
        break
      state = table.next_state[state, id_]
    return tuple(ids)
  return encode


def played(dialogue, tokenizer, *script):
  """A trajectory whose turns are a script's, each cut where an engine stops."""
  question = tiny.question(answers=('Paris',))
  (trajectory,), _ = driver.run(
      [Request(question)], engine=fakes.Engine(
          {(question.uid, 0): script}, slots=1, length=20_000,
          encode=sampled(dialogue, tokenizer)),
      search=lambda queries: [FOUND for _ in queries], dialogue=dialogue,
      tokenizer=tokenizer, budgets=driver.Budgets(
          max_turns=len(script), max_new_tokens=400, max_prompt_tokens=4000),
      step=fakes.STEP, policy_step=0)
  return trajectory


def search_of(dialogue):
  return CALL if dialogue.stop_strings == tools.TOOL_STOPS else (
      '<search> who? </search>')


@pytest.mark.parametrize('protocol', range(len(BOTH)))
@pytest.mark.parametrize('rest', ['', *RESTS])
def test_an_action_counts_whatever_shares_its_last_token(protocol, rest):
  dialogue, tokenizer = BOTH[protocol]
  search = THINK + search_of(dialogue)
  trajectory = played(dialogue, tokenizer, search + rest,
                      THINK + ANSWER + rest)
  first, last = trajectory.turns
  assert first.action == Action('search', ('who?',))
  assert last.action == Action('answer', ('Paris',))
  assert (first.text.strip(), last.text.strip()) == (search, THINK + ANSWER)
  # What was sampled is kept, and is trained on.
  whole = tokenizer.decode(last.action_tokens).strip()
  assert whole == (THINK + ANSWER + rest).strip()
  assert tokenizer.decode(trajectory.tokens).rstrip().endswith(whole)
  assert sum(trajectory.loss_mask) == sum(
      len(turn.action_tokens) for turn in trajectory.turns)
  # All readers agree.
  assert formats.is_well_formed(trajectory, needs_search=True)
  assert rewards.em(trajectory) == 1 and trajectory.stop_reason == 'answer'
  assert rewards.format_em().score([trajectory])[0].reward == 1
  assert scores.score_trajectory(trajectory).values['em'] == 1
  texts = [segment['text'].strip() for segment in demonstrations.lines(
      trajectory, tokenizer)[0]['segments'] if segment['trained']]
  assert texts == [search, THINK + ANSWER]
  shown = [''.join(segment.texts).strip() for segment in report_tokens.segments(
      trajectory, tokenizer, {}) if segment.role == report_tokens.POLICY]
  assert shown[-1] == whole


@pytest.mark.parametrize('dialogue, tokenizer', BOTH)
def test_a_dream_of_a_result_is_a_search(dialogue, tokenizer):
  """A base model in its first steps writes the information itself."""
  search = search_of(dialogue)
  trajectory = played(
      dialogue, tokenizer, f'{search}<information> x </information>{ANSWER}',
      ANSWER)
  assert trajectory.turns[0].action == Action('search', ('who?',))
  assert trajectory.turns[0].passages == FOUND
  assert trajectory.turns[0].text.strip() == search
  assert trajectory.answer == 'Paris' and trajectory.searches == 1


@pytest.mark.parametrize('dialogue, tokenizer', BOTH)
@pytest.mark.parametrize('rest', RESTS)
def test_what_is_no_action_stays_none(dialogue, tokenizer, rest):
  closing = dialogue.stop_strings[0]
  for text in (f'hm {closing}{rest}', f'{closing[:1]}{closing[2:]}{closing}',
               f'<answer></answer>{rest}', f'<answer> a {closing}{rest}',
               f'<answer> a{rest}', f'<answer> <think> a </answer>{rest}'):
    assert played(dialogue, tokenizer, text).turns[0].action.kind == 'invalid'


@pytest.mark.parametrize('rest', ['', *RESTS, ' and', '\n<answer> c </answer>'])
def test_parsers_read_up_to_the_first_closing_tag(rest):
  for parse in (dialogues.parse_tags, tools.parse):
    assert parse(THINK + ANSWER + rest) == Action('answer', ('Paris',))
  assert dialogues.parse_tags(f'<search> a </search>{rest}') == (
      Action('search', ('a',)))
  assert tools.parse(CALL + rest) == Action('search', ('who?',))
  turn = played(*IN_TAGS[0], f'<question> who? </question> {ANSWER}{rest}')
  assert proposals.read(turn) == proposals.Proposal('who?', 'Paris')


def test_text_is_read_up_to_the_end_of_the_first_stop_string():
  for text, stop_strings, expected in (
      ('', ('a',), ''), ('b', (), 'b'), ('b', ('a',), 'b'),
      ('bab', ('a',), 'ba'), ('bacb', ('cb', 'ac'), 'bac'),
      ('x.\n\ny', ('\n', '.'), 'x.'), ('a', ('a', 'aa'), 'a')):
    assert tag_parser.until_stop(text, stop_strings) == expected


@pytest.mark.parametrize('tag', ['<search>', '</search>', '</answer>',
                                 '<information>', '<think>'])
def test_a_tag_that_is_a_special_token_is_refused_with_a_way_out(tag, tmp_path):
  chats.byte_level(special=(tag,))._fast.save_pretrained(tmp_path)
  tokenizer = tokenizers.load(str(tmp_path))
  with pytest.raises(ValueError, match=(
      f"write the .* '{tag}', but has it as a special token.*\"special\" to "
      'false in tokenizer.json and tokenizer_config.json')):
    dialogues.check_writable(dialogues.search_r1(tokenizer), tokenizer)
  for name in ('tokenizer.json', 'tokenizer_config.json'):  # as it says
    path = tmp_path / name
    record = json.loads(path.read_text())
    added = record.get('added_tokens') or [
        *record.get('added_tokens_decoder', {}).values()]
    for token in added:
      if token['content'] == tag:
        token['special'] = False
    for key in ('additional_special_tokens', 'extra_special_tokens'):
      if tag in record.get(key, ()):
        record[key].remove(tag)
    path.write_text(json.dumps(record))
  tokenizer = tokenizers.load(str(tmp_path))
  dialogues.check_writable(dialogues.search_r1(tokenizer), tokenizer)
  assert len(tokenizer.encode(tag)) == 1
  assert played(dialogues.search_r1(tokenizer), tokenizer,
                ANSWER).answer == 'Paris'
