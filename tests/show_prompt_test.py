# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""jobs.show_prompt: the texts that it prints are those that a policy reads."""

import json
import re

import chats
from configs import drzero, grpo, sft
import pytest

from searchrl import main
from searchrl.agent import chat
from searchrl.agent import dialogue as dialogues
from searchrl.agent import tools
from searchrl.experiment import policy
from searchrl.jobs import show_prompt


def shown(config, tokens=False):
  return '\n'.join(show_prompt.show(config, tokens))


@pytest.fixture(name='config')
def own_data(tmp_path):
  config = grpo.get_config('smoke')
  (tmp_path / 'q.jsonl').write_text('\n'.join(map(json.dumps, (
      {'id': '1', 'question': 'Who made it?', 'golden_answers': ['Ann']},
      {'id': '2', 'question': 'Where?', 'golden_answers': ['Albi']}))))
  (tmp_path / 'c.jsonl').write_text('\n'.join(json.dumps(
      {'id': str(n), 'contents': f'"Title {n}"\nText {n}.'})
                                              for n in range(9)))
  config.data.train = str(tmp_path / 'q.jsonl')
  config.search.corpus = str(tmp_path / 'c.jsonl')
  return config


def test_the_first_question_and_passages_of_the_config_are_shown(config):
  text = shown(config)
  assert 'Search, then answer: Who made it?\n' in text
  assert re.search(r'<information>Doc 1\(Title: "Title 0"\) Text 0\.\n'
                   r'Doc 2\(Title: "Title 1"\) Text 1\.</information>', text)
  assert 'Title 2' not in text  # config.rollout.budgets.top_k is 2
  assert 'Try again.' in text and "'</search>' or '</answer>'" in text


def test_the_ids_are_those_of_the_rollouts(config):
  text = shown(config, tokens=True)
  model = policy.folder_of(config)
  prompt = dialogues.opening(model.dialogue, 'Who made it?', model.tokenizer)
  part = text.split('== ')[1]
  ids = [int(x) for x in re.findall(r'^ *(\d+)  \'', part, re.M)]
  assert tuple(ids) == prompt
  assert f'{len(prompt)} tokens' in part


@pytest.mark.parametrize('tokenizer, make', [
    (chats.qwen(), chat.search_r1), (chats.llama(), chat.search_r1),
    (chats.qwen(), tools.dspo)], ids=['qwen', 'llama', 'tools'])
def test_special_tokens_of_a_chat_are_spelt_out(tokenizer, make):
  dialogue = make(tokenizer)
  ids = dialogues.opening(dialogue, 'Who?', tokenizer)
  text = '\n'.join(show_prompt._as_text(ids, tokenizer))
  assert text == chats.written(tokenizer, ids)
  pieces = list(show_prompt._by_token(ids, tokenizer))
  assert len(pieces) == len(ids)
  special = [i for i in ids if i in tokenizer.special_ids]
  assert special and all(any(line.split(maxsplit=1) == [
      str(i), repr(tokenizer.token(i))] for line in pieces) for i in special)


def test_a_config_without_questions_shows_an_example():
  config = grpo.get_config('smoke')
  config.data.per_hop = ()
  assert show_prompt._QUESTION in shown(config)


def test_the_prompt_of_a_run_is_shown_by_the_jobs_that_serve_it(capsys):
  with pytest.raises(SystemExit) as end:
    main.run(['--config=configs/ask.py', '--show_prompt'])
  assert not end.value.code
  assert show_prompt._QUESTION in capsys.readouterr().out


def test_each_role_of_self_play_has_its_prompt(capsys):
  show_prompt.run(drzero.get_config('smoke'), '')
  proposer, solver = capsys.readouterr().out.split('The solver:')
  assert 'Write a question' in proposer and 'A title' in proposer
  assert 'Search, then answer: ' in solver


def test_a_config_without_a_dialogue_of_rollouts_is_refused():
  with pytest.raises(ValueError, match='a prompt is shown of a config with a mod'
                     'el, a dialogue and a rollout.*Choose one of the recipes'):
    show_prompt.run(sft.get_config('smoke'), '')


@pytest.mark.parametrize('flag, tokens', [
    ('--show_prompt', False), ('--show_prompt=tokens', True)])
def test_the_flag_chooses_the_form_and_writes_nothing(
    flag, tokens, tmp_path, capsys):
  with pytest.raises(SystemExit) as end:
    main.run(['--config=configs/grpo.py:smoke', flag,
              f'--workdir={tmp_path / "run"}'])
  assert not end.value.code
  lines = capsys.readouterr().out
  assert bool(re.search(r"^ +\d+  '", lines, re.M)) == tokens
  assert not (tmp_path / 'run').exists()
