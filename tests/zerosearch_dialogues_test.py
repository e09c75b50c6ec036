# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""zerosearch_dialogues: documents in a row, and the prompts of a simulator."""

import dataclasses

import chats
import pytest
import tiny

from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tokenizer as tokenizers
from searchrl.agent import transcripts
from searchrl.experiment import policy
from searchrl.papers.zerosearch import zerosearch_dialogues
from searchrl.trajectory import Passage

TOKENIZER = tiny.Tokenizer()
TOKENIZERS = {
    'qwen2': chats.qwen(), 'qwen3': chats.qwen(chats.QWEN3),
    'llama3': chats.llama(), 'mistral': chats.sentence_piece(chats.MISTRAL)}


def test_in_a_chat_only_passages_differ_from_search_r1():
  dialogue = zerosearch_dialogues.in_chat(TOKENIZERS['qwen2'])
  other = chat.search_r1(TOKENIZERS['qwen2'])
  assert dialogue.passage is zerosearch_dialogues.document
  assert dataclasses.replace(dialogue, passage=other.passage) == other


def test_zerosearchs_documents_have_a_title_only_where_the_text_lacks_it():
  dialogue = zerosearch_dialogues.in_tags(TOKENIZER)
  assert dialogue.template == dialogues.search_r1(TOKENIZER).template
  ids, _ = dialogues.observation(dialogue, [(
      Passage('1', '', 'it is.'), Passage('2', 'on a', 'it is on a.'),
      Passage('3', 'b', 'c'))], TOKENIZER, passage_tokens=50)
  assert TOKENIZER.decode(ids).split('\n') == [
      '', '', '<information>Doc 1: it is.', 'Doc 2: it is on a.',
      'Doc 3: b c</information>', '', '']
  shown = zerosearch_dialogues.document(
      1, Passage('', '</think>', '</search>'))
  assert '</' not in shown


@pytest.mark.parametrize('name', ['qwen2', 'qwen3', 'llama3'])
def test_a_simulators_prompt_is_a_users_message_after_an_empty_one(name):
  tokenizer = TOKENIZERS[name]
  messages = [{'role': 'system', 'content': ''},
              {'role': 'user', 'content': 'Query: "a" {{ x }} é'}]
  dialogue = zerosearch_dialogues.of_writer(tokenizer)
  ids = dialogues.opening(dialogue, messages[1]['content'], tokenizer)
  assert chats.unspaced(chats.written(tokenizer, ids)) == chats.unspaced(
      tokenizer.render(messages))
  assert dialogue.parse('Doc 1: </search> x').texts == ('Doc 1: </search> x',)
  assert dialogue.stop_strings == ()


def test_a_simulators_prompt_is_what_it_was_tuned_on():
  """Ids of rollout and of fine-tuning agree, prompt and end."""
  tokenizer = TOKENIZERS['qwen2']
  dialogue = zerosearch_dialogues.of_writer(tokenizer)
  said = 'Doc 1: the town'
  tuned = transcripts.of_messages([
      {'role': 'system', 'content': ''},
      {'role': 'user', 'content': 'who?\n'},  # as the published ones end
      {'role': 'assistant', 'content': said}], tokenizer)
  asked = dialogues.opening(dialogue, 'who?\n', tokenizer)
  assert tuned.ids[:len(asked)] == asked
  assert not any(tuned.trained[:len(asked)])
  assert tuned.ids[-1:] == dialogue.end_ids
  assert tokenizer.decode(tuned.ids[len(asked):-1]) == said


def test_a_template_without_an_empty_system_message_is_refused():
  with pytest.raises(ValueError, match='messages of system, user'):
    zerosearch_dialogues.of_writer(TOKENIZERS['mistral'])


def test_a_simulator_without_a_chat_template_continues_its_prompt():
  tokenizer = tokenizers.load(str(policy.TINY_BASE))
  assert not tokenizer.has_chat_template
  assert zerosearch_dialogues.of_writer(
      tokenizer) == dialogues.continuation(tokenizer)
