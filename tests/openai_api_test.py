# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""openai_api: what bodies mean, and each refusal names its field."""

import json

import chats
import pytest

from searchrl.models.inference.sampling import Draw, Truncation
from searchrl.serving import openai_api

TOKENIZER = chats.qwen()
HELLO = [{'role': 'user', 'content': 'go on'}]
LIMITS = openai_api.Limits(choices=6, stops=2, stop_chars=9)


def read(is_chat=False, tokenizer=TOKENIZER, body=None, **fields):
  record = {'model': 'it', **({'messages': HELLO} if is_chat else
                              {'prompt': 'the search'}), **fields}
  return openai_api.read(
      json.dumps(record).encode() if body is None else body, is_chat=is_chat,
      name='it', tokenizer=tokenizer, length=100, limits=LIMITS)


def test_what_is_left_out_has_openais_defaults():
  prompt = TOKENIZER.encode('the search')
  request = read()
  assert request == openai_api.Request(
      False, (prompt,), (16,), 1, Draw(), (), None, False, False, False)
  assert read(temperature=None, stop=None, seed=None, echo=False, best_of=1,
              user='me', tools=[]) == request
  chat = read(True)
  assert chat.budgets == (100 - len(chat.prompts[0]),)


def test_what_is_given_is_taken():
  request = read(n=2, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3,
                 min_p=0.1, stop=['a', 'é'], seed=-5, logprobs=0, stream=True,
                 stream_options={'include_usage': True})
  assert request.draw == Draw(0.5, Truncation(3, 0.9, 0.1))
  assert (request.budgets, request.n, request.stops, request.seed) == (
      (7,), 2, ('a', 'é'), -5)
  assert request.logprobs and request.stream and request.include_usage
  assert read(stop='a').stops == ('a',)
  assert read(top_k=-1).draw == Draw() and read(temperature=0).draw[0] == 0
  assert read(True, max_completion_tokens=5, logprobs=True).budgets == (5,)


@pytest.mark.parametrize('model', ['it', 'IT', 'owner/it', '/models/it/'])
def test_a_model_is_known_by_its_short_name(model):
  assert read(model=model) == read()


def test_prompts_of_every_form():
  one, two = TOKENIZER.encode('the search'), TOKENIZER.encode('on')
  assert read(prompt=list(one)).prompts == (one,)
  assert read(prompt=['the search', 'on']).prompts == (one, two)
  assert read(prompt=[list(two), 'the search']).prompts == (two, one)
  special = read(prompt='<|im_start|>').prompts[0]
  assert special == TOKENIZER.encode('<|im_start|>') and len(special) == 1


def test_a_conversation_is_written_by_the_template():
  talk = [{'role': 'system', 'content': 'be brief'}, *HELLO,
          {'role': 'assistant', 'content': 'so?'},
          {'role': 'user', 'content': [{'type': 'text', 'text': 'on'},
                                       {'type': 'text', 'text': ' and on'}]}]
  ids, = read(True, messages=talk).prompts
  assert chats.written(TOKENIZER, ids) == (
      '<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ngo on'
      '<|im_end|>\n<|im_start|>assistant\nso?<|im_end|>\n<|im_start|>user\n'
      'on and on<|im_end|>\n<|im_start|>assistant\n')


def messages(**fields):
  return [{'role': 'user', 'content': 'go', **fields}]


@pytest.mark.parametrize('is_chat, fields, param, message', [
    (False, dict(model='other'), 'model', "must be 'it'"),
    (False, dict(model=None), 'model', "must be 'it'"),
    (False, dict(prompt=None), 'prompt', 'must be a string'),
    (False, dict(prompt=7), 'prompt', 'must be a string'),
    (False, dict(prompt=[]), 'prompt', 'must be a string'),
    (False, dict(prompt=[True]), 'prompt', 'must be a string'),
    (False, dict(prompt=[1.5]), 'prompt', 'must be a string'),
    (False, dict(prompt=['a', None]), 'prompt', 'must be a string'),
    (False, dict(prompt='\ud800'), 'prompt', 'must be a string'),
    (False, dict(prompt=''), 'prompt', 'at least one token'),
    (False, dict(prompt=[-1]), 'prompt', 'ids from 0 to'),
    (False, dict(prompt=[10**30]), 'prompt', 'ids from 0 to'),
    (False, dict(prompt=[3] * 100), 'prompt',
     'may have 99 tokens, but has 100'),
    (False, dict(prompt=[3] * 90, max_tokens=11), 'max_tokens',
     'may have 100 tokens together, but have 11 and 90'),
    (False, dict(max_tokens=0), 'max_tokens', 'from 1'),
    (False, dict(max_tokens='7'), 'max_tokens', 'a whole number'),
    (False, dict(max_tokens=True), 'max_tokens', 'a whole number'),
    (False, dict(max_tokens=10**400), 'max_tokens', 'a whole number'),
    (False, dict(n=0), 'n', 'from 1 to 6'),
    (False, dict(n=7), 'n', 'from 1 to 6'),
    (False, dict(prompt=['a'] * 3, n=3), 'n',
     'n times the number of prompts must be at most 6'),
    (False, dict(temperature=-0.1), 'temperature', 'from 0'),
    (False, dict(temperature=float('nan')), 'temperature', 'from 0'),
    (False, dict(temperature=float('inf')), 'temperature', 'from 0'),
    (False, dict(temperature=1e-9), 'temperature', '0 or at least 0.001'),
    (False, dict(temperature='hot'), 'temperature', 'is "hot"'),
    (False, dict(top_p=0), 'top_p', 'above 0 to 1'),
    (False, dict(top_p=1.1), 'top_p', 'above 0 to 1'),
    (False, dict(top_k=1.5), 'top_k', 'a whole number'),
    (False, dict(top_k=-2), 'top_k', 'from -1'),
    (False, dict(min_p=2), 'min_p', 'from 0 to 1'),
    (False, dict(stop=''), 'stop', 'none empty'),
    (False, dict(stop=['a', '']), 'stop', 'none empty'),
    (False, dict(stop=[3]), 'stop', 'none empty'),
    (False, dict(stop=['\udfff']), 'stop', 'none empty'),
    (False, dict(stop=['a', 'b', 'c']), 'stop', '2 strings of 9'),
    (False, dict(stop='a' * 10), 'stop', '2 strings of 9'),
    (False, dict(seed=2**63), 'seed', 'a whole number'),
    (False, dict(seed=1.0), 'seed', 'a whole number'),
    (False, dict(logprobs=1), 'logprobs', 'must be 0'),
    (False, dict(logprobs=True), 'logprobs', 'must be 0'),
    (True, dict(logprobs=0), 'logprobs', 'true or false'),
    (True, dict(top_logprobs=2), 'top_logprobs', 'not supported'),
    (False, dict(stream='yes'), 'stream', 'true or false'),
    (False, dict(stream_options=3), 'stream_options', 'only include'),
    (False, dict(stream_options={'x': 1}), 'stream_options', 'only include'),
    (False, dict(stream_options={'include_usage': 1}),
     'stream_options.include_usage', 'true or false'),
    (False, dict(echo=True), 'echo', 'not supported'),
    (False, dict(best_of=3), 'best_of', 'not supported'),
    (False, dict(suffix='x'), 'suffix', 'not supported'),
    (False, dict(logit_bias={'3': 5}), 'logit_bias', 'not supported'),
    (False, dict(presence_penalty=0.5), 'presence_penalty', 'not supported'),
    (True, dict(tools=[{}]), 'tools', 'not supported'),
    (True, dict(response_format={'type': 'json_object'}), 'response_format',
     'not supported'),
    (False, dict(temprature=1), 'temprature', 'is not a known field'),
    (False, dict(messages=HELLO), 'messages', 'is not a known field'),
    (True, dict(prompt='a'), 'prompt', 'is not a known field'),
    (True, dict(max_tokens=3, max_completion_tokens=3), 'max_tokens',
     'means the same'),
    (True, dict(max_completion_tokens=0), 'max_completion_tokens', 'from 1'),
    (True, dict(messages=None), 'messages', 'at least one message'),
    (True, dict(messages=[]), 'messages', 'at least one message'),
    (True, dict(messages='hi'), 'messages', 'at least one message'),
    (True, dict(messages=['hi']), 'messages[0].role', 'must be one of system'),
    (True, dict(messages=messages(role='tool')), 'messages[0].role',
     'must be one'),
    (True, dict(messages=[*HELLO, *messages(content=None)]),
     'messages[1].content',
     'must be a text'),
    (True, dict(messages=messages(content=[{'type': 'image_url'}])),
     'messages[0].content', 'must be a text'),
    (True, dict(messages=messages(tool_calls=[{}])), 'messages[0].tool_calls',
     'only role, content and name'),
    (True, dict(messages=messages(content='x<|im_end|>y')),
     'messages[0].content',
     "special token '<|im_end|>'"),
    (True, dict(messages=messages(role='assistant')), 'messages',
     "assistant's"),
])
def test_what_is_refused_names_its_field(is_chat, fields, param, message):
  with pytest.raises(openai_api.Refused) as caught:
    read(is_chat, **fields)
  error = json.loads(openai_api.write_error(caught.value))['error']
  assert error['param'] == param and message in error['message']
  assert error['type'] == 'invalid_request_error'
  assert caught.value.status == (404 if param == 'model' else 400)
  assert '10000000000' * 20 not in error['message']  # not too much of it


@pytest.mark.parametrize('body', [
    b'', b'{', b'[]', b'3', b'\xff', b'[' * 60_000, b'{"n": 1' + b'0' * 9000])
def test_what_is_no_json_object(body):
  with pytest.raises(openai_api.Refused, match='JSON'):
    read(body=body)


@pytest.mark.parametrize('tokenizer', [
    chats.byte_level(), chats.sentence_piece(chats.MISTRAL)])
def test_what_no_template_writes_is_refused_without_the_inside(tokenizer):
  with pytest.raises(openai_api.Refused) as caught:
    read(True, tokenizer,
         messages=[{'role': 'system', 'content': 'on'}, *HELLO])
  assert 'chat template can write' in str(caught.value)
  assert 'jinja' not in str(caught.value).lower()


def test_a_character_that_a_tokenizer_lacks_is_text_all_the_same():
  assert read(True, chats.sentence_piece(chats.MISTRAL), messages=messages(
      content='東')).prompts
