# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Starts of sequences: BOS where the tokenizer itself puts it, exactly once.

The oracle is the tokenizer's own call, with its special tokens.
"""

import json

import chats
import fakes
import pytest
from tokenizers import processors

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import prompts
from searchrl.agent import tokenizer as tokenizers
from searchrl.agent import transcripts
from searchrl.experiment import model_folders
from searchrl.papers.dr_zero import dialogues as proposer_dialogues
from searchrl.papers.zerosearch import zerosearch_dialogues
from searchrl.rollouts import driver
from searchrl.serving import openai_api
from searchrl.trajectory import Question, Request

DEVICES = 8


def with_bos(tokenizer, end=''):
  """The same tokenizer, which begins texts with BOS as Llama's does."""
  raw, bos = tokenizer._fast.backend_tokenizer, tokenizer._fast.bos_token
  names = [name for name in (bos, end) if name]
  raw.post_processor = processors.TemplateProcessing(
      single=f'{bos} $A {end}'.strip(),
      special_tokens=[(name, raw.token_to_id(name)) for name in names])
  return tokenizers.Tokenizer(tokenizer._fast)


BOS = {
    'llama': with_bos(chats.byte_level(eos='<|eot_id|>')),
    'with an end, too': with_bos(chats.byte_level(), '<|endoftext|>'),
    'mistral': with_bos(chats.sentence_piece()),
    'mistral legacy': with_bos(chats.sentence_piece(legacy=True)),
}
NONE = {'qwen': chats.qwen(), 'word piece': chats.word_piece(),
        'sentence piece': chats.sentence_piece()}
ALL = BOS | NONE
PLAIN = (dialogues.laptop, dialogues.laptop_answer, dialogues.laptop_read,
         dialogues.search_r1, dialogues.r1, dialogues.from_memory,
         dialogues.from_documents, dialogues.continuation,
         proposer_dialogues.in_tags, proposer_dialogues.laptop,
         zerosearch_dialogues.in_tags)
each = pytest.mark.parametrize('name', ALL)


def by_the_tokenizer(tokenizer, text):
  """Ids of the tokenizer's own call, without an end that it adds."""
  ids = tokenizer._fast.encode(text, add_special_tokens=True)
  end = tokenizer._fast.convert_tokens_to_ids('<|endoftext|>')
  return tuple(ids[:-1] if ids[-1:] == [end] else ids)


@each
def test_the_start_is_what_the_tokenizer_puts_before_a_text(name):
  tokenizer = ALL[name]
  bos = (tokenizer._fast.bos_token_id,)
  assert tokenizer.start_ids == (bos if name in BOS else ())


@each
@pytest.mark.parametrize('make', PLAIN)
def test_a_plain_prompt_is_the_tokenizers_own(name, make):
  tokenizer = ALL[name]
  dialogue = make(tokenizer)
  ids = dialogues.opening(dialogue, 'who goes on?', tokenizer)
  text = dialogue.prompt('who goes on?').removeprefix(tokenizer.leading_space)
  assert ids == by_the_tokenizer(tokenizer, text)
  if name in BOS:
    assert ids.count(tokenizer.start_ids[0]) == 1


@pytest.mark.parametrize('text', [
    'the search', '', ' goes on', '\n', 'é 日本', 'Question: who?\n'])
@each
def test_data_and_completions_begin_as_the_tokenizers_own_call(name, text):
  tokenizer = ALL[name]
  expected = by_the_tokenizer(tokenizer, text) if text else tokenizer.start_ids
  assert tokenizer.encode_first(text) == expected
  found = transcripts.of_segments(
      [(text, False), (' an answer', True)], tokenizer, ends=True)
  after = (*tokenizer.encode(' an answer'), tokenizer.eos_ids[0])
  assert found.ids == (*expected, *after)
  assert found.trained == (False,) * len(expected) + (True,) * len(after)
  if expected:
    record = {'model': 'm', 'prompt': [text, list(after)], 'max_tokens': 1}
    request = openai_api.read(
        json.dumps(record).encode(), is_chat=False, name='m', length=100,
        tokenizer=tokenizer, limits=openai_api.Limits())
    assert request.prompts == (expected, after)  # ids stay as they are


@each
def test_a_first_segment_of_plain_text_begins_alike(name):
  """A special token in it is text, but the sequence still has its start."""
  tokenizer = ALL[name]
  for special in (True, False):
    found = transcripts.of_segments(
        [('the search', False, special), ('a', True)], tokenizer)
    assert found.ids[:-1] == by_the_tokenizer(tokenizer, 'the search')


@pytest.mark.parametrize('name', BOS)
def test_a_text_that_writes_bos_itself_has_it_once(name):
  tokenizer = BOS[name]
  text = f'{tokenizer._fast.bos_token}the search'
  ids = tokenizer.encode_first(text)
  assert [ids] == tokenizer._ids([text])
  assert ids.count(tokenizer.start_ids[0]) == 1
  assert transcripts.of_segments([(text, False), ('a', True)], tokenizer).ids[
      :len(ids)] == ids


def test_a_start_is_never_trained_on():
  tokenizer = BOS['llama']
  found = transcripts.of_segments([('the', True), ('search', True)], tokenizer)
  assert found.trained == (False,) + (True,) * (len(found.ids) - 1)


@pytest.mark.parametrize('template, tokenizer', [
    (chats.LLAMA3, with_bos(chats.llama())),
    (chats.MISTRAL, with_bos(chats.sentence_piece(chats.MISTRAL))),
    (chats.QWEN2, with_bos(chats.qwen()))])
def test_a_chat_has_the_start_that_its_template_writes(template, tokenizer):
  """It is the one of transformers' apply_chat_template and of vLLM's chat."""
  count = int('bos_token' in template)
  for make in (chat.search_r1, chat.r1, lambda tokenizer: prompts.framed(
      tokenizer, 'Answer: {question}')):
    dialogue = make(tokenizer)
    ids = dialogues.opening(dialogue, 'who?', tokenizer)
    assert ids.count(tokenizer._fast.bos_token_id) == count
    if template != chats.MISTRAL:  # which puts a space before the question
      assert ids == tuple(tokenizer._fast.encode(
          tokenizer.render(chat.first_messages(dialogue, 'who?')),
          add_special_tokens=False))
  talk = [{'role': 'user', 'content': 'who?'},
          {'role': 'assistant', 'content': 'the answer'}]
  assert transcripts.of_messages(talk, tokenizer).ids.count(
      tokenizer._fast.bos_token_id) == count


def test_the_budget_of_a_prompt_counts_its_start():
  tokenizer = BOS['llama']
  dialogue = dialogues.laptop(tokenizer)
  bare = tokenizer.encode_data(dialogue.prompt('who?'))
  folder = model_folders.ModelFolder('', None, tokenizer, dialogue)
  question = Question('q', 'who?', ())
  for extra in (0, 1):
    budgets = driver.Budgets(max_prompt_tokens=len(bare) + extra)
    run = lambda: driver.run(
        [Request(question)], engine=fakes.Engine(
            {(question.uid, 0): ['<answer> a </answer>']}, slots=1,
            encode=tokenizer.encode), search=None, dialogue=dialogue,
        tokenizer=tokenizer, budgets=budgets, step=fakes.STEP, policy_step=0)
    if extra:
      (trajectory,), _ = run()
      assert trajectory.prompt_tokens == (*tokenizer.start_ids, *bare)
      assert trajectory.prompt == dialogue.prompt('who?')
      folder.admit(budgets)(question, 'line 1')
    else:
      with pytest.raises(ValueError, match=f'has {len(bare) + 1}'):
        run()
      with pytest.raises(ValueError, match=f'has {len(bare) + 1}'):
        folder.admit(budgets)(question, 'line 1')
