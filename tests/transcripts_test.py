# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""transcripts: what is trained on, in ids that a rollout could have had."""

import chats
import pytest

from searchrl.agent import dialogue as dialogues
from searchrl.agent import chat
from searchrl.agent import transcripts

ASKS = {'role': 'user', 'content': 'the question, too?'}
SAYS = {'role': 'assistant', 'content': 'the search for an answer'}
AGAIN = {'role': 'user', 'content': 'goes on <|im_end|> and on'}
ENDS = {'role': 'assistant', 'content': '<answer> Paris </answer>'}
TOKENIZERS = {
    'qwen2': chats.qwen(), 'llama3': chats.llama(),
    'mistral': chats.sentence_piece(chats.MISTRAL)}


def texts(tokenizer, transcript):
  """Runs of ids that are trained on alike, as texts with special tokens."""
  runs = []
  for id_, trained in zip(*transcript, strict=True):
    if not runs or runs[-1][1] != trained:
      runs.append(([], trained))
    runs[-1][0].append(id_)
  return [(chats.written(tokenizer, ids), trained) for ids, trained in runs]


def test_segments_are_encoded_one_by_one():
  tokenizer = chats.qwen()
  found = transcripts.of_segments(
      [('the sea', False), ('rch', True), ('<|im_end|>', False)], tokenizer)
  ids = [tokenizer.encode(text) for text in ('the sea', 'rch', '<|im_end|>')]
  assert found.ids == ids[0] + ids[1] + ids[2] and len(ids[2]) == 1
  assert found.trained == (
      (False,) * len(ids[0]) + (True,) * len(ids[1]) + (False,))


def test_a_completion_ends_with_the_token_that_ends_a_turn():
  tokenizer = chats.qwen()
  found = transcripts.of_segments(
      [('the', False), (' answer', True)], tokenizer, ends=True)
  assert found.ids[-1] == tokenizer.eos_ids[0] and found.trained[-1]
  assert len(found.ids) == len(found.trained)


def test_the_assistants_turns_are_trained_on_by_hand():
  tokenizer = chats.qwen()
  found = transcripts.of_messages([ASKS, SAYS, AGAIN, ENDS], tokenizer)
  assert texts(tokenizer, found) == [
      ('<|im_start|>system\nBe useful.<|im_end|>\n<|im_start|>user\n'
       'the question, too?<|im_end|>\n<|im_start|>assistant\n', False),
      ('the search for an answer<|im_end|>', True),
      ('\n<|im_start|>user\ngoes on <|im_end|> and on<|im_end|>\n'
       '<|im_start|>assistant\n', False),
      ('<answer> Paris </answer><|im_end|>', True)]
  ends = found.ids.count(tokenizer.eos_ids[0])
  assert ends == 5  # and not the six that stand in the text


def test_a_turn_of_weight_0_and_the_header_of_a_second_turn_are_only_read():
  tokenizer = chats.qwen()
  found = transcripts.of_messages(
      [ASKS, SAYS | {'weight': 0}, ENDS | {'weight': 1}], tokenizer)
  assert [text for text, is_trained in texts(tokenizer, found)
          if is_trained] == ['<answer> Paris </answer><|im_end|>']
  assert tokenizer.write(found.ids).endswith(
      'the search for an answer<|im_end|>\n<|im_start|>assistant\n'
      '<answer> Paris </answer><|im_end|>')


def test_the_last_turn_of_a_template_without_end_tokens_gets_one():
  tokenizer = chats.qwen(
      "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ '\n' }}"
      "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}")
  end = tokenizer.token(chat.last_id(tokenizer))
  for said in ('Paris', f'Paris{end}'):
    found = transcripts.of_messages(
        [ASKS, SAYS, AGAIN, {'role': 'assistant', 'content': said}], tokenizer)
    trained = [text for text, is_trained in texts(tokenizer, found)
               if is_trained]
    assert trained == ['the search for an answer\n', f'Paris\n{end}']


@pytest.mark.parametrize('content', [
    'the <|endoftext|> goes on', 'the <|im_start|>', '<|im_end|> on',
    '<think>\nthe <|im_end|>\n</think>\n\nParis'])
def test_a_turn_is_not_cut_at_a_special_token_in_its_text(content):
  says = {'role': 'assistant', 'content': content}
  end = '<|im_end|>'
  without_ends = chats.qwen(
      "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ '\n' }}"
      "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}")
  for tokenizer, first, last in (
      (without_ends, f'{content}\n', f'{content}\n{end}'),
      (chats.qwen(), f'{content}{end}', f'{content}{end}')):
    found = transcripts.of_messages([ASKS, says, ASKS, says], tokenizer)
    assert [text for text, is_trained in texts(tokenizer, found)
            if is_trained] == [first, last]


def test_a_turn_whose_thoughts_are_rewritten_ends_after_its_text():
  """In the manner of Qwen 3, but without a token that ends a turn."""
  tokenizer = chats.qwen(chats.QWEN3.replace(
      "rest ~ '<|im_end|>\\n' }}", "rest ~ '\\n' }}"))
  says = {'role': 'assistant',
          'content': '<think>the <|endoftext|> on</think>Paris'}
  found = transcripts.of_messages([ASKS, says], tokenizer)
  assert texts(tokenizer, found)[-1] == (
      '<think>\nthe <|endoftext|> on\n</think>\n\nParis\n<|im_end|>', True)


@pytest.mark.parametrize('name', TOKENIZERS)
def test_the_text_is_the_templates_in_every_family(name):
  tokenizer = TOKENIZERS[name]
  messages = [ASKS, SAYS, {**AGAIN, 'content': 'and on'}, ENDS]
  found = transcripts.of_messages(messages, tokenizer)
  whole = ''.join(text for text, _ in texts(tokenizer, found))
  rendered = tokenizer.render(messages)
  # SentencePiece: a run that is decoded on its own loses its first space.
  assert rendered.replace(' ', '').startswith(whole.replace(' ', ''))
  trained = [text for text, trained in texts(tokenizer, found) if trained]
  for text, message in zip(trained, (SAYS, ENDS), strict=True):
    assert message['content'] in text
  assert found.ids[-1] in tokenizer.special_ids and found.trained[-1]


def test_the_prompt_has_the_ids_that_a_rollout_gives_it():
  tokenizer = chats.qwen()
  dialogue = chat.search_r1(tokenizer)
  opening = dialogues.opening(dialogue, 'who?', tokenizer)
  found = transcripts.of_messages(
      [*chat.first_messages(dialogue, 'who?'), ENDS], tokenizer)
  assert found.ids[:len(opening)] == opening
  assert found.trained.index(True) == len(opening)


@pytest.mark.parametrize('content', [
    '<|im_end|>', 'user', 'u', '<|im_start|>', '\n', 'Be useful.',
    '<|im_end|>\n<|im_start|>assistant\n', 'the question, too?'])
def test_a_message_that_repeats_the_frame_is_found_in_its_place(content):
  """The first place where a template writes '<|im_end|>' is its own."""
  tokenizer = chats.qwen()
  data, own = map(tokenizer.encode_data, (content, ASKS['content']))
  for before in ([], [ASKS, SAYS]):
    plain, found = (transcripts.of_messages(
        [*before, {**ASKS, 'content': asked}, ENDS], tokenizer).ids
                    for asked in (ASKS['content'], content))
    at = len(plain) - plain[::-1].index(own[-1]) - len(own)
    assert plain[at:at + len(own)] == own
    assert found == plain[:at] + data + plain[at + len(own):]


@pytest.mark.parametrize('name', TOKENIZERS)
def test_a_prompt_has_the_ids_that_a_rollout_gives_it_in_every_family(name):
  tokenizer = TOKENIZERS[name]
  dialogue = chat.search_r1(tokenizer)
  for question in ('who?', '<|im_end|></s><|eot_id|> or who?', 'user'):
    opening = dialogues.opening(dialogue, question, tokenizer)
    asked = dialogues.tags(dialogues.verbatim('search_r1_prompt.txt'))
    found = transcripts.of_messages(
        [*chat.first_messages(asked, question), ENDS], tokenizer)
    assert found.ids[:len(opening)] == opening
    assert found.trained.index(True) == len(opening)


def test_a_message_that_the_template_changes_may_hold_no_special_token():
  shouts = chats.QWEN2.replace("m.content ~ '<|im_end|>", (
      "(m.content | upper) ~ '<|im_end|>"))
  tokenizer = chats.qwen(shouts)
  loud = {**ENDS, 'content': 'PARIS'}
  found = transcripts.of_messages([{**ASKS, 'content': 'who?'}, loud],
                                  tokenizer)
  assert 'WHO?' in chats.written(tokenizer, found.ids)
  with pytest.raises(ValueError, match=(
      'message 1 of my.jsonl, line 7 must be written as it is, .* changes it, '
      'and it holds the special token \'<|im_end|>\'')):
    transcripts.of_messages(
        [{**ASKS, 'content': 'who<|im_end|>'}, loud], tokenizer,
        'my.jsonl, line 7')


def test_a_template_that_takes_something_back_is_refused():
  tokenizer = chats.qwen(chats.STRIPS_THINKING)
  thinks = {**SAYS, 'content': '<think>\nhm\n</think>\n\n<answer> a </answer>'}
  transcripts.of_messages([ASKS, thinks], tokenizer)
  with pytest.raises(ValueError, match=(
      'must only add to a conversation, but for message 4 of my.jsonl, line 7 '
      'it writes .* where .*think.* stood. Give such conversations as "segm')):
    transcripts.of_messages(
        [ASKS, thinks, {**ASKS, 'content': 'x'}, ENDS], tokenizer,
        'my.jsonl, line 7')


def test_a_tokenizer_without_a_template_is_refused():
  with pytest.raises(ValueError, match='needs a tokenizer with a chat'):
    transcripts.of_messages([ASKS, SAYS], chats.byte_level())
